"""Context parallelism: each rank holds a few chunks of the sequence, and sees the keys of all of it.

Queries stay where they are; keys and values are gathered, and their gradients summed and scattered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gsa_train.distributed.context_sharding import ContextSharding, query_chunks


def local_part(tokens: torch.Tensor, cut: ContextSharding, dim: int = 1) -> torch.Tensor:
    """[B, L, ...] -> this rank's tokens [B, L / size, ...]; along another dimension than 1 if told so."""
    if cut.size == 1:
        return tokens
    chunks = query_chunks(tokens.shape[dim] // cut.size, cut)
    return torch.cat([tokens.narrow(dim, chunk.start, chunk.end - chunk.start) for chunk in chunks], dim)


def gather_tokens(local: torch.Tensor, cut: ContextSharding, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tokens [B, L / size, ...] -> all tokens of the sequence in order, [B, L, ...]. Collective.

    The backward pass sums the ranks' gradients in fp32; each rank gets the part of its own tokens. It is collective,
    too, so the result must reach the loss on all ranks or on none.
    """
    if cut.size == 1:
        return local
    gathered: torch.Tensor = _GatherTokens.apply(local, cut, group)
    return gathered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, cut: ContextSharding, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.cut, ctx.group = cut, group
        held = local.transpose(0, 1).contiguous()  # [L / n, B, ...]: a rank's part is in one piece
        every = held.new_empty(cut.size * held.shape[0], *held.shape[1:])
        dist.all_gather_into_tensor(every, held, group=group)
        chunks = dict(zip(_held_in_turn(cut), every.chunk(cut.size * cut.chunks), strict=True))
        return torch.cat([chunks[number] for number in range(len(chunks))]).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cut = ctx.cut
        chunks = grad.transpose(0, 1).chunk(cut.size * cut.chunks)
        every = torch.cat([chunks[number].float() for number in _held_in_turn(cut)])
        total = every.new_empty(len(every) // cut.size, *every.shape[1:])
        dist.reduce_scatter_tensor(total, every, group=ctx.group)
        return total.to(grad.dtype).transpose(0, 1), None, None


def _held_in_turn(cut: ContextSharding) -> list[int]:
    """The chunks of the first rank, of the second one, ..."""
    return [number for rank in range(cut.size) for number in cut.numbers(rank)]
