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
from gsa_kernels.indexer.split_op import fused_split_projection
from gsa_kernels.indexer.split_reference import split_projection
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
        ((torch.cat([qkv] * 2, 0)[::2], logits, cos, sin), options, "qkv is .* with strides"),
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


PROJECTIONS = {  # length, batch, columns, heads, dim
    "padded": (37, 2, 328, 4, 64),
    "recommended": (19, 1, 584, 8, 64),
    "one token per program": (3, 2, 8320, 32, 128),
    "few heads": (5, 3, 32, 3, 6),
    "odd": (16, 1, 11, 1, 5),
    "no weights": (37, 2, 320, 4, 64),
}


def projection_inputs(name, norms, rotates, dtype, device):
    """Return the projection and, with norms, their weights; then the options and the gradients."""
    length, batch, columns, heads, dim = PROJECTIONS[name]
    has_weights = name != "no weights"
    leaves = [torch.randn(length, batch, columns, device=device).to(dtype)]
    leaves += [(1 + torch.randn(dim, device=device) / 4).to(dtype) for _ in range(2 * norms)]
    options = {"has_weights": has_weights, "eps": 1e-5}
    if rotates:
        angles = torch.randn(length, dim // 2, device=device) * 3
        options["tables"] = (angles.cos(), angles.sin())
    shapes = [(heads, dim), (dim,), (heads,)][: 2 + has_weights]
    grads = [torch.randn(length, batch, *shape, device=device).transpose(0, 1) for shape in shapes]
    return leaves, options, grads


@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("rotates", [False, True], ids=["", "rotates"])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_split_projection(device, name, rotates, norms):
    heads, dim = PROJECTIONS[name][3:]
    if rotates and dim % 2:
        pytest.skip("an odd size has no halves")
    for dtype in DTYPES:
        leaves, options, grads = projection_inputs(name, norms, rotates, dtype, device)

        def call(function, options=options):
            def on_leaves(together, *weights):
                parts = function(together, heads, dim, norms=weights or None, **options)
                assert all(part.is_contiguous() for part in parts if part is not None)
                return parts

            return on_leaves

        found = compare(call(fused_split_projection), call(split_projection), leaves, grads)
        if not (norms or rotates):
            plain = run(call(split_projection), leaves, grads)
            assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_norms_of_zeros_and_of_large_values(device):
    """The gradient of a projection is largest at zeros, and almost 0 at large values."""
    leaves, options, grads = projection_inputs("padded", True, True, torch.bfloat16, device)
    leaves[0][3] = 0
    leaves[0][4] *= 1e15

    def call(function):
        return lambda together, *norms: function(together, 4, 64, norms=norms, **options)

    found = compare(call(fused_split_projection), call(split_projection), leaves, grads)
    assert all(part.isfinite().all() for part in found)


def test_split_projection_names_what_is_wrong(device):
    (together, *norms), options, _ = projection_inputs("padded", True, True, torch.float32, device)
    cos, sin = options["tables"]
    transposed = together.transpose(0, 2).contiguous().transpose(0, 2)
    wrong = [
        ((together[0], 4, 64), {}, "together has shape"),
        ((together.half(), 4, 64), {}, "together has dtype torch.float16"),
        ((together[:, :, 5:].contiguous(), 4, 64), {}, "together has 323 columns"),
        ((transposed, 4, 64), {}, "together is .* with strides"),
        ((together, 0, 64), {}, "heads is 0"),
        ((together, 4, 64), {"norms": (norms[0], norms[1][1:])}, r"norms\[1\] has shape"),
        ((together, 4, 64), {"norms": (norms[0].bfloat16(), norms[1])}, r"norms\[0\] is torch.bfloat16"),
        ((together, 4, 64), {"norms": tuple(norms), "eps": 0.0}, "eps is 0.0"),
        ((together, 4, 63), {"tables": (cos, sin)}, "dim is 63 with tables"),
        ((together, 4, 64), {"tables": (cos, sin[1:])}, r"tables\[1\] has shape"),
        ((together, 4, 64), {"tables": (cos.double(), sin)}, r"tables\[0\] is torch.float64"),
    ]
    for arguments, named, message in wrong:
        with pytest.raises(ValueError, match=message):
            fused_split_projection(*arguments, **named)
