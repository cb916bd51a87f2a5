"""Decoding against its reference: interpreted on the CPU, or on a CUDA device.

The selection is compared with a stable sort of the scores the kernels themselves calculated; the attention, with fp64
over that selection. What lies beyond a sequence's length is NaN throughout.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gsa_kernels as ops

pytest.importorskip("triton")

from decode_cases import (
    CUDA,
    RULE,
    check,
    check_attention,
    check_selection,
    make_case,
    poisoned_buffers,  # noqa: F401 - pytest finds it here
    run,
    selected_mask,
)

from gsa_kernels.decode import op, state, triton_select

GPU_ONLY = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="runs on the GPU instead")),
    pytest.param("cuda", marks=GPU_ONLY),
]

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("mode", "activation", "biases", "gate", "window", "dtype"),
    [
        ("inverse", "sigmoid", True, True, 9, torch.float32),
        ("direct", "sigmoid", False, False, 0, torch.float16),
        ("off", "relu", False, True, 40, torch.float32),
    ],
)
def test_step(
    device: str, mode: str, activation: str, biases: bool, gate: bool, window: int, dtype: torch.dtype
) -> None:
    """Lengths: 1, less than k_t, an unused slot, one span and a bit."""
    options: dict[str, Any] = {"activation": activation, "biases": biases, "gate": gate, "dtype": dtype}
    case = make_case(device, [1, 3, 0, 1029], 1061, **options)
    check(case, window, mode=mode)


@pytest.mark.parametrize("heads", [(3, 1), (2, 2)])
@pytest.mark.parametrize("splits", [1, 4])
def test_heads_and_splits(device: str, heads: tuple[int, int], splits: int) -> None:
    check(make_case(device, [77], 80, heads=heads, indexer=(3, 24), gate=True), 5, splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_parts_of_several_tiles(device: str, splits: int) -> None:
    """More keys than the parts take at once, fewer than the selection has room for, the last tile short."""
    check(make_case(device, [300, 149], 300, gate=True), 9, splits, k_base=120, k_max=150, mode="off")


def test_last_row_of_the_prefill(device: str) -> None:
    """Every operation of the prefill on its last row, from the same inputs."""
    length, window = 150, 6
    case = make_case(device, [length], length, gate=True, biases=True)
    selection, workspace = case.state(RULE["k_max"])
    out = run(case, selection, workspace, window)

    visible = ops.causal_mask(length, query_positions=torch.tensor([length - 1], device=device))
    scores = ops.indexer_scores(case.q_idx[:, None], case.k_idx, case.weights[:, None], **case.indexer)
    _, variance = ops.score_moments(scores, visible)
    budget = ops.adaptive_budget(variance, case.ema, visible.sum(-1), **RULE)
    near = ops.local_window_mask(
        length, window, query_positions=torch.tensor([length - 1]).to(device), device=device
    )
    top_k = ops.select_top_k(scores, visible, budget)
    assert case.gate is not None
    wanted = ops.sigmoid_gate(
        ops.sparse_attention(case.q[:, None], case.k, case.v, top_k | near).out, case.gate[:, None]
    )
    assert torch.equal(selected_mask(selection, length), top_k[:, 0])
    torch.testing.assert_close(out, wanted[:, 0])


@pytest.mark.parametrize("few", [0, triton_select._FEW_PROGRAMS], ids=["wide spans", "narrow spans"])
def test_ties_go_to_the_lower_index(device: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One score for all keys, more than one program's span of them: variance 0, and the first k_max keys."""
    monkeypatch.setattr(triton_select, "_FEW_PROGRAMS", few)
    case = make_case(device, [1100, 40], 1100)
    case.k_idx[:] = 0.5
    selection = check(case)
    assert selection.variance.tolist() == [0.0, 0.0]
    assert selection.indices[0, :20].tolist() == list(range(20))


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e5])
def test_scores_beyond_the_histogram(device: str, scale: float) -> None:
    """Scores at 0, below its first bin, and above its last one; negative ones among them."""
    case = make_case(device, [1050], 1050, activation="relu", seed=3)
    case.weights[:] = torch.tensor([scale, -scale], device=device)
    selection, workspace = case.state(RULE["k_max"])
    run(case, selection, workspace, mode="off")
    scores = workspace.scores[:, None, :1050]
    wanted = ops.select_top_k(scores, case.visible()[:, None], torch.full((1, 1), 12, device=device))[:, 0]
    assert torch.equal(selected_mask(selection, 1050), wanted)


def test_floor_above_the_cut(device: str) -> None:
    """The sampled keys, and they alone, have high scores: fewer keys than k_t are above the floor."""
    case = make_case(device, [1100], 1100, activation="relu", seed=4)
    case.weights.fill_(1.0)
    sampled = torch.arange(state.SAMPLE, device=device)
    case.k_idx[:, sampled * 1100 // state.SAMPLE] = case.q_idx[:, :1] * (10 + sampled[:, None])
    rule = {**RULE, "mode": "off"}
    selection, workspace = case.state(RULE["k_max"])
    out = run(case, selection, workspace, **rule)
    floor, threshold_bin, wanted = workspace.plan[0].tolist()
    assert floor > 0
    assert threshold_bin == 0
    assert wanted == 4
    check_selection(case, selection, workspace.scores, **rule)
    check_attention(case, out, selected_mask(selection, 1100), 0)


def test_few_distinct_scores(device: str) -> None:
    """Ties across the cut, at several levels."""
    case = make_case(device, [700], 700)
    levels = torch.randint(0, 3, (1, 700, 1), generator=torch.Generator().manual_seed(1))
    case.k_idx[:] = levels.to(case.k_idx) * 0.25
    check(case, k_min=15)


def test_block_shared_selection(device: str) -> None:
    """Two blocks of tokens, the sequences at different places in theirs: every row as the reference has it."""
    block, window, steps = 4, 5, 8
    first = torch.tensor([41, 12], dtype=torch.int32)
    case = make_case(device, (first + steps).tolist(), 60, gate=True)
    generator = torch.Generator().manual_seed(7)
    selection, workspace = case.state(RULE["k_max"])
    selected = torch.zeros(2, 60, dtype=torch.bool, device=device)
    for step in range(steps):
        lengths = (first + step).to(device)
        queries = {"q": case.q, "q_idx": case.q_idx, "weights": case.weights}
        drawn = {
            name: torch.randn(x.shape, generator=generator).to(device=device, dtype=x.dtype)
            for name, x in queries.items()
        }
        now = replace(case, lengths=lengths, **drawn)
        out = run(now, selection, workspace, window, selection_block=block)
        reference = ops.decode_top_k(
            now.q_idx, now.k_idx, now.weights, lengths, now.ema, **now.indexer, **RULE
        )
        refreshed = (lengths - 1) % block == 0
        selected = torch.where(refreshed[:, None], reference.selected, selected)
        assert torch.equal(selected_mask(selection, 60), selected)
        check_attention(now, out, selected, window)


def test_stale_selection_beyond_the_length_is_not_read(device: str) -> None:
    """A slot that is given to a shorter sequence before its first refresh: only its window is attended to."""
    case = make_case(device, [3], 40)
    selection, workspace = case.state(4)
    selection.indices[:] = torch.tensor([0, 5, 20, 39], dtype=torch.int32, device=device)
    selection.counts[:] = 4
    out = op.decode_attend(case.q, case.k, case.v, case.lengths, selection, workspace, local_window=2)
    first = torch.zeros(1, 40, dtype=torch.bool, device=device)
    first[0, 0] = True
    check_attention(case, out, first, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.zeros(1, dtype=torch.int64)}, "pass contiguous int32"),
        ({"k": torch.zeros(1, 30, 2, 32, dtype=torch.float16)}, "pass one dtype"),
        ({"weights": torch.zeros(1, 3)}, "weight_logits has shape"),
        ({"k_idx": torch.zeros(1, 31, 16)}, "pass caches of one"),
    ],
)
def test_refuses(change: dict[str, torch.Tensor], message: str) -> None:
    device = "cuda" if CUDA else "cpu"
    case = make_case(device, [30], 30)
    selection, workspace = case.state(RULE["k_max"])
    bad = replace(case, **{name: x.to(device) for name, x in change.items()})
    with pytest.raises(ValueError, match=message):
        run(bad, selection, workspace)


def test_refuses_options() -> None:
    device = "cuda" if CUDA else "cpu"
    case = make_case(device, [30], 30)
    selection, workspace = case.state(RULE["k_max"])
    with pytest.raises(ValueError, match="local_window of at least 8"):
        run(case, selection, workspace, window=4, selection_block=8)
    with pytest.raises(ValueError, match="selection holds 20 keys"):
        run(case, selection, workspace, k_max=30)
    with pytest.raises(ValueError, match="make one for 1 of 30"):
        run(case, selection, replace(workspace, scores=workspace.scores[:, :8]))
    with pytest.raises(ValueError, match="power of two"):
        case.state(8, splits=3)
