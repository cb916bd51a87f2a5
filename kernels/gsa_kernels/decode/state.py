"""Holds what decoding keeps between calls: each sequence's selection, and scratch memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gsa_kernels.checks import check_at_least
from gsa_kernels.limits import next_power_of_2
from gsa_kernels.types import BudgetRule

CHUNK = 256
"""Keys that one program scores. A constant, so that a sequence's variance depends on nothing but its scores."""

SPAN = 1024
"""Keys that one program of the selection has; half as many where that leaves multiprocessors without one."""

BINS, BINS_PER_OCTAVE = 4096, 128
"""Bins of the histogram of scores."""

SAMPLE = 64
"""Keys from which the lowest score worth counting is guessed, and of a tile of the scores: a divisor of CHUNK."""

_PROGRAMS_PER_SM = 4  # of the attention kernel; measured on an H200 at 16 sequences
PARTS = 32
"""Into which the keys of a head are cut at most: more take longer to join than they save."""


@dataclass(frozen=True)
class DecodeSelection:
    """The top-k of every sequence, without the local window."""

    indices: torch.Tensor
    """int32 [B, k_cap]: ascending positions, or numbers of groups of keys, the first `counts` of each row."""

    counts: torch.Tensor
    """int32 [B]: k_t, or k_t // p, but at most the groups before the query's own."""

    variance: torch.Tensor
    """fp32 [B]: population variance of the row's scores."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch memory of `decode_select` and `decode_attend`; layers that run one after the other share it."""

    scores: torch.Tensor
    """fp32 [B, columns], columns a multiple of SPAN: after a selection, the scores it ranked."""

    chunk_moments: torch.Tensor
    """fp32 [2, B, columns / CHUNK]: mean, and sum of squared deviations from it."""

    histogram: torch.Tensor
    """int32 [B, BINS], at `bin_slot`: scores in each bin above the floor; 0 between calls."""

    borderline: torch.Tensor
    """int32 [2, B, columns]: ordered score, and position, of the keys in the bin of the k-th score."""

    borderline_counts: torch.Tensor
    """int32 [B]"""

    span_counts: torch.Tensor
    """int32 [B, 2 columns / SPAN]: keys of a span in higher bins."""

    plan: torch.Tensor
    """int32 [B, 3]: the floor, the bin of the k-th score, and how many of that bin's keys are selected."""

    partial_out: torch.Tensor
    """fp32 [B, Hkv, splits, H / Hkv, D]: attention of one split, not yet divided by its sum."""

    partial_stats: torch.Tensor
    """fp32 [2, B, Hkv, splits, H / Hkv]: largest logit (base 2), and sum of probabilities."""

    arrivals: torch.Tensor
    """int32 [B, Hkv]: splits that have finished, 0 between calls. The first also counts in joined.py."""

    written: torch.Tensor
    """int32 [1]: with `LayerCache.counted`, key-value heads of all sequences whose output attention has written. The
    caller makes it 0 before the next call."""

    splits: int
    """Parts into which attention cuts the keys of one key-value head."""


@dataclass(frozen=True)
class LayerCache:
    """What decoding keeps of one layer, beside the keys of its indexer (`Indexer.keys`, [B, L_max, DI]).

    With `block_table` all three caches are paged: k and v are [pages, N, Hkv, D] and the indexer's keys [pages, N, DI].
    """

    k: torch.Tensor
    """[B, L_max, Hkv, D], the new token's key included."""

    v: torch.Tensor
    """[B, L_max, Hkv, D]"""

    lengths: torch.Tensor
    """int32 [B]: tokens of each sequence, the new one included; 0 marks an unused slot. Layers may share it. Values
    above L_max count as L_max; entries of the caches from there on are not read."""

    selection: DecodeSelection
    """For B sequences and at least `most_selected` keys; written by each step that selects."""

    workspace: DecodeWorkspace | None
    """Layers that run one after the other may share it. None: for the reference."""

    starts: torch.Tensor | None = None
    """int32 [B]: entries in front of each sequence, which are padding: its token at position p is entry starts + p.
    None: no sequence has any. `lengths` and the selection count from the sequence's first token, and starts + lengths
    is at most L_max."""

    settled: bool = False
    """Indexer keys of all tokens but each sequence's newest were written before the step. The kernel of the scores may
    then read them while the kernel in front still runs.

    A step is a chain of early launched kernels (row_product/op.py) and begins after an ordinary one, which has waited
    for all before it. So True is wrong where the kernel in front copied the cache."""

    in_chain: bool = False
    """The kernels before and after a step are also launched early, and wait (row_product/op.py). Then scores
    are in place before the one in front ends, and attention lets the next one start when its own wait is over. Between
    ordinary kernels that makes a step slower: programs that wait stand in the way of those that work."""

    counted: bool = False
    """Attention counts in the workspace's `written` the outputs that are there, so that not only the next kernel can
    wait for them (`Awaited`, row_product/triton_product.py)."""

    beside: Callable[[], object] | None = None
    """Launches a kernel of the caller's that needs nothing of the selection. A call that selects does so between its
    kernels, so that this one runs beside the one in front, for which it waits before it ends (row_product/op.py)."""

    block_table: torch.Tensor | None = None
    """int32 [B, pages of a sequence]: token t of sequence b is row t % N of page block_table[b, t // N], and L_max is N
    times the table's width. Entries after a sequence's last page may hold anything. None: the caches are not paged. The
    kernels read the table before they wait for the previous kernel."""

    @property
    def max_length(self) -> int:
        """L_max"""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def page_size(self) -> int:
        """N, or 0 without a block table."""
        return 0 if self.block_table is None else self.k.shape[1]


def most_selected(rule: BudgetRule, max_length: int) -> int:
    """Return the number of keys that a selection needs room for."""
    return min(rule.most_keys, max_length)


def new_selection(batch: int, most_keys: int, *, device: torch.device | str) -> DecodeSelection:
    """An empty selection (counts 0) of up to `most_keys` keys for each of `batch` sequences."""
    check_at_least("batch", batch, 1)
    check_at_least("most_keys", most_keys, 1)
    return DecodeSelection(
        indices=torch.zeros((batch, most_keys), dtype=torch.int32, device=device),
        counts=torch.zeros(batch, dtype=torch.int32, device=device),
        variance=torch.zeros(batch, dtype=torch.float32, device=device),
    )


def new_workspace(
    batch: int,
    max_length: int,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    device: torch.device | str,
    splits: int | None = None,
) -> DecodeWorkspace:
    """Scratch memory for up to `batch` sequences of up to `max_length` tokens: 12 bytes per token and sequence.

    Args:
        splits: parts into which the keys of one key-value head are cut; enough to fill the device if None
    """
    for name, value in (("batch", batch), ("max_length", max_length)):
        check_at_least(name, value, 1)
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"heads is {heads} and kv_heads {kv_heads}; pass heads in a multiple of kv_heads")
    group = heads // kv_heads
    if splits is None:
        splits = default_splits(_programs(device), batch * kv_heads)
    if splits < 1 or splits != next_power_of_2(splits):
        raise ValueError(f"splits is {splits}; pass a power of two")

    columns = -(-max_length // SPAN) * SPAN

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return DecodeWorkspace(
        scores=floats(batch, columns),
        chunk_moments=floats(2, batch, columns // CHUNK),
        histogram=zeros(batch, BINS),
        borderline=integers(2, batch, columns),
        borderline_counts=integers(batch),
        span_counts=integers(batch, columns // (SPAN // 2)),
        plan=integers(batch, 3),
        partial_out=floats(batch, kv_heads, splits, group, head_size),
        partial_stats=floats(2, batch, kv_heads, splits, group),
        arrivals=zeros(batch, kv_heads),
        written=zeros(1),
        splits=splits,
    )


def _programs(device: torch.device | str) -> int:
    """Programs of attention that a GPU should run at once; 0 for another device."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def default_splits(programs: int, rows: int) -> int:
    """`splits` of a workspace, a power of two.

    Args:
        programs: how many there are to be, about; 0: two for each row, which is little work for the interpreter
        rows: key-value heads of all sequences
    """
    if programs == 0:
        return 2
    return min(next_power_of_2(max(programs // rows, 1)), PARTS)
