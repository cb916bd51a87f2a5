"""What kind of pass runs through the attention layers: made by the step, read by every layer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionPass:
    """The same for all layers and micro-batches of a step or a validation, except `is_first_of_two`."""

    sparse: bool = False
    """Attend to the selected keys; otherwise to all causal keys of the document."""
    trains_indexer: bool = False
    """Compute the indexer loss and its gradients."""
    base_has_graph: bool = True
    """False in the indexer warm-up: the base runs without a graph, and each layer runs its indexer's backward pass on
    the spot."""
    evaluating: bool = False
    """Validation: no gradients, no moving average moves."""
    measuring: bool = False
    """Record the statistics of the attention (stats.py): this step or validation is logged."""
    kl_grad_scale: float | torch.Tensor = 0.0
    """Factor from a layer's sum of KL over its rows to its share of the gradient: a number, or fp32, 0-d."""
    row_fraction: float = 1.0
    """Share of the queries that the indexer loss takes (`gsa.indexer_loss_row_fraction`); validation takes all."""
    row_key: str = ""
    """Names the run, the step and the data-parallel rank; chooses these queries."""
    is_first_of_two: bool = False
    """Recomputation runs the same forward pass twice: first without a graph, then with one, in the backward pass. The
    first one records and draws nothing, and teaches the indexer nothing."""

    @property
    def uses_indexer(self) -> bool:
        return self.sparse or self.trains_indexer

    @property
    def has_graph(self) -> bool:
        """Whether autograd records what the base does."""
        return self.base_has_graph and not self.evaluating and not self.is_first_of_two

    @property
    def measures(self) -> bool:
        return self.measuring and not self.is_first_of_two

    @property
    def moves_averages(self) -> bool:
        """Whether the variances of its scores count in the moving average."""
        return not self.evaluating and not self.is_first_of_two

    @property
    def needs_indexer_loss(self) -> bool:
        """To learn from, or to log."""
        return not self.is_first_of_two and (self.trains_indexer or self.measuring)

    def indexer_graph(self) -> torch.enable_grad | nullcontext[None]:
        """In the indexer warm-up the base runs under `no_grad`, and only the indexer gets a graph."""
        return nullcontext() if self.base_has_graph else torch.enable_grad()
