"""The attention core in plain torch with L x L_k tensors: the reference for the fused core.

Equations 7, 10, 11, 12, 14 and 15 of the paper. Unlike `gsa_kernels.operations_reference` it keeps attention's
probabilities for the indexer loss.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gsa_kernels.indexer.pool import earlier_groups, firsts_of, sum_over_groups, whole_groups
from gsa_kernels.operations_reference import attended_keys
from gsa_kernels.reference import (
    indexer_kl,
    indexer_scores,
    renormalise_target,
    sigmoid_gate,
    sparse_attention,
    sum_over_blocks,
)
from gsa_kernels.sampling import sample_rows
from gsa_kernels.types import Geometry, Implementation, Indexer, RowSample, Selection
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.cores.interface import (
    AttentionInputs,
    AttentionResult,
    CoreSettings,
    IndexerLossInputs,
)
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
    ) -> AttentionResult:
        q, k, v = inputs.q, inputs.k, inputs.v
        assert selection is not None or not attention_pass.sparse
        attended = attended_keys(selection if attention_pass.sparse else None, geometry, q, k)
        attention = sparse_attention(q, k, v, attended, return_probs=loss is not None)
        out, target = attention.out, attention.head_sum_probs
        if target is not None:
            dist.all_reduce(target, group=self.settings.tp_group)  # the target averages all ranks' heads
        if inputs.output_gate is not None:
            out = sigmoid_gate(out, inputs.output_gate.flatten(2, 3))  # eq. 10
        if loss is None:
            return AttentionResult(out)
        assert target is not None
        with attention_pass.indexer_graph(), trace_span("kl"):
            rows = self._kl_of_rows(loss.indexer, target, attended, geometry)
            kl, logged = _sum_or_estimate(rows, loss.rows, geometry.selection_block)
        return AttentionResult(out, kl if attention_pass.trains_indexer else None, logged)

    def _kl_of_rows(
        self,
        indexer: Indexer,
        probs: torch.Tensor,
        attended: torch.Tensor,
        geometry: Geometry,
    ) -> torch.Tensor:
        """KL(p_t || softmax over the attended set of beta * I[t, :]) of each scored query, [B, R] (eqs. 14, 15).

        With pooled keys p is summed over each group, and the set holds the groups that the query attends to entirely.
        """
        block, firsts = geometry.selection_block, firsts_of(geometry, indexer.keys)
        if firsts is None:
            rows, target = attended[:, ::block], sum_over_blocks(probs, block)
        else:
            candidates = earlier_groups(firsts, attended_keys(None, geometry, probs, probs))
            rows = whole_groups(attended, candidates, firsts, geometry.indexer_pool)
            target = sum_over_groups(probs, firsts, geometry.indexer_pool)
        target = renormalise_target(target, rows)
        return indexer_kl(_scores(indexer), target, rows, indexer.inverse_temperature)


def _scores(indexer: Indexer) -> torch.Tensor:
    """I[t, s] of the selecting queries against all keys: fp32 [B, R, L_k]."""
    return indexer_scores(
        indexer.queries,
        indexer.keys,
        indexer.head_weight_logits,
        score_bias=indexer.score_bias,
        weight_bias=indexer.head_weight_bias,
        activation=indexer.activation,
    )


def _sum_or_estimate(
    rows: torch.Tensor, taken: RowSample, queries_per_row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL rows [B, R] -> their sum and the rows for the log; with sampling, twice the estimated sum."""
    if taken.fraction == 1:
        return rows.sum(), rows
    sample, factor = sample_rows(rows.shape[1], taken.fraction, taken.seed, queries_per_row=queries_per_row)
    kl = rows[:, sample.rows(rows.device)].sum() * factor
    return kl, kl.detach()
