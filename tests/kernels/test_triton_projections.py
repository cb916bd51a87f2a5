"""Compares Triton's split of attention's and the indexer's projections, with rotation and gates, with references."""

import pytest
import torch

pytest.importorskip("triton")

from layer_kernels import (
    DTYPES,
    compare,
    poisoned_memory,  # noqa: F401 - pytest finds it here
    run,
)

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.reference import sparse_attention
from gsa_kernels.fused.gates import rows as rows_module
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.fused.split_rotate_gate import op as prologue_op
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.split_rotate_gate.reference import split_rotate_gate
from gsa_kernels.indexer.split_op import split_projection
from gsa_kernels.key_lists.format import key_lists_from_mask

# --- split, rotation, G2 ----------------------------------------------------------------------------------


def prologue_inputs(batch, length, kv_heads, group, size, value_gate, output_gate, dtype, device):
    qkv = torch.randn(length, batch, kv_heads * (group + 2) * size, device=device).to(dtype)
    rows = kv_heads * size * (value_gate + group * output_gate)
    logits = (torch.randn(length, batch, rows, device=device) * 3).to(dtype) if rows else None
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(size // 2) / (size // 2))
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    shapes = [(kv_heads * group,), (kv_heads,), (kv_heads,), (kv_heads, group)]
    grads = [torch.randn(length, batch, *shape, size, device=device) for shape in shapes]
    grads = [grad.transpose(0, 1) for grad in grads]
    grads[1] = grads[1].contiguous()  # another order of memory
    return qkv, logits, cos, sin, grads if output_gate else grads[:3]


SHAPES = [  # batch, length, kv heads, group, head size, G2, G1
    (2, 9, 2, 2, 32, True, True),
    (1, 17, 1, 3, 32, True, False),
    (2, 5, 3, 1, 32, False, True),
    (1, 3, 1, 12, 256, False, False),
    (1, 18, 2, 8, 256, True, True),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_split_rotate_gate(device, shape):
    options = {"kv_heads": shape[2], "value_gate": shape[5], "output_gate": shape[6]}

    def call(function):
        def on_leaves(qkv, *gates):
            return function(qkv, *(gates or (None,)), *tables, **options)

        return on_leaves

    for dtype in DTYPES:
        *leaves, cos, sin, grads = prologue_inputs(*shape, dtype, device)
        leaves, tables = [leaf for leaf in leaves if leaf is not None], (cos, sin)
        compare(call(fused_split_rotate_gate), call(split_rotate_gate), leaves, grads)


def test_split_rotate_gate_names_what_is_wrong(device):
    qkv, logits, cos, sin, _ = prologue_inputs(2, 4, 1, 1, 32, True, True, torch.float32, device)
    options = {"kv_heads": 1, "value_gate": True, "output_gate": True}
    wrong = [
        ((qkv[:, 0], logits, cos, sin), options, "qkv has shape"),
        ((qkv, None, cos, sin), options, "gate_logits is None"),
        ((qkv, logits[..., :32], cos, sin), options, "gate_logits has shape"),
        ((qkv, logits, cos[:, :3], sin[:, :3]), options, "heads of 6"),
        ((qkv, logits.bfloat16(), cos, sin), options, "gate_logits is torch.bfloat16"),
        ((qkv, logits, cos.double(), sin), options, "cos is torch.float64"),
        ((qkv, logits, cos, sin), {**options, "kv_heads": 2}, "qkv has 96 columns"),
        ((torch.cat([qkv] * 2, 0)[::2], logits, cos, sin), options, "qkv has strides"),
    ]
    for arguments, keywords, message in wrong:
        with pytest.raises(ValueError, match=message):
            fused_split_rotate_gate(*arguments, **keywords)


KERNELS = {
    "packed mask": lambda q, k, v, gates: masked_attention(q, k, v, gate_logits=gates)[0],
    "key lists": lambda q, k, v, gates: gathered_attention(q, k, v, key_lists_from_mask(causal(q)), gates)[0],
}


def causal(q):
    return torch.ones(q.shape[0], q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [("packed mask", (2, 9, 2, 2, 32, True, True)), ("key lists", (2, 5, 3, 1, 32, False, True))],
)
def test_g1_where_the_projection_has_it(device, kernel, shape, monkeypatch):
    """Attention reads G1's logits in the projection, and writes their gradient beside the gradient of G2."""
    options = {"kv_heads": shape[2], "value_gate": shape[5], "output_gate": True}
    given = []

    def take_projection(gradient):
        given.append(rows_module.take_projection(gradient))
        assert rows_module.take_projection(gradient) is None  # once
        return given[-1]

    monkeypatch.setattr(prologue_op, "take_projection", take_projection)
    for dtype in (torch.float32, torch.bfloat16):
        qkv, logits, cos, sin, grads = prologue_inputs(*shape, dtype, device)
        tables, grad = (cos, sin), [grads[0]]

        def fused(qkv, logits, tables=tables):
            return KERNELS[kernel](*fused_split_rotate_gate(qkv, logits, *tables, **options))

        def written_out(qkv, logits, tables=tables):
            q, k, v, gates = split_rotate_gate(qkv, logits, *tables, **options)
            return sigmoid_gate(sparse_attention(q, k, v, causal(q)).out, gates.flatten(2, 3))

        found = compare(fused, written_out, [qkv, logits], grad)
        if shape[5]:
            assert found[2].data_ptr() == given[0].data_ptr()
        given.clear()

        # If the projection is read twice, its gradient is a sum in other memory.
        def read_twice(qkv, logits, tables=tables):
            q, k, v, gates = fused_split_rotate_gate(qkv, logits, *tables, **options)
            return KERNELS[kernel](q, k, v, gates) + gates.sum()

        twice = run(read_twice, [qkv, logits], grad)
        assert given.pop() is None
        g1 = torch.ones_like(logits.unflatten(-1, (shape[2], -1, shape[4])))
        if shape[5]:
            g1[..., 0, :] = 0
        by_sum = grads[0].to(dtype).sum() * g1.flatten(2)
        rtol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(twice[2], found[2] + by_sum, rtol=rtol, atol=2e-5)


# --- the indexer's projection -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "heads", "dim", "rotates"),
    [
        ((37, 2, 328), 4, 64, False),
        ((5, 3, 32), 3, 6, False),
        ((16, 1, 11), 1, 5, False),
        ((37, 2, 328), 4, 64, True),
        ((5, 3, 32), 3, 6, True),
    ],
)
def test_split_projection(device, shape, heads, dim, rotates):
    angles = torch.randn(shape[0], dim // 2, device=device) * 3
    cos, sin = tables = (angles.cos(), angles.sin()) if rotates else (None, None)

    def turn(x):  # [B, L, ..., dim], in fp32, rounded once
        if not rotates:
            return x
        first, second = x.float().chunk(2, -1)
        c, s = (table.view(-1, *[1] * (x.ndim - 3), dim // 2) for table in tables)
        return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)

    def plain(together):
        sizes = [heads * dim, dim, heads, shape[2] - heads * dim - dim - heads]
        queries, keys, weights, _ = (part.transpose(0, 1) for part in together.split(sizes, -1))
        return turn(queries.unflatten(-1, (heads, dim))), turn(keys), weights

    def fused(together):
        parts = split_projection(together, heads, dim, *tables)
        assert all(part.is_contiguous() for part in parts)
        return parts

    for dtype in DTYPES:
        together = torch.randn(shape, device=device).to(dtype)
        sizes = [(heads, dim), (dim,), (heads,)]
        grads = [torch.randn(shape[0], shape[1], *size, device=device).transpose(0, 1) for size in sizes]
        tolerance = (1e-5 if dtype == torch.float32 else 1e-2) if rotates else 0
        for found, wanted in zip(run(fused, [together], grads), run(plain, [together], grads), strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    wrong = [
        ((together[0], heads, dim), "together has shape"),
        ((together[:, :, 2:].contiguous(), heads, dim + 1), "columns; pass"),
        ((together.transpose(0, 2).contiguous().transpose(0, 2), heads, dim), "together has strides"),
        ((together, 0, dim), "heads is 0"),
    ]
    if rotates:
        wrong = [
            ((together, heads, dim, cos), "sin is None"),
            ((together, heads, dim, cos, sin[1:]), "sin has shape"),
            ((together, heads, dim, cos.double(), sin), "cos is torch.float64"),
        ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            split_projection(*arguments)
