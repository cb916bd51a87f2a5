"""Decoding against its reference: interpreted on the CPU, and with a broader sweep on a CUDA device.

The selection is compared with a stable sort of the scores the kernels themselves calculated; the attention, with fp64
over that selection. What lies beyond a sequence's length is NaN throughout.
"""

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gsa_kernels as ops

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the import below

from gsa_kernels.decode import op, state, triton_select  # noqa: E402

GPU_ONLY = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="runs on the GPU instead")),
    pytest.param("cuda", marks=GPU_ONLY),
]
EMA = 0.02
RULE: dict[str, Any] = {"k_base": 12, "k_min": 4, "k_max": 20, "mode": "inverse"}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernels do not write is NaN, or a large integer."""

    def poisoned(make: Any) -> Any:
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30 + 7)

        return create

    fake = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    fake.empty, fake.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
    monkeypatch.setattr(op, "torch", fake)
    monkeypatch.setattr(state, "torch", fake)


@dataclass(frozen=True)
class Case:
    """One token of each sequence, and the caches."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor
    weights: torch.Tensor
    lengths: torch.Tensor
    ema: torch.Tensor
    indexer: dict[str, Any]
    gate: torch.Tensor | None

    def state(self, k_max: int, splits: int | None = None) -> tuple[op.DecodeSelection, op.DecodeWorkspace]:
        batch, heads, dim = self.q.shape
        sizes = {"heads": heads, "kv_heads": self.k.shape[2], "head_size": dim}
        device = self.q.device
        workspace = state.new_workspace(batch, self.k.shape[1], **sizes, device=device, splits=splits)
        return state.new_selection(batch, k_max, device=device), workspace

    def visible(self) -> torch.Tensor:
        return torch.arange(self.k.shape[1], device=self.q.device) < self.lengths[:, None]


def make_case(
    device: str,
    lengths: list[int],
    max_length: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    indexer: tuple[int, int] = (2, 16),
    dtype: torch.dtype = torch.float32,
    activation: str = "sigmoid",
    biases: bool = False,
    gate: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed + max_length)
    batch, (query_heads, kv_heads), (hi, di) = len(lengths), heads, indexer

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)

    k, v = draw(batch, max_length, kv_heads, dim), draw(batch, max_length, kv_heads, dim)
    k_idx = draw(batch, max_length, di)
    for row, length in enumerate(lengths):
        for cache in (k, v, k_idx):
            cache[row, length:] = float("nan")
    options: dict[str, Any] = {"activation": activation}
    if biases:
        options |= {"score_bias": draw(hi), "weight_bias": draw(hi)}
    return Case(
        q=draw(batch, query_heads, dim),
        k=k,
        v=v,
        q_idx=draw(batch, hi, di),
        k_idx=k_idx,
        weights=draw(batch, hi),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        ema=torch.tensor(EMA, device=device),
        indexer=options,
        gate=draw(batch, query_heads, dim) if gate else None,
    )


def selected_mask(selection: op.DecodeSelection, max_length: int) -> torch.Tensor:
    """bool [B, L_max]; also that the indices ascend."""
    mask = torch.zeros(len(selection.counts), max_length, dtype=torch.bool, device=selection.counts.device)
    for row, count in enumerate(selection.counts.tolist()):
        indices = selection.indices[row, :count].long()
        assert bool((indices.diff() > 0).all())
        mask[row, indices] = True
    return mask


def check_selection(case: Case, selection: op.DecodeSelection, scores: torch.Tensor, **rule: Any) -> None:
    """Scores and variance to rounding; budget, given the variance, and selection, given the scores, exactly."""
    visible = case.visible()
    max_length = visible.shape[1]
    scores = torch.where(visible, scores[:, :max_length], 0)
    half = case.q_idx.dtype != torch.float32
    doubles = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in case.indexer.items()}
    inputs = (case.q_idx.double(), case.k_idx.double(), case.weights.double())
    exact = ops.decode_top_k(*inputs, case.lengths, case.ema, **doubles, **rule)
    difference = torch.where(visible, scores - exact.scores, 0).abs().max()
    # The tanh of the hardware is good to 2^-11 of each head's weight; scores of ReLU may be large.
    scale = max(1.0, exact.scores.abs().max().item())
    assert difference <= case.q_idx.shape[1] * scale * (2**-11 if half else 2e-6)
    _, variance = ops.score_moments(scores[:, None], visible[:, None])
    torch.testing.assert_close(selection.variance, variance[:, 0], rtol=1e-5, atol=1e-12)
    lengths = case.lengths[:, None]
    budget = ops.adaptive_budget(selection.variance[:, None], case.ema, lengths, **rule)
    assert torch.equal(selection.counts, budget[:, 0].int())
    wanted = ops.select_top_k(scores[:, None], visible[:, None], budget)[:, 0]
    assert torch.equal(selected_mask(selection, max_length), wanted)


def check_attention(case: Case, out: torch.Tensor, selected: torch.Tensor, window: int) -> None:
    """Within twice the error of torch in the same dtype, both against fp64."""
    assert out.dtype == case.q.dtype
    assert bool(out.isfinite().all())

    def attend(dtype: torch.dtype) -> torch.Tensor:
        visible = case.visible()
        q = case.q.to(dtype)
        k, v = (x.to(dtype).masked_fill(~visible[..., None, None], 0) for x in (case.k, case.v))
        distance = case.lengths[:, None] - 1 - torch.arange(k.shape[1], device=k.device)
        mask = (selected | (distance < window)) & visible
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[2], 2) for x in (k, v))
        logits = torch.einsum("bhd,bkhd->bhk", q, k) * q.shape[-1] ** -0.5
        probs = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        result = torch.einsum("bhk,bkhd->bhd", probs, v)
        return result if case.gate is None else result * torch.sigmoid(case.gate.to(dtype))

    exact = attend(torch.float64)
    doubles = (x.double() for x in (case.q, case.k, case.v))
    gate = None if case.gate is None else case.gate.double()
    reference = ops.decode_attention(
        *doubles, case.lengths, selected, local_window=window, output_gate_logits=gate
    )
    torch.testing.assert_close(reference, exact)
    floor = 4 * torch.finfo(out.dtype).eps * max(1.0, exact.abs().max().item())
    allowed = 2 * (attend(out.dtype).double() - exact).abs().max() + floor
    error = (out.double() - exact).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def run(
    case: Case, selection: op.DecodeSelection, workspace: op.DecodeWorkspace, window: int = 0, **options: Any
) -> torch.Tensor:
    inputs = (case.q, case.k, case.v, case.q_idx, case.k_idx, case.weights, case.lengths, case.ema)
    options = {**case.indexer, **RULE, "local_window": window, "output_gate_logits": case.gate, **options}
    return op.decode_step(*inputs, selection, workspace, **options)


def check(case: Case, window: int = 0, splits: int | None = None, **changes: Any) -> op.DecodeSelection:
    rule = {**RULE, **changes}
    selection, workspace = case.state(rule["k_max"], splits)
    out = run(case, selection, workspace, window, **rule)
    check_selection(case, selection, workspace.scores, **rule)
    selected = selected_mask(selection, case.k.shape[1])
    check_attention(case, out, selected, window)
    # A second call, with the workspace as the first one left it, gives the same bits.
    again = replace(selection, indices=torch.zeros_like(selection.indices))
    assert torch.equal(run(case, again, workspace, window, **rule), out)
    assert torch.equal(selected_mask(again, case.k.shape[1]), selected)
    return selection


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


def test_last_row_of_the_prefill(device: str) -> None:
    """Every operation of the prefill on its last row, from the same inputs."""
    length, window = 150, 6
    case = make_case(device, [length], length, gate=True, biases=True)
    selection, workspace = case.state(RULE["k_max"])
    out = run(case, selection, workspace, window)

    visible = ops.visible_mask(length, query_positions=torch.tensor([length - 1], device=device))
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


# CUDA only


needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "heads", "dim"),
    [
        (torch.bfloat16, (32, 8), 128),
        (torch.bfloat16, (5, 1), 64),
        (torch.bfloat16, (32, 1), 128),
        (torch.float16, (4, 4), 128),
        (torch.float32, (8, 2), 64),
    ],
    ids=str,
)
def test_sweep(dtype: torch.dtype, heads: tuple[int, int], dim: int) -> None:
    lengths = [1, 257, 1024, 5001, 8192, 0, 2049]
    rule = {"k_base": 512, "k_min": 64, "k_max": 1000}
    for mode, activation, window, splits in (
        ("inverse", "sigmoid", 64, None),
        ("direct", "sigmoid", 0, 1),
        ("off", "relu", 130, 16),
    ):
        sizes: dict[str, Any] = {"heads": heads, "dim": dim, "indexer": (4, 64), "dtype": dtype}
        sigmoid = activation == "sigmoid"
        case = make_case("cuda", lengths, 8192, **sizes, activation=activation, biases=sigmoid, gate=sigmoid)
        check(case, window, splits, **rule, mode=mode)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[131072], [131001, 70000, 4097]], ids=str)
def test_long(lengths: list[int]) -> None:
    rule = {"k_base": 2048, "k_min": 256, "k_max": 4096}
    sizes: dict[str, Any] = {"heads": (8, 2), "dim": 128, "indexer": (4, 64), "dtype": torch.bfloat16}
    case = make_case("cuda", lengths, 131072, **sizes, biases=True, gate=True)
    for mode in ("inverse", "off"):
        check(case, 64, **rule, mode=mode)
    case.k_idx[:, : lengths[-1]] = 0.25  # every score of the shortest sequence is equal
    check(case, 64, **rule, mode="inverse")


@pytest.mark.gpu
@needs_gpu
def test_graph_follows_the_lengths() -> None:
    """One capture, replayed with lengths that grow on the device and with other queries: eager's bits."""
    block, window, rule = 4, 8, {"k_base": 100, "k_min": 16, "k_max": 128}
    case = make_case(
        "cuda", [3000, 1021], 3072, heads=(8, 2), indexer=(4, 64), dtype=torch.bfloat16, gate=True
    )
    for cache in (case.k, case.v, case.k_idx):
        cache.nan_to_num_(0.5)
    selection, workspace = case.state(128)
    out = torch.empty_like(case.q)

    def step(selection: op.DecodeSelection, out: torch.Tensor | None) -> torch.Tensor:
        return run(case, selection, workspace, window, **rule, selection_block=block, out=out)

    step(selection, out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(selection, out)
    eager, _ = case.state(128)
    for row in (selection, eager):
        row.counts.zero_()
    for _ in range(2 * block + 1):
        case.lengths.add_(1)
        case.q.normal_()
        case.q_idx.normal_()
        graph.replay()
        wanted = step(eager, None)
        assert torch.equal(out, wanted)
        assert torch.equal(selection.counts, eager.counts)
        assert torch.equal(selected_mask(selection, 3072), selected_mask(eager, 3072))
    assert bool((selection.counts > 0).all())
