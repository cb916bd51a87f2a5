"""Exports the definitions of this package's operations in plain torch: exact, differentiable, with [L, Lk] tensors.

Each name is one part of an operation. `gsa_kernels` exports whole operations, which call these parts if the caller
passes `implementation="reference"`.
"""

from gsa_kernels.attention.reference import AttentionOutput, sparse_attention
from gsa_kernels.decode.reference import DecodeTopK, decode_attention, decode_top_k
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.indexer.reference import indexer_scores
from gsa_kernels.loss.reference import indexer_kl, renormalise_target
from gsa_kernels.selection.budget import adaptive_budget, score_moments
from gsa_kernels.selection.causal_mask import causal_mask
from gsa_kernels.selection.reference import local_window_mask, select_top_k
from gsa_kernels.selection.statistics import adjacent_overlap, union_ratio

__all__ = [
    "AttentionOutput",
    "DecodeTopK",
    "adaptive_budget",
    "adjacent_overlap",
    "causal_mask",
    "decode_attention",
    "decode_top_k",
    "indexer_kl",
    "indexer_scores",
    "local_window_mask",
    "renormalise_target",
    "score_moments",
    "select_top_k",
    "sigmoid_gate",
    "sparse_attention",
    "union_ratio",
]
