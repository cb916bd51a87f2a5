"""Tests `train.fused_ops`: the same model computed by fused kernels, interpreted here."""

import dataclasses
from typing import Any

import pytest
import torch

from gsa_train.config import RopeScalingConfig
from gsa_train.model.mcore import config as mcore_config
from gsa_train.model.mcore.config import uses_fused_ops
from helpers.single_rank import (
    DENSE,
    SPARSE,
    WARM_UP,
    random_batches,
    read_stats,
    single_rank,
    step_gradients,
    tiny_config,
    tiny_model,
)


def one_step(monkeypatch: pytest.MonkeyPatch, fused: bool, phase: Any, **sections: Any) -> Any:
    monkeypatch.setattr(mcore_config, "uses_fused_ops", lambda config, device: fused)
    sections["model"] = {"head_dim": 32, "init_std": 0.2, **sections.get("model", {})}
    config = tiny_config([phase], **sections)
    model = tiny_model(config, variance_ema=0.02)
    names = [name for name, _ in model.gpt.named_parameters()]
    result, gradients = step_gradients(model, phase, random_batches(config), config, measures=True)
    return result, gradients, read_stats(model), names


CASES = {
    "GSA": (SPARSE, {}),
    "warm-up": (WARM_UP, {}),
    "G2 only, tied": (SPARSE, {"gsa": {"output_gate": False}, "model": {"tie_embeddings": True}}),
    "standard": (DENSE, {"gsa": {"attention": "dense", "value_gate": False, "output_gate": False}}),
    "qk_norm": (SPARSE, {"model": {"qk_norm": True}}),
    "qkv_bias": (SPARSE, {"model": {"qkv_bias": True}}),
    "half of the channels turn": (SPARSE, {"model": {"rotary_percent": 0.5}}),
    "YaRN": (SPARSE, {"model": {"rope_base": 100.0, "rope_scaling": RopeScalingConfig("yarn", 4.0, 16)}}),
    "recomputed layers": (SPARSE, {"train": {"recompute": "full"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_matches_megatron_core(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    phase, sections = CASES[case]
    plain, expected, plain_stats, plain_names = one_step(monkeypatch, False, phase, **sections)
    result, gradients, stats, names = one_step(monkeypatch, True, phase, **sections)
    assert names == plain_names
    torch.testing.assert_close(result.loss_sum, plain.loss_sum, rtol=1e-6, atol=0)
    torch.testing.assert_close(result.grad_norm, plain.grad_norm, rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert error < 1e-4, (name, error)
    for name, values in plain_stats.items():
        assert stats[name] == pytest.approx(values, rel=1e-4, nan_ok=True), name


def test_which_device_fuses() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def config(value: str) -> Any:
        base = tiny_config()
        return dataclasses.replace(base, train=dataclasses.replace(base.train, fused_ops=value))

    assert [uses_fused_ops(config(value), gpu) for value in ("auto", "triton", "none")] == [True, True, False]
    assert [uses_fused_ops(config(value), cpu) for value in ("auto", "none")] == [False, False]
    with pytest.raises(ValueError, match=r"train.fused_ops = triton: there is no CUDA device"):
        uses_fused_ops(config("triton"), cpu)
    assert single_rank().device.type == "cpu"
