"""What turns gated, rotated Q, K, V and the indexer's projections into attention: the interface of its versions.

Batch first throughout: q [B, L_q, n_h, d_k], k and v [B, L_k, n_kv, d_k] of this tensor-parallel rank. The queries
are those at positions query_start .. query_start + L_q - 1 of the sequence, the keys all up to the last of them:
L_k = query_start + L_q. Only under context parallelism is query_start not 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gsa_train.losses import inject_loss
from gsa_train.model.indexer import IndexerProjections
from gsa_train.model.query_sample import QuerySample
from gsa_train.model.runtime import AttentionRuntime

if TYPE_CHECKING:
    from gsa_train.model.gsa_attention import GSASelfAttention


class AttentionCore(Protocol):
    """A selection is an object whose format only its core knows."""

    def select(
        self,
        projections: IndexerProjections,
        document_ids: torch.Tensor | None,
        query_start: int,
        sample: QuerySample | None,
    ) -> Any:
        """S_t of every query, without gradient; None where a dense pass measures nothing.

        Called outside of what is recomputed: a backward pass that selected anew could differ from its forward
        pass. Records the variance of the scores.

        Args:
            projections: queries and weight logits of the L_q queries, keys of all L_k.
            document_ids: int32 [B, L_k], or None for one document per sequence.
            sample: which of the queries to measure; None where the pass is not logged.
        """
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output_gate: torch.Tensor | None,
        queries: torch.Tensor | None,
        keys: torch.Tensor | None,
        weight_logits: torch.Tensor | None,
        document_ids: torch.Tensor | None,
        selected: Any,
        query_start: int,
        sample: QuerySample | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gated attention [B, L_q, n_h, d_k], and the indexer loss summed over these queries where it is to be
        learned from, 0-d.

        A function of its arguments and the parameters alone, so that it can be recomputed.

        Args:
            output_gate: logits of G1 [B, L_q, n_kv, n_h / n_kv, d_k], or None.
            queries, keys, weight_logits: the indexer's projections; None where it does not run.
            document_ids: int32 [B, L_k], or None for one document per sequence.
            selected: what `select` returned, perhaps for an earlier layer.
            sample: as in `select`.
        """
        ...


def build_core(attention: GSASelfAttention, implementation: str, dense_attention: str) -> AttentionCore:
    """The core with this name: `reference` (plain torch) or `triton` (fused kernels, and for dense passes what
    `dense_attention` names)."""
    if implementation == "triton":
        from gsa_train.model.triton_core import TritonCore

        return TritonCore(attention, dense_attention)
    from gsa_train.model.reference_core import ReferenceCore

    return ReferenceCore(attention)


def indexer_graph(runtime: AttentionRuntime) -> torch.enable_grad | nullcontext[None]:
    """In the warm-up the base runs under `no_grad`, and only the indexer gets a graph."""
    return torch.enable_grad() if runtime.local_backward else nullcontext()


def train_indexer(runtime: AttentionRuntime, out: torch.Tensor, kl: torch.Tensor) -> torch.Tensor:
    """Differentiate the layer's summed KL, on the spot in the warm-up, else with the backward pass of `out`."""
    if runtime.local_backward:
        (kl * runtime.kl_grad_scale).backward()
        return out
    return inject_loss(out, kl, runtime.kl_grad_scale) if kl.requires_grad else out
