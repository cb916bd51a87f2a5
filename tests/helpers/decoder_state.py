"""Saves and restores the state that a decoder's steps change, so that several runs start from the same state."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gsa_hf.decoding import FusedDecoder

KEPT_STEPS = 3
"""Steps that keep the selection of a first step."""


@dataclass(frozen=True)
class HeldState:
    """Holds copies of what steps write: caches from the decoder's slot on, and all other state. The workspace is
    scratch memory except for its counters, which are 0 between calls."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Tensors that steps write, and their contents."""
    zeros: list[torch.Tensor]

    def put_back(self) -> None:
        for written, copy in self.copies:
            written.copy_(copy)
        for each in self.zeros:
            each.zero_()


def hold(decoder: FusedDecoder) -> HeldState:
    """Save the state; the next token goes to slot `slot`, and steps write nothing else that is still needed."""
    filled = int(decoder.slot)
    written = [decoder.tokens, decoder.lengths, decoder.starts, decoder.slot]
    for buffers in decoder.buffers:
        written += [buffers.k[:, :, filled:], buffers.v[:, :, filled:]]
        if buffers.rows is not None:
            written.append(buffers.rows[:, filled:])
    for selection in decoder._selections.values():
        written += [selection.indices, selection.counts, selection.variance]
    written += decoder._group_keys.values()
    workspace = decoder._workspace
    zeros = [] if workspace is None else [workspace.histogram, workspace.arrivals]
    return HeldState([(each, each.clone()) for each in written], zeros)


def walk(state: HeldState, step: Callable[[bool], torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of a step that selects and of `KEPT_STEPS` steps after it. Without blocks these select, too.

    Args:
        step: as in `FusedDecoder.step`
    """
    state.put_back()
    return [step(place == 0).clone() for place in range(1 + KEPT_STEPS)]
