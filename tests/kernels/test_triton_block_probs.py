"""Compares the target and the loss of a shared selection with the torch references."""

import pytest
import torch
from kernel_devices import GPU, devices

pytest.importorskip("triton")

from gsa_kernels import sampling
from gsa_kernels.attention.triton_block_probs import block_sum_probs_rows
from gsa_kernels.reference import causal_mask, sum_over_blocks
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import Geometry


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_attention(length, *, device, dtype=torch.float32, batch=1, head_size=32, documents=False):
    generator = torch.Generator().manual_seed(length)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    starts = None
    if documents:
        first = torch.rand(batch, length, generator=generator) < 0.04
        first[:, 0] = True
        starts = torch.where(first, torch.arange(length), 0).cummax(1).values.to(device, torch.int32)
    return draw(batch, length, 4, head_size), draw(batch, length, 2, head_size), starts


def probabilities(q, k, mask):
    """Return lse [B, H, L] fp32 and the probabilities summed over heads [B, L, L], in fp64."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask[:, None], float("-inf"))
    return logits.logsumexp(-1).float(), logits.softmax(-1).sum(1)


def check_probs(length, block, *, device, dtype=torch.float32, head_size=32, documents=False, ranges=None):
    batch = 2 if documents else 1
    q, k, starts = make_attention(
        length, device=device, dtype=dtype, batch=batch, head_size=head_size, documents=documents
    )
    visible = causal_mask(length, document_ids=starts, device=device).expand(batch, length, length)
    lse, probs = probabilities(q, k, visible)
    blocks = -(-length // block)
    keys = torch.arange(length, device=device)
    wanted = sum_over_blocks(probs, block)
    wanted = torch.where(keys <= torch.arange(blocks, device=device)[:, None] * block, wanted, 0)
    for chunk in ranges or [(0, blocks)]:
        rows = SampledRows(*chunk)
        got = block_sum_probs_rows(q, k, lse, rows, Geometry(starts, 0, block, block))
        want = wanted[:, rows.rows()]
        torch.testing.assert_close(
            got.double(), want, atol=1e-5 if q.dtype == torch.float32 else 1e-3, rtol=1e-4
        )
        assert (got[want == 0] == 0).all()
        again = block_sum_probs_rows(q, k, lse, rows, Geometry(starts, 0, block, block))
        assert torch.equal(got, again)


@devices
@pytest.mark.parametrize(("block", "length", "head_size"), [(16, 75, 32), (64, 130, 256), (128, 140, 32)])
def test_probs_are_the_sums_of_the_reference(device, block, length, head_size):
    check_probs(length, block, device=device, head_size=head_size, documents=length == 75)


@devices
def test_ranges_of_rows(device, monkeypatch):
    check_probs(150, 16, device=device, ranges=[(3, 4), (9, 1), (0, 10)])
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 4)
    check_probs(150, 16, device=device, ranges=[(0, 6, 2), (4, 4, 2)])


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_probs_of_many_shapes(device, block, documents):
    for dtype in (torch.bfloat16, torch.float32):
        for length in (1, 128, 1000, 1536):
            check_probs(length, block, device=device, dtype=dtype, documents=documents)
    check_probs(1000, block, device=device, dtype=torch.bfloat16, head_size=256, documents=documents)


@devices
def test_errors(device):
    q, k, _ = make_attention(40, device=device)
    lse = torch.zeros(1, 4, 40, device=device)
    for block, rows, message in (
        (24, SampledRows(0, 1), "selection_block is 24"),
        (16, SampledRows(0, 4), "rows end at 3; pass rows of the sequence's 3 blocks"),
        (16, SampledRows(0, 0), "rows.count is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            block_sum_probs_rows(q, k, lse, rows, Geometry(selection_block=block, local_window=block))
