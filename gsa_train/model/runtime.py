"""Hold the state that the attention layers of one rank share during a pass."""

from __future__ import annotations

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
    """The current pass. Between passes it is the phase's default, which steps and validation modify."""
    shared_selection: Any = field(default=None, repr=False)
    """The group's selections, one per query chunk, from the layer with the indexer (`selection_reuse`)."""

    _row_draws: dict[int, int] = field(default_factory=dict, repr=False)
    """Per layer: number of losses with sampled rows in this step."""
    _samples: dict[tuple[int, int, int], QuerySample] = field(default_factory=dict, repr=False)
    _documents: torch.Tensor | None = field(default=None, repr=False)
    """The documents for which `_made` holds results."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _rotary: dict[Hashable, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, repr=False
    )

    @contextmanager
    def during(self, attention_pass: AttentionPass) -> Iterator[None]:
        """Set the pass for layers called in this context, and reset row sampling."""
        before, self.attention_pass = self.attention_pass, attention_pass
        self._row_draws.clear()
        try:
            yield
        finally:
            self.attention_pass, self.shared_selection = before, None
            self._documents, self._made = None, {}

    def pass_of_this_forward(self) -> AttentionPass:
        """Return the current pass for the layer that is running. If the layer will run again later, `will_recompute` of
        the returned pass is True.

        To recompute a layer, megatron-core calls it twice: first under `no_grad`, and later with a graph. Only the grad
        mode distinguishes the two calls. Call this function at the start of a layer's forward, before the layer changes
        the grad mode.
        """
        current = self.attention_pass
        if current.has_graph and not torch.is_grad_enabled():
            return replace(current, will_recompute=True)
        return current

    def draw_rows(self, attention_pass: AttentionPass, layer: int) -> RowSample:
        """Sample the queries of this layer's next indexer loss.

        Call this method once per loss, in the order of the micro-batches. If a layer is recomputed, call this method
        only in the recomputation. All tensor-parallel ranks draw the same sample. A resumed run draws the samples that
        it would have drawn without the interruption.
        """
        if attention_pass.row_fraction == 1:
            return RowSample()
        draw = self._row_draws.get(layer, 0)
        self._row_draws[layer] = draw + 1
        return RowSample(attention_pass.row_fraction, attention_pass.row_draw + draw)

    def query_sample(
        self, attention_pass: AttentionPass, length: int, start: int, end: int
    ) -> QuerySample | None:
        """Return the queries to measure among the queries `start` to `end - 1` of a sequence, or None if the pass does
        not measure."""
        if not attention_pass.measures:
            return None
        piece = (length, start, end)
        if piece not in self._samples:
            self._samples[piece] = sample_queries(*piece, self.stats.device)
        return self._samples[piece]

    def once(self, document_ids: torch.Tensor | None, key: Hashable, make: Callable[[], T]) -> T:
        """Cache the result of `make`, which depends only on `key` and the documents, for all layers of a micro-batch.

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
        """Return cos and sin of megatron-core's angles [L, 1, 1, D]: fp32 [L, D / 2] each. Both halves of the D angles
        are equal, so one half is enough.

        The tables are cached per length for all layers, for the lifetime of the model.

        Args:
            magnitude: factor of both tables, the same in all layers.
        """
        # Recomputation passes a new tensor with the same memory, so the memory address is the key. The cache holds the
        # first tensor, so that no other tensor gets this address.
        key = (angles.data_ptr(), angles.shape, magnitude)
        if key not in self._rotary:
            half = angles[:, 0, 0, : angles.shape[-1] // 2].float()
            cos, sin = half.cos() * magnitude, half.sin() * magnitude
            self._rotary[key] = (angles, cos.contiguous(), sin.contiguous())
        return self._rotary[key][1:]


def _same_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Compare addresses, because recomputation detaches its inputs: the new tensors have the same memory."""
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
