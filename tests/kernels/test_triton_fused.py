"""The elementwise kernels of a layer and the cross-entropy against their references.

On CUDA where there is a device, else interpreted.
"""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Read when triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


from gsa_kernels.attention.gathered import gathered_attention  # noqa: E402
from gsa_kernels.attention.op import masked_attention  # noqa: E402
from gsa_kernels.attention.reference import sparse_attention  # noqa: E402
from gsa_kernels.fused.cross_entropy import op as cross_entropy_op  # noqa: E402
from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy  # noqa: E402
from gsa_kernels.fused.cross_entropy.reference import cross_entropy  # noqa: E402
from gsa_kernels.fused.cross_entropy.triton_rows import row_statistics, write_gradient  # noqa: E402
from gsa_kernels.fused.gates import rows as rows_module  # noqa: E402
from gsa_kernels.fused.gates.op import BLOCK, fused_sigmoid_gate  # noqa: E402
from gsa_kernels.fused.gates.reference import sigmoid_gate  # noqa: E402
from gsa_kernels.fused.split_rotate_gate import op as prologue_op  # noqa: E402
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate  # noqa: E402
from gsa_kernels.fused.split_rotate_gate.reference import split_rotate_gate  # noqa: E402
from gsa_kernels.fused.swiglu.op import fused_swiglu  # noqa: E402
from gsa_kernels.fused.swiglu.reference import swiglu, weighted_swiglu  # noqa: E402
from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu  # noqa: E402
from gsa_kernels.indexer.split_op import split_projection  # noqa: E402
from gsa_kernels.key_lists.format import key_lists_from_mask  # noqa: E402

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")])
CPU = pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the kernels are compiled for CUDA here"))
devices = pytest.mark.parametrize("device", [CPU, GPU])
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New buffers hold NaN: what is not written shows."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


def poison(tensor):
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor


def relative_error(found, expected):
    scale = expected.double().norm().clamp(min=1e-30)
    return float((found.double() - expected.double()).norm() / scale)


def assert_as_good(found, plain, exact, dtype):
    """Within twice the error of the reference in the same dtype, and a few units in the last place."""
    floor = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, truth) <= max(2 * relative_error(other, truth), floor / 4)


def run(function, leaves, grads):
    """Outputs and gradients of a function of some leaves."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None]
    gradients = torch.autograd.grad(
        outputs, leaves, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    )
    return [out.detach() for out in outputs] + list(gradients)


# --- SwiGLU -----------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("shape", [(3, 2, 74), (1, 1030), (5, 2)])
def test_swiglu(device, shape):
    for dtype in DTYPES:
        x = (torch.randn(shape, device=device) * 3).to(dtype)
        x.view(-1)[:2] = torch.tensor([30.0, -30.0])
        grad = torch.randn(*shape[:-1], shape[-1] // 2, device=device)
        found, again = (run(fused_swiglu, [x], [grad]) for _ in range(2))
        assert_as_good(found, run(swiglu, [x], [grad]), run(swiglu, [x.double()], [grad]), dtype)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@devices
@pytest.mark.parametrize(("rows", "width"), [(3, 74), (21, 300), (8, 256), (1, 1)])
def test_weighted_swiglu(device, rows, width):
    for dtype in DTYPES:
        x = (torch.randn(rows, 2 * width, device=device) * 3).to(dtype)
        x.view(-1)[:2] = torch.tensor([30.0, -30.0])
        weights, grad = torch.rand(rows, device=device), torch.randn(rows, width, device=device)
        weights[0] = 0  # its row teaches its weight all the same
        found, again = (run(fused_weighted_swiglu, [x, weights], [grad]) for _ in range(2))
        exact = run(weighted_swiglu, [x.double(), weights.double()], [grad])
        assert_as_good(found, run(weighted_swiglu, [x, weights], [grad]), exact, dtype)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        assert found[-1][0] != 0


@devices
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


@devices
@pytest.mark.parametrize("shape", [(2, 5, 3, 32), (1, BLOCK + 3), (7,)])
def test_sigmoid_gate(device, shape):
    for dtype in DTYPES:
        x, logits = ((torch.randn(shape, device=device) * 3).to(dtype) for _ in range(2))
        logits.view(-1)[:2] = torch.tensor([30.0, -30.0])
        grad = torch.randn(shape, device=device)
        found, again = (run(fused_sigmoid_gate, [x, logits], [grad]) for _ in range(2))
        exact = run(sigmoid_gate, [x.double(), logits.double()], [grad])
        assert_as_good(found, run(sigmoid_gate, [x, logits], [grad]), exact, dtype)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@devices
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


@devices
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

        found, again = (run(call(fused_split_rotate_gate), leaves, grads) for _ in range(2))
        plain = run(call(split_rotate_gate), leaves, grads)
        exact = run(call(split_rotate_gate), [leaf.double() for leaf in leaves], grads)
        assert_as_good(found, plain, exact, dtype)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@devices
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


@devices
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [("packed mask", (2, 9, 2, 2, 32, True, True)), ("key lists", (2, 5, 3, 1, 32, False, True))],
)
def test_g1_where_the_projection_has_it(device, kernel, shape, monkeypatch):
    """Attention reads its logits there, and puts their gradient where G2's completes it."""
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

        found, again = (run(fused, [qkv, logits], grad) for _ in range(2))
        exact = run(written_out, [qkv.double(), logits.double()], grad)
        assert_as_good(found, run(written_out, [qkv, logits], grad), exact, dtype)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        if shape[5]:
            assert found[2].data_ptr() == given[0].data_ptr()
        given.clear()

        # Read twice, its gradient is a sum in other memory.
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


@devices
@pytest.mark.parametrize(
    ("shape", "heads", "dim"), [((37, 2, 328), 4, 64), ((5, 3, 32), 3, 6), ((16, 1, 11), 1, 5)]
)
def test_split_projection(device, shape, heads, dim):
    def plain(together):
        sizes = [heads * dim, dim, heads, shape[2] - heads * dim - dim - heads]
        queries, keys, weights, _ = (part.transpose(0, 1) for part in together.split(sizes, -1))
        return queries.unflatten(-1, (heads, dim)), keys, weights

    for dtype in DTYPES:
        together = torch.randn(shape, device=device).to(dtype)
        sizes = [(heads, dim), (dim,), (heads,)]
        grads = [torch.randn(shape[0], shape[1], *size, device=device).transpose(0, 1) for size in sizes]

        def fused(together):
            parts = split_projection(together, heads, dim)
            assert all(part.is_contiguous() for part in parts)
            return parts

        for found, wanted in zip(run(fused, [together], grads), run(plain, [together], grads), strict=True):
            assert torch.equal(found, wanted)
    wrong = [
        ((together[0], heads, dim), "together has shape"),
        ((together[:, :, 2:].contiguous(), heads, dim + 1), "columns; pass"),
        ((together.transpose(0, 2).contiguous().transpose(0, 2), heads, dim), "together has strides"),
        ((together, 0, dim), "heads is 0"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            split_projection(*arguments)


@devices
@pytest.mark.parametrize(("shape", "heads", "dim"), [((37, 2, 328), 4, 64), ((5, 3, 32), 3, 6)])
def test_split_projection_rotates(device, shape, heads, dim):
    angles = torch.randn(shape[0], dim // 2, device=device) * 3
    cos, sin = angles.cos(), angles.sin()

    def turn(x):  # [B, L, ..., dim], in fp32, rounded once
        first, second = x.float().chunk(2, -1)
        c, s = (table.view(-1, *[1] * (x.ndim - 3), dim // 2) for table in (cos, sin))
        return torch.cat([first * c - second * s, second * c + first * s], -1).to(x.dtype)

    def plain(together):
        sizes = [heads * dim, dim, heads, shape[2] - heads * dim - dim - heads]
        queries, keys, weights, _ = (part.transpose(0, 1) for part in together.split(sizes, -1))
        return turn(queries.unflatten(-1, (heads, dim))), turn(keys), weights

    for dtype in DTYPES:
        together = torch.randn(shape, device=device).to(dtype)
        sizes = [(heads, dim), (dim,), (heads,)]
        grads = [torch.randn(shape[0], shape[1], *size, device=device).transpose(0, 1) for size in sizes]
        found = run(lambda x: split_projection(x, heads, dim, cos, sin), [together], grads)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        for value, wanted in zip(found, run(plain, [together], grads), strict=True):
            torch.testing.assert_close(value, wanted, **tolerance)
    wrong = [
        ((together, heads, dim, cos), "sin is None"),
        ((together, heads, dim, cos, sin[1:]), "sin has shape"),
        ((together, heads, dim, cos.double(), sin), "cos is torch.float64"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            split_projection(*arguments)


# --- cross-entropy ----------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 37), (2, 9000), (1, 1)])
def test_cross_entropy(device, rows, vocabulary):
    for dtype in DTYPES:
        logits = (torch.randn(rows, vocabulary, device=device) * 4).to(dtype)
        logits[0, 0] = 60.0
        targets = torch.randint(vocabulary, (rows,), device=device)
        targets[-1] = vocabulary - 1
        grad = torch.randn(rows, device=device)
        results = []
        for overwrite in (False, True, False):
            leaf = logits.clone().requires_grad_()
            held = leaf * 1  # the gradient may be written over it
            loss = vocab_parallel_cross_entropy(held, targets, overwrite_logits=overwrite)
            results.append([loss.detach(), torch.autograd.grad(loss, leaf, grad)[0]])
        plain = run(lambda x, t=targets: cross_entropy(x, t), [logits], [grad])
        exact = run(lambda x, t=targets: cross_entropy(x, t), [logits.double()], [grad])
        assert_as_good(results[0], plain, exact, dtype)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@devices
def test_a_second_backward_pass_after_the_logits_are_gone_is_an_error(device):
    """The first one has written the gradient over them: it would take that for logits."""
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    leaf = torch.randn(2, 5, device=device, requires_grad=True)
    for overwrite in (False, True):
        loss = vocab_parallel_cross_entropy(leaf * 1, targets, overwrite_logits=overwrite).sum()
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            assert torch.equal(torch.autograd.grad(loss, leaf)[0], first)


@devices
def test_cross_entropy_of_a_split_vocabulary(device, monkeypatch):
    """Both ranks in turn, the collectives done by hand."""
    logits = torch.randn(6, 40, device=device) * 3
    targets = torch.randint(40, (6,), device=device)
    parts = logits.chunk(2, 1)
    statistics = [row_statistics(part.contiguous(), targets, 20 * rank) for rank, part in enumerate(parts)]
    highest = torch.maximum(statistics[0][0], statistics[1][0])

    def all_reduce(tensor, op=None, group=None):
        if tensor.dim() == 1:
            tensor.copy_(highest)
        else:
            tensor.copy_(sum(torch.stack([t * (m - highest).exp(), x]) for m, t, x in statistics))

    monkeypatch.setattr(cross_entropy_op.dist, "all_reduce", all_reduce)
    maximum, total, target_logit = cross_entropy_op._over_ranks(*statistics[1], group=None)
    torch.testing.assert_close(total.log() + maximum - target_logit, cross_entropy(logits, targets))
    grad = torch.rand(6, device=device)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(cross_entropy(leaf, targets), leaf, grad)
    for rank, part in enumerate(parts):
        out = torch.empty_like(part.contiguous())
        write_gradient(part.contiguous(), targets, maximum, total, grad, 20 * rank, out)
        torch.testing.assert_close(out, expected.chunk(2, 1)[rank], atol=1e-6, rtol=1e-5)


@devices
def test_cross_entropy_names_what_is_wrong(device):
    logits, targets = torch.randn(4, 6, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    for arguments, message in [
        ((logits[0], targets), "logits has shape"),
        ((logits, targets[:2]), "targets has shape"),
        ((logits.double(), targets), "logits has dtype"),
        ((logits.T.contiguous().T, targets), "rows of logits have stride"),
        ((logits, targets.int()), "targets is torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(*arguments)
