"""Tests mixtures of experts on a CUDA device. The results must be close to fp64 results and repeat bit for bit, and the
host must never wait for the device."""

from typing import Any

import pytest
import torch

from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu
from gsa_train.model.mcore.moe_layer import MixtureOfExperts
from helpers.single_rank import tiny_config, tiny_model

SIZES: dict[str, Any] = {
    "experts": 16, "top_k": 4, "expert_ffn_hidden_size": 128, "shared_expert_ffn_hidden_size": 128,
}  # fmt: skip
LENGTH, BATCH, WIDTH = 256, 2, 256


def layer_of(experts_impl: str, precision: str = "bf16") -> MixtureOfExperts:
    config = tiny_config(
        model={"hidden_size": WIDTH, "num_heads": 4, "head_dim": 64, "init_std": 0.05},
        moe={**SIZES, "experts_impl": experts_impl},
        train={"seq_len_tokens": LENGTH, "precision": precision, "fused_ops": "none"},
    )
    return tiny_model(config).gpt.decoder.layers[0].mlp


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn((2, LENGTH, BATCH, WIDTH), generator=generator).bfloat16().to("cuda", dtype)
    return hidden.requires_grad_(), weights


def gradients_of(layer: MixtureOfExperts, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the gradients and the output. Separate experts are concatenated."""
    hidden, weights = inputs(dtype)
    output, _ = layer(hidden)
    (output * weights).sum().backward()
    found: dict[str, Any] = {name: p.grad.double() for name, p in layer.named_parameters()}
    for number in (1, 2):
        singles = [name for name in found if ".local_experts." in name and f"linear_fc{number}" in name]
        if singles:
            found[f"experts.linear_fc{number}.weight"] = torch.stack([found.pop(name) for name in singles])
    return {**found, "hidden": hidden.grad.double(), "output": output.detach().double()}


def test_grouped_experts_are_as_near_to_fp64_as_those_one_by_one() -> None:
    exact_layer = layer_of("sequential")
    exact = gradients_of(exact_layer.double(), torch.float64)
    one_by_one = gradients_of(layer_of("sequential"), torch.bfloat16)
    fused_layer: Any = layer_of("grouped")
    fused_layer.experts.activation = fused_weighted_swiglu  # other fused operations need buffers and are off
    for layer in (layer_of("grouped"), fused_layer):
        grouped = gradients_of(layer, torch.bfloat16)
        assert grouped.keys() == exact.keys()
        for name, right in exact.items():
            allowed = 2 * (one_by_one[name] - right).norm()  # torch in the same precision
            assert (grouped[name] - right).norm() <= allowed, name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_layer_repeats_bit_for_bit(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    layer = layer_of("grouped", precision)
    first = gradients_of(layer, dtype)
    for _ in range(3):
        layer.zero_grad()
        again = gradients_of(layer, dtype)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_experts_without_tokens_get_gradients_of_zero() -> None:
    experts: Any = layer_of("grouped").experts
    for counts in ([0] * 16, [0] * 15 + [24], [3] + [0] * 14 + [21]):
        rows = torch.ones(sum(counts), WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weights = torch.ones(sum(counts), device="cuda")
        experts.zero_grad()
        output, _ = experts(rows, torch.tensor(counts, device="cuda"), weights)
        output.backward(torch.ones_like(output))
        found = experts.linear_fc1.weight.grad.flatten(1).abs().amax(1) > 0
        assert found.tolist() == [count > 0 for count in counts]


def test_the_host_waits_for_nothing_on_one_rank() -> None:
    layer = layer_of("grouped")
    gradients_of(layer, torch.bfloat16)
    hidden, weights = inputs(torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        output, _ = layer(hidden)
        (output * weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
