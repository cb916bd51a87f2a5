"""The state that a decoder's steps change: held, put back, and compared, so that ways to run a step start alike."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gsa_hf.decoding import FusedDecoder

KEPT_STEPS = 3
"""Behind a first step that selects."""

Step = Callable[[bool], torch.Tensor]
"""As `FusedDecoder.step`."""


@dataclass(frozen=True)
class HeldState:
    """Where the decoder stood, and copies of what its steps write: from its slot on of the caches, all of the rest.

    The workspace is scratch memory but for its counters, which are 0 between calls.
    """

    filled: int
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """What steps write, and what was there."""
    zeros: list[torch.Tensor]
    sums: dict[str, int]
    """Of the bits of all that a step reads."""

    def put_back(self) -> None:
        for written, copy in self.copies:
            written.copy_(copy)
        for each in self.zeros:
            each.zero_()

    def moved(self, decoder: FusedDecoder) -> list[str]:
        """Names of what a step reads that is another after `put_back`."""
        self.put_back()
        return [name for name, found in bit_sums(decoder).items() if found != self.sums[name]]


def hold(decoder: FusedDecoder) -> HeldState:
    """The next token goes to slot `slot`, behind which no step has written what is still needed."""
    filled = int(decoder.slot)
    written = [decoder.tokens, decoder.lengths, decoder.starts, decoder.slot]
    for buffers in decoder.buffers:
        written += [buffers.k[:, :, filled:], buffers.v[:, :, filled:]]
        if buffers.rows is not None:
            written.append(buffers.rows[:, filled:])
    for place, selection in decoder._selections.items():
        written += [selection.indices, selection.counts, selection.variance]
        written.append(decoder.model.model.layers[place].self_attn.indexer.variance_ema)
    workspace = decoder._workspace
    zeros = [] if workspace is None else [workspace.histogram, workspace.arrivals]
    return HeldState(filled, [(each, each.clone()) for each in written], zeros, bit_sums(decoder))


def bit_sums(decoder: FusedDecoder) -> dict[str, int]:
    return {name: int(each.reshape(-1).view(torch.uint8).sum()) for name, each in named(decoder)}


def named(decoder: FusedDecoder) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("tokens", "lengths", "starts", "slot"):
        yield name, getattr(decoder, name)
    if decoder._table is not None:
        yield "angles", decoder._table.values
    yield from decoder.model.named_parameters()
    yield from decoder.model.named_buffers()
    for place, ((weights, _), buffers) in enumerate(zip(decoder.layers, decoder.buffers, strict=True)):
        for kind, tensors in (("joined weights", weights), ("cache", buffers)):
            for field, each in tensors._asdict().items():
                if each is not None:
                    yield f"{kind} {field} of layer {place}", each
    for place, selection in decoder._selections.items():
        for field in ("indices", "counts", "variance"):
            yield f"selection {field} of layer {place}", getattr(selection, field)
    if decoder._workspace is not None:
        yield "histogram", decoder._workspace.histogram
        yield "arrivals", decoder._workspace.arrivals


def walk(state: HeldState, step: Step) -> list[torch.Tensor]:
    """Logits of a step that selects and of `KEPT_STEPS` behind it, which without blocks select, too."""
    state.put_back()
    return [step(place == 0).clone() for place in range(1 + KEPT_STEPS)]


def same_bits(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
