"""Operations of Gated Sparse Attention: Triton kernels, and their definitions in plain torch.

`GatedSparseAttention`, made of a `GSAConfig`, is the whole layer as a torch module. Below it `api.py` is the door:
`select`, `sparse_attention`, `indexer_loss`, `decode_step`, with the types of `types.py`.
`limits.py` says what the kernels can do, without torch. Every `reference.py` is the definition of its operation.

Names are imported when they are first asked for: who plans a run reads the limits and loads neither torch nor Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsa_kernels.layer import GatedSparseAttention as GatedSparseAttention
    from gsa_kernels.layer import LayerOutput as LayerOutput
    from gsa_kernels.layer_cache import GSACache as GSACache
    from gsa_kernels.layer_config import GSAConfig as GSAConfig
    from gsa_kernels.rotary import YarnScaling as YarnScaling

__version__ = "0.1.0"

_PLACES = {
    "GatedSparseAttention": "layer",
    "GSACache": "layer_cache",
    "GSAConfig": "layer_config",
    "LayerOutput": "layer",
    "YarnScaling": "rotary",
    "AttentionOutput": "attention.reference",
    "sparse_attention": "attention.reference",
    "DecodeTopK": "decode.reference",
    "decode_attention": "decode.reference",
    "decode_top_k": "decode.reference",
    "sigmoid_gate": "fused.gates.reference",
    "indexer_scores": "indexer.reference",
    "indexer_kl": "indexer_loss.reference",
    "renormalise_target": "indexer_loss.reference",
    "sum_over_blocks": "indexer_loss.reference",
    "adaptive_budget": "selection.budget",
    "score_moments": "selection.budget",
    "causal_mask": "selection.causal_mask",
    "expand_block_selection": "selection.reference",
    "local_window_mask": "selection.reference",
    "select_top_k": "selection.reference",
    "adjacent_overlap": "selection.statistics",
    "union_ratio": "selection.statistics",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
