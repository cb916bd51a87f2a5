"""Gated Sparse Attention (GSA): Triton kernels and the definitions of their operations in plain torch.

    selection = select(indexer, rule, variance_ema, geometry, implementation="triton")
    out, lse = sparse_attention(q, k, v, selection, geometry, gate_logits, implementation="triton")
    loss, kl_of_rows = indexer_loss(indexer, q, k, lse, selection, geometry, implementation="triton")

`GatedSparseAttention` is the whole layer as a torch module. `gsa_kernels.reference` exports the parts of the reference
implementation. `gsa_kernels.limits` lists what the kernels support.

Each name is imported on first use. A program that only plans a run can therefore read the limits without loading torch
or Triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsa_kernels.api import decode_step as decode_step
    from gsa_kernels.api import indexer_loss as indexer_loss
    from gsa_kernels.api import select as select
    from gsa_kernels.api import sparse_attention as sparse_attention
    from gsa_kernels.layer import GatedSparseAttention as GatedSparseAttention
    from gsa_kernels.types import BudgetRule as BudgetRule
    from gsa_kernels.types import Geometry as Geometry
    from gsa_kernels.types import Indexer as Indexer
    from gsa_kernels.types import Selection as Selection

__version__ = "0.1.0"

_MODULES = {
    "select": "api",
    "sparse_attention": "api",
    "indexer_loss": "api",
    "decode_step": "api",
    "Selection": "types",
    "Geometry": "types",
    "Indexer": "types",
    "BudgetRule": "types",
    "GatedSparseAttention": "layer",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
