"""Compares decoding with its reference: interpreted on the CPU, or on a CUDA device.

The expected selection comes from a stable sort of the scores that the kernels have computed. The expected attention
over this selection is computed in fp64. In all tests, cache entries after the end of a sequence are NaN.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import covered

from gsa_kernels import reference as ops

pytest.importorskip("triton")

from decode_cases import (
    CUDA,
    RULE,
    check,
    check_attention,
    check_selection,
    make_case,
    poisoned_buffers,  # noqa: F401 - pytest finds it here
)

from gsa_kernels.decode import op, state, triton_select
from gsa_kernels.types import BudgetRule

OFF = replace(RULE, adaptive_k="off")

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


@covered(
    "options",
    mode=["inverse", "direct", "off"],
    activation=["sigmoid", "relu"],
    gate=[False, True],
    window=[0, 9],
    dtype=[torch.float32, torch.bfloat16],
    heads=[(16, 2), (3, 1), (2, 2)],
    dim=[32, 256],
    splits=[None, 1, 4],
)
def test_step(device: str, options: dict[str, Any]) -> None:
    """Lengths are 1, below k_t, 0 (an unused slot), and longer than a tile."""
    options = dict(options)
    rule, window = replace(RULE, adaptive_k=options.pop("mode")), options.pop("window")
    sigmoid = options["activation"] == "sigmoid"
    check(make_case(device, [1, 3, 0, 77], 80, indexer=(3, 24), biases=sigmoid, **options), rule, window)


def test_more_than_one_span(device: str) -> None:
    case = make_case(device, [1029], 1061, biases=True, gate=True)
    check(case, window=9)


@pytest.mark.parametrize("splits", [1, 2])
def test_parts_of_several_tiles(device: str, splits: int) -> None:
    """Each program attends to several tiles of the keys of one sequence. The last tile is not full, and the selection
    has free slots. After two calls, `workspace.written` must have counted the outputs of both calls."""
    rule = BudgetRule(120, 4, 150, "off")
    case = make_case(device, [300, 149], 300, gate=True, k_max=150, splits=splits)
    check(case.with_new(in_chain=True, counted=True), rule, 9)
    assert case.workspace.written.item() == 8


def test_sequences_that_are_short_attend_to_all(device: str) -> None:
    """Lengths are below and at `dense_below`."""
    rule = replace(RULE, dense_below=150)
    case = make_case(device, [149, 150, 9], 300, gate=True, k_max=rule.most_keys)
    check(case, rule, 9)
    assert case.cache.selection.counts[[0, 2]].tolist() == [149, 9]
    assert case.cache.selection.counts[1] <= RULE.k_max
    with pytest.raises(ValueError, match="selection holds 20 keys; pass one for 149"):
        make_case(device, [149], 300).step(rule)


@pytest.mark.parametrize("few", [0, triton_select._FEW_PROGRAMS], ids=["wide spans", "narrow spans"])
def test_ties_go_to_the_lower_index(device: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of several programs have one score: the variance is 0, and the first k_max keys win."""
    monkeypatch.setattr(triton_select, "_FEW_PROGRAMS", few)
    case = make_case(device, [1100, 40], 1100)
    case.indexer.keys[:] = 0.5
    check(case)
    assert case.cache.selection.variance.tolist() == [0.0, 0.0]
    assert case.cache.selection.indices[0, :20].tolist() == list(range(20))


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e5])
def test_scores_beyond_the_histogram(device: str, scale: float) -> None:
    """Scores are 0, below the first bin, above the last one, and negative."""
    case = make_case(device, [1050], 1050, activation="relu", seed=3)
    case.indexer.head_weight_logits[:] = torch.tensor([scale, -scale], device=device)
    case.step(OFF)
    scores = case.workspace.scores[:, None, :1050]
    wanted = ops.select_top_k(scores, case.causal()[:, None], torch.full((1, 1), 12, device=device))[:, 0]
    assert torch.equal(case.selected(), wanted)


def test_negative_scores_are_counted(device: str) -> None:
    """Head weights and all scores are negative. Few keys share a histogram bin with the last selected key."""
    case = make_case(device, [1050], 1050, activation="relu", seed=3)
    case.indexer.head_weight_logits.fill_(-1.0)
    case.indexer.keys[..., 0] = 40.0  # all products are positive
    case.indexer.queries[..., 0] = 1.0
    out = case.step(OFF)
    scores = case.workspace.scores[0, :1050]
    assert scores.sort(descending=True).values[11] < 0
    assert case.workspace.borderline_counts.item() < 50
    check_selection(case, OFF)
    check_attention(case, out, case.selected(), 0)


def test_floor_above_the_cut(device: str) -> None:
    """Only the sampled keys have high scores, so fewer than k_t keys are above the floor."""
    case = make_case(device, [1100], 1100, activation="relu", seed=4)
    x = case.indexer
    x.head_weight_logits.fill_(1.0)
    sampled = torch.arange(state.SAMPLE, device=device)
    x.keys[:, sampled * 1100 // state.SAMPLE] = x.queries[:, 0, :1] * (10 + sampled[:, None])
    out = case.step(OFF)
    floor, threshold_bin, wanted = case.workspace.plan[0].tolist()
    assert floor > 0
    assert threshold_bin == 0
    assert wanted == 4
    check_selection(case, OFF)
    check_attention(case, out, case.selected(), 0)


def test_stale_selection_beyond_the_length_is_not_read(device: str) -> None:
    """A slot that still has the selection of an earlier, longer sequence attends only to its window."""
    case = make_case(device, [3], 40, k_max=4)
    selection = case.cache.selection
    selection.indices[:] = torch.tensor([0, 5, 20, 39], dtype=torch.int32, device=device)
    selection.counts[:] = 4
    out = op.decode_attend(case.q, case.cache, local_window=2)
    first = torch.zeros(1, 40, dtype=torch.bool, device=device)
    first[0, 0] = True
    check_attention(case, out, first, 2)


@pytest.mark.parametrize(
    ("programs", "rows", "splits"), [(528, 4, 32), (528, 16, 32), (528, 128, 4), (528, 1000, 1), (0, 4, 2)]
)
def test_default_parts(programs: int, rows: int, splits: int) -> None:
    assert state.default_splits(programs, rows) == splits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_read_settled_keys_ahead(device: str, dtype: torch.dtype) -> None:
    """The batch has sequences whose newest key starts or ends a chunk, a short sequence, a sequence of one key, and an
    unused slot. The step must call the function passed as `beside`."""
    lengths = [257, 256, 300, 12, 1, 0]
    case = make_case(device, lengths, 300, indexer=(3, 24), biases=True, gate=True, dtype=dtype)
    launched: list[int] = []
    check(case.with_new(settled=True, beside=lambda: launched.append(1)), window=9)
    assert launched


def test_refuses() -> None:
    device = "cuda" if CUDA else "cpu"
    case = make_case(device, [30], 30)
    workspace = replace(case.workspace, scores=case.workspace.scores[:, :8])
    other_keys = replace(case.indexer, keys=case.indexer.keys.new_zeros(1, 31, 16))
    for bad, message in [
        (lambda: case.with_new(lengths=case.lengths.long()).step(), "pass contiguous int32"),
        (lambda: case.with_new(k=case.cache.k.bfloat16()).step(), "pass one dtype"),
        (lambda: replace(case, q=case.q.half()).step(), "float16; pass bfloat16 or float32"),
        (lambda: case.with_new(workspace=workspace).step(), "make one for 1 of 30"),
        (lambda: case.with_new(workspace=None).step(), "workspace is None"),
        (lambda: replace(case, indexer=other_keys).step(), r"pass \[B, L_max, DI\] = \[1, 30, 16\]"),
        (lambda: case.with_new(block_table=case.lengths[:, None].long()).step(), "int64; pass int32"),
        (lambda: case.with_new(block_table=case.lengths[:, None], starts=case.lengths).step(), "both given"),
        (lambda: case.step(replace(RULE, k_max=30)), "selection holds 20 keys"),
        (lambda: make_case(device, [30], 30, indexer=(17, 16)).step(), "has 17 heads; pass 1 to 16"),
        (lambda: make_case(device, [30], 30, splits=3), "splits is 3; pass a power of two"),
        (lambda: make_case(device, [30], 30, splits=0), "splits is 0; pass a power of two"),
        (lambda: case.with_new(starts=case.lengths.long()).step(), r"starts is torch\.int64"),
        (lambda: case.with_new(starts=case.lengths.repeat(2)).step(), "starts"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad()
