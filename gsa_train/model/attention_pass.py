"""Define the settings of one forward pass through the attention layers. The step sets them, and every layer reads
them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionPass:
    """All layers and micro-batches of a step or validation share these settings, except `will_recompute`."""

    sparse: bool = False
    """Whether queries attend to the selected keys. If False, they attend to all causal keys of the document."""
    trains_indexer: bool = False
    """Whether to compute the indexer loss and its gradients."""
    base_has_graph: bool = True
    """Whether the base model (all except indexers) runs with an autograd graph. It has none in the indexer warm-up,
    where each layer runs its indexer's backward pass immediately."""
    evaluating: bool = False
    """Whether this is a validation, in which there are no gradients and moving averages keep their values."""
    measuring: bool = False
    """Whether this step or validation is logged, and therefore records attention statistics (probes/stats.py)."""
    batch_share: float = 1.0
    """Sequences of this step divided by `train.global_batch_size`; below 1 in a batch ramp."""
    kl_grad_scale: float | torch.Tensor = 0.0
    """Factor for the gradient of a layer's KL sum: a number, or fp32, 0-d."""
    row_fraction: float = 1.0
    """Fraction of queries in the indexer loss (`gsa.indexer_loss_row_fraction`); validation uses all."""
    row_draw: int = 0
    """Number of the random query sample (`RowSample`) for the indexer loss in the first micro-batch. Each later
    micro-batch uses the next number."""
    will_recompute: bool = False
    """True in a layer's forward pass if the backward pass will recompute the layer. Graph, statistics, samples and
    indexer loss then exist only in the recomputation."""

    @property
    def uses_indexer(self) -> bool:
        return self.sparse or self.trains_indexer

    @property
    def has_graph(self) -> bool:
        """Whether autograd records the base model's operations."""
        return self.base_has_graph and not self.evaluating and not self.will_recompute

    @property
    def measures(self) -> bool:
        return self.measuring and not self.will_recompute

    @property
    def moves_averages(self) -> bool:
        """Whether score variances enter the moving average."""
        return not self.evaluating and not self.will_recompute

    @property
    def needs_indexer_loss(self) -> bool:
        """Whether the pass computes the indexer loss, for training or for the log."""
        return not self.will_recompute and (self.trains_indexer or self.measuring)

    def indexer_graph(self) -> torch.enable_grad | nullcontext[None]:
        """Enable gradients for the indexer in its warm-up, where the base runs under `no_grad`."""
        return nullcontext() if self.base_has_graph else torch.enable_grad()
