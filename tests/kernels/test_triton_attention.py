"""Compares the Triton attention kernels with the reference: on CUDA if there is a device, else interpreted."""

import pytest
import torch
from attention_problems import GPUS, causal, check, document_starts, from_query, make_inputs
from covering import covered
from kernel_devices import CUDA

from gsa_kernels import sampling
from gsa_kernels.attention import inputs, triton_backward_keys, triton_backward_queries
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.reference import sparse_attention
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import Geometry

DTYPES = (torch.float32, torch.bfloat16)


def make_mask(kind, batch, length, starts, device):
    """Create selections of each kind; every row selects a key."""
    visible = causal(batch, length, starts).to(device)
    if kind == "full":
        return visible
    if kind == "random":
        chosen = visible & (torch.rand(visible.shape) < 0.6).to(device)
        return chosen | (visible & (visible.cumsum(-1) == 1) & ~chosen.any(-1, keepdim=True))
    if kind == "single":
        # Each row selects one key, often not its own.
        score = torch.where(visible, torch.rand(visible.shape).to(device), -1.0)
        return torch.zeros_like(visible).scatter_(-1, score.argmax(-1, keepdim=True), True)
    raise ValueError(kind)


def attention(packed=None, geometry=None):
    return lambda q, k, v, gate: masked_attention(q, k, v, packed, geometry or Geometry(), gate)


@covered(
    "case",
    length=[1, 33, 70, 128],
    query_start=[0, 37],
    kind=["dense", "full", "random", "single"],
    documents=[False, True],
    heads=[(8, 1), (2, 2), (4, 2), (12, 1)],
    head_size=[32, 64, 128, 256],
    gpu=GPUS,
    splits=[1, 2],
    gated=[True, False],
)
def test_output_and_gradients(device, case, monkeypatch):
    """`splits` divides the work for keys among several programs, if a group has enough heads."""
    dtype, kib = case["gpu"]
    if kib:
        monkeypatch.setattr(triton_backward_queries, "shared_memory", lambda _: kib * 1024)
    length, first, (heads, kv_heads) = case["length"], case["query_start"], case["heads"]
    num_keys = first + length
    torch.manual_seed(length)
    monkeypatch.setattr(
        triton_backward_keys, "count_key_parts", lambda *_: min(case["splits"], heads // kv_heads)
    )
    batch = 2 if length < 70 else 1
    starts = document_starts(batch, num_keys, device) if case["documents"] else None
    words = case["kind"] != "dense"
    mask = make_mask(case["kind"] if words else "full", batch, num_keys, starts, device)[:, first:]
    *projections, gate = make_inputs(batch, num_keys, heads, kv_heads, case["head_size"], dtype, device)
    inputs = from_query([*projections, gate if case["gated"] else None], first)
    geometry = Geometry(None if starts is None else starts[:, first:], first)
    check(inputs, mask, attention(pack_mask(mask) if words else None, geometry))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize(
    ("length", "heads", "dim"),
    [(1000, (8, 2), 128), (2048, (8, 2), 128), (1000, (24, 2), 256), (2048, (16, 2), 256)],
)
@pytest.mark.parametrize("words", [True, False], ids=["words", "dense"])
def test_long_sequences(length, heads, dim, words):
    torch.manual_seed(3)
    starts = document_starts(2, length, "cuda")
    mask = make_mask("random" if words else "full", 2, length, starts, "cuda")
    inputs = make_inputs(2, length, *heads, dim, torch.bfloat16, "cuda")
    q, k, v, _ = inputs
    packed = pack_mask(mask) if words else None
    check(inputs, mask, attention(packed, Geometry(starts)))
    _, lse = masked_attention(q, k, v, packed, Geometry(starts))
    probs = head_sum_probs_rows(q, k, lse, packed, SampledRows(0, length), Geometry(starts))
    wanted = sparse_attention(q.double(), k.double(), v.double(), mask, return_probs=True).head_sum_probs
    torch.testing.assert_close(probs.double()[mask], wanted[mask], atol=1e-5, rtol=1e-4)


@covered(
    "case",
    words=[True, False],
    documents=[False, True],
    dtype=DTYPES,
    rows=[(0, 150), (37, 50), (149, 1), (0, 86, 2)],
    head_size=[32, 256],
)
def test_head_sum_probs(device, case, monkeypatch):
    """The test compares all rows, ranges, and every second run of 64 rows."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 64)
    torch.manual_seed(12)
    length, chunk = 150, SampledRows(*case["rows"])
    starts = document_starts(2, length, device) if case["documents"] else None
    mask = make_mask("random" if case["words"] else "full", 2, length, starts, device)
    packed = pack_mask(mask) if case["words"] else None
    q, k, v, _ = make_inputs(2, length, 4, 2, case["head_size"], case["dtype"], device)
    _, lse = masked_attention(q, k, v, packed, Geometry(starts))
    wanted = sparse_attention(q.double(), k.double(), v.double(), mask, return_probs=True).head_sum_probs
    probs = head_sum_probs_rows(q, k, lse, packed, chunk, Geometry(starts))
    hit = mask[:, chunk.rows()]
    torch.testing.assert_close(probs.double()[hit], wanted[:, chunk.rows()][hit], atol=1e-5, rtol=1e-4)
    halves = head_sum_probs_rows(q, k, lse, packed, chunk, Geometry(starts), dtype=torch.float16)
    assert torch.equal(halves[hit], probs[hit].half())


def test_errors(device):
    q, k, v, gate = make_inputs(1, 40, 4, 2, 32, torch.float32, device)
    words = pack_mask(causal(1, 40)).to(device)
    good = {"q": q, "k": k, "v": v, "packed_mask": words}
    bad = [
        ({"q": q[0]}, "q has shape"),
        ({"k": k[:, 1:]}, "k has shape"),
        ({"v": v[:, :, 1:]}, "v has shape"),
        ({"q": q[:, :, :3]}, "multiple"),
        ({"q": q[..., :16], "k": k[..., :16], "v": v[..., :16]}, "head size"),
        ({"q": q.double(), "k": k.double(), "v": v.double()}, "torch.float64; pass bfloat16 or float32"),
        (
            {"q": q.half(), "k": k.half(), "v": v.half()},
            "float16; pass bfloat16 or float32, or use implementation",
        ),
        ({"k": k.half()}, "one dtype"),
        ({"packed_mask": words.long()}, "int32"),
        ({"packed_mask": words[..., :1]}, "packed_mask has shape"),
        ({"gate_logits": gate[..., :1]}, "gate_logits has shape"),
        ({"v": v.transpose(1, 3).contiguous().transpose(1, 3)}, "contiguous"),
        ({"packed_mask": words.to("meta")}, "packed_mask is torch.int32 on meta"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            masked_attention(**(good | change))
    with pytest.raises(ValueError, match="rows end at 40"):
        head_sum_probs_rows(q, k, torch.zeros(1, 4, 40, device=device), words, SampledRows(30, 11))


@pytest.mark.parametrize(
    ("capability", "kib", "size"), [((8, 0), 163, 256), ((8, 9), 99, 256), ((7, 5), 64, 32)]
)
def test_heads_that_do_not_fit_are_refused(device, capability, kib, size, monkeypatch):
    monkeypatch.setattr(inputs, "shared_memory", lambda _: kib * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    q, k, v, _ = make_inputs(1, 32, 2, 1, size, torch.bfloat16, device)
    needed, architecture = 227 if size > 128 else 99, "sm_{}{}".format(*capability)
    with pytest.raises(
        ValueError, match=f"heads of {size} need {needed} KiB .* {architecture} has {kib} KiB; pass"
    ):
        masked_attention(q, k, v, None)
