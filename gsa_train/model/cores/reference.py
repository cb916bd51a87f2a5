"""The attention core in plain torch with L x L_k tensors: the reference for the fused core.

Equations 7, 10, 11, 12, 14 and 15 of the paper. Unlike `gsa_kernels.operations_reference` it keeps attention's
probabilities for the indexer loss, the sum over a group's layers included (group_target.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gsa_kernels.operations_reference import attended_keys, kl_of_rows
from gsa_kernels.reference import sigmoid_gate, sparse_attention
from gsa_kernels.sampling import sample_rows
from gsa_kernels.types import Geometry, Implementation, RowSample, Selection
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.cores.interface import (
    AttentionInputs,
    AttentionResult,
    CoreSettings,
    IndexerLossInputs,
)
from gsa_train.model.group_target import TargetSum
from gsa_train.profiling.trace_spans import trace_span


class ReferenceCore:
    """Attention and indexer loss of one layer; see `AttentionCore`."""

    implementation: Implementation = "reference"

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings

    def attend(
        self,
        inputs: AttentionInputs,
        selection: Selection | None,
        geometry: Geometry,
        loss: IndexerLossInputs | None,
        attention_pass: AttentionPass,
        target_sum: TargetSum | None = None,
    ) -> AttentionResult:
        q, k, v = inputs.q, inputs.k, inputs.v
        assert selection is not None or not attention_pass.sparse
        selection = selection if attention_pass.sparse else None
        attended = attended_keys(selection, geometry, q, k)
        wants_probs = loss is not None or target_sum is not None
        attention = sparse_attention(q, k, v, attended, return_probs=wants_probs)
        out, target = attention.out, attention.head_sum_probs
        if target is not None:
            dist.all_reduce(target, group=self.settings.tp_group)  # the target averages all ranks' heads
            target = target if target_sum is None else target_sum.add(target)
        if inputs.output_gate is not None:
            out = sigmoid_gate(out, inputs.output_gate.flatten(2, 3))  # eq. 10
        if loss is None:
            return AttentionResult(out)
        assert target is not None
        with attention_pass.indexer_graph(), trace_span("kl"):
            rows = kl_of_rows(loss.indexer, target, attended, selection, geometry)
            kl, logged = _sum_or_estimate(rows, loss.rows, geometry.selection_block)
        return AttentionResult(out, kl if attention_pass.trains_indexer else None, logged)


def _sum_or_estimate(
    rows: torch.Tensor, taken: RowSample, queries_per_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL rows [B, R] -> their sum and the rows for the log; with sampling, twice the estimated sum."""
    if taken.fraction == 1:
        return rows.sum(), rows
    sample, factor = sample_rows(rows.shape[1], taken.fraction, taken.seed, queries_per_row=queries_per_row)
    kl = rows[:, sample.rows(rows.device)].sum() * factor
    return kl, kl.detach()
