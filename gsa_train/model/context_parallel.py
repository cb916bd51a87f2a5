"""Context parallelism: each rank holds two chunks of the sequence, and sees the keys of all of it.

The sequence is cut into 2 n chunks over n ranks; rank r holds chunks r and 2 n - 1 - r (zig-zag), so that under a
causal mask all ranks have the same work. megatron-core cuts its rotary angles in the same way. Queries stay where
they are; keys and values are gathered, and their gradients summed and scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class QueryRun:
    """Queries that this rank holds and that follow each other in the sequence."""

    local: slice
    """Where they stand among this rank's tokens."""
    start: int
    """Position of the first one in the whole sequence."""
    end: int
    """Position behind the last one: they see keys [0, end)."""


def query_runs(local_length: int, rank: int, size: int) -> list[QueryRun]:
    """This rank's chunks in the order in which it holds them; on one rank the whole sequence.

    Args:
        local_length: tokens of this rank, L / size.
    """
    if size == 1:
        return [QueryRun(slice(0, local_length), 0, local_length)]
    length = local_length // 2
    return [
        QueryRun(slice(place * length, (place + 1) * length), chunk * length, (chunk + 1) * length)
        for place, chunk in enumerate((rank, 2 * size - 1 - rank))
    ]


def local_part(tokens: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """[B, L, ...] -> this rank's tokens [B, L / size, ...]."""
    if size == 1:
        return tokens
    runs = query_runs(tokens.shape[1] // size, rank, size)
    return torch.cat([tokens[:, run.start : run.end] for run in runs], dim=1)


def gather_tokens(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tokens [B, L / size, ...] -> all tokens of the sequence in order, [B, L, ...]. Collective.

    The backward pass sums the ranks' gradients in fp32, and each rank gets those of its own tokens. It is collective,
    too, so the result must reach the loss on all ranks or on none.
    """
    if group.size() == 1:
        return local
    gathered: torch.Tensor = _GatherTokens.apply(local, group)
    return gathered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, size = group, group.size()
        held = local.transpose(0, 1).contiguous()  # [L / n, B, ...]: a rank's part is in one piece
        every = held.new_empty(size * held.shape[0], *held.shape[1:])
        dist.all_gather_into_tensor(every, held, group=group)
        pairs = every.unflatten(0, (size, 2, -1))  # [rank, place, L / 2n, B, ...]
        # The first places hold chunks 0 .. n - 1, the second ones 2 n - 1 .. n.
        ordered = torch.cat([pairs[:, 0], pairs[:, 1].flip(0)])
        return ordered.flatten(0, 1).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = ctx.group.size()
        chunks = grad.transpose(0, 1).unflatten(0, (2 * size, -1)).float()
        pairs = torch.stack([chunks[:size], chunks[size:].flip(0)], dim=1)
        total = pairs.new_empty(2 * pairs.shape[2], *pairs.shape[3:])
        dist.reduce_scatter_tensor(total, pairs.flatten(0, 2), group=ctx.group)
        return total.to(grad.dtype).transpose(0, 1), None
