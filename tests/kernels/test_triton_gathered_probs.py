"""Head-summed probabilities over key lists against torch in fp64: on a GPU, or small in the interpreter."""

import os
from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

pytest.importorskip("triton")


from random_lists import lists_of, make_mask  # noqa: E402

from gsa_kernels import sum_over_blocks  # noqa: E402
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists  # noqa: E402

CPU = pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the kernels are compiled for the GPU"))
GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
)
device_of = pytest.mark.parametrize("device", [CPU, GPU])
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


@pytest.fixture
def _poisoned_memory() -> Iterator[None]:
    """torch.empty is filled with NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def attention_of(
    mask: torch.Tensor, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, lse and the probabilities summed over the heads, these two from fp64."""
    rng = torch.Generator().manual_seed(seed)
    batch, length, _ = mask.shape
    q = torch.randn(batch, length, heads, dim, generator=rng).to(mask.device, dtype)
    k = torch.randn(batch, length, kv_heads, dim, generator=rng).to(mask.device, dtype)
    keys = k.double().repeat_interleave(heads // kv_heads, 2)
    logits = torch.einsum("bthd,bshd->bhts", q.double(), keys) * dim**-0.5
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    lse = logits.logsumexp(-1)
    return q, k, lse.float(), torch.where(mask, (logits - lse[..., None]).exp().sum(1), 0)


def check_probs(
    length: int,
    device: str,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    queries: int,
) -> None:
    mask = make_mask(length, 2, block, max(1, block), True, 0).to(device)
    share = max(1, block // queries)
    lists = lists_of(mask, queries, share)
    q, k, lse, want = attention_of(mask, dtype, heads, kv_heads, dim)
    units = -(-length // max(block, queries))
    tiles = torch.arange(units - 1, -1, -1, device=device, dtype=torch.int32)
    got = head_sum_probs_lists(q, k, lse, lists, tiles, selection_block=block)
    again = head_sum_probs_lists(q, k, lse, lists, tiles, selection_block=block)
    rows = queries if block == 1 else 1
    want = sum_over_blocks(want, block)
    want = torch.nn.functional.pad(want, (0, 0, 0, units * rows - want.shape[1])).unflatten(1, (units, rows))
    tolerance = (
        2e-5 if dtype == torch.float32 else 1e-3
    )  # of a sum over the heads that is at most their number
    for b in range(2):
        for i, tile in enumerate(tiles.tolist()):
            start, count = lists.key_starts[b, tile * share], int(lists.counts[b, tile * share])
            keys = lists.keys[start : start + count].long()
            part = got[b, i, :count].reshape(count, rows)
            torch.testing.assert_close(
                part.double(), want[b, tile][:, keys].T, rtol=tolerance, atol=tolerance * block
            )
            assert torch.equal(got[b, i, :count], again[b, i, :count])


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize(
    ("heads", "kv_heads", "block", "queries"), [(6, 2, 1, 32), (2, 2, 1, 16), (4, 1, 64, 32), (5, 1, 16, 16)]
)
def test_target(device: str, heads: int, kv_heads: int, block: int, queries: int) -> None:
    check_probs(77, device, torch.float32, heads, kv_heads, 32, block, queries)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("group", range(1, 9))
def test_target_in_bf16(device: str, group: int) -> None:
    for block, queries in ((1, 32), (1, 16), (32, 32), (128, 32)):
        check_probs(301, device, torch.bfloat16, 2 * group, 2, 128, block, queries)
    check_probs(301, device, torch.bfloat16, group, 1, 64, 1, 32)


def test_errors() -> None:
    lists = lists_of(make_mask(10, 2, 1, 1, False, 0), 32, 1)
    q, lse, tiles = torch.zeros(2, 10, 2, 32), torch.zeros(2, 2, 10), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="tiles is"):
        head_sum_probs_lists(q, q, lse, lists, tiles.float())
    with pytest.raises(ValueError, match="selection_block is 48"):
        head_sum_probs_lists(q, q, lse, lists, tiles, selection_block=48)
