"""Defines the types that the operations take: frozen dataclasses, validated on construction.

In shapes, B is the number of sequences, L the number of queries of a sequence, and Lk the number of its keys. There are
H query heads and Hkv key-value heads of size D, and HI indexer heads of size DI. Query i is at position
t = query_start + i of its sequence, and key s is at position s. Lk is query_start + L.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gsa_kernels.checks import check_activation, check_at_least, check_budget_rule, check_shape
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.sampling import stretches_per_sampled

Implementation = Literal["triton", "reference"]
"""`triton`: the fused kernels, on a CUDA device. `reference`: plain torch on any device, with tensors of [L, Lk]."""


@dataclass(frozen=True)
class Indexer:
    """Holds the tensors of one layer's lightning indexer (GSA, equation 7). The fields below explain q, k, w, b and c.

    The score of key s for query t depends on the activation:
    - sigmoid: I[t, s] = sum_j sigmoid(w[t, j] + c_j) * sigmoid(q[t, j] . k[s] / sqrt(DI) + b_j)
    - relu, as in DeepSeek's indexer, without biases: I[t, s] = sum_j w[t, j] * relu(q[t, j] . k[s] / sqrt(DI))
    """

    queries: torch.Tensor
    """q, [B, L, HI, DI]."""
    keys: torch.Tensor
    """k, [B, Lk, DI]: one key for all indexer heads, in the dtype of the queries. Decoding also takes pages of keys
    (`LayerCache.block_table`)."""
    head_weight_logits: torch.Tensor
    """w, [B, L, HI]."""
    score_bias: torch.Tensor | None = None
    """b, [HI]; 0 if None."""
    head_weight_bias: torch.Tensor | None = None
    """c, [HI]; 0 if None."""
    activation: Literal["sigmoid", "relu"] = "sigmoid"
    inverse_temperature: float | torch.Tensor = 1.0
    """beta > 0 in softmax(beta * I) of the indexer loss: a number or a one-element tensor, which may require a
    gradient."""

    def __post_init__(self) -> None:
        check_shape("queries", self.queries, "[B, L, HI, DI]", (None, None, None, None))
        batch, length, heads, dim = self.queries.shape
        check_shape("keys", self.keys, "[B, Lk, DI]", (None, None, dim))
        check_shape("head_weight_logits", self.head_weight_logits, "[B, L, HI]", (batch, length, heads))
        biases = {"score_bias": self.score_bias, "head_weight_bias": self.head_weight_bias}
        check_activation(self.activation, heads, **biases)
        beta = self.inverse_temperature
        if isinstance(beta, torch.Tensor) and beta.numel() != 1:
            raise ValueError(f"inverse_temperature has shape {tuple(beta.shape)}; pass one element")
        if not isinstance(beta, torch.Tensor) and not beta > 0:
            raise ValueError(f"inverse_temperature is {beta}; pass a positive number")


@dataclass(frozen=True)
class BudgetRule:
    """Decides how many keys a query selects: k_t (GSA, equation 8; `adaptive_budget` is the definition).

    k_t = clamp(floor(raw), k_min, k_max), but at most the number of the query's causal keys. `adaptive_k` decides how
    raw depends on var, the variance of the query's scores, and on ema, the moving average of this variance:
    - `inverse`: raw = k_base * ema / var
    - `direct`: raw = k_base * var / ema
    - `off`: raw = k_base
    A query with fewer than `dense_below` causal keys selects all of them.
    """

    k_base: int
    k_min: int
    k_max: int
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    dense_below: int = 0

    def __post_init__(self) -> None:
        check_budget_rule(self.k_base, self.k_min, self.k_max, self.adaptive_k, self.dense_below)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """Return k_base, k_min, k_max and dense_below, the arguments of the kernels that compute budgets."""
        return self.k_base, self.k_min, self.k_max, self.dense_below

    @property
    def most_keys(self) -> int:
        return max(self.k_max, self.dense_below - 1)


@dataclass(frozen=True)
class Geometry:
    """Describes positions of the queries and keys that they may select."""

    document_starts: torch.Tensor | None = None
    """int32 [B, L], never decreasing: the position at which the query's document begins. Query i at position t has the
    causal keys document_starts[b, i] <= s <= t. Default: one document per sequence."""
    query_start: int = 0
    """Position of the first query; only context parallelism needs values above 0."""
    local_window: int = 0
    """Number of latest keys, including the query's own, that are selected in addition to the budget; 0 in the paper."""

    def __post_init__(self) -> None:
        check_at_least("query_start", self.query_start, 0)
        check_at_least("local_window", self.local_window, 0)
        starts = self.document_starts
        if starts is not None:
            check_shape("document_starts", starts, "[B, L]", (None, None))
            if starts.dtype != torch.int32:
                raise ValueError(f"document_starts has dtype {starts.dtype}; pass int32")


@dataclass(frozen=True)
class RowSample:
    """Describes which rows of the indexer loss to compute: all, a sample of stretches, or a rank's share.

    A stretch has limits.STRETCH_ROWS rows. With key lists it has limits.TILE_QUERIES rows, so samples of the two
    selection formats differ.
    """

    fraction: float = 1.0
    """1 / n for an integer n. Below 1 the loss is an unbiased estimate of the loss over all rows."""
    draw: int | None = None
    """Chooses every n-th stretch, from number `draw` modulo n on, so that n consecutive draws take each row once. A
    fraction below 1 needs a draw, equal on all ranks that share the rows."""
    share: tuple[int, int] = (0, 1)
    """(rank, size): this rank computes every size-th of the chosen stretches, from number `rank` on. The losses and
    gradients of all shares add up to the whole."""

    def __post_init__(self) -> None:
        if stretches_per_sampled(self.fraction) > 1 and self.draw is None:
            raise ValueError(f"draw is None with fraction {self.fraction}; pass a number, equal on all ranks")
        rank, size = self.share
        if not 0 <= rank < size:
            raise ValueError(f"share is {self.share}; pass (rank, size) with 0 <= rank < size")


@dataclass(frozen=True)
class Selection:
    """Holds S_t of every query as a packed mask or key lists, whichever is faster. `select` creates it."""

    packed_mask: torch.Tensor | None
    """int32 [B, L, ceil(Lk / 32)]: bit s % 32 of word s // 32 says that the query attends to key s."""
    key_lists: KeyLists | None
    """For each tile of neighbouring queries, the keys that any of them attends to (CSR)."""
    budget: torch.Tensor
    """int32 [B, L]: k_t. The local window may add keys."""
    variance: torch.Tensor
    """[B, L], fp32 (fp64 for fp64 inputs): population variance of the query's scores over its causal keys."""
    log_sum: torch.Tensor | None = None
    """fp32 [B, L]: log sum_{s in S_t} exp(beta I[t, s]), which saves the indexer loss one pass. It is computed on
    request (see `api.select`)."""

    def __post_init__(self) -> None:
        if (self.packed_mask is None) == (self.key_lists is None):
            raise ValueError("packed_mask and key_lists are both given, or both None; pass one of them")

    @property
    def format(self) -> Literal["packed_mask", "key_lists"]:
        return "packed_mask" if self.packed_mask is not None else "key_lists"

    def packed_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the packed mask of some queries, for statistics: int32 [B, S, ceil(Lk / 32)].

        Args:
            rows: int64 [S], numbers of queries, 0 <= i < L
        """
        if self.packed_mask is not None:
            return self.packed_mask.index_select(1, rows)
        from gsa_kernels.key_lists.triton_rows import packed_mask_of_rows  # imports Triton

        assert self.key_lists is not None
        return packed_mask_of_rows(self.key_lists, rows)
