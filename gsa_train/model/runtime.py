"""What the attention layers of one rank share while they run: the phase's mode and what they measure."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from gsa_train.model.query_sample import QuerySample, sample_queries
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
    row_fraction: float = 1.0
    """Share of the queries that the indexer loss takes (`gsa.indexer_loss_row_fraction`)."""
    row_key: str = ""
    """Names the run, the step and the data-parallel rank: what draws these queries."""
    _row_draws: dict[int, int] = field(default_factory=dict, repr=False)
    """Per layer: micro-batches of this step that have drawn."""
    shared_selection: Any = field(default=None, repr=False)
    """Selections of the last leader layer, one per run of queries, for the followers of its group
    (`selection_reuse`)."""

    _samples: dict[tuple[int, int, int], QuerySample] = field(default_factory=dict, repr=False)
    _rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def begin_step(self, row_key: str) -> None:
        """Start to count the micro-batches anew."""
        self.row_key = row_key
        self._row_draws.clear()

    def draw_rows(self, layer: int) -> tuple[float, int | None]:
        """Share of the rows for this layer's loss on the micro-batch under way, and the seed that chooses them.

        Call it once per loss: recomputation calculates a loss in its second pass only, micro-batch after micro-batch.
        The same on all tensor-parallel ranks, and after a resume.
        """
        if self.evaluating or self.row_fraction == 1:
            return 1.0, None
        draw = self._row_draws.get(layer, 0)
        self._row_draws[layer] = draw + 1
        return self.row_fraction, zlib.crc32(f"{self.row_key} {draw} {layer}".encode())

    def rotary_tables(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [L, D / 2], of megatron-core's angles [L, 1, 1, D], whose halves are equal.

        All layers get the same tensor, so the last one is remembered.
        """
        if self._rotary is None or self._rotary[0] is not angles:
            half = angles[:, 0, 0, : angles.shape[-1] // 2].float()
            self._rotary = (angles, half.cos().contiguous(), half.sin().contiguous())
        return self._rotary[1:]

    def sample(self, length: int, start: int, end: int) -> QuerySample | None:
        """The queries, of those at start .. end - 1 of a sequence, that the pass under way measures; None if it is not
        logged. Where `counts_this_pass` may be asked."""
        if not (self.measuring and self.counts_this_pass()):
            return None
        piece = (length, start, end)
        if piece not in self._samples:
            self._samples[piece] = sample_queries(*piece, self.stats.device)
        return self._samples[piece]

    @property
    def uses_indexer(self) -> bool:
        return self.sparse or self.train_indexer

    def counts_this_pass(self) -> bool:
        """Whether the pass under way may record: with recomputation only the second one, which has a graph.

        Ask before entering `no_grad` or `enable_grad`.
        """
        return self.evaluating or self.local_backward or torch.is_grad_enabled()
