"""Queries that start at a position, as in test_query_start: the indexer's loss, and all that goes over lists."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from query_chunks import (
    BLOCK_RUNS,
    LENGTH,
    RUNS,
    assert_near,
    attend,
    devices,
    document_starts,
    draw,
    indexer,
    of_run,
    random_mask,
    rows_of,
)
from random_lists import make_mask

from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.indexer_loss.gathered import gathered_indexer_kl_loss
from gsa_kernels.indexer_loss.op import indexer_kl_loss
from gsa_kernels.indexer_loss.triton_gathered_launch import GatheredBlocks
from gsa_kernels.indexer_loss.triton_launch import Blocks
from gsa_kernels.key_lists.format import key_lists_from_mask
from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.sampling import SampledRows

NAMES = ("score_bias", "weight_bias", "inverse_temperature")


def kl_inputs(device: str, block: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    others = dict(zip(NAMES, (draw(device, 2), draw(device, 2), torch.tensor(1.7)), strict=True))
    return indexer(device, block), {name: x.to(device) for name, x in others.items()}


def kl_gradients(loss, inputs, others, *arguments, **options):  # type: ignore[no-untyped-def]
    """KL of the rows and the gradients of q_idx and weight_logits, of k_idx, and of the rest."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *others.values())]
    total, rows = loss(
        *leaves[:3], *arguments, **dict(zip(others, leaves[3:], strict=True)), return_rows=True, **options
    )
    grad_q, grad_k, grad_w, *rest = torch.autograd.grad(total, leaves)
    return (rows, grad_q, grad_w), grad_k, [total.detach(), *rest]


def check_kl(whole, parts, runs, block, same):  # type: ignore[no-untyped-def]
    rows, grad_k, totals = whole
    sum_k, sums = torch.zeros_like(grad_k), [torch.zeros_like(x) for x in totals]
    for (first, last), (own, seen, added) in zip(runs, parts, strict=True):
        for got, want in zip(own, rows, strict=True):
            same(got, want[:, first // block : -(-last // block)])
        sum_k[:, :last] += seen
        sums = [total + x for total, x in zip(sums, added, strict=True)]
    for got, want in zip([sum_k, *sums], [grad_k, *totals], strict=True):
        assert_near(got, want)


@devices
@pytest.mark.parametrize(
    ("support", "block", "documents", "stacked"),
    [
        ("dense", 1, True, False),
        ("words", 1, False, False),
        ("words", 1, True, True),
        ("dense", 1, False, True),
        ("dense", 16, True, False),
    ],
)
def test_kl_over_rows(device, support, block, documents, stacked):
    torch.manual_seed(4)
    starts = document_starts(device) if documents else None
    inputs, others = kl_inputs(device, block)
    mask = random_mask(starts, device)[:, ::block]
    probs = torch.rand(2, len(mask[0]), LENGTH).to(device)
    keys = 64 if stacked else 32
    options: dict[str, Any] = {
        "selection_block": block,
        "row_chunk_bytes": 4 * 2 * LENGTH * 32,
        "blocks": Blocks(32, keys, 8, keys, 8, segment=64, stacked=stacked),
    }

    def run(first: int, last: int) -> Any:
        part = slice(first // block, -(-last // block))

        def target(rows: SampledRows) -> torch.Tensor:
            return probs[:, part][:, rows.rows(probs.device), :last]

        words = pack_mask(mask[:, part, :last]) if support == "words" else None
        return kl_gradients(
            indexer_kl_loss,
            of_run(inputs, first, last, block),
            others,
            target,
            words=words,
            document_starts=rows_of(starts, first, last),
            query_start=first,
            **options,
        )

    runs = RUNS if block == 1 else BLOCK_RUNS
    check_kl(run(0, LENGTH), [run(*ends) for ends in runs], runs, block, assert_near)


@devices
@pytest.mark.parametrize("block", [1, 16])
def test_over_lists(device, block):
    """Attention, its probabilities and the loss; tiles of the runs begin elsewhere than those of the whole."""
    torch.manual_seed(5)
    mask = make_mask(LENGTH, 2, block, max(1, block), True, 5).to(device)
    q, gate, grad = (draw(device, 2, LENGTH, 2, 32) for _ in range(3))
    k, v = (draw(device, 2, LENGTH, 1, 32) for _ in range(2))
    inputs, others = kl_inputs(device, block)

    def run(first: int, last: int) -> Any:
        lists = key_lists_from_mask(mask[:, first:last, :last], 16)
        assert lists.query_start == first
        parts = (
            x[:, a:last] for x, a in zip((q, k, v, gate, grad), (first, 0, 0, first, first), strict=True)
        )
        rows, keys = attend(*parts, lists=lists, scratch_bytes=2**15)

        def target(tiles: torch.Tensor) -> torch.Tensor:
            lse = rows[1].transpose(1, 2)
            return head_sum_probs_lists(
                q[:, first:last], k[:, :last], lse, lists, tiles, selection_block=block
            )

        loss = kl_gradients(
            gathered_indexer_kl_loss,
            of_run(inputs, first, last, block),
            others,
            target,
            lists,
            selection_block=block,
            blocks=GatheredBlocks(16, 8, 16, 8, segment=32, stats_stages=1),
        )
        return rows, keys, loss

    runs = RUNS if block == 1 else BLOCK_RUNS
    rows, keys, loss = run(0, LENGTH)
    results = [run(*ends) for ends in runs]
    sums = [torch.zeros_like(x) for x in keys]
    for (first, last), (own, seen, _) in zip(runs, results, strict=True):
        for got, want in zip(own, rows, strict=True):
            assert_near(got, want[:, first:last])
        for total, got in zip(sums, seen, strict=True):
            total[:, :last] += got
    for total, want in zip(sums, keys, strict=True):
        assert_near(total, want)
    check_kl(loss, [result[2] for result in results], runs, block, assert_near)
