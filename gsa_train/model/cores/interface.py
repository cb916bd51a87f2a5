"""The interface of an attention core, which turns gated, rotated Q, K and V and a selection into attention.

Batch first throughout: q [B, L, n_h, d_k], k and v [B, L_k, n_kv, d_k] of this tensor-parallel rank. The queries stand
at positions query_start .. query_start + L - 1 of the sequence, the keys are all up to the last of them: L_k =
query_start + L. Only under context parallelism is query_start not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from gsa_kernels.types import Geometry, Implementation, Indexer, RowSample, Selection
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.group_lesson import TargetSum


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
    """Called with the KL of each query by a core that knows it in the backward pass only; None if it is not logged."""


@dataclass(frozen=True)
class AttentionResult:
    out: torch.Tensor
    """[B, L, n_h, d_k], gated by G1."""
    indexer_loss: torch.Tensor | None = None
    """0-d, summed over these queries; None where it is not differentiated, or attention's backward pass does so."""
    kl: torch.Tensor | None = None
    """To log: KL of each row, or 0-d the estimate of their sum; None without a loss, or where `on_rows` gets it."""


@dataclass(frozen=True)
class CoreSettings:
    """What a core knows of its layer."""

    tp_group: dist.ProcessGroup
    layer: int
    """For log lines."""


class AttentionCore(Protocol):
    settings: CoreSettings
    implementation: Implementation
    """The name that its layer passes to `gsa_kernels.api`."""

    def attend(
        self,
        inputs: AttentionInputs,
        selection: Selection | None,
        geometry: Geometry,
        loss: IndexerLossInputs | None,
        attention_pass: AttentionPass,
        target_sum: TargetSum | None = None,
    ) -> AttentionResult:
        """Gated attention, and the indexer loss.

        A function of its arguments and the parameters alone, so that it can be recomputed.

        Args:
            selection: S_t, perhaps made for an earlier layer; None where no indexer runs.
            loss: None where nobody needs the indexer loss.
            target_sum: takes this layer's probabilities; the loss then learns the sum. None: it learns this layer's.
        """
        ...
