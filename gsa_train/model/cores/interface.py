"""Interface of the attention core, which turns gated, rotated Q, K and V and a selection into attention.

Tensors are batch first: q [B, L, n_h, d_k], k and v [B, L_k, n_kv, d_k] of this tensor-parallel rank. Queries have
positions query_start .. query_start + L - 1 in the sequence; keys end with the last query: L_k = query_start + L.
query_start is 0 without context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from gsa_kernels.types import Geometry, Implementation, Indexer, RowSample, Selection
from gsa_train.model.attention_pass import AttentionPass


@dataclass(frozen=True)
class AttentionInputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output_gate: torch.Tensor | None
    """Logits of G1 [B, L, n_kv, n_h / n_kv, d_k]; None without this gate."""


@dataclass(frozen=True)
class IndexerLossInputs:
    indexer: Indexer
    rows: RowSample
    on_rows: Callable[[torch.Tensor], None] | None
    """Callback with each query's KL, for a core that computes it in the backward pass; None if it is not logged."""


@dataclass(frozen=True)
class AttentionResult:
    out: torch.Tensor
    """[B, L, n_h, d_k], gated by G1."""
    indexer_loss: torch.Tensor | None = None
    """0-d, summed over these queries; None without training of the indexer, or if fused into attention's backward
    pass."""
    kl: torch.Tensor | None = None
    """For the log: KL of each row, or their estimated sum, 0-d; None without a loss, or if `on_rows` receives it."""


@dataclass(frozen=True)
class CoreSettings:
    """Settings of a layer's core."""

    tp_group: dist.ProcessGroup
    layer: int
    """For log lines."""


class AttentionCore(Protocol):
    settings: CoreSettings
    implementation: Implementation
    """Implementation name for `gsa_kernels.api`."""

    def attend(
        self,
        inputs: AttentionInputs,
        selection: Selection | None,
        geometry: Geometry,
        loss: IndexerLossInputs | None,
        attention_pass: AttentionPass,
    ) -> AttentionResult:
        """Compute gated attention and the indexer loss.

        The result depends only on arguments and parameters, so it can be recomputed.

        Args:
            selection: S_t, possibly an earlier layer's; None without an indexer.
            loss: None if the indexer loss is not needed.
        """
        ...
