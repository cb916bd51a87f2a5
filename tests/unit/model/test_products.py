"""Tests weight gradients that the backward pass of a matrix product adds directly to fp32 buffers, as on GPUs.
test_gate_variants.py and test_layer_oracle.py test the gradients themselves."""

import dataclasses
from typing import Any

import pytest
import torch

from gsa_train.model.gsa_attention import GSASelfAttention
from gsa_train.model.mcore import grad_accumulation_fusion as weight_gradients
from gsa_train.model.mcore.grad_accumulation_fusion import CublasAccumulation
from helpers.single_rank import SPARSE, tiny_config, tiny_model


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> GSASelfAttention:
    """Create a layer in fp64, whose buffers plain torch fills."""
    sums = pytest.importorskip("gsa_kernels.fused.sums.op")

    def accumulate(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad += grad_output.t() @ inputs

    monkeypatch.setattr(CublasAccumulation, "wgrad_gemm_accum_fp32", staticmethod(accumulate))
    monkeypatch.setattr(weight_gradients, "fp32_product", torch.mm)
    monkeypatch.setattr(sums, "add_column_sums", lambda rows, into: into.add_(rows.sum(0)))
    return tiny_model(tiny_config([SPARSE])).attentions[0].double()


def hidden_of(attention: GSASelfAttention) -> torch.Tensor:
    return torch.randn(6, 2, attention.config.hidden_size, dtype=torch.float64, requires_grad=True)


def add_buffers(tensors: list[Any]) -> None:
    for tensor in tensors:
        tensor.main_grad, tensor.grad_added_to_main_grad = torch.ones_like(tensor), False


def assert_added(tensors: list[Any], gradients: list[torch.Tensor]) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        torch.testing.assert_close(tensor.main_grad, 1 + gradient)
        assert tensor.grad_added_to_main_grad
        assert tensor.grad is not None  # for megatron-core's hook


def test_gates_add_to_their_buffers_in_each_micro_batch(attention: GSASelfAttention) -> None:
    """QKV takes the input that the gates return, so one product adds both input gradients."""
    gate, hidden = attention.linear_gate, hidden_of(attention)
    gate.gradient_accumulation_fusion = True
    add_buffers([gate.weight, gate.bias])
    for _ in range(2):
        logits, shared = gate(hidden)
        results = [logits, attention.linear_qkv(shared)[0]]
        grads = [torch.ones_like(result) for result in results]
        torch.autograd.backward(results, grads)
    of_weight, of_bias = torch.einsum("lbo,lbi->oi", grads[0], hidden.detach()), grads[0].sum((0, 1))
    assert_added([gate.weight, gate.bias], [2 * of_weight, 2 * of_bias])
    of_hidden = grads[0] @ gate.weight + grads[1] @ attention.linear_qkv.weight
    torch.testing.assert_close(hidden.grad, 2 * of_hidden)


def test_the_indexer_adds_to_its_buffers(attention: GSASelfAttention) -> None:
    indexer, hidden = attention.indexer, hidden_of(attention)
    indexer.config = dataclasses.replace(indexer.config, gradient_accumulation_fusion=True)
    weights = [indexer.query_weight, indexer.key_weight, indexer.head_weight]
    expected = [torch.einsum("lbi,oi->blo", hidden, weight) for weight in weights]
    grads = [torch.randn_like(result) for result in expected]
    wanted = torch.autograd.grad(expected, [hidden, *weights], grads)
    results = indexer(hidden)
    add_buffers(weights)
    torch.autograd.backward(results, [g.view_as(result) for g, result in zip(grads, results, strict=True)])
    assert_added(weights, list(wanted[1:]))
    torch.testing.assert_close(hidden.grad, wanted[0])
