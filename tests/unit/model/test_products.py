"""Compares the products on a layer's input, and their gradients, with plain torch; tests/distributed uses ranks."""

import dataclasses
from typing import Any

import pytest
import torch

from gsa_train.model.gates import GateProjection
from gsa_train.model.gsa_attention import GSASelfAttention
from gsa_train.model.mcore import grad_accumulation_fusion as weight_gradients
from gsa_train.model.mcore.grad_accumulation_fusion import CublasAccumulation
from helpers.single_rank import SPARSE, tiny_config, tiny_model

LENGTH, BATCH = 6, 2


def layer() -> GSASelfAttention:
    return tiny_model(tiny_config([SPARSE])).attentions[0].double()


def inputs_and_gradients(attention: GSASelfAttention) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the normed input, and gradients of QKV, of the gates' logits, and of a third result."""
    torch.manual_seed(1)
    width = attention.config.hidden_size
    rows = len(attention.linear_qkv.weight), len(gates_of(attention).weight), width
    return (
        torch.randn(LENGTH, BATCH, width, dtype=torch.float64, requires_grad=True),
        [torch.randn(LENGTH, BATCH, count, dtype=torch.float64) for count in rows],
    )


def gates_of(attention: GSASelfAttention) -> GateProjection:
    assert attention.linear_gate is not None
    return attention.linear_gate


def products(attention: GSASelfAttention, hidden: torch.Tensor) -> list[torch.Tensor]:
    logits, shared = gates_of(attention)(hidden)
    return [attention.linear_qkv(shared)[0], logits, shared.sin()]


def parameters(attention: GSASelfAttention) -> list[Any]:
    gate = gates_of(attention)
    return [attention.linear_qkv.weight, gate.weight, gate.bias]


def written_out(attention: GSASelfAttention, hidden: torch.Tensor) -> list[torch.Tensor]:
    qkv, gate, bias = parameters(attention)
    return [hidden @ qkv.T, hidden @ gate.T + bias, hidden.sin()]


def test_one_input_of_several_products() -> None:
    attention = layer()
    torch.nn.init.normal_(gates_of(attention).bias)
    hidden, grads = inputs_and_gradients(attention)
    given = [grad.clone() for grad in grads]
    leaves = [hidden, *parameters(attention)]
    results, expected = products(attention, hidden), written_out(attention, hidden)
    found = torch.autograd.grad(results, leaves, grads)
    wanted = torch.autograd.grad(expected, leaves, grads)
    for one, other in zip([*results, *found], [*expected, *wanted], strict=True):
        torch.testing.assert_close(one, other)
    assert all(torch.equal(one, other) for one, other in zip(grads, given, strict=True))


def test_the_gates_alone() -> None:
    """The gates' returned input is unused, and frozen weights get no gradient."""
    attention = layer()
    hidden, grads = inputs_and_gradients(attention)
    for parameter in gates_of(attention).parameters():
        parameter.requires_grad_(False)
    logits, _ = gates_of(attention)(hidden)
    logits.backward(grads[1])
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, grads[1] @ gates_of(attention).weight)


def test_gradients_that_are_added_to_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    add_as_a_gpu_does(monkeypatch)
    attention = layer()
    hidden, grads = inputs_and_gradients(attention)
    gate = gates_of(attention)
    gate.gradient_accumulation_fusion = True
    add_buffers([gate.weight, gate.bias])
    for _ in range(2):  # micro-batches
        torch.autograd.backward(products(attention, hidden), grads)
    of_weight, of_bias = torch.einsum("lbo,lbi->oi", grads[1], hidden.detach()), grads[1].sum((0, 1))
    assert_added([gate.weight, gate.bias], [2 * of_weight, 2 * of_bias])


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_indexers_products(accumulates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    add_as_a_gpu_does(monkeypatch)
    attention = layer()
    indexer = attention.indexer
    assert indexer is not None
    indexer.config = dataclasses.replace(indexer.config, gradient_accumulation_fusion=accumulates)
    weights = [indexer.query_weight, indexer.key_weight, indexer.head_weight]
    for weight in weights:
        torch.nn.init.normal_(weight)
    hidden, _ = inputs_and_gradients(attention)
    results = indexer(hidden)
    expected = [torch.einsum("lbi,oi->blo", hidden, weight) for weight in weights]
    grads = [torch.randn_like(result) for result in expected]
    wanted = torch.autograd.grad(expected, [hidden, *weights], grads)
    of_results = [grad.view_as(result) for grad, result in zip(grads, results, strict=True)]
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result.flatten(2), other)
    if accumulates:
        add_buffers(weights)
        torch.autograd.backward(results, of_results)
        assert_added(weights, list(wanted[1:]))
        torch.testing.assert_close(hidden.grad, wanted[0])
    else:
        found = torch.autograd.grad(results, [hidden, *weights], of_results)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)


def add_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use plain torch, for fp64 on CPUs."""
    sums = pytest.importorskip("gsa_kernels.fused.sums.op")

    def accumulate(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad += grad_output.t() @ inputs

    monkeypatch.setattr(CublasAccumulation, "wgrad_gemm_accum_fp32", staticmethod(accumulate))
    monkeypatch.setattr(weight_gradients, "fp32_product", torch.mm)
    monkeypatch.setattr(sums, "add_column_sums", lambda rows, into: into.add_(rows.sum(0)))


def add_buffers(tensors: list[Any]) -> None:
    for tensor in tensors:
        tensor.main_grad, tensor.grad_added_to_main_grad = torch.ones_like(tensor), False


def assert_added(tensors: list[Any], gradients: list[torch.Tensor]) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        torch.testing.assert_close(tensor.main_grad, 1 + gradient)
        assert tensor.grad_added_to_main_grad
        assert tensor.grad is not None  # for megatron-core's hook
