"""The Triton attention kernels against the reference: on CUDA where there is a device, else interpreted."""

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    # Read when triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


from covering import covered  # noqa: E402

from gsa_kernels import sampling  # noqa: E402
from gsa_kernels.attention import triton_backward_keys, triton_forward  # noqa: E402
from gsa_kernels.attention.op import masked_attention  # noqa: E402
from gsa_kernels.attention.reference import sparse_attention  # noqa: E402
from gsa_kernels.attention.triton_packed_mask import transpose_words  # noqa: E402
from gsa_kernels.attention.triton_probs import head_sum_probs_rows  # noqa: E402
from gsa_kernels.sampling import SampledRows  # noqa: E402

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no CUDA device")])
CPU = pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the kernels are compiled for CUDA here"))
devices = pytest.mark.parametrize("device", [CPU, GPU])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def pack(mask):
    """bool [B, L, Lk] -> words int32 [B, L, ceil(Lk / 32)]"""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (padded.long() << torch.arange(32, device=mask.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def causal(batch, length, starts=None):
    """bool [B, L, L], and with `starts` int32 [B, L] only within the document."""
    position = torch.arange(length, device="cpu" if starts is None else starts.device)
    mask = (position[None, :] <= position[:, None]).expand(batch, length, length)
    return mask if starts is None else mask & (position >= starts[..., None])


def document_starts(batch, length, device):
    starts = torch.zeros(batch, length, dtype=torch.int32)
    for b in range(batch):
        for cut in (length // 3 + b, length // 2 + 2 * b):
            starts[b, min(cut, length) :] = min(cut, length)
    return starts.to(device)


def make_mask(kind, batch, length, starts, device):
    """Selections of each kind; every row selects a key."""
    visible = causal(batch, length, starts).to(device)
    if kind == "full":
        return visible
    if kind == "random":
        chosen = visible & (torch.rand(visible.shape) < 0.6).to(device)
        return chosen | (visible & (visible.cumsum(-1) == 1) & ~chosen.any(-1, keepdim=True))
    if kind == "single":
        # One key per row, often not the row's own.
        score = torch.where(visible, torch.rand(visible.shape).to(device), -1.0)
        return torch.zeros_like(visible).scatter_(-1, score.argmax(-1, keepdim=True), True)
    raise ValueError(kind)


def make_inputs(batch, length, heads, kv_heads, dim, dtype, device):
    return [
        torch.randn(batch, length, n, dim, dtype=dtype).to(device) for n in (heads, kv_heads, kv_heads, heads)
    ]


def reference(q, k, v, gate, mask, grad):
    """Output, lse and gradients in fp64."""
    q, k, v, gate = leaves = [x.detach().double().requires_grad_() for x in (q, k, v, gate)]
    out = sparse_attention(q, k, v, mask).out * torch.sigmoid(gate)
    grads = torch.autograd.grad(out, leaves, grad.double())
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    lse = logits.masked_fill(~mask[:, None], float("-inf")).logsumexp(-1)
    return [out.detach(), lse.detach(), *grads]


def plain(q, k, v, gate, mask, grad):
    """The same in the dtype of the inputs, the way it is written in torch."""
    q, k, v, gate = leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
    ratio = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), values) * torch.sigmoid(gate)
    grads = torch.autograd.grad(out, leaves, grad)
    return [out.detach(), logits.float().logsumexp(-1).detach(), *grads]


def kernels(q, k, v, gate, mask, grad, *, words=True, starts=None):
    q, k, v, gate = leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
    packed = pack(mask) if words else None
    out, lse = masked_attention(q, k, v, packed, document_starts=starts, output_gate_logits=gate)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]


NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v", "grad_gate")


def check(inputs, mask, *, words=True, starts=None):
    grad = torch.randn_like(inputs[0])
    wanted = reference(*inputs, mask, grad)
    other = plain(*inputs, mask, grad)
    got = kernels(*inputs, mask, grad, words=words, starts=starts)
    # Where the reference's error vanishes (a single key has probability exactly 1) rounding remains.
    floor = 4 * torch.finfo(inputs[0].dtype).eps * max(1.0, *(value.abs().max().item() for value in wanted))
    for name, want, torch_value, value in zip(NAMES, wanted, other, got, strict=True):
        error = (value.double() - want).abs().max()
        allowed = 2 * (torch_value.double() - want).abs().max() + floor
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


@devices
@covered(
    "case",
    length=[1, 17, 33, 70, 128],
    kind=["dense", "full", "random", "single"],
    documents=[False, True],
    heads=[(2, 1), (2, 2), (4, 2), (4, 1)],
    head_size=[32, 64, 128],
    dtype=DTYPES,
    splits=[1, 2],
)
def test_output_and_gradients(device, case, monkeypatch):
    """`splits`: the key side's work divided among several programs, where a group has the heads."""
    length, (heads, kv_heads) = case["length"], case["heads"]
    torch.manual_seed(length)
    monkeypatch.setattr(
        triton_backward_keys, "_choose_splits", lambda *_: min(case["splits"], heads // kv_heads)
    )
    batch = 2 if length < 100 else 1
    starts = document_starts(batch, length, device) if case["documents"] else None
    words = case["kind"] != "dense"
    mask = make_mask(case["kind"] if words else "full", batch, length, starts, device)
    inputs = make_inputs(batch, length, heads, kv_heads, case["head_size"], case["dtype"], device)
    check(inputs, mask, words=words, starts=starts)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("length", [1000, 2048])
@pytest.mark.parametrize("words", [True, False], ids=["words", "dense"])
def test_long_sequences(length, words):
    torch.manual_seed(3)
    starts = document_starts(2, length, "cuda")
    mask = make_mask("random" if words else "full", 2, length, starts, "cuda")
    for dtype in (torch.float16, torch.bfloat16):
        inputs = make_inputs(2, length, 8, 2, 128, dtype, "cuda")
        check(inputs, mask, words=words, starts=starts)
        q, k, v, _ = inputs
        packed = pack(mask) if words else None
        _, lse = masked_attention(q, k, v, packed, document_starts=starts)
        probs = head_sum_probs_rows(q, k, lse, packed, SampledRows(0, length), document_starts=starts)
        wanted = sparse_attention(q.double(), k.double(), v.double(), mask, return_probs=True).head_sum_probs
        torch.testing.assert_close(probs.double(), wanted, atol=1e-5, rtol=1e-4)


@devices
def test_without_gate_and_with_scale(device):
    torch.manual_seed(4)
    q, k, v, _ = make_inputs(1, 40, 2, 1, 32, torch.float32, device)
    mask = make_mask("random", 1, 40, None, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = masked_attention(q, k, v, pack(mask), softmax_scale=0.3)
    wanted = sparse_attention(q, k, v, mask, softmax_scale=0.3).out
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
    for value, want in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, leaves, grad), strict=True
    ):
        torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-4)


@devices
@pytest.mark.parametrize("words", [True, False], ids=["words", "dense"])
def test_strides_do_not_matter(device, words):
    """[L, B, ...] memory, slices of a fused projection, and an expanded gradient: bit for bit the same."""
    torch.manual_seed(5)
    dtype, batch, length = torch.float16, 2, 50
    mask = make_mask("random" if words else "full", batch, length, None, device)
    fused = torch.randn(length, batch, 8, 32, dtype=dtype).to(device)
    parts = [fused[:, :, 0:3:2], fused[:, :, 3:4], fused[:, :, 4:5], fused[:, :, 6:8]]
    views = [part.transpose(0, 1) for part in parts]
    grad = torch.ones(1, dtype=dtype, device=device).expand(views[0].shape)
    got = kernels(*views, mask, grad, words=words)
    wanted = kernels(*(x.contiguous() for x in views), mask, grad.contiguous(), words=words)
    for value, want in zip(got, wanted, strict=True):
        assert torch.equal(value, want)
    misaligned = torch.randn(batch, length, 2, 33, dtype=dtype).to(device)[..., 1:]
    check([misaligned, *views[1:]], mask, words=words)


@devices
@pytest.mark.parametrize("words", [True, False], ids=["words", "dense"])
def test_everything_is_written(device, words, monkeypatch):
    """All buffers begin as NaN; none reaches a result."""
    torch.manual_seed(6)

    def poisoned(allocate):
        def wrapped(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)

        return wrapped

    inputs = make_inputs(2, 75, 4, 2, 32, torch.float16, device)
    mask = make_mask("random" if words else "full", 2, 75, None, device)
    grad = torch.randn_like(inputs[0])
    monkeypatch.setattr(triton_backward_keys, "_choose_splits", lambda *_: 2)
    clean = kernels(*inputs, mask, grad, words=words)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    for value, want in zip(kernels(*inputs, mask, grad, words=words), clean, strict=True):
        assert torch.equal(value, want)


@devices
def test_unselected_keys_get_no_gradient(device):
    torch.manual_seed(7)
    length = 100
    mask = make_mask("random", 1, length, None, device)
    dropped = torch.tensor([5, 31, 32, 64, 90], device=device)
    mask[..., dropped] = False
    mask[..., 0] = True
    inputs = make_inputs(1, length, 2, 1, 32, torch.bfloat16, device)
    results = kernels(*inputs, mask, torch.randn_like(inputs[0]))
    for value in results[3:5]:
        assert (value[:, dropped] == 0).all()
        assert (value[:, 0] != 0).any()


@devices
def test_runs_are_equal(device):
    torch.manual_seed(8)
    length = 60 if device == "cpu" else 1024
    inputs = make_inputs(1, length, 4, 1, 32, torch.float16, device)
    mask = make_mask("random", 1, length, None, device)
    grad = torch.randn_like(inputs[0])
    first = kernels(*inputs, mask, grad)
    for _ in range(1 if device == "cpu" else 5):
        for value, want in zip(kernels(*inputs, mask, grad), first, strict=True):
            assert torch.equal(value, want)


@devices
@pytest.mark.parametrize("words", [True, False], ids=["words", "dense"])
def test_the_future_is_not_seen(device, words):
    torch.manual_seed(9)
    length, cut = 90, 41
    q, k, v, gate = make_inputs(1, length, 2, 1, 32, torch.float16, device)
    mask = make_mask("random" if words else "full", 1, length, None, device)
    packed = pack(mask) if words else None
    before, lse_before = masked_attention(q, k, v, packed, output_gate_logits=gate)
    for tensor in (q, k, v, gate):
        tensor[:, cut:] = 50 * torch.randn_like(tensor[:, cut:])
    after, lse_after = masked_attention(q, k, v, packed, output_gate_logits=gate)
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert torch.equal(lse_before[..., :cut], lse_after[..., :cut])


@devices
def test_large_logits(device):
    """A row's first keys unselected, logits far apart: no overflow, no NaN."""
    torch.manual_seed(10)
    q, k, v, gate = make_inputs(1, 140, 2, 1, 32, torch.float16, device)
    mask = make_mask("random", 1, 140, None, device)
    mask[:, 135, :130] = False
    mask[:, 135, 131] = True
    got = kernels(40 * q, 40 * k, v, gate, mask, torch.randn_like(q))
    assert all(value.isfinite().all() for value in got)
    wanted = sparse_attention(40 * q, 40 * k, v, mask).out * torch.sigmoid(gate)
    torch.testing.assert_close(got[0], wanted, atol=4e-3, rtol=4e-3)


@devices
@pytest.mark.parametrize("length", [1, 100, 257])
def test_transposed_words(device, length):
    torch.manual_seed(11)
    mask = make_mask("random", 2, length, None, device)
    assert torch.equal(transpose_words(pack(mask)), pack(mask.transpose(1, 2)).transpose(1, 2))


@devices
@covered(
    "case",
    words=[True, False],
    documents=[False, True],
    dtype=DTYPES,
    rows=[(0, 150), (37, 50), (149, 1), (0, 86, 2)],
)
def test_head_sum_probs(device, case, monkeypatch):
    """Of the whole, of parts, and of every second stretch of 64 rows."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 64)
    torch.manual_seed(12)
    length, chunk = 150, SampledRows(*case["rows"])
    starts = document_starts(2, length, device) if case["documents"] else None
    mask = make_mask("random" if case["words"] else "full", 2, length, starts, device)
    packed = pack(mask) if case["words"] else None
    q, k, v, _ = make_inputs(2, length, 4, 2, 32, case["dtype"], device)
    _, lse = masked_attention(q, k, v, packed, document_starts=starts)
    wanted = sparse_attention(q.double(), k.double(), v.double(), mask, return_probs=True).head_sum_probs
    probs = head_sum_probs_rows(q, k, lse, packed, chunk, document_starts=starts)
    torch.testing.assert_close(probs.double(), wanted[:, chunk.rows()], atol=1e-5, rtol=1e-4)
    hidden = ~mask[:, chunk.rows()]
    assert (probs[hidden] == 0).all()
    halves = head_sum_probs_rows(
        q, k, lse, packed, chunk, document_starts=starts, dtype=torch.float16, fill=False
    )
    assert torch.equal(halves[~hidden], probs[~hidden].half())


@devices
def test_errors(device):
    q, k, v, gate = make_inputs(1, 40, 4, 2, 32, torch.float32, device)
    words = pack(causal(1, 40)).to(device)
    good = {"q": q, "k": k, "v": v, "words": words}
    bad = [
        ({"q": q[0]}, "q has shape"),
        ({"k": k[:, 1:]}, "k has shape"),
        ({"v": v[:, :, 1:]}, "v has shape"),
        ({"q": q[:, :, :3]}, "multiple"),
        ({"q": q[..., :16], "k": k[..., :16], "v": v[..., :16]}, "head size"),
        ({"q": q.double(), "k": k.double(), "v": v.double()}, "float32"),
        ({"k": k.half()}, "one dtype"),
        ({"words": words.long()}, "int32"),
        ({"words": words[..., :1]}, "words has shape"),
        ({"document_starts": torch.zeros(1, 40, device=device)}, "int32"),
        ({"output_gate_logits": gate[..., :1]}, "output_gate_logits has shape"),
        ({"v": v.transpose(1, 3).contiguous().transpose(1, 3)}, "contiguous"),
        ({"words": words.to("meta")}, "one device"),
        ({"softmax_scale": 0.0}, "softmax_scale"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            masked_attention(**(good | change))
    with pytest.raises(ValueError, match="rows end at 40"):
        head_sum_probs_rows(q, k, torch.zeros(1, 4, 40, device=device), words, SampledRows(30, 11))


@devices
def test_forward_tiles_agree(device):
    """Every width of a key tile expands its words the same way."""
    torch.manual_seed(13)
    q, k, v, _ = make_inputs(1, 140, 2, 1, 32, torch.float16, device)
    mask = make_mask("random", 1, 140, None, device)
    wanted = sparse_attention(q.double(), k.double(), v.double(), mask).out
    for keys in (32, 64, 128):
        for tma in (False, True):
            tiles = triton_forward.Tiles(64, keys, 4, 2, tma)
            out, _ = triton_forward.attention_forward(q, k, v, pack(mask), None, None, 32**-0.5, tiles)
            torch.testing.assert_close(out.double(), wanted, atol=2e-3, rtol=2e-3)
