"""Tests FP8 linear layers on CPUs, where reference code computes the products. tests/kernels/test_fp8.py and
tests/gpu/test_fp8_on_gpu.py test the kernels. tests/distributed/test_fp8_tensor_parallel.py tests two ranks."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gsa_kernels.fused.fp8.reference import E4M3, E5M2
from gsa_train.checkpoint.load import load_checkpoint
from gsa_train.config import Config, TrainConfig
from gsa_train.distributed.parallel import DeviceError
from gsa_train.model.mcore import config as mcore_config
from gsa_train.model.mcore.fp8_linears import Fp8ColumnLinear, Fp8RowLinear, _Fp8Product
from gsa_train.model.mcore.linears import unsupported_by_device
from gsa_train.optimizer.mcore import build_optimizer
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import (
    SPARSE,
    named_weights,
    random_batches,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
)

FP8 = TrainConfig(linear_layers="fp8")


def fp8_config(**train: Any) -> Config:
    fields = {"linear_layers": "fp8", "precision": "bf16", **train}
    return tiny_config(model={"ffn_hidden_size": 32, "qkv_bias": True}, train=fields)


@pytest.fixture
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcore_config, "unsupported_by_device", lambda train, device: [])


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize to an FP8 format and back, in fp64. E4M3 has 3 mantissa bits, and E5M2 has 2. Both have subnormals."""
    limit, bits, lowest = (448.0, 3, -6) if dtype == E4M3 else (57344.0, 2, -14)
    x = x.double()
    scaled = x * (limit / x.abs().max())
    exponent = scaled.abs().clamp(min=2.0**-40).log2().floor().clamp(min=lowest)
    return (scaled / 2 ** (exponent - bits)).round() * 2 ** (exponent - bits) * (x.abs().max() / limit)


def products(
    x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor, accumulates: bool, gathers: bool = False
) -> tuple[torch.Tensor, ...]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    group = single_rank().groups.tp
    layer = SimpleNamespace(tp_group=group, shards_output=True, gradient_accumulation_fusion=accumulates)
    main_grad = w.main_grad = torch.ones(w.shape)  # type: ignore[attr-defined]  # megatron-core adds it
    output = _Fp8Product.apply(x, w, layer, True, gathers, False)
    output.backward(grad)
    assert x.grad is not None
    assert w.grad is not None
    return output.detach(), x.grad, main_grad - 1 if accumulates else w.grad


@pytest.mark.parametrize("accumulates", [False, True])
def test_outputs_and_gradients_have_the_error_of_rounded_operands(accumulates: bool) -> None:
    torch.manual_seed(0)
    x, w, grad = torch.randn(16, 4, 48), torch.randn(32, 48), torch.randn(16, 4, 32) * 1e-2
    x8, w8, g8 = rounded(x, E4M3), rounded(w, E4M3), rounded(grad, E5M2)
    exact = (x8 @ w8.T, g8 @ w8, g8.flatten(0, 1).T @ x8.flatten(0, 1))
    plain = (
        x.double() @ w.double().T,
        grad.double() @ w.double(),
        grad.double().flatten(0, 1).T @ x.double().flatten(0, 1),
    )
    for found, defined, unrounded in zip(products(x, w, grad, accumulates), exact, plain, strict=True):
        torch.testing.assert_close(found.double(), defined, rtol=1e-5, atol=1e-5 * float(defined.abs().max()))
        # E4M3 rounds by at most 1 part in 16, E5M2 by 1 in 8.
        assert 0.01 < (found - unrounded).norm() / unrounded.norm() < 0.08


def test_the_reduction_of_the_input_gradient_waits_for_no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of one group run in the order of their calls. If the backward pass gathered the input after it
    reduce-scattered the input gradient, computing the weight gradient would have to wait for both collectives."""
    calls: list[str] = []

    def call(name: str, collective: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return collective(*arguments, **options)

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, partial(call, name, getattr(dist, name)))
    products(torch.randn(16, 4, 48), torch.randn(32, 48), torch.randn(16, 4, 32), True, gathers=True)
    assert calls == ["all_gather_into_tensor"] * 2 + ["reduce_scatter_tensor"]


@pytest.mark.usefixtures("on_this_device")
def test_which_products_are_in_fp8() -> None:
    model = tiny_model(fp8_config())
    found = {
        name.split(".")[-1]
        for name, module in model.gpt.named_modules()
        if isinstance(module, Fp8ColumnLinear | Fp8RowLinear)
    }
    assert found == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    plain = tiny_model(fp8_config(linear_layers="megatron"))
    assert named_weights(model).keys() == named_weights(plain).keys()
    for name, weight in named_weights(model).items():
        assert torch.equal(weight, named_weights(plain)[name])


@pytest.mark.usefixtures("on_this_device")
def test_recomputed_layers_have_the_same_bits() -> None:
    results = []
    for train in ({}, {"recompute": "full"}, {"recompute": "selective"}, {"linear_layers": "megatron"}):
        config = fp8_config(**train)
        results.append(step_gradients(tiny_model(config), SPARSE, random_batches(config), config))
    for result, gradients in results[1:3]:
        assert torch.equal(result.loss_sum, results[0][0].loss_sum)
        for name, gradient in gradients.items():
            assert torch.equal(gradient, results[0][1][name]), name
    loss, in_bf16 = (each[0].loss_sum for each in (results[0], results[3]))
    assert loss != in_bf16
    torch.testing.assert_close(loss, in_bf16, rtol=0.02, atol=0)


@pytest.mark.usefixtures("on_this_device")
def test_a_resumed_run_has_the_same_bits(tmp_path: Any) -> None:
    config = fp8_config()
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)
    take_step(model, optimizer, random_batches(config, 0), config, 1e-2)
    folder = write_checkpoint(tmp_path, 1, model, optimizer, config)
    loaded = tiny_model(dataclasses.replace(config, run=dataclasses.replace(config.run, seed=99)))
    resumed = build_optimizer(loaded, SPARSE, config)
    load_checkpoint(folder, loaded, resumed, single_rank(), with_optimizer=True)
    for either, its in ((model, optimizer), (loaded, resumed)):
        take_step(either, its, random_batches(config, 1), config, 1e-2)
    for name, weight in named_weights(model).items():
        assert torch.equal(weight, named_weights(loaded)[name]), name


def test_a_device_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DeviceError, match=r"linear_layers = fp8: there is no CUDA device; set it to megatron"
    ):
        tiny_model(fp8_config())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        lines = unsupported_by_device(FP8, torch.device("cuda"))
        assert [("NVIDIA A100 has compute capability 8.0" in line) for line in lines] == [True] * refused
    assert unsupported_by_device(TrainConfig(), torch.device("cpu")) == []
