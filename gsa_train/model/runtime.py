"""What the attention layers of one rank share while they run: the phase's mode and what they measure."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gsa_train.model.stats import LayerStats


@dataclass
class AttentionRuntime:
    """Set by the phase and the step; read by every attention layer of this rank."""

    stats: LayerStats
    sparse: bool = False
    """Attend to the selected keys; otherwise to all visible ones."""
    train_indexer: bool = False
    """Compute the indexer loss and its gradients."""
    local_backward: bool = False
    """Warm-up: the base runs without a graph, and each layer runs its indexer's backward pass on the spot."""
    evaluating: bool = False
    measuring: bool = False
    """This pass is logged: record the statistics of section 4 of the specification."""
    kl_grad_scale: float = 0.0
    """Factor from a layer's sum of KL over its rows to its share of the gradient."""
    shared_selection: torch.Tensor | None = field(default=None, repr=False)
    """Selection of the last leader layer, for the followers of its group (`selection_reuse`)."""

    @property
    def uses_indexer(self) -> bool:
        return self.sparse or self.train_indexer

    def counts_this_pass(self) -> bool:
        """Whether the pass under way may record: with recomputation only the second one, which has a graph.

        Ask before entering `no_grad` or `enable_grad`.
        """
        return self.evaluating or self.local_backward or torch.is_grad_enabled()
