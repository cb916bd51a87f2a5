"""Tests that the plug-in refuses unsupported settings with an error message before an engine starts."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import EngineArgs
from vllm.platforms import current_platform

from gsa_vllm import supported
from gsa_vllm.supported import CheckedConfig, check_version
from small_models import VARIANTS, engine, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("experts"), VARIANTS["experts"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "int8_per_channel_weight_only"}, "quantization is 'int8_per"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'; gsa_vllm"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; gsa_vllm"),
        ({"tensor_parallel_size": 4}, "num_key_value_heads is 2 with tensor_parallel_size 4; pass a divisor"),
    ],
)
def test_options_are_refused(folder: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineArgs(folder, skip_tokenizer_init=True, **options).create_engine_config()


def test_another_platform_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(ValueError, match="gsa_vllm runs on CPUs and CUDA devices"):
        EngineArgs(folder, skip_tokenizer_init=True).create_engine_config()


def test_speculative_decoding_on_a_gpu_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = EngineArgs(
        folder, skip_tokenizer_init=True, speculative_config=speculative
    ).create_engine_config()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    with pytest.raises(ValueError, match="speculative_config is set on a CUDA device"):
        CheckedConfig.verify_and_update_config(config)


def test_a_gpu_runs_eagerly_with_a_warning(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, said = EngineArgs(folder, skip_tokenizer_init=True).create_engine_config(), []
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setattr(supported.logger, "warning", said.append)
    CheckedConfig.verify_and_update_config(config)
    assert config.model_config.enforce_eager
    assert "not yet a vLLM engine" in said[0]


def test_other_versions_are_refused() -> None:
    for version in ("0.31.0", "0.32.0+cpu"):
        check_version(version)
    for version in ("0.30.2", "0.33.0"):
        with pytest.raises(ValueError, match=f"vllm is {version} and gsa_vllm supports 0.31 and 0.32"):
            check_version(version)


@pytest.mark.parametrize(
    ("old", "new"),
    [("q_proj.weight", None), ("indexer.variance_ema", None), ("q_proj.weight", "r_proj.weight")],
)
def test_a_missing_or_unknown_weight_is_refused(tmp_path: Path, old: str, new: str | None) -> None:
    folder = save_model(tmp_path, VARIANTS["paper"])
    weights = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1.self_attn."
    moved = weights.pop(prefix + old)
    if new is not None:
        weights[prefix + new] = moved
    save_file(weights, tmp_path / "model.safetensors")
    verb = "lacks" if new is None else "has"
    with pytest.raises(ValueError, match=f"the folder {verb} {prefix}{new or old}"), engine(folder):
        pass
