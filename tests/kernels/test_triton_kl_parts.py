"""The indexer's loss with a target in parts, which its kernels add up."""

from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
from query_chunks import assert_same
from test_triton_kl import SMALL, STACKED, compute, device_of, make_problem
from test_triton_kl_known_sums import TARGET_SUM, log_sums, scale_target

from gsa_kernels import sampling
from gsa_kernels.sampling import SampledRows

ROWS_OF_16 = replace(SMALL, rows=16)
FORMS: dict[str, dict[str, Any]] = {
    "side by side, bf16": {"dtype": torch.bfloat16, "sparse": True, "batch": 2},
    "side by side, one head": {"dtype": torch.bfloat16, "heads": 1, "sparse": True},
    "side by side, fp32": {"blocks": STACKED, "documents": True},
    "by head, fp16": {"dtype": torch.float16, "sparse": True, "documents": True},
    "by head, fp32": {"blocks": SMALL, "sparse": True},
    "by head, 16 rows": {"blocks": ROWS_OF_16, "documents": True},
}


@device_of
@pytest.mark.parametrize("form", FORMS)
def test_a_target_in_parts(device: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is that of its sum. Off the support there is NaN, and room between the rows."""
    monkeypatch.setattr(sampling, "STRETCH_ROWS", 32)
    options: dict[str, Any] = {"batch": 1, "heads": 2, **FORMS[form]}
    chosen: dict[str, Any] = {"blocks": options.pop("blocks", None)}
    problem = make_problem(70, device=device, **options)
    scale_target(problem)
    parts = 2 if "documents" in options else 3
    rng = torch.Generator().manual_seed(parts)
    shares = torch.rand(problem.target.shape[0], parts, *problem.target.shape[1:], generator=rng).to(device)
    shares = problem.target[:, None] * shares / shares.sum(1, keepdim=True)
    if form != "by head, fp32":
        shares = shares.half()
    # As the kernels add: in order, and in the type of the parts.
    problem.target = reduce(torch.add, shares.unbind(1)).float()
    shares = shares.masked_fill(~problem.support[:, None], float("nan"))
    known: dict[str, Any] = {"target_sum": TARGET_SUM}
    variants: list[dict[str, Any]] = [{}]
    if "side by side" in form:  # these read the sums
        variants = [known, {**known, "log_sum": log_sums(problem)}]
    if form == "side by side, fp32":
        variants += [{}]
    elif chosen["blocks"] is SMALL:
        variants += [{"row_fraction": 0.5, "seed": 3}]
    for variant in variants:
        total, rows, grads = compute(problem, **chosen, **variant)
        for row_chunk_bytes in (1, 2**20):
            target_rows = partial(rows_of, shares)
            got = compute(
                problem, target_rows=target_rows, row_chunk_bytes=row_chunk_bytes, **chosen, **variant
            )
            assert_same(got[0], total)
            assert_same(got[1].nan_to_num(-1.0), rows.nan_to_num(-1.0))  # rows that a sample left out
            for name, want in grads.items():
                assert_same(got[2][name], want)


def rows_of(target: torch.Tensor, rows: SampledRows) -> torch.Tensor:
    return torch.nn.functional.pad(target[:, :, rows.rows(target.device)], (0, 5))[..., :-5]


def test_targets_of_other_shapes_are_refused() -> None:
    problem = make_problem(10, device="cpu")
    target = problem.target[:, None].expand(2, 3, 10, 10)
    for wrong in (
        target[:, :, 1:],
        target[..., 1:],
        target[:, None],
        target[:1],
        target.transpose(2, 3),
        target.double(),
    ):
        with pytest.raises(ValueError, match=r"target_rows\(\.\.\.\)"):
            compute(problem, target_rows=lambda _, wrong=wrong: wrong, blocks=SMALL)
