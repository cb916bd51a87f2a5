"""What queries attend to, in the forms that the fused kernels take: all visible keys, bits, or lists of keys.

Each form is one class with the same operations: attention over it, the indexer loss on it, and bits for statistics.
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
from gsa_kernels.distillation.op import distilling_attention
from gsa_kernels.kl.gathered import gathered_indexer_kl_loss
from gsa_kernels.kl.op import indexer_kl_loss
from gsa_kernels.lists.key_lists import KeyLists
from gsa_kernels.lists.triton_rows import words_of_rows
from gsa_kernels.sampling import RowSample
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


@dataclass(frozen=True)
class AllVisible:
    """Dense attention."""

    block: int
    """Queries that share a row of the indexer loss."""

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

    def distilling_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_starts: torch.Tensor | None,
        output_gate: torch.Tensor | None,
        projections: IndexerProjections,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attention`, whose backward pass gives the gradients of the indexer loss, too. `options` are the kernel's."""
        return distilling_attention(
            q,
            k,
            v,
            self.words,
            *projections,
            log_sum=self.log_sum,
            document_starts=document_starts,
            output_gate_logits=output_gate,
            query_start=k.shape[1] - q.shape[1],
            **options,
        )

    def words_of(self, rows: torch.Tensor) -> torch.Tensor:
        """int32 [B, S, ceil(L_k / 32)]: the bits of the queries with these numbers, int64 [S]."""
        return self.words.index_select(1, rows)


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

    def words_of(self, rows: torch.Tensor) -> torch.Tensor:
        """As of `SelectedBits`."""
        return words_of_rows(self.lists, rows)


Selected = SelectedBits | SelectedLists


def sampled_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    words: torch.Tensor,
    document_starts: torch.Tensor | None,
) -> torch.Tensor:
    """Logarithm of the softmax's sum over the keys in `words`, for S queries from anywhere in the sequence, in its
    order: fp32 [B, n_h, S].

    Takes 4 B n_h S L_k d_k operations: the kernel believes the queries to be the last S, whose tiles go over nearly
    all keys.

    Args:
        q: [B, S, n_h, d_k]
        words: int32 [B, S, ceil(L_k / 32)]
        document_starts: of these queries, int32 [B, S]
    """
    query_start = k.shape[1] - q.shape[1]
    return masked_attention(q, k, v, words, document_starts=document_starts, query_start=query_start)[1]


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
        return block_sum_probs_rows(q, k, inputs.lse, rows, selection_block=block, **where)

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
