"""Parts of the rows of the indexer's loss: an estimate's sample, and the shares of tensor-parallel ranks."""

from typing import Any

import pytest
import torch
from test_triton_kl import (
    SMALL,
    STACKED,
    _poisoned_memory,  # noqa: F401 (a fixture)
    check,
    compute,
    device_of,
    make_problem,
)

from gsa_kernels import sampling
from gsa_kernels.indexer_loss.triton_launch import Blocks


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
@pytest.mark.parametrize(
    ("blocks", "documents", "seed"),
    [(SMALL, False, 1), (STACKED, True, 3)],
    ids=["head by head", "side by side"],
)
def test_row_fraction_is_the_rescaled_sum_over_its_runs(
    device: str, blocks: Blocks, documents: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four runs the first and the third, or the second and the last, which is short; in chunks of one run."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 32)
    dtype = torch.float32 if blocks is SMALL else torch.bfloat16
    problem = make_problem(100, device=device, dtype=dtype, sparse=True, documents=documents)
    options: dict[str, Any] = {"blocks": blocks, "row_fraction": 0.5, "seed": seed}
    _, rows, _ = compute(problem, **options)
    taken = rows.isfinite()
    runs = {1: [*range(32, 64), *range(96, 100)], 3: [*range(32), *range(64, 96)]}
    assert taken[0].nonzero()[:, 0].tolist() == runs[seed]
    check(problem, row_weights=2.0 * taken.double(), **options)
    check(problem, row_weights=2.0 * taken.double(), row_chunk_bytes=4 * 2 * 100 * 32, **options)
    assert torch.equal(taken, compute(problem, **options)[1].isfinite())


@pytest.mark.usefixtures("_poisoned_memory")
@device_of
def test_shares_of_ranks_sum_to_the_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs, and for the third rank nothing."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 32)
    problem = make_problem(50, device=device, sparse=True)
    whole, rows, grads = compute(problem, blocks=SMALL)
    parts = [compute(problem, blocks=SMALL, share=(rank, 3)) for rank in range(3)]
    assert parts[2][0] == 0
    torch.testing.assert_close(sum(part[0] for part in parts), whole)
    torch.testing.assert_close(torch.stack([part[1] for part in parts]).nansum(0), rows)
    for name, grad in grads.items():
        torch.testing.assert_close(sum(part[2][name] for part in parts), grad, rtol=1e-4, atol=1e-6, msg=name)
