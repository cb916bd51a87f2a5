"""Compares attention over key lists with the reference: on CUDA if there is a device, else interpreted."""

import dataclasses
import weakref

import pytest
import torch
import triton
from attention_problems import (
    GPUS,
    NAMES,
    causal,
    check,
    differentiated,
    document_starts,
    from_query,
    make_inputs,
    random_mask,
)
from covering import covered
from kernel_devices import CUDA

from gsa_kernels.attention import triton_gathered_backward
from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.key_lists.format import HostCounts, key_lists_from_mask

DTYPES = (torch.float32, torch.bfloat16)


def attention(lists, **options):
    return lambda q, k, v, gate: gathered_attention(q, k, v, lists, gate, **options)


@covered(
    "case",
    length=[1, 35, 70],
    query_start=[0, 41],
    documents=[False, True],
    heads=[(12, 1), (2, 2), (3, 1), (8, 2), (8, 1)],
    head_size=[32, 64, 128, 256],
    gpu=GPUS,
    gated=[True, False],
)
def test_output_and_gradients(device, case, monkeypatch):
    """The cases include groups of heads that are not powers of two, or that need several programs."""
    dtype, kib = case["gpu"]
    if kib:
        monkeypatch.setattr(triton_gathered_backward, "shared_memory", lambda _: kib * 1024)
    length, first, batch = case["length"], case["query_start"], 2 if case["heads"][0] < 8 else 1
    num_keys = first + length
    torch.manual_seed(length)
    mask = random_mask(batch, num_keys, 0.5, device)
    if case["documents"]:
        mask = mask & causal(batch, num_keys, document_starts(batch, num_keys, device))
    mask = mask[:, first:]
    *projections, gate = make_inputs(batch, num_keys, *case["heads"], case["head_size"], dtype, device)
    inputs = from_query([*projections, gate if case["gated"] else None], first)
    check(inputs, mask, attention(key_lists_from_mask(mask)))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_other_lists_compile_nothing(monkeypatch):
    """The length of lists and the ranges of tiles in scratch memory must not be compile-time constants."""
    torch.manual_seed(7)
    inputs = make_inputs(1, 700, 2, 1, 64, torch.bfloat16, "cuda")

    def run(density, tiles):
        lists = key_lists_from_mask(random_mask(1, 700, density, "cuda"))
        attend = attention(lists, scratch_bytes=tiles * lists.max_count * 256)
        differentiated(attend, inputs, torch.randn_like(inputs[0]))

    run(0.3, 2)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["fn"].name)
    )
    for number in range(8):
        run(0.2 + 0.05 * number, 1 + number)
    assert compiled == []


def test_the_lists_go_with_the_backward_pass(device):
    """Key lists are freed after the backward pass, although pipeline schedules keep the loss longer."""
    torch.manual_seed(6)
    lists = key_lists_from_mask(random_mask(1, 40, 0.5, device))
    alive = weakref.ref(lists.keys)
    q, k, v, gate = (x.requires_grad_() for x in make_inputs(1, 40, 2, 1, 32, torch.float32, device))
    loss = gathered_attention(q, k, v, lists, gate)[0].sum()
    del lists
    assert alive() is not None
    loss.backward()
    assert alive() is None


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "dtype"),
    [
        (128, 8, 2, torch.bfloat16),
        (128, 8, 1, torch.bfloat16),
        (256, 16, 2, torch.bfloat16),
        (256, 24, 2, torch.bfloat16),
        (256, 4, 1, torch.float32),
        (64, 2, 2, torch.bfloat16),
        (64, 4, 1, torch.float32),
    ],
)
def test_long_sequences(dim, heads, kv_heads, dtype):
    torch.manual_seed(5)
    mask = random_mask(2, 1001, 0.2, "cuda") & causal(2, 1001, document_starts(2, 1001, "cuda"))
    lists = key_lists_from_mask(mask)
    inputs = make_inputs(2, lists.length, heads, kv_heads, dim, dtype, "cuda")
    check(inputs, mask, attention(lists), attention(lists, scratch_bytes=1 << 22))


@pytest.mark.parametrize("heads", [4, 8], ids=["one piece a head", "two pieces a head"])
def test_heads_that_share_a_launch_have_the_same_bits(heads, device, monkeypatch):
    """The scratch memory has room for all key-value heads at once, for two of four, or for one."""
    torch.manual_seed(8)
    lists = key_lists_from_mask(random_mask(1, 48, 0.5, device))
    inputs = make_inputs(1, 48, heads, 4, 32, torch.float32, device)
    grad, launched = torch.randn_like(inputs[0]), []
    launch = triton_gathered_backward._launch

    def noted(*arguments):
        launched.append(len(arguments[-1]))
        launch(*arguments)

    monkeypatch.setattr(triton_gathered_backward, "_launch", noted)
    of_head = int(lists.counts.sum()) * 2 * 32 * 4
    results = [
        differentiated(attention(lists, scratch_bytes=room * of_head), inputs, grad) for room in (1, 3, 4)
    ]
    pieces = heads // 4
    assert launched == [1] * 4 * pieces + [2] * 2 * pieces + [4] * pieces
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(other, results[0], strict=True))


@pytest.mark.parametrize(
    ("programs", "wanted", "keys", "segments"),
    [
        (40, 132, 26000, 3),  # 120 programs; with 6 two waves of a sixth, which is no less
        (40, 132, 128000, 13),  # four waves of a thirteenth
        (80, 132, 26000, 3),  # two waves of a third
        (40, 132, 9000, 2),
        (40, 132, 8191, 1),  # each half is too short
        (132, 132, 26000, 1),
        (136, 132, 10**6, 1),
        (100, 132, 13000, 1),  # two or three waves of halves or thirds
        (1, 132, 10**6, 132),
        (2, 132, 0, 1),
        (1, 1, 10**6, 1),  # interpreted
    ],
)
def test_segments_fill_the_device(programs, wanted, keys, segments):
    assert triton_gathered_backward.count_segments(programs, wanted, keys) == segments


def in_segments(attend, segments, monkeypatch):
    """Attend with this number of programs for each tile's list in the backward pass."""

    def patched(*inputs):
        monkeypatch.setattr(triton_gathered_backward, "count_segments", lambda *_: segments)
        return attend(*inputs)

    return patched


@pytest.mark.parametrize(
    ("batch", "heads", "head_size", "dtype"),
    [
        (1, (4, 2), 64, torch.float32),
        (2, (2, 2), 64, torch.bfloat16),
        pytest.param(1, (5, 1), 128, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(1, (3, 1), 256, torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_segments(device, batch, heads, head_size, dtype, monkeypatch):
    """The key list of a tile is divided into one to three segments, each with its own program. Some lists are empty,
    have fewer loop steps than segments, or do not divide evenly. dK and dV do not depend on the number of segments."""
    torch.manual_seed(9)
    length, empty = 165, 32
    mask = random_mask(batch, length, 0.4, device)
    mask[:, :empty] = False
    lists = key_lists_from_mask(mask)
    assert lists.counts.min() == 0
    assert lists.counts.max() > 128  # three steps

    def attend(q, k, v, gate):
        """Skip queries of the first tile, whose lists are empty, because the reference rejects them."""
        q, gate = (torch.nn.functional.pad(x, (0, 0, 0, 0, empty, 0)) for x in (q, gate))
        out, lse = gathered_attention(q, k, v, lists, gate)
        return out[:, empty:], lse[..., empty:]

    inputs = from_query(make_inputs(batch, length, *heads, head_size, dtype, device), empty)
    attends = [in_segments(attend, segments, monkeypatch) for segments in (1, 2, 3)]
    whole, *others = check(inputs, mask[:, empty:], *attends)
    for other in others:
        for name, value, want in zip(NAMES, other, whole, strict=True):
            if name != "grad_q":
                assert torch.equal(value, want), name


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize(("heads", "head_size"), [((24, 2), 256), ((16, 1), 128)])
def test_long_lists_are_shared_by_programs(heads, head_size, monkeypatch):
    """`count_segments` decides. Selections are random, in memory for 40 tiles at a time."""
    torch.manual_seed(16)
    length = 16384
    lists = key_lists_from_mask(random_mask(1, length, 0.1, "cuda"))
    inputs = make_inputs(1, length, *heads, head_size, torch.bfloat16, "cuda")
    grad, counted = torch.randn_like(inputs[0]), []
    count = triton_gathered_backward.count_segments

    def noted(*arguments):
        counted.append(count(*arguments))
        return counted[-1]

    monkeypatch.setattr(triton_gathered_backward, "count_segments", noted)
    attend = attention(lists, scratch_bytes=40 * lists.max_count * 2 * head_size * 2)
    shared, again = (differentiated(attend, inputs, grad) for _ in range(2))
    assert max(counted) > 1
    whole = differentiated(in_segments(attend, 1, monkeypatch), inputs, grad)
    for name, value, repeated, want in zip(NAMES, shared, again, whole, strict=True):
        assert torch.equal(value, repeated), name
        if name == "grad_q":  # two roundings to bf16 of fp32 sums in different order
            torch.testing.assert_close(value, want, rtol=2**-7, atol=1e-5 * want.abs().max().item())
        else:
            assert torch.equal(value, want), name


def test_a_list_of_one_key(device):
    """All queries attend to key 0: its probability is 1, and only its value gets a gradient."""
    torch.manual_seed(6)
    mask = torch.zeros(1, 40, 40, dtype=torch.bool, device=device)
    mask[..., 0] = True
    lists = key_lists_from_mask(mask)
    assert lists.max_count == 1
    for dtype in DTYPES:
        check(make_inputs(1, 40, 2, 1, 32, dtype, device), mask, attention(lists))


def test_chunks_add_up(device):
    """Any amount of scratch memory gives the same gradients up to the order of fp32 sums."""
    torch.manual_seed(8)
    inputs = make_inputs(2, 40, 1, 1, 32, torch.float32, device)
    lists = key_lists_from_mask(random_mask(2, 40, 0.5, device))
    bounded = dataclasses.replace(lists, host_counts=HostCounts(lists.counts.cpu() + 3))
    grad = torch.randn_like(inputs[0])
    wanted = differentiated(attention(lists), inputs, grad)
    tile_bytes = lists.max_count * 2 * 32 * 4
    for scratch, some in ((1, lists), (2 * tile_bytes, lists), (2 * tile_bytes, bounded)):
        got = differentiated(attention(some, scratch_bytes=scratch), inputs, grad)
        for value, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-5)


def test_errors(device):
    q, k, v, _ = make_inputs(1, 40, 4, 2, 32, torch.float32, device)
    lists = key_lists_from_mask(random_mask(1, 40, 0.5, device))

    def changed(**fields):
        return {"lists": dataclasses.replace(lists, **fields)}

    good = {"q": q, "k": k, "v": v, "lists": lists}
    bad = [
        ({"k": k[:, 1:]}, "k has shape"),  # test_triton_attention.py has the other errors of q, k, v and gate
        ({"scratch_bytes": 0}, "scratch_bytes is 0"),
        (changed(length=41), "41 tokens"),
        (changed(counts=lists.counts[:, :1]), "lists.counts has shape"),
        (changed(keys=lists.keys.long()), "lists.keys is torch.int64"),
        (changed(starts=lists.starts.to("meta")), "lists.starts is torch.int64 on meta"),
        (changed(words=lists.words[::2]), "contiguous"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            gathered_attention(**(good | change))
