"""Tests that the indexer loss rejects wrong shapes, types and options by name."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from loss_problems import make_problem

from gsa_kernels import api
from gsa_kernels.loss.op import Attended, Target, triton_indexer_loss
from gsa_kernels.loss.triton_launch import list_columns
from gsa_kernels.sampling import SampledRows
from gsa_kernels.types import Indexer, RowSample


def test_errors() -> None:
    """The types of the API do not cover these errors."""
    problem = make_problem("packed mask", 10, "cpu", log_sum=True)
    indexer, selection = problem.indexer, problem.selection
    assert selection is not None
    mask, log_sum = selection.packed_mask, selection.log_sum
    assert mask is not None
    assert log_sum is not None
    target = torch.zeros(2, 10, 10)
    given = Target(lambda rows: target)
    summed = replace(given, row_sum=1.0)

    def of(wrong: torch.Tensor) -> Target:
        return Target(lambda rows: wrong)

    def halved(dtype: torch.dtype) -> Indexer:
        return replace(indexer, queries=indexer.queries.to(dtype), keys=indexer.keys.to(dtype))

    unread = Attended(mask)
    calls: list[tuple[Indexer, Target, Attended, str]] = [
        (replace(indexer, keys=indexer.keys[:, 1:]), given, unread, "queries has 10 rows; pass 9"),
        (replace(indexer, keys=indexer.keys.bfloat16()), given, unread, "pass one dtype for both"),
        (
            replace(indexer, head_weight_logits=indexer.head_weight_logits.double()),
            given,
            unread,
            r"indexer\.head_weight_logits has dtype torch\.float64",
        ),
        (halved(torch.float16), given, unread, "float16; pass bfloat16 or float32, or use implementation"),
        (halved(torch.float64), given, unread, "float64; pass bfloat16 or float32, or use implementation"),
        (indexer, given, Attended(mask[:, 1:]), "packed_mask has shape"),
        (indexer, given, Attended(mask.float()), "packed_mask has dtype"),
        (indexer, given, Attended(mask, log_sum), "both or none"),
        (indexer, summed, Attended(mask, log_sum.double()), "log_sum has dtype"),
        (indexer, summed, Attended(mask, log_sum[:, 1:]), "log_sum has shape"),
        (indexer, replace(given, row_sum=0.0), unread, "row_sum is 0.0"),
        *(
            (indexer, of(wrong), unread, r"target\.of_rows\(\.\.\.\)")
            for wrong in (
                *(target[:, 1:], target[..., 1:], target[:, None], target[:1]),
                *(target.transpose(1, 2), target.double()),
            )
        ),
    ]
    for *arguments, message in calls:
        with pytest.raises(ValueError, match=message):
            triton_indexer_loss(*arguments)


def test_errors_of_key_lists(device: str) -> None:
    problem, longer = (make_problem("key lists", length, device) for length in (10, 12))
    assert problem.selection is not None
    lists = problem.selection.key_lists
    assert lists is not None

    def target(rows: SampledRows) -> torch.Tensor:
        return torch.zeros(2, rows.count, list_columns(lists), dtype=torch.float64, device=device)

    for indexer, message in (
        (longer.indexer, "sequences of 10"),
        (problem.indexer, r"target\.of_rows\(\.\.\.\) gave torch\.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_indexer_loss(indexer, Target(target), Attended(key_lists=lists))
    for fraction, draw in ((0.0, 1), (0.4, 1), (0.5, None)):
        with pytest.raises(ValueError, match="fraction"):
            api.indexer_loss(
                problem.indexer,
                problem.q,
                problem.k,
                problem.lse,
                problem.selection,
                rows=RowSample(fraction, draw),
                implementation="triton",
            )
