"""The attention core on fused kernels: the results of `ReferenceCore` without L x L floating-point tensors."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from gsa_kernels import api
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.sampling import sampled_one_of
from gsa_kernels.types import FusedLoss, Geometry, Implementation, RowSample, Selection
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.cores.interface import (
    AttentionInputs,
    AttentionResult,
    CoreSettings,
    IndexerLossInputs,
)
from gsa_train.model.dense_attention import build_dense_attention
from gsa_train.profiling.trace_spans import trace_span

logger = logging.getLogger(__name__)


def gather_heads(local: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather the heads of the tensor-parallel ranks in rank order, without gradient. Collective."""
    local = local.detach()
    if group.size() == 1:
        return local
    local = local.contiguous()
    every = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(every, local, group=group)
    return torch.cat(every.chunk(group.size()), dim=dim)


class TritonCore:
    """Attention and indexer loss of one layer; see `AttentionCore`."""

    implementation: Implementation = "triton"

    def __init__(self, settings: CoreSettings, dense_attention: str = "triton") -> None:
        self.settings = settings
        self.dense = build_dense_attention(dense_attention)
        self._said_fused_loss = False

    def attend(
        self,
        inputs: AttentionInputs,
        selection: Selection | None,
        geometry: Geometry,
        loss: IndexerLossInputs | None,
        attention_pass: AttentionPass,
    ) -> AttentionResult:
        q, k, v, output_gate = inputs.q, inputs.k, inputs.v, inputs.output_gate
        attended = selection if attention_pass.sparse else None  # None: all causal keys
        assert attended is not None or not attention_pass.sparse
        teaches = loss is not None and attention_pass.trains_indexer
        lse: torch.Tensor | None = None
        fuses_loss = loss is not None and self._fuses_loss(q, k, loss, attended, geometry, attention_pass)
        if fuses_loss:
            assert attended is not None
            assert loss is not None
            fused = FusedLoss(loss.indexer, attention_pass.kl_grad_scale, loss.on_rows)
            out, lse = api.sparse_attention_with_loss(
                q, k, v, attended, geometry, fused, output_gate, implementation="triton"
            )
        elif attention_pass.sparse or self.dense is None or teaches:
            out, lse = api.sparse_attention(q, k, v, attended, geometry, output_gate, implementation="triton")
        else:
            out = self.dense(q, k, v)
            if output_gate is not None:
                out = fused_sigmoid_gate(out, output_gate.flatten(2, 3))
        if loss is None or fuses_loss:
            return AttentionResult(out)
        assert lse is not None
        with attention_pass.indexer_graph(), trace_span("kl"):
            kl, rows = self._indexer_loss(loss, inputs, lse, attended, geometry, attention_pass)
        return AttentionResult(out, kl if attention_pass.trains_indexer else None, rows)

    def _fuses_loss(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        loss: IndexerLossInputs,
        attended: Selection | None,
        geometry: Geometry,
        attention_pass: AttentionPass,
    ) -> bool:
        """Whether attention's backward pass also computes the indexer's gradients. It has the target if this rank holds
        all heads and the loss uses all rows."""
        num_rows = loss.indexer.queries.shape[1]
        fuses = (
            attention_pass.trains_indexer
            and attention_pass.has_graph
            and sampled_one_of(num_rows, loss.rows.fraction, geometry.selection_block) == 1
            and self.settings.tp_group.size() == 1
            and api.can_fuse_indexer_loss(q, k, attended)
        )
        if fuses and not self._said_fused_loss:
            self._said_fused_loss = True
            logger.info("layer %d: indexer loss fused into attention's backward pass", self.settings.layer)
        return fuses

    def _indexer_loss(
        self,
        loss: IndexerLossInputs,
        inputs: AttentionInputs,
        lse: torch.Tensor,
        attended: Selection | None,
        geometry: Geometry,
        attention_pass: AttentionPass,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over the rows of KL(p_t || softmax over the attended set of beta * I[t, :]), and the rows
        [B, R]. For sampled or sharded rows the second value is the total, estimated sum, for the log.

        The target averages the heads of all tensor-parallel ranks. The ranks all-gather queries, keys and log-sum-exps,
        which grow with L, instead of probabilities, which grow with L^2, and each computes a share of the rows. Its sum
        is multiplied by the number of ranks, because the indexer's gradients are averaged over them (indexer.py).
        """
        tp = self.settings.tp_group
        q, k, lse = (gather_heads(x, dim, tp) for x, dim in ((inputs.q, 2), (inputs.k, 2), (lse, 1)))
        share = replace(loss.rows, share=(tp.rank(), tp.size()))
        kl, rows = api.indexer_loss(
            loss.indexer, q, k, lse, attended, geometry, share, implementation="triton"
        )
        if share == RowSample():
            return kl, rows
        total = kl.detach().clone()
        if tp.size() > 1 and attention_pass.measures:
            dist.all_reduce(total, group=tp)
        return kl * tp.size(), total
