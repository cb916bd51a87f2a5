"""Serve Gated Sparse Attention models in vLLM. This is a vLLM plug-in: vLLM calls `register` in each process."""


def register() -> None:
    import vllm
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    import gsa_hf  # noqa: F401 - registers model_type "gsa", so that --trust-remote-code is not needed
    from gsa_vllm.supported import CheckedConfig, check_version

    check_version(vllm.__version__)
    MODELS_CONFIG_MAP["GSAForCausalLM"] = CheckedConfig
    if "GSAForCausalLM" not in vllm.ModelRegistry.get_supported_archs():
        vllm.ModelRegistry.register_model("GSAForCausalLM", "gsa_vllm.model:GSAForCausalLM")
