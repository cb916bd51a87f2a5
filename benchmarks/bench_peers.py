"""Times released sparse attention next to ours on one Hopper GPU, with the same selections, in one process.

    python benchmarks/bench_peers.py [--lengths 8192 32768 131072] [--keys 1024] [--only "FA4 bit mask" "fla NSA"]

The shape is the 1.7B model's: 16 query heads, 4 KV heads of size 128, bf16, batch 1. Only `fla NSA` has another shape
(one KV head). Each peer's runs alternate with runs of our key-list attention, which uses the peer's shape and
selection (columns ours_). A ratio is the peer's time divided by our time. Above 1, ours is faster.

Masks, block lists and key lists are made before the timed runs. `dense cuDNN` attends to all causal keys. `both` is
forward and backward, without gates.

The `cuDNN top-k` rows measure cuDNN's exact top-k of given scores. Like our selection, cuDNN prefers the lower index
among equal scores. In the first row, our selection uses the same scores. In the second row, only our time includes
computing scores and making key lists.

Before timing, each peer and our attention must agree with plain torch at 4096 tokens. If a peer is missing, fails or is
wrong, its row says so. Selections are random, but similar for neighbouring queries, as in a trained model.
--only can leave out a peer that hangs. --add keeps the rows of the existing file.
"""

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cases
import harness
import peer_attention
import torch
from cases import AttentionInputs, Shape
from peer_attention import BLOCK, CUDNN, PEERS, Peer, Selected

from gsa_kernels.limits import CANDIDATES_FROM, SELECTION_CHUNK_BYTES
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.selection.lists_op import select_key_lists
from gsa_kernels.selection.op import Selector, new_outputs, select_chunk
from gsa_kernels.selection.score_chunks import chunk_view
from gsa_kernels.types import BudgetRule, Geometry

T = TypeVar("T")

TOP_K = "cuDNN top-k"
CHECKED_LENGTH = 4096
TOLERANCE = 2e-2
TIMING: dict[str, Any] = {"budget_ms": 150.0, "min_runs": 2, "rounds": 3}
REASON_LETTERS = 300


def refuse_missing(package: str, module: str) -> None:
    """Raise ImportError if the peer is not installed."""
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        found = False
    if not found:
        raise ImportError(f"not installed: pip install {package}")


def reference(inputs: AttentionInputs, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients of q, k and v with plain torch in fp32.

    Args:
        mask: bool [L, L]
    """
    q, k, v = leaves = [x.detach().float().requires_grad_() for x in inputs.leaves[:3]]
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("blhd,bshd->bhls", q, k) * q.shape[3] ** -0.5
    out = torch.einsum("bhls,bshd->blhd", logits.masked_fill(~mask, -torch.inf).softmax(-1), v)
    return [out, *torch.autograd.grad(out, leaves, inputs.grad.float())]


def largest_error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest relative error. Results may be [B, heads, L, D] instead of [B, L, heads, D]."""
    pairs = zip(found, wanted, strict=False)
    errors = [harness.relative_error(x if x.shape == y.shape else x.transpose(1, 2), y) for x, y in pairs]
    # max() may ignore NaN.
    return max((error if error == error else float("inf") for error in errors), default=float("inf"))


def wanted_mask(peer: Peer, selected: Selected) -> torch.Tensor:
    """Return bool [L, L]."""
    if peer.mask == "causal":
        return torch.ones(selected.length, selected.length, device=cases.DEVICE).tril().bool()
    if peer.mask == "whole blocks":
        assert selected.blocks is not None
        return selected.blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return unpack_mask(selected.words[0], selected.length)


def check(report: harness.Report, name: str, peer: Peer, keys: int) -> None:
    """Compare ours and the peer with plain torch. Raise ArithmeticError if the peer is wrong."""
    inputs = cases.attention_inputs(peer.shape, CHECKED_LENGTH)
    selected = peer.select(CHECKED_LENGTH, keys)
    wanted = reference(inputs, unpack_mask(selected.words[0], selected.length))
    error = largest_error(peer_attention.ours(inputs, selected).both(), wanted)
    if not error < TOLERANCE:
        report.fail(f"ours beside {name} differs from plain torch by {error:.1e}")
    if peer.mask != "selected":
        wanted = reference(inputs, wanted_mask(peer, selected))
    run = peer.run(inputs, selected)
    error = largest_error(run.both() if peer.backward else [run.forward()], wanted)
    if not error < TOLERANCE:
        raise ArithmeticError(f"wrong result: relative error {error:.1e}")


def attempt(action: Callable[..., T], *arguments: Any) -> T | str:
    """Return the action's result, or the last line of its exception, and free the memory that it used."""
    try:
        return action(*arguments)
    except Exception as error:  # noqa: BLE001  # the row says it, and the other peers go on
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:REASON_LETTERS]
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def add_row(
    report: harness.Report,
    name: str,
    computes: str,
    tokens: int | None = None,
    keys: int | None = None,
    shape: Shape | None = None,
    ms: dict[str, float] | None = None,
    note: str = "",
) -> None:
    ms = ms or {}

    def ratio(run: str) -> float | None:
        return ms[run] / ms[f"ours {run}"] if f"ours {run}" in ms and run in ms else None

    report.row(
        peer=name,
        tokens=tokens,
        keys=keys,
        shape=None if shape is None else shape.name,
        forward_ms=ms.get("forward"),
        both_ms=ms.get("both"),
        ours_forward_ms=ms.get("ours forward"),
        ours_both_ms=ms.get("ours both"),
        forward_ratio=ratio("forward"),
        both_ratio=ratio("both"),
        computes=computes,
        note=note,
    )


def measure_peer(report: harness.Report, name: str, lengths: list[int], keys: int) -> None:
    peer = PEERS[name]
    note = attempt(refuse_missing, *peer.needs) or attempt(check, report, name, peer, keys)
    if note:
        add_row(report, name, peer.computes, keys=keys, shape=peer.shape, note=note)
        return
    for length in lengths:
        ms = attempt(time_peer, peer, length, keys)
        cells: dict[str, Any] = {"note": ms} if isinstance(ms, str) else {"ms": ms}
        add_row(report, name, peer.computes, length, keys, peer.shape, **cells)


def time_peer(peer: Peer, length: int, keys: int) -> dict[str, float]:
    """Time the peer and our attention alternately."""
    inputs = cases.attention_inputs(peer.shape, length)
    selected = peer.select(length, keys)
    run, own = peer.run(inputs, selected), peer_attention.ours(inputs, selected)
    runs: dict[str, harness.Run] = {
        "forward": run.forward,
        "ours forward": own.forward,
        "ours both": own.both,
    }
    if peer.backward:
        runs["both"] = run.both
    return harness.measure(runs, **TIMING)


def measure_top_k(report: harness.Report, lengths: list[int], keys: int) -> None:
    computes = "top k of given scores"
    if missing := attempt(refuse_missing, *CUDNN):
        add_row(report, TOP_K, computes, keys=keys, note=missing)
        return
    for length in lengths:
        if note := attempt(time_top_k, report, length, keys):
            add_row(report, TOP_K, computes, length, keys, note=note)


def time_top_k(report: harness.Report, length: int, keys: int) -> None:
    """Time cuDNN's selection over the chunks of scores that our selection has at this length."""
    cudnn: Any = importlib.import_module("cudnn")
    indexer, rule = peer_attention.relu_indexer(length), BudgetRule(keys, keys, keys, "off")
    ema = torch.ones((), device=cases.DEVICE)
    selector = Selector(indexer, rule, ema, Geometry(), SELECTION_CHUNK_BYTES, None)
    selector.buffer.normal_()
    outputs = new_outputs(selector.inputs)
    views = [(rows, chunk_view(selector.buffer, selector.inputs, rows)) for rows in selector.chunks]
    lengths = torch.arange(1, length + 1, dtype=torch.int32, device=cases.DEVICE)

    def top_k(rows: range, view: torch.Tensor) -> torch.Tensor:
        """Return int32 [rows, keys], with -1 where a row has fewer keys."""
        options = {"return_val": False, "deterministic": True, "tie_break": 1}
        counts = lengths[rows.start : rows.stop]
        indices: torch.Tensor = cudnn.DSA.indexer_top_k_wrapper(view[0], counts, keys, **options)["indices"]
        return indices

    rows, view = views[-1]
    full = max(keys - 1 - rows.start, 0)  # from this row on, a query has enough keys
    scores = view[0].masked_fill(
        torch.arange(view.shape[2], device=cases.DEVICE) >= lengths[rows.start : rows.stop, None], -torch.inf
    )
    found = scores.gather(1, top_k(rows, view).long().clamp(min=0))[full:].sort(1).values
    if not torch.equal(found, scores[full:].topk(keys).values.sort(1).values):
        raise ArithmeticError("wrong result: other keys than torch.topk")

    def select() -> None:
        for rows, view in views:
            select_chunk(selector.criteria, view, rows, outputs)

    runs: dict[str, harness.Run] = {
        "forward": lambda: [top_k(*each) for each in views],
        "select": select,
        "score and select": lambda: select_key_lists(indexer, rule, ema, candidates_from=CANDIDATES_FROM),
    }
    ms = harness.measure(runs, **TIMING)
    for own in ("select", "score and select"):
        times = {"forward": ms["forward"], "ours forward": ms[own]}
        add_row(report, TOP_K, f"top k of given scores; ours: {own}", length, keys, None, times)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--keys", type=int, nargs="+", default=[1024], help="selected keys per query")
    names = [*PEERS, TOP_K]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PEER", help=f"of {names}")
    parser.add_argument("--add", action="store_true", help="keep the rows of the existing file")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)

    report = harness.Report("bench_peers", arguments)
    if arguments.add:
        report.take_over()
    for keys in arguments.keys:
        for name in arguments.only:
            if name == TOP_K:
                measure_top_k(report, arguments.lengths, keys)
            else:
                measure_peer(report, name, arguments.lengths, keys)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
