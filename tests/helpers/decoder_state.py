"""The state that a decoder's steps change, held and put back, so that several walks start alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gsa_hf.decoding import FusedDecoder

KEPT_STEPS = 3
"""The state after a first step that selects."""


@dataclass(frozen=True)
class HeldState:
    """Copies of what steps write: from the decoder's slot on of the caches, all of the rest.

    The workspace is scratch memory except its counters, which are 0 between calls.
    """

    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """What steps write, and what was there."""
    zeros: list[torch.Tensor]

    def put_back(self) -> None:
        for written, copy in self.copies:
            written.copy_(copy)
        for each in self.zeros:
            each.zero_()


def hold(decoder: FusedDecoder) -> HeldState:
    """The next token goes to slot `slot`, after which no step has written what is still needed."""
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
    """Logits of a step that selects and of `KEPT_STEPS` after it, which without blocks select, too.

    Args:
        step: as `FusedDecoder.step`
    """
    state.put_back()
    return [step(place == 0).clone() for place in range(1 + KEPT_STEPS)]
