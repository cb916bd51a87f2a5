"""Tests attention over all formats of a selection: on CUDA if there is a device, else interpreted."""

import dataclasses

import pytest
import torch
from attention_problems import check, differentiated, make_inputs, random_mask
from kernel_devices import GPU
from poison import poisoned

from gsa_kernels.attention import triton_backward_keys
from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.key_lists.format import HostCounts, key_lists_from_mask
from gsa_kernels.packed_mask import pack_mask

every_format = pytest.mark.parametrize("form", ["packed mask", "dense", "key lists"])
formats = pytest.mark.parametrize("form", ["packed mask", "key lists"])


def make_mask(form, batch, length, device):
    """Return bool [B, L, L]; every row selects a key."""
    return random_mask(batch, length, 1.0 if form == "dense" else 0.5, device)


def attention(form, mask, junk=False):
    """Attend with q, k, v and the gate; `junk` fills the lists after their end."""
    if form != "key lists":
        packed = None if form == "dense" else pack_mask(mask)
        return lambda q, k, v, gate: masked_attention(q, k, v, packed, gate_logits=gate)
    lists = key_lists_from_mask(mask)
    if junk:
        end = torch.full((200,), 2**30, dtype=torch.int32, device=mask.device)
        keys, words = torch.cat([lists.keys, end]), torch.cat([lists.words, end])
        bounds = HostCounts(lists.counts.cpu() + 60)
        lists = dataclasses.replace(lists, keys=keys, words=words, host_counts=bounds)
    return lambda q, k, v, gate: gathered_attention(q, k, v, lists, gate)


def assert_equal(results, wanted):
    for value, want in zip(results, wanted, strict=True):
        assert torch.equal(value, want)


@every_format
def test_strides_do_not_matter(device, form):
    """An expanded gradient and inputs sliced from a fused projection [L, B, ...] give the same bits as contiguous
    tensors."""
    torch.manual_seed(5)
    batch, length = 2, 50
    mask = make_mask(form, batch, length, device)
    fused = torch.randn(length, batch, 8, 32, dtype=torch.bfloat16).to(device)
    parts = [fused[:, :, 0:3:2], fused[:, :, 3:4], fused[:, :, 4:5], fused[:, :, 6:8]]
    views = [part.transpose(0, 1) for part in parts]
    grad = torch.ones(1, dtype=torch.bfloat16, device=device).expand(views[0].shape)
    attend = attention(form, mask)
    got = differentiated(attend, views, grad)
    assert_equal(got, differentiated(attend, [x.contiguous() for x in views], grad.contiguous()))
    assert got[0].stride() == torch.empty_like(views[0]).stride()
    if form != "key lists":
        misaligned = torch.randn(batch, length, 2, 33, dtype=torch.bfloat16).to(device)[..., 1:]
        check([misaligned, *views[1:]], mask, attend)


@every_format
def test_everything_is_written(device, form, monkeypatch):
    """Buffers are filled with NaN or a large integer, which must not reach a result. Entries after the end of a key
    list must not be read."""
    torch.manual_seed(6)
    inputs = make_inputs(2, 75, 4, 2, 32, torch.bfloat16, device)
    mask, grad = make_mask(form, 2, 75, device), torch.randn_like(inputs[0])
    monkeypatch.setattr(triton_backward_keys, "count_key_parts", lambda *_: 2)
    clean = differentiated(attention(form, mask), inputs, grad)
    attend = attention(form, mask, junk=True)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    assert_equal(differentiated(attend, inputs, grad), clean)


@pytest.mark.parametrize("device", [GPU])
@formats
def test_repetitions_are_equal(device, form):
    torch.manual_seed(8)
    inputs = make_inputs(1, 2048, 4, 1, 32, torch.bfloat16, device)
    attend, grad = attention(form, make_mask(form, 1, 2048, device)), torch.randn_like(inputs[0])
    first = differentiated(attend, inputs, grad)
    for _ in range(5):
        assert_equal(differentiated(attend, inputs, grad), first)


@formats
def test_large_logits(device, form):
    """The first keys of a row are unselected and logits are far apart, but nothing overflows or becomes NaN."""
    torch.manual_seed(10)
    mask = make_mask(form, 1, 140, device)
    mask[:, 135, :130] = False
    mask[:, 135, 131] = True
    q, k, v, gate = make_inputs(1, 140, 2, 1, 32, torch.bfloat16, device)
    check([40 * q, 40 * k, v, gate], mask, attention(form, mask))
