"""The types that the operations take: frozen dataclasses, validated on construction.

Letters in shapes: B sequences, L queries and Lk keys of each, R rows of the indexer (R = L, or one per block of
queries that share a selection), H query heads, Hkv key-value heads, D their size, HI indexer heads of size DI. Query i
is at position t = query_start + i of its sequence, key s at position s, and Lk = query_start + L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gsa_kernels.checks import check_activation, check_at_least, check_budget_rule, check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.sampling import stretches_per_sampled

Implementation = Literal["triton", "reference"]
"""`triton`: the fused kernels, on a CUDA device. `reference`: plain torch on any device, with tensors of [L, Lk]."""


@dataclass(frozen=True)
class Indexer:
    """One layer's lightning indexer, applied to its tokens (GSA, equation 7).

    With sigmoid, I[t, s] = sum_j sigmoid(w[t, j] + c_j) * sigmoid(q[t, j] . k[s] / sqrt(DI) + b_j); with relu, as in
    DeepSeek's indexer, I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s] / sqrt(DI)), without biases.
    """

    queries: torch.Tensor
    """q, [B, R, HI, DI]: of the first query of each block, row r being query r * selection_block."""
    keys: torch.Tensor
    """k, [B, Lk, DI]: one key for all indexer heads, of the same dtype."""
    head_weight_logits: torch.Tensor
    """w, [B, R, HI]."""
    score_bias: torch.Tensor | None = None
    """b, [HI]; 0 if None."""
    head_weight_bias: torch.Tensor | None = None
    """c, [HI]; 0 if None."""
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    inverse_temperature: float | torch.Tensor = 1.0
    """beta > 0 of softmax(beta * I) in the indexer loss: a number, or a tensor of one element, which may need a
    gradient."""

    def __post_init__(self) -> None:
        check_shape("queries", self.queries, "[B, R, HI, DI]", (None, None, None, None))
        batch, rows, heads, dim = self.queries.shape
        check_shape("keys", self.keys, "[B, Lk, DI]", (batch, None, dim))
        check_shape("head_weight_logits", self.head_weight_logits, "[B, R, HI]", (batch, rows, heads))
        biases = {"score_bias": self.score_bias, "head_weight_bias": self.head_weight_bias}
        check_activation(self.activation, heads, **biases)
        beta = self.inverse_temperature
        if isinstance(beta, torch.Tensor) and beta.numel() != 1:
            raise ValueError(f"inverse_temperature has shape {tuple(beta.shape)}; pass one element")
        if not isinstance(beta, torch.Tensor) and not beta > 0:
            raise ValueError(f"inverse_temperature is {beta}; pass a positive number")

    def of_block_leaders(self, selection_block: int) -> Indexer:
        """The rows of each aligned block's first query, from an indexer with a row per query."""
        check_at_least("selection_block", selection_block, 1)
        if selection_block == 1:
            return self
        return replace(
            self,
            queries=self.queries[:, ::selection_block],
            head_weight_logits=self.head_weight_logits[:, ::selection_block],
        )

    def of_previous_blocks(
        self, selection_block: int, document_starts: torch.Tensor | None = None
    ) -> Indexer:
        """For each aligned block the mean row of the previous block, from an indexer with a row per query.

        Differentiable. The mean covers queries in the document of the block's first query; if there are none, as for
        the first block, the row of that first query is used.

        Args:
            document_starts: int32 [B, L], as in `Geometry`
        """
        check_at_least("selection_block", selection_block, 1)
        length, rows = self.queries.shape[1], -(-self.queries.shape[1] // selection_block)
        positions = torch.arange((rows - 1) * selection_block, device=self.queries.device)
        before = positions.unflatten(0, (rows - 1, selection_block))
        starts = torch.zeros(1, rows - 1, 1, dtype=torch.int32, device=positions.device)
        if document_starts is not None:
            check_shape("document_starts", document_starts, "[B, L]", (len(self.queries), length))
            starts = document_starts[:, selection_block::selection_block, None]
        counts = before >= starts  # [B or 1, R - 1, b]

        def mean(x: torch.Tensor) -> torch.Tensor:
            leaders = x[:, ::selection_block]
            blocks = x[:, : len(positions)].unflatten(1, (rows - 1, selection_block))
            shape = (*counts.shape, *(1,) * (x.ndim - 2))
            weights = counts.view(shape).to(torch.promote_types(x.dtype, torch.float32))
            number = weights.sum(2)
            means = (blocks * weights).sum(2) / number.clamp(min=1)
            of_rows = torch.where(number > 0, means.to(x.dtype), leaders[:, 1:])
            return torch.cat([leaders[:, :1], of_rows], dim=1)

        return replace(self, queries=mean(self.queries), head_weight_logits=mean(self.head_weight_logits))


@dataclass(frozen=True)
class BudgetRule:
    """How many keys a query selects: k_t (GSA, equation 8; `adaptive_budget` is the definition).

    k_t = clamp(floor(raw), k_min, k_max), at most the number of the query's causal keys. `inverse`: raw = k_base *
    ema / var, with var the variance of the query's scores and ema its moving average. `direct`: raw = k_base * var /
    ema. `off`: raw = k_base. A query with fewer than `dense_below` causal keys selects all of them.
    """

    k_base: int
    k_min: int
    k_max: int
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    dense_below: int = 0

    def __post_init__(self) -> None:
        check_budget_rule(self.k_base, self.k_min, self.k_max, self.adaptive_k, self.dense_below)

    @property
    def most_keys(self) -> int:
        """The largest k_t."""
        return max(self.k_max, self.dense_below - 1)


@dataclass(frozen=True)
class Geometry:
    """Positions of the queries, the keys they may select, and which queries share a selection."""

    document_starts: torch.Tensor | None = None
    """int32 [B, L], never decreasing: the position at which the query's document begins. The causal keys of
    query t are document_starts[b, i] <= s <= t. One document per sequence if None."""
    query_start: int = 0
    """Position of the first query, a multiple of `selection_block`; not 0 under context parallelism only."""
    selection_block: int = 1
    """Queries in aligned blocks of this many share the top-k of the block's first query; 1 in the paper."""
    local_window: int = 0
    """Latest keys, the query's own included, that are selected in addition to the budget; 0 in the paper."""
    indexer_pool: int = 1
    """Neighbouring keys, aligned in the sequence, that are selected together, by their mean (indexer/pool.py); 1 in
    the paper. The budget counts keys. A query chooses among the groups before its own, which it always reads up to
    itself. The indexer's keys are `pooled`."""

    def __post_init__(self) -> None:
        check_at_least("query_start", self.query_start, 0)
        check_at_least("selection_block", self.selection_block, 1)
        check_at_least("local_window", self.local_window, 0)
        check_at_least("indexer_pool", self.indexer_pool, 1)
        if self.indexer_pool > 1 and (self.selection_block > 1 or self.query_start % self.indexer_pool):
            raise ValueError(
                f"indexer_pool is {self.indexer_pool} with selection_block {self.selection_block} and query_start "
                f"{self.query_start}; pass selection_block 1 and a multiple of {self.indexer_pool}"
            )
        if self.query_start % self.selection_block:
            raise ValueError(
                f"query_start is {self.query_start} with selection_block {self.selection_block}; pass a multiple of "
                f"{self.selection_block}, so that no block is cut"
            )
        if 1 < self.selection_block > self.local_window:
            raise ValueError(
                f"local_window is {self.local_window}, below selection_block {self.selection_block}; pass at least "
                f"{self.selection_block}, so that each query attends to the keys of its own block"
            )
        starts = self.document_starts
        if starts is not None:
            check_shape("document_starts", starts, "[B, L]", (None, None))
            if starts.dtype != torch.int32:
                raise ValueError(f"document_starts has dtype {starts.dtype}; pass int32")


@dataclass(frozen=True)
class RowSample:
    """The rows of the indexer loss: all, every n-th stretch for an estimate, or one rank's share."""

    fraction: float = 1.0
    """1 / n for a whole n. Below 1 the loss is an unbiased estimate of the loss over all rows."""
    seed: int | None = None
    """Chooses the stretches; needed with a fraction below 1, and equal on all ranks that share the rows."""
    share: tuple[int, int] = (0, 1)
    """(rank, size): of the stretches that are taken, every size-th from number `rank` on. The losses and gradients of
    all shares add up to the whole."""

    def __post_init__(self) -> None:
        if stretches_per_sampled(self.fraction) > 1 and self.seed is None:
            raise ValueError(f"seed is None with fraction {self.fraction}; pass a number, equal on all ranks")
        rank, size = self.share
        if not 0 <= rank < size:
            raise ValueError(f"share is {self.share}; pass (rank, size) with 0 <= rank < size")


@dataclass(frozen=True)
class Selection:
    """S_t of every query, in the format for which attention is fastest; made by `select`.

    Exactly one of packed mask and key lists is given.
    """

    packed_mask: torch.Tensor | None
    """int32 [B, L, ceil(Lk / 32)]: bit s % 32 of word s // 32 says that the query attends to key s. A word is a uint32,
    held in an int32."""
    key_lists: KeyLists | None
    """For each tile of queries the keys that any of them attends to (CSR)."""
    budget: torch.Tensor
    """int32 [B, R]: k_t. The local window may add keys."""
    variance: torch.Tensor
    """[B, R], fp32 (fp64 for fp64 inputs): population variance of the row's scores over its causal keys."""
    density: float | None = None
    """Keys in the lists over the causal keys of their tiles; None for lists of a fixed length."""
    log_sum: torch.Tensor | None = None
    """fp32 [B, R]: log sum_{s in S_t} exp(beta I[t, s]), which saves the indexer loss a pass; on request, with a
    packed mask only."""
    group_mask: torch.Tensor | None = None
    """int32 [B, L, ceil(G / 32)], with `Geometry.indexer_pool` and a packed mask: a bit for each of the G groups that
    the query chose."""
    group_lists: KeyLists | None = None
    """The same with key lists: each entry is a group, named by its first key. The entries of `key_lists` are the keys
    of these entries, in the same order; a word of 0 is a group that queries read without choosing it."""

    def __post_init__(self) -> None:
        if (self.packed_mask is None) == (self.key_lists is None):
            raise ValueError("packed_mask and key_lists are both given, or both None; pass one of them")

    @property
    def format(self) -> Literal["packed_mask", "key_lists"]:
        return "packed_mask" if self.packed_mask is not None else "key_lists"

    def packed_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The packed mask of some queries, for statistics: int32 [B, S, ceil(Lk / 32)].

        Args:
            rows: int64 [S], numbers of queries, 0 <= i < L
        """
        if self.packed_mask is not None:
            return self.packed_mask.index_select(1, rows)
        from gsa_kernels.key_lists.triton_rows import packed_mask_of_rows  # imports Triton

        assert self.key_lists is not None
        return packed_mask_of_rows(self.key_lists, rows)


@dataclass(frozen=True)
class FusedLoss:
    """The indexer loss whose gradients attention's backward pass calculates (`sparse_attention_with_loss`)."""

    indexer: Indexer
    scale: float | torch.Tensor
    """Gradient of what is trained with respect to the loss, the sum of the rows' KL. A tensor is fp32, of one element,
    and is not read back to the host."""
    on_rows: Callable[[torch.Tensor], None] | None = None
    """Called in the backward pass with the KL of each row, fp32 [B, R]. Without it the KL is not calculated."""
