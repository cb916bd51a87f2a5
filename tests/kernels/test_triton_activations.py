"""Compares SwiGLU and the sigmoid gate by Triton with their references, and checks a dtype that no kernel supports."""

import pytest
import torch

pytest.importorskip("triton")

from layer_kernels import (
    DTYPES,
    compare,
    poisoned_memory,  # noqa: F401 - pytest finds it here
    run,
)

from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy
from gsa_kernels.fused.gates.op import BLOCK, fused_sigmoid_gate
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.swiglu.op import fused_swiglu
from gsa_kernels.fused.swiglu.reference import swiglu, weighted_swiglu
from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu

# --- SwiGLU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fused", "reference", "shape"),
    [
        *((fused_swiglu, swiglu, shape) for shape in ((3, 2, 74), (1, 1030), (5, 2))),
        *((fused_sigmoid_gate, sigmoid_gate, shape) for shape in ((2, 5, 3, 32), (1, BLOCK + 3), (7,))),
    ],
)
def test_swiglu_and_sigmoid_gate(device, fused, reference, shape):
    for dtype in DTYPES:
        inputs = [
            (torch.randn(shape, device=device) * 3).to(dtype)
            for _ in range(1 + (fused is fused_sigmoid_gate))
        ]
        inputs[-1].view(-1)[:2] = torch.tensor([30.0, -30.0])
        compare(fused, reference, inputs, [torch.randn_like(reference(*inputs), dtype=torch.float32)])


@pytest.mark.parametrize(("rows", "width"), [(3, 74), (21, 300), (8, 256), (1, 1)])
def test_weighted_swiglu(device, rows, width):
    for dtype in DTYPES:
        x = (torch.randn(rows, 2 * width, device=device) * 3).to(dtype)
        x.view(-1)[:2] = torch.tensor([30.0, -30.0])
        weights, grad = torch.rand(rows, device=device), torch.randn(rows, width, device=device)
        weights[0] = 0  # its row still gets a gradient
        assert compare(fused_weighted_swiglu, weighted_swiglu, [x, weights], [grad])[-1][0] != 0


def test_swiglu_of_nothing(device):
    x = torch.empty(0, 8, device=device, requires_grad=True)
    fused_swiglu(x).sum().backward()
    assert x.grad.shape == (0, 8)
    weights = torch.empty(0, device=device, requires_grad=True)
    fused_weighted_swiglu(x, weights).sum().backward()
    assert weights.grad.shape == (0,)


def test_weights_that_do_not_fit():
    x = torch.zeros(4, 6)
    for weights, message in (
        (torch.zeros(3), r"weights has shape \(3,\)"),
        (torch.zeros(4).bfloat16(), "pass float32"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_weighted_swiglu(x, weights)
    with pytest.raises(ValueError, match="two halves"):
        fused_weighted_swiglu(torch.zeros(4, 5), torch.zeros(4))


def test_fp16_is_refused_by_all():
    half = torch.zeros(2, 2, 96, dtype=torch.float16)
    flat, tables = half[0], torch.zeros(2, 16)
    options = {"kv_heads": 1, "value_gate": False, "output_gate": False}
    for call in (
        lambda: fused_swiglu(half),
        lambda: fused_weighted_swiglu(half[0], torch.zeros(2)),
        lambda: fused_sigmoid_gate(half, half),
        lambda: fused_split_rotate_gate(half, None, tables, tables, **options),
        lambda: vocab_parallel_cross_entropy(flat, torch.zeros(2, dtype=torch.int64)),
    ):
        with pytest.raises(
            ValueError, match=r"dtype torch\.float16; pass bfloat16 or float32, or use fused/"
        ):
            call()


# --- sigmoid gate -----------------------------------------------------------------------------------------


def test_sigmoid_gate_of_other_orders_of_memory(device):
    x, logits = (torch.randn(4, 6, 32, device=device) for _ in range(2))
    grad = torch.randn(6, 4, 32, device=device).transpose(0, 1)
    swapped = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, logits)]
    wanted = run(fused_sigmoid_gate, [x, logits], [grad.contiguous()])
    leaves = [t.requires_grad_() for t in swapped]
    out = fused_sigmoid_gate(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 1), "gate_logits has shape"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), "gate_logits is torch.bfloat16"),
    ],
)
def test_sigmoid_gate_refuses(logits, message):
    with pytest.raises(ValueError, match=message):
        fused_sigmoid_gate(torch.zeros(2, 4), logits)
