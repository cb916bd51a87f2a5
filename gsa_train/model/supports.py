"""What queries attend to, in the forms that the fused kernels take: all visible keys, bits, or lists of keys.

Each form is one class with the same operations: attention over it, the indexer loss on it, and its statistics.
Shapes as in `AttentionCore`: q [B, L, n_h, d_k], k and v [B, L_k, n_kv, d_k] of this tensor-parallel rank; the
queries are the last L positions of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_block_probs import block_sum_probs_rows
from gsa_kernels.attention.triton_gathered_probs import head_sum_probs_lists
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.kl.gathered import gathered_indexer_kl_loss
from gsa_kernels.kl.op import indexer_kl_loss
from gsa_kernels.lists.key_lists import KeyLists
from gsa_kernels.sampling import RowSample
from gsa_kernels.statistics import lists as list_statistics
from gsa_kernels.statistics import words as word_statistics
from gsa_train.model.indexer import IndexerProjections


@dataclass(frozen=True)
class LossInputs:
    """What the indexer loss of a layer reads besides the support."""

    projections: IndexerProjections
    """Of the queries that select: every b-th one when blocks of b share a selection."""
    q: torch.Tensor
    k: torch.Tensor
    """Both of all heads, whose probabilities the target sums: the kernels renormalise."""
    lse: torch.Tensor
    """fp32 [B, n_h, L], of the attention over the same support."""
    document_starts: torch.Tensor | None
    options: dict[str, Any]
    """Biases, activation, temperature, and which rows: as the kernels' functions name them."""


class Support(Protocol):
    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_starts: torch.Tensor | None,
        output_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gated output [B, L, n_h, d_k], and the logarithm of the softmax's sum, fp32 [B, n_h, L].

        Args:
            document_starts: of the queries, int32 [B, L]
        """
        ...

    def indexer_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the scored rows of KL(p_t || softmax of beta * I[t, :] on the support), and the rows [B, R]; of the
        rows that `options` choose."""
        ...

    def sees_first(self, document_starts: torch.Tensor | None, length: int) -> torch.Tensor:
        """bool, broadcastable to [B, L]: whether a query attends to position 0."""
        ...


@dataclass(frozen=True)
class AllVisible:
    """Dense attention."""

    block: int
    """Queries that share a row of the indexer loss."""
    device: torch.device

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_starts: torch.Tensor | None,
        output_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return masked_attention(
            q,
            k,
            v,
            None,
            document_starts=document_starts,
            output_gate_logits=output_gate,
            query_start=k.shape[1] - q.shape[1],
        )

    def indexer_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return _loss_by_rows(inputs, None, self.block)

    def sees_first(self, document_starts: torch.Tensor | None, length: int) -> torch.Tensor:
        if document_starts is None:
            return torch.ones(1, length, dtype=torch.bool, device=self.device)
        return document_starts == 0


@dataclass(frozen=True)
class SelectedBits:
    """Bit s % 32 of words[b, t, s // 32] says that t attends to s: for lengths where most tiles of keys are hit."""

    words: torch.Tensor
    """int32 [B, L, ceil(L_k / 32)]"""
    log_sum: torch.Tensor | None = None
    """fp32 [B, L]: log sum_{s in S_t} exp(beta I[t, s]), by which the indexer loss is spared a pass."""

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_starts: torch.Tensor | None,
        output_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return masked_attention(
            q,
            k,
            v,
            self.words,
            document_starts=document_starts,
            output_gate_logits=output_gate,
            query_start=k.shape[1] - q.shape[1],
        )

    def indexer_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return _loss_by_rows(inputs, self.words, 1, self.log_sum)

    def sees_first(self, document_starts: torch.Tensor | None, length: int) -> torch.Tensor:
        return self.words[..., 0] & 1 == 1

    def keys_per_query(self) -> torch.Tensor:
        return word_statistics.selected_per_row(self.words)

    def adjacent_overlap(self) -> torch.Tensor:
        return word_statistics.adjacent_overlap_of_words(self.words)

    def union_ratio(self) -> torch.Tensor:
        return word_statistics.union_ratio_of_words(self.words, 32)


@dataclass(frozen=True)
class SelectedLists:
    """For each tile of queries the keys that any of them selects: for long contexts and shared selections."""

    lists: KeyLists
    block: int
    """Queries that share a selection, 1 in the paper."""

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_starts: torch.Tensor | None,
        output_gate: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return gathered_attention(q, k, v, self.lists, output_gate_logits=output_gate)

    def indexer_loss(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        def target(tiles: torch.Tensor) -> torch.Tensor:
            return head_sum_probs_lists(
                inputs.q, inputs.k, inputs.lse, self.lists, tiles, selection_block=self.block
            )

        result = gathered_indexer_kl_loss(
            *inputs.projections,
            target,
            self.lists,
            selection_block=self.block,
            return_rows=True,
            **inputs.options,
        )
        assert isinstance(result, tuple)
        return result

    def sees_first(self, document_starts: torch.Tensor | None, length: int) -> torch.Tensor:
        return list_statistics.selects_key_zero(self.lists)

    def keys_per_query(self) -> torch.Tensor:
        return list_statistics.selected_per_row(self.lists)

    def adjacent_overlap(self) -> torch.Tensor:
        return list_statistics.adjacent_overlap_of_lists(self.lists)

    def union_ratio(self) -> torch.Tensor:
        return list_statistics.union_ratio_of_lists(self.lists, 32)


Selected = SelectedBits | SelectedLists


def _loss_by_rows(
    inputs: LossInputs, words: torch.Tensor | None, block: int, log_sum: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target is made for chunks of rows, [B, rows, L_k]."""
    q, k, starts = inputs.q, inputs.k, inputs.document_starts
    query_start = k.shape[1] - q.shape[1]

    def target(rows: RowSample) -> torch.Tensor:
        where: dict[str, Any] = {"document_starts": starts, "query_start": query_start}
        if block == 1:
            # Half floats have probabilities exact to 2^-12 of themselves, as the hardware's tanh has the scores.
            return head_sum_probs_rows(
                q,
                k,
                inputs.lse,
                words,
                rows,
                **where,
                dtype=torch.float32 if q.dtype == torch.float32 else torch.float16,
                fill=False,
            )
        return block_sum_probs_rows(q, k, inputs.lse, words, rows, selection_block=block, **where)

    result = indexer_kl_loss(
        *inputs.projections,
        target,
        words=words,
        # Each head's probabilities sum to 1 over the support of their log-sum-exp, which is this one.
        target_sum=float(q.shape[2]) if block == 1 else None,
        log_sum=log_sum,
        document_starts=starts,
        query_start=query_start,
        selection_block=block,
        return_rows=True,
        **inputs.options,
    )
    assert isinstance(result, tuple)
    return result
