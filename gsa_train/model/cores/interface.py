"""What turns gated, rotated Q, K, V and the indexer's projections into attention: the interface of its versions.

Batch first throughout: q [B, L, n_h, d_k], k and v [B, L_k, n_kv, d_k] of this tensor-parallel rank. The queries stand
at positions query_start .. query_start + L - 1 of the sequence, the keys are all up to the last of them: L_k =
query_start + L. Only under context parallelism is query_start not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gsa_kernels.limits import Kernel
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.group_lesson import TargetSum
from gsa_train.model.probes.measured_queries import MeasuredQueries
from gsa_train.model.probes.stats import Statistics


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
    counted_rows: torch.Tensor | None
    """0-d: by what the sum of the rows' KL is divided in the statistics; queries that see one key do not count. None
    where the pass measures nothing."""
    on_rows: Callable[[torch.Tensor], None] | None
    """Called with the KL of each query, for the statistics, by a core that knows it in the backward pass only."""


@dataclass(frozen=True)
class SelectionResult:
    selection: Any
    """S_t of every query, in a format that only its core knows; None where a dense pass measures nothing."""
    variance: torch.Tensor
    """fp32 [B, R]: variance of the scores of the R queries that select."""
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(frozen=True)
class AttentionResult:
    out: torch.Tensor
    """[B, L, n_h, d_k], gated by G1."""
    indexer_loss: torch.Tensor | None
    """0-d, summed over these queries; None where it is not to be differentiated, or attention's backward pass does
    so."""
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(frozen=True)
class CoreSettings:
    """What a core knows of its layer."""

    rule: BudgetRule
    kernel: Kernel
    """`gsa.attention_kernel`"""
    tp_group: dist.ProcessGroup
    layer: int
    """For log lines."""


class AttentionCore(Protocol):
    """Neither function changes anything of the layer: what is to be recorded is returned."""

    def select(
        self,
        indexer: Indexer,
        variance_ema: torch.Tensor,
        geometry: Geometry,
        attention_pass: AttentionPass,
        measured: MeasuredQueries | None,
    ) -> SelectionResult:
        """S_t of every query, without gradient.

        Called outside of what is recomputed: a backward pass that selected anew could differ from its forward pass.

        Args:
            indexer: of the queries that select, the first of each block, and of all keys.
            variance_ema: fp32, 0-d, V̄ of eq. 8.
            measured: which of the queries to measure, and what they see; None where the pass is not logged.
        """
        ...

    def attend(
        self,
        inputs: AttentionInputs,
        selection: Any,
        geometry: Geometry,
        loss: IndexerLossInputs | None,
        attention_pass: AttentionPass,
        measured: MeasuredQueries | None,
        target_sum: TargetSum | None = None,
    ) -> AttentionResult:
        """Gated attention, and the indexer loss.

        A function of its arguments and the parameters alone, so that it can be recomputed.

        Args:
            selection: what `select` returned, perhaps for an earlier layer; None where no indexer runs.
            loss: None where nobody needs the indexer loss.
            measured: as in `select`.
            target_sum: takes this layer's probabilities; the loss then learns the sum. None: it learns this layer's.
        """
        ...
