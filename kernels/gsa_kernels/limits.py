"""What the kernels support, and where they choose between methods: plain numbers, without torch or Triton.

The kernels read their constants here, and so does planning on a machine without an accelerator: config checks, memory
estimates, FLOP counts. Each constant names its kernel and the reason for its value. Lengths are in tokens, sizes in
bytes, unless stated otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# ---- shapes


HEAD_SIZES = (32, 64, 128, 256)
"""D of attention's q, k and v. A tile of D columns is an operand of a matrix product, so D is a power of two. With 512
the gradients of 64 keys and values would take all registers of a multiprocessor (attention/triton_backward_keys.py)."""

INDEXER_ACTIVATIONS = ("sigmoid", "relu")
"""Activations of the indexer's scores (indexer/triton_scores.py, loss/triton_scores.py, decode/triton_score.py)."""

INDEXER_HEADS = range(1, 9)
"""HI. The score kernel holds the queries of all heads at once (indexer/triton_scores.py)."""

INDEXER_HEAD_SIZES = range(16, 129)
"""DI. Matrix products take no fewer than 16 columns, and 128 fill the shared memory (indexer/triton_scores.py)."""

DECODE_INDEXER_HEADS = range(1, 17)
"""HI in decoding, where a tile has the heads of one query only (decode/triton_score.py)."""

TILE_QUERIES = 32
"""Queries whose selections share a list of keys: one for each bit of a word (key_lists/triton_build.py)."""

TILE_SIZES = (16, TILE_QUERIES)
"""Queries of a tile of key lists. Blocks of 16 queries that share a selection have tiles of 16."""

SELECTION_BLOCKS = (1, 16, 32, 64, 128)
"""Queries that share a selection. Beyond 1, a block is a tile of the key lists, or whole tiles of 32; the kernel of the
target (attention/triton_block_probs.py) sums blocks of up to 128 queries."""

KEY_POOLS = (1, 2, 4, 8, 16, 32, 64)
"""Neighbouring keys that are selected together. A power of two, so that a word of a packed mask holds whole groups, or
a group whole words (selection/triton_group_keys.py)."""

STRETCH_ROWS = 128
"""Neighbouring queries of the indexer loss that an estimate takes or leaves together, and rows of it that
tensor-parallel ranks share out: whole tiles of the loss kernels (sampling.py)."""

ROW_PRODUCT_ROWS = range(1, 17)
"""B of a product of few rows: 16 columns are the narrowest product that wastes none (row_product/triton_product.py)."""

ROW_PRODUCT_FASTER_ROWS = 1
"""B up to which decoding of sparse models takes them; beyond it, and in dense models, cuBLAS is faster."""

ROW_PRODUCT_COLUMNS = range(16, 8193, 8)
"""K of a product of few rows. A program holds whole rows in registers, and loads 8 columns at a time."""


# ---- choice of the format of a selection


PACKED_MASK_MAX_TOKENS = 32768
"""Longest sequence that is selected as a packed mask, a bit for each pair of tokens. A longer one is selected as key
lists, chunk by chunk, so that memory does not grow with the square of the length."""

MEASURED_FROM_TOKENS = 16384
"""From this length on `kernel="auto"` measures the density of a selection, and takes the format that it favours. In a
shorter sequence budgets of thousands of keys hit most tiles, and the packed mask is taken unseen."""

GATHERED_BELOW_DENSITY = 2 / 3
"""Share of the causal keys in the key lists below which attention over key lists is faster than under a packed mask.
The work over lists grows with their length, the work under a mask does not; benchmarks/bench_attention.py and
bench_gathered.py measure both."""

SHARED_GATHERED_BELOW_DENSITY = 2 / 3
"""The same of selections that blocks of queries share, for which nothing is measured while training: `shared_density`
takes the budgets for k_base. Under a packed mask attention's backward pass also computes the indexer loss."""

Kernel = Literal["auto", "masked", "gathered"]


def takes_key_lists(kernel: Kernel, seq_len_tokens: int, selection_block: int, keys_per_query: int) -> bool:
    """Whether a selection becomes key lists independent of its content. With "auto" the measured density of individual
    selections may also favour them; the density of a shared selection is known beforehand.

    Args:
        seq_len_tokens: Lk, the keys up to the last query's own
        keys_per_query: k_base and the local window
    """
    if kernel == "gathered" or seq_len_tokens > PACKED_MASK_MAX_TOKENS:
        return True
    if kernel == "masked" or selection_block == 1:
        return False
    return shared_density(seq_len_tokens, keys_per_query) < SHARED_GATHERED_BELOW_DENSITY


def shared_density(seq_len_tokens: int, keys_per_query: int) -> float:
    """Keys that all queries of one document attend to over their causal keys, with the same budget for each."""
    selected = min(keys_per_query / seq_len_tokens, 1.0)
    return 2 * selected - selected**2


# ---- selection


REGISTER_KEYS = 32768
"""Rows of at most this many keys are selected in registers, 256 KiB per program (selection/op.py). Only they
give the log-sum that spares the indexer loss a pass."""

GROUP_KEYS = 8
"""Neighbouring keys of a longer row, which is searched by their maxima first (selection/triton_select_long.py)."""


def long_row_bytes(num_keys: int, most_keys: int) -> int:
    """Scratch memory of such a row: the maxima of its groups, of its clusters of groups if there are many groups, and
    the numbers of the best groups."""
    groups = ceil_div(num_keys, GROUP_KEYS)
    return 4 * (groups + ceil_div(groups, GROUP_KEYS) + next_power_of_2(most_keys))


CANDIDATES_FROM = 8192
"""Rows at or beyond this many keys are selected by candidates where key lists are made (selection/candidates.py)."""

MOST_CANDIDATES = 16384
"""Candidates of one row, which stay in registers. No row is selected by candidates if `candidate_room` is larger."""

CANDIDATE_SAMPLE_STRIDE = 32
"""Stride of the keys sampled to estimate the lowest score of a row worth keeping."""

CANDIDATE_SLACK = 0.0625
"""So much more of the sample than wanted is close enough (selection/triton_guess.py)."""

CANDIDATE_BYTES = 8
"""A candidate: a score and a position."""


def candidate_room(most_keys: int) -> int:
    """Candidates of a row for which memory is kept: what a guess for the largest budget lets through.

    A guess takes a share of the sample (`_guess_kernel`). The keys for which that stands are as many times the stride,
    and spread about it as counts do: three deviations leave out one row in a thousand.
    """
    expected = most_keys / CANDIDATE_SAMPLE_STRIDE
    sampled = (expected + 5 * expected**0.5 + 3) * (1 + CANDIDATE_SLACK)
    return next_power_of_2(math.ceil(CANDIDATE_SAMPLE_STRIDE * (sampled + 3 * sampled**0.5)))


SCORED_KEYS = {2: 512, 4: 256}
"""Keys of one program of the score kernel, by the bytes of an element (indexer/triton_scores.py)."""


# ---- the indexer loss


FUSED_LOSS_HEADS = 4
"""Query heads whose probabilities attention's backward pass sums into one part of the target: the heads of a key-value
head are a multiple of it (hopper/triton_backward_target.py)."""

STACKED_MAX_WIDTH = 256
"""HI * DI, DI padded to a power of two: above it the heads do not fit side by side in one product of bf16."""


@dataclass(frozen=True)
class LossTile:
    """How the loss kernels over packed masks cut their work (loss/triton_launch.py)."""

    rows: int
    segment: int
    """Keys of one program."""
    stacked: bool
    """All heads side by side in one product: bf16 on Hopper. Partial gradients of the keys are then bf16."""


def loss_tile(heads: int, dim: int, element_bytes: int, stacks: bool) -> LossTile:
    """The tile for an indexer of `heads` heads of size `dim`.

    Args:
        element_bytes: 2 for bf16, 4 for fp32
        stacks: whether the device and the dtype allow the stacked kernels
    """
    width = heads * max(16, next_power_of_2(dim))
    if element_bytes == 2 and stacks and width <= STACKED_MAX_WIDTH:
        # The matrix units take 64 rows at a time, here of all heads together.
        return LossTile(rows=32 if heads > 1 else 64, segment=1024, stacked=True)
    # fp32 has no matrix units; with more rows its products do not fit the registers.
    return LossTile(
        rows=32 if element_bytes == 2 or width <= STACKED_MAX_WIDTH else 16, segment=256, stacked=False
    )


# ---- scratch memory: more is faster, up to a point


SELECTION_CHUNK_BYTES = 512 * 2**20
"""Scores, or candidates, of a chunk of rows (selection/op.py)."""

LOSS_CHUNK_BYTES = 256 * 2**20
"""Target of a chunk of rows, counted as fp32; the loss takes about as much again (loss/op.py)."""

FUSED_LOSS_CHUNK_BYTES = 2**30
"""Target of a chunk of rows in attention's backward pass, fp16 (hopper/fused_indexer_loss.py)."""

GATHERED_LOSS_BYTES = 512 * 2**20
"""Scratch memory of the loss over key lists (loss/gathered.py)."""

GATHERED_GRADIENT_BYTES = 2**30
"""Partial gradients of k and v in the backward pass over key lists (attention/gathered.py)."""

SEGMENT_KEYS = 4096
"""Least keys per program where several share a list in that pass. A program loads q and the output's gradient, and
stores its gradient of q, which is read once more: 3 x 64 KiB in fp32, the load of 3 steps of 64 keys and values of 256
(attention/triton_gathered_backward.py)."""

SEGMENT_WAVES = 4
"""Such a launch has no more programs for each multiprocessor: each leaves a gradient of q."""

SEGMENT_GRADIENT_BYTES = 64 * 2**10
"""Largest gradient tile of a program, fp32: 128 rows of heads of 128, or 64 of 256 (`backward_tiles`)."""

MULTIPROCESSORS = 132
"""On an H100 or H200, for estimates on a machine without one. The kernels ask the device."""


def segments_bytes(longest_list: int, multiprocessors: int) -> int:
    """What the programs of a launch leave that share lists: 33 MiB on an H200. A bound: most launches have fewer than
    they may, and one that fills the device without sharing leaves nothing."""
    if longest_list < 2 * SEGMENT_KEYS:
        return 0
    return SEGMENT_WAVES * multiprocessors * SEGMENT_GRADIENT_BYTES


GRADIENT_KEYS = {2: 64, 4: 32}
"""Keys of a program for the gradients of k and v under a packed mask, by the bytes of an element
(attention/triton_backward_keys.py)."""


def count_key_parts(programs: int, group: int, multiprocessors: int) -> int:
    """Parts of the query heads of a key-value head, each with programs and gradients of k and v of its own: the fewest
    that give the device three programs per multiprocessor, or the whole group.

    Programs differ in length by the causal triangle: with fewer, the longest one sets the time.

    Args:
        programs: with one part
        group: query heads of a key-value head
    """
    fitting = (n for n in range(1, group) if group % n == 0 and programs * n >= 3 * multiprocessors)
    return next(fitting, group)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """number / divisor, rounded up; triton.cdiv, which also serves kernels, takes microseconds on the host."""
    return -(-number // divisor)
