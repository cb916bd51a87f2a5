"""Exports the definitions of this package's operations in plain torch: exact, differentiable, with [L, Lk] tensors.

Each function is one part of an operation. `gsa_kernels` exports whole operations, which call these functions if the
caller passes `implementation="reference"`.
"""

from gsa_kernels.attention.reference import AttentionOutput as AttentionOutput
from gsa_kernels.attention.reference import sparse_attention as sparse_attention
from gsa_kernels.decode.reference import DecodeTopK as DecodeTopK
from gsa_kernels.decode.reference import decode_attention as decode_attention
from gsa_kernels.decode.reference import decode_top_k as decode_top_k
from gsa_kernels.fused.gates.reference import sigmoid_gate as sigmoid_gate
from gsa_kernels.indexer.reference import indexer_scores as indexer_scores
from gsa_kernels.loss.reference import indexer_kl as indexer_kl
from gsa_kernels.loss.reference import renormalise_target as renormalise_target
from gsa_kernels.selection.budget import adaptive_budget as adaptive_budget
from gsa_kernels.selection.budget import score_moments as score_moments
from gsa_kernels.selection.causal_mask import causal_mask as causal_mask
from gsa_kernels.selection.reference import local_window_mask as local_window_mask
from gsa_kernels.selection.reference import select_top_k as select_top_k
from gsa_kernels.selection.statistics import adjacent_overlap as adjacent_overlap
from gsa_kernels.selection.statistics import union_ratio as union_ratio
