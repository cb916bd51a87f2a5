"""Gather keys and values for context parallelism, in which each rank holds a few chunks of the sequence.

Queries stay local and attend to the keys of the whole sequence. Keys and values are all-gathered, and their gradients
are reduce-scattered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gsa_train.distributed.context_sharding import ContextSharding, query_chunks


def local_part(tokens: torch.Tensor, cut: ContextSharding, dim: int = 1) -> torch.Tensor:
    """Take this rank's tokens [B, L / size, ...] from [B, L, ...], along dimension `dim`."""
    if cut.size == 1:
        return tokens
    chunks = query_chunks(tokens.shape[dim] // cut.size, cut)
    return torch.cat([tokens.narrow(dim, chunk.start, chunk.end - chunk.start) for chunk in chunks], dim)


def gather_tokens(local: torch.Tensor, cut: ContextSharding, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather this rank's tokens [B, L / size, ...] into the ordered sequence [B, L, ...]. Collective.

    The backward pass is collective too: it reduce-scatters the gradients in fp32. The result must therefore affect the
    loss of every rank or of no rank.
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
        held = local.transpose(0, 1).contiguous()  # [L / n, B, ...]: each rank's shard is contiguous
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
    """List chunk numbers by the rank that holds them, from the first rank to the last."""
    return [number for rank in range(cut.size) for number in cut.numbers(rank)]
