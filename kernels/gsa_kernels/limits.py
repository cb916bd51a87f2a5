"""Lists what the kernels support and where they switch between methods, as plain numbers without torch or Triton.

The kernels read their constants here. Programs that plan a run on a machine without an accelerator (checks of a config,
estimates of memory, counts of FLOPs) read the same constants. The docstring of each constant names the kernel that uses
it and gives the reason for its value. Unless stated otherwise, lengths are in tokens and sizes in bytes.
"""

from __future__ import annotations

import math
from typing import Literal

# ---- shapes


HEAD_SIZES = (32, 64, 128, 256)
"""Head sizes D of attention's q, k and v. Tiles in Triton have D columns, so D is a power of two. With D = 512 the
gradients of 64 keys and values would fill all registers of a multiprocessor (attention/triton_backward_keys.py)."""

HOPPER_SHARED_BYTES, ADA_SHARED_BYTES = 227 * 1024, 99 * 1024
"""Largest shared memory of a program on sm_90, and on sm_86, sm_89 and sm_120. The A100 (sm_80) has 163 KiB. Heads of
size 256 need Hopper. On Ada two kernels have smaller tiles (`query_tiles`, `backward_tiles`)."""

INDEXER_ACTIVATIONS = ("sigmoid", "relu")
"""Activations of the indexer's scores (indexer/triton_scores.py, loss/triton_scores.py, decode/triton_score.py)."""

INDEXER_HEADS = range(1, 9)
"""Numbers of indexer heads HI. The score kernel holds the queries of all heads at once (indexer/triton_scores.py)."""

INDEXER_HEAD_SIZES = range(16, 129)
"""Sizes DI of an indexer head. Matrix products need at least 16 columns. 128 columns fill the shared memory
(indexer/triton_scores.py)."""

DECODE_INDEXER_HEADS = range(1, 17)
"""Numbers of indexer heads in decoding, where a tile holds the heads of only one query (decode/triton_score.py)."""

TILE_QUERIES = 32
"""Queries whose selections share a list of keys: one query per bit of an int32 (key_lists/triton_build.py)."""

STRETCH_ROWS = 128
"""Number of neighbouring queries in a stretch, which an estimate of the indexer loss takes or skips as a whole.
Tensor-parallel ranks also divide the rows of the loss in stretches. A stretch consists of whole tiles of the loss
kernels (sampling.py)."""

ROW_PRODUCT_ROWS = range(1, 17)
"""Numbers B of rows of x in `row_product`. The narrowest matrix product has room for 16 rows of x
(row_product/triton_product.py)."""

ROW_PRODUCT_FASTER_ROWS = 1
"""Largest B for which decoding of sparse models uses `row_product`. For larger B and dense models cuBLAS is faster."""

ROW_PRODUCT_COLUMNS = range(16, 8193, 8)
"""Numbers K of columns of x in `row_product`. A program holds whole rows of the weight in registers and loads 8 columns
at a time."""


# ---- choice of the format of a selection


PACKED_MASK_MAX_TOKENS = 32768
"""Longest sequence that is selected as a packed mask, which has a bit for each pair of tokens. Longer sequences are
selected as key lists in chunks of queries, so that memory does not grow with the square of the length."""

GATHERED_FROM_TOKENS, GATHERED_BUDGETS = 8192, 8
"""`kernel="auto"` selects key lists if a query has 8192 or more keys to select from, and these are at least 8 times its
budget (k_base). With 1024 of 8192 keys, a training step is 9% faster with key lists than with a packed mask, if
neighbouring queries select as similar keys as in a trained model (benchmarks/bench_step.py). Lists are slower if they
contain more than about 2/3 of the causal keys, as with an untrained indexer."""

Kernel = Literal["auto", "masked", "gathered"]


def takes_key_lists(kernel: Kernel, seq_len_tokens: int, k_base: int) -> bool:
    """Return whether a selection among `seq_len_tokens` keys becomes key lists. Otherwise it becomes a packed mask."""
    if kernel == "auto":
        wide = seq_len_tokens >= GATHERED_BUDGETS * k_base
        kernel = "gathered" if wide and seq_len_tokens >= GATHERED_FROM_TOKENS else "masked"
    return kernel == "gathered" or seq_len_tokens > PACKED_MASK_MAX_TOKENS


# ---- selection


REGISTER_KEYS = 32768
"""Longest rows (the scores of one query) that are selected in registers, with 256 KiB per program (selection/op.py).
Only these rows can also return the log-sum that saves the indexer loss a pass over the keys."""

GROUP_KEYS = 8
"""Keys per group in rows above REGISTER_KEYS, which compare group maxima first (selection/triton_select_long.py)."""

CANDIDATES_ABOVE_TOKENS, CANDIDATES_FROM = 16384, 8192
"""If a sequence has more tokens than the first number and gets key lists, rows with at least the second number of keys
are selected by candidates (selection/candidates.py). Such a selection has no log-sum, so the indexer loss needs one
more pass over the keys."""

MOST_CANDIDATES = 16384
"""Largest number of candidates of one row, which stay in registers. `candidate_room` must not exceed it."""

CANDIDATE_SAMPLE_STRIDE = 32
"""Stride of the sampled keys, from which the lowest useful score of a row is estimated."""

CANDIDATE_SLACK = 0.0625
"""The number of sampled keys that reach an estimated threshold may exceed the wanted number by this fraction
(selection/triton_guess.py)."""

CANDIDATE_BYTES = 8
"""Size of a candidate, which is a score and a position."""


def candidate_room(most_keys: int) -> int:
    """Return the number of candidates per row to reserve memory for, at the largest budget.

    Candidates are keys whose score reaches a threshold. `_guess_kernel` chooses the threshold such that at most
    `sampled` keys of the sample reach it. Each sampled key stands for CANDIDATE_SAMPLE_STRIDE keys. The returned
    number is at least the expected number of candidates plus three standard deviations: enough for 99.9% of rows.
    """
    expected = most_keys / CANDIDATE_SAMPLE_STRIDE
    sampled = (expected + 5 * expected**0.5 + 3) * (1 + CANDIDATE_SLACK)
    return next_power_of_2(math.ceil(CANDIDATE_SAMPLE_STRIDE * (sampled + 3 * sampled**0.5)))


def has_candidates(most_keys: int) -> bool:
    """Return whether candidates can select rows whose largest budget is `most_keys`."""
    return candidate_room(most_keys) <= MOST_CANDIDATES


SCORED_KEYS = {2: 512, 4: 256}
"""Keys per program of the score kernel, by element size in bytes (indexer/triton_scores.py)."""


# ---- scratch memory: more is faster, up to a point


SELECTION_CHUNK_BYTES = 512 * 2**20
"""Scores, or candidates, of one chunk of rows (selection/op.py)."""

LOSS_CHUNK_BYTES = 256 * 2**20
"""Target probabilities of one chunk of rows, counted as fp32. The loss itself needs at most about as much memory again
(loss/op.py)."""

LIST_LOSS_CHUNK_BYTES = 512 * 2**20
"""Like LOSS_CHUNK_BYTES, over key lists. The gradients of the indexer's keys, one fp32 row per list entry, take another
DI / 32 times this size."""

GATHERED_GRADIENT_BYTES = 2 * 2**30
"""Partial gradients of k and v in the backward pass over key lists (attention/gathered.py)."""

SEGMENT_KEYS = 4096
"""Smallest number of keys per program if several programs share a list in the backward pass over key lists. Sharing
costs each program as much as loading 192 keys and values of size 256: the program loads q and the output's gradient,
and stores a gradient of q that is read again (attention/triton_gathered_backward.py)."""

SEGMENT_WAVES = 4
"""Largest number of programs per multiprocessor if programs share lists. Each program stores a gradient of q."""

SEGMENT_GRADIENT_BYTES = 64 * 2**10
"""Largest fp32 gradient tile of a program: 128 rows of heads of 128, or 64 rows of heads of 256 (`backward_tiles`)."""

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200, for estimates on a machine without one. The kernels query the device."""


def segments_bytes(longest_list: int, multiprocessors: int) -> int:
    """Return an upper bound on the memory of the gradients of q that programs store if they share lists."""
    if longest_list < 2 * SEGMENT_KEYS:
        return 0
    return SEGMENT_WAVES * multiprocessors * SEGMENT_GRADIENT_BYTES


GRADIENT_KEYS = {2: 64, 4: 32}
"""Keys per program for the gradients of k and v under a packed mask, and of the indexer's keys, by element size in
bytes (attention/triton_backward_keys.py, loss/triton_launch.py)."""


def count_key_parts(programs: int, group: int, multiprocessors: int) -> int:
    """Return into how many parts to divide the query heads of a key-value head, or the indexer's heads.

    Each part has its own programs and its own key gradients. The number of parts is the smallest divisor of `group`
    that gives the device at least three programs per multiprocessor. If no divisor does, the number is `group`. Because
    attention is causal, some programs take longer than others. With fewer programs per multiprocessor, the longest
    program would determine the whole kernel's time.

    Args:
        programs: number of programs with one part
        group: query heads per key-value head, or indexer heads
    """
    fitting = (n for n in range(1, group) if group % n == 0 and programs * n >= 3 * multiprocessors)
    return next(fitting, group)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number` >= 1."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up. On the host this is faster than triton.cdiv."""
    return -(-number // divisor)


FP8_MULTIPLE = 16
"""cuBLAS's products in FP8 need sizes that are multiples of this."""
