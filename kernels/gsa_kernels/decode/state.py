"""Holds what decoding keeps between calls: each sequence's selection, and scratch memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gsa_kernels.checks import check_at_least
from gsa_kernels.limits import next_power_of_2
from gsa_kernels.types import BudgetRule

CHUNK = 256
"""Number of keys that one program scores. This number is constant, so that a sequence's variance depends only on its
scores."""

SPAN = 1024
"""Keys per program of the selection, or half as many if some multiprocessors would have no program."""

BINS, BINS_PER_OCTAVE = 4096, 128
"""Bins of the histogram of scores."""

SAMPLE = 64
"""Keys in a tile of the scores kernel, a divisor of CHUNK. The histogram's floor comes from a sample of the same size.
"""

_PROGRAMS_PER_SM = 4  # programs of the attention kernel, measured on an H200 at 16 sequences
PARTS = 32
"""Largest number of parts into which a head's keys are cut. With more parts, joining them takes longer than the parts
save."""


@dataclass(frozen=True)
class DecodeSelection:
    """The top-k of every sequence, without the local window."""

    indices: torch.Tensor
    """int32 [B, k_cap]: positions, ascending in the first `counts` places of a row."""

    counts: torch.Tensor
    """int32 [B]: number of indices, k_t."""

    variance: torch.Tensor
    """fp32 [B]: population variance of the row's scores."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Scratch memory of `decode_select` and `decode_attend`; layers that run one after the other share it."""

    scores: torch.Tensor
    """fp32 [B, columns], columns a multiple of SPAN: the scores that the last selection ranked."""

    chunk_moments: torch.Tensor
    """fp32 [2, B, columns / CHUNK]: mean of each chunk's scores, and sum of squared deviations from this mean."""

    histogram: torch.Tensor
    """int32 [B, BINS]: number of scores in each bin above the floor, at the index `bin_slot`; 0 between calls."""

    borderline: torch.Tensor
    """int32 [2, B, columns]: ordered scores and positions of the keys in the bin of the k-th score."""

    borderline_counts: torch.Tensor
    """int32 [B]"""

    span_counts: torch.Tensor
    """int32 [B, 2 columns / SPAN]: number of each span's keys in bins above the bin of the k-th score."""

    plan: torch.Tensor
    """int32 [B, 3]: the floor, the bin of the k-th score, and how many of that bin's keys are selected."""

    partial_out: torch.Tensor
    """fp32 [B, Hkv, splits, H / Hkv, D]: attention of one split, not yet divided by its sum."""

    partial_stats: torch.Tensor
    """fp32 [2, B, Hkv, splits, H / Hkv]: largest logit (base 2) of a split, and its sum of exponentials relative to
    this logit."""

    arrivals: torch.Tensor
    """int32 [B, Hkv]: number of splits that have finished, 0 between calls. joined.py also uses the first element as a
    counter."""

    written: torch.Tensor
    """int32 [1]: with `LayerCache.counted`, the number of key-value heads, over all sequences, whose output is written.
    The caller sets it to 0 before the next call."""

    splits: int
    """Number of parts into which attention cuts the keys of one key-value head."""


@dataclass(frozen=True)
class LayerCache:
    """Holds what decoding keeps of one layer, except the indexer's keys (`Indexer.keys`, [B, L_max, DI]).

    If there is a `block_table`, all three caches consist of pages of N tokens. The shape of k and v is then
    [pages, N, Hkv, D], and the shape of the indexer's keys is [pages, N, DI].
    """

    k: torch.Tensor
    """[B, L_max, Hkv, D], including the new token's key."""

    v: torch.Tensor
    """[B, L_max, Hkv, D]"""

    lengths: torch.Tensor
    """int32 [B]: tokens of each sequence, including the new token; 0 marks an unused slot. Layers may share the tensor.
    Values above L_max count as L_max. Cache entries after a sequence are not read."""

    selection: DecodeSelection
    """Memory for B sequences and at least `most_selected` keys. Each step that selects writes it."""

    workspace: DecodeWorkspace | None
    """Scratch memory, which layers that run one after the other may share. The reference needs None."""

    starts: torch.Tensor | None = None
    """int32 [B]: padding in front of each sequence; None without padding. The token at position p is entry starts + p.
    `lengths` and the selection count from the sequence's first token. starts + lengths is at most L_max."""

    settled: bool = False
    """Whether all indexer keys except each sequence's newest were written before the current chain of kernels began
    (row_product/op.py). The scores kernel then reads these keys while the previous kernel runs. Must be False if the
    previous kernel copied the cache."""

    in_chain: bool = False
    """Whether the kernels before and after a decoding step also start early and wait (row_product/op.py). The scores
    kernel then starts before the previous kernel ends, and attention releases the next kernel after its own wait. If
    the neighbours do not start early, True makes a step slower, because waiting programs take the place of working
    ones."""

    counted: bool = False
    """Whether attention counts its written outputs in `DecodeWorkspace.written`. Later kernels can then wait for the
    count (`Awaited`, row_product/triton_product.py)."""

    beside: Callable[[], object] | None = None
    """Launches a kernel of the caller that does not need the selection. `decode_select` calls this function between its
    own kernels. The caller's kernel runs beside the preceding kernel, and must not end before it has waited for that
    kernel (rule 4 of row_product/op.py)."""

    block_table: torch.Tensor | None = None
    """int32 [B, pages per sequence]; None without pages. With N tokens per page, token t of sequence b is row t % N of
    page block_table[b, t // N], and L_max is N times the table's width. Entries after a sequence's last page may hold
    anything. The kernels read the table before they wait for the previous kernel."""

    @property
    def max_length(self) -> int:
        """L_max"""
        return self.k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def page_size(self) -> int:
        """N, or 0 without a block table."""
        return 0 if self.block_table is None else self.k.shape[1]


def most_selected(rule: BudgetRule, max_length: int) -> int:
    """Return the largest number of keys that one query can select."""
    return min(rule.most_keys, max_length)


def new_selection(batch: int, most_keys: int, *, device: torch.device | str) -> DecodeSelection:
    """Return an empty selection (counts 0) of up to `most_keys` keys for each of `batch` sequences."""
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
    """Return scratch memory for up to `batch` sequences of up to `max_length` tokens: 12 bytes per token and sequence.

    Args:
        splits: number of parts into which the keys of one key-value head are cut; None: enough parts to fill the device
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

    floats = partial(torch.empty, dtype=torch.float32, device=device)
    integers, zeros = (partial(make, dtype=torch.int32, device=device) for make in (torch.empty, torch.zeros))

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
    """Return how many programs of attention a GPU should run at once; 0 for another device."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    return _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def default_splits(programs: int, rows: int) -> int:
    """Return `splits` of a workspace, a power of two.

    Args:
        programs: approximate number of programs that should run at once; 0 without a GPU, which gives two splits
        rows: number of key-value heads in all sequences
    """
    if programs == 0:
        return 2
    return min(next_power_of_2(max(programs // rows, 1)), PARTS)
