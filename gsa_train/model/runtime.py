"""What the attention layers of one rank share while they run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from gsa_kernels.types import RowSample
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.probes.query_sample import QuerySample, sample_queries
from gsa_train.model.probes.stats import LayerStats

T = TypeVar("T")


@dataclass
class AttentionRuntime:
    stats: LayerStats
    attention_pass: AttentionPass = field(default_factory=AttentionPass)
    """The pass under way; between two the phase's, from which step and validation make theirs."""
    shared_selection: Any = field(default=None, repr=False)
    """Selections of the last leader layer, one per chunk of queries, for the followers of its group
    (`selection_reuse`)."""
    lesson: Any = field(default=None, repr=False)
    """What the layers of a group gather for the loss of their indexer (group_lesson.py); None where there is none."""

    _row_draws: dict[int, int] = field(default_factory=dict, repr=False)
    """Per layer: losses of this step that have drawn their rows."""
    _samples: dict[tuple[int, int, int], QuerySample] = field(default_factory=dict, repr=False)
    _documents: torch.Tensor | None = field(default=None, repr=False)
    """Those that `_made` is of."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _rotary: dict[Hashable, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )

    @contextmanager
    def during(self, attention_pass: AttentionPass) -> Iterator[None]:
        """What the layers run in this block is of this kind; draws of rows start again."""
        before, self.attention_pass = self.attention_pass, attention_pass
        self._row_draws.clear()
        try:
            yield
        finally:
            self.attention_pass, self.shared_selection, self.lesson = before, None, None
            self._documents, self._made = None, {}

    def pass_of_this_forward(self) -> AttentionPass:
        """The pass under way as the layer that runs now must see it.

        megatron-core recomputes whole layers by calling them twice, first under `no_grad` and later with a graph, and
        tells them in no other way. This is the one place that reads the grad mode: ask at the start of a layer's
        forward, before it changes the mode.
        """
        current = self.attention_pass
        if current.has_graph and not torch.is_grad_enabled():
            return replace(current, is_first_of_two=True)
        return current

    def draw_rows(self, attention_pass: AttentionPass, layer: int) -> RowSample:
        """The rows of this layer's next loss.

        Call it once per loss, in the order of the micro-batches: never in the first of two passes. The draws are the
        same on all tensor-parallel ranks, and after a resume.
        """
        if attention_pass.row_fraction == 1:
            return RowSample()
        draw = self._row_draws.get(layer, 0)
        self._row_draws[layer] = draw + 1
        seed = zlib.crc32(f"{attention_pass.row_key} {draw} {layer}".encode())
        return RowSample(attention_pass.row_fraction, seed)

    def query_sample(
        self, attention_pass: AttentionPass, length: int, start: int, end: int
    ) -> QuerySample | None:
        """The queries to measure of those at start .. end - 1 of a sequence; None if the pass measures none."""
        if not attention_pass.measures:
            return None
        piece = (length, start, end)
        if piece not in self._samples:
            self._samples[piece] = sample_queries(*piece, self.stats.device)
        return self._samples[piece]

    def once(self, document_ids: torch.Tensor | None, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, a function of the key and the micro-batch's documents alone: the same for all layers.

        Args:
            document_ids: int32 [B, L]; None for one document per sequence.
        """
        if not _same_memory(document_ids, self._documents):
            self._documents, self._made = document_ids, {}
        if key not in self._made:
            self._made[key] = make()
        value: T = self._made[key]
        return value

    def rotary_tables(self, angles: torch.Tensor, magnitude: float) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [L, D / 2], of megatron-core's angles [L, 1, 1, D], whose halves are equal.

        All layers get the same tensor, and a length's is kept as long as the model: its tables are, too.

        Args:
            magnitude: what they are multiplied with, the same in all layers.
        """
        # Recomputation detaches the angles: another tensor each time, of the same memory. The first one is kept, so
        # that no other gets its memory.
        key = (angles.data_ptr(), angles.shape, magnitude)
        if key not in self._rotary:
            half = angles[:, 0, 0, : angles.shape[-1] // 2].float()
            cos, sin = half.cos() * magnitude, half.sin() * magnitude
            self._rotary[key] = (angles, cos.contiguous(), sin.contiguous())
        return self._rotary[key][1:]


def _same_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Recomputation detaches what it is given: the same numbers in another tensor."""
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
