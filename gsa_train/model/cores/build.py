"""Build the attention core by name."""

from __future__ import annotations

from gsa_train.model.cores.interface import AttentionCore, CoreSettings
from gsa_train.model.cores.reference import ReferenceCore


def build_core(settings: CoreSettings, implementation: str, dense_attention: str) -> AttentionCore:
    """Build `reference` (plain torch) or `triton` (fused kernels; `dense_attention` names the dense kernel)."""
    if implementation == "triton":
        from gsa_train.model.cores.triton import TritonCore  # imports Triton

        return TritonCore(settings, dense_attention)
    return ReferenceCore(settings)
