"""Operations of Gated Sparse Attention: torch references, against which the Triton kernels are tested.

Every `reference.py` is the definition of its operation. Layouts are batch first: q [B, Lq, H, D],
k and v [B, Lk, Hkv, D], indexer queries [B, Lq, HI, DI], indexer keys [B, Lk, DI], masks [B or 1, Lq, Lk].
Where queries are a part of the sequence (context parallelism), the references take their positions in the masks, and
the kernels `query_start`: query i stands at position query_start + i, and Lk = query_start + Lq. Key lists carry it.
"""

from gsa_kernels.attention.reference import AttentionOutput, sparse_attention
from gsa_kernels.budget.reference import adaptive_budget, score_moments
from gsa_kernels.decode.reference import DecodeTopK, decode_attention, decode_top_k
from gsa_kernels.gates.reference import sigmoid_gate
from gsa_kernels.indexer.reference import indexer_scores
from gsa_kernels.kl.reference import indexer_kl, renormalise_target, sum_over_blocks
from gsa_kernels.selection.reference import expand_block_selection, local_window_mask, select_top_k
from gsa_kernels.statistics.reference import adjacent_overlap, union_ratio
from gsa_kernels.visibility.reference import visible_mask

__all__ = [
    "AttentionOutput",
    "DecodeTopK",
    "adaptive_budget",
    "adjacent_overlap",
    "decode_attention",
    "decode_top_k",
    "expand_block_selection",
    "indexer_kl",
    "indexer_scores",
    "local_window_mask",
    "renormalise_target",
    "score_moments",
    "select_top_k",
    "sigmoid_gate",
    "sparse_attention",
    "sum_over_blocks",
    "union_ratio",
    "visible_mask",
]
