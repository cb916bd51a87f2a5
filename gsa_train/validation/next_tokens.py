"""Find the most probable next token after a position, by the training model's forward pass. No KV cache is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from gsa_train.config import Config
from gsa_train.data.batches import MicroBatch
from gsa_train.distributed.context_sharding import ContextSharding
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.context_parallel import local_part
from gsa_train.model.mcore.build import Model
from gsa_train.step import evaluating


@dataclass
class _Place:
    """Holds the position in the current micro-batch whose logits are needed, among this rank's tokens."""

    local: int | None = None
    """Index of the position among this rank's tokens; None if another context-parallel rank has the position."""
    shard: int = 0
    """Tensor-parallel rank that has the position under sequence parallelism."""

    def take(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep only the needed position of the hidden states [L / ranks, 1, d], so that the output layer computes no
        other logits. The method is a pre-hook of the output layer."""
        hidden, *others = inputs
        self.shard, row = divmod(self.local or 0, len(hidden))
        return (hidden[row : row + 1], *others)


@torch.no_grad()
def next_tokens(
    model: Model,
    batches: Sequence[MicroBatch],
    positions: Sequence[int],
    vocab_size: int,
    config: Config,
    parallel: Parallel,
) -> list[int]:
    """Returns the most probable token after a position of each sequence, on every rank. Collective over all ranks.

    Every replica runs every sequence through the whole forward pass, because there is no KV cache.

    Args:
        batches: batches of one sequence each, the same on all ranks
        positions: position in each sequence, from 0; later tokens have no influence
        vocab_size: tokens from this one on are excluded
    """
    cut = ContextSharding(parallel.context_rank, parallel.context_size, config.parallel.context_chunks)
    place = _Place()
    # Interleaved stages take micro-batches in groups as large as the number of stages.
    missing = -len(batches) % parallel.pipeline_size
    asked = [*zip(batches, positions, strict=True)] + [(batches[0], positions[0])] * missing
    iterators = [iter(asked) for _ in model.modules]
    is_last = parallel.is_last_stage
    hook = model.chunks[-1].output_layer.register_forward_pre_hook(place.take) if is_last else None
    with evaluating(model, measures=False):
        found = get_forward_backward_func()(
            forward_step_func=partial(
                _forward_to_logits, cut=cut, place=place, vocab_size=vocab_size, parallel=parallel
            ),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(model.modules) if len(iterators) > 1 else model.modules[0],
            num_microbatches=len(asked),
            seq_length=config.train.seq_len_tokens,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if hook is not None:
        hook.remove()
    tokens = torch.stack(found) if is_last else torch.full((len(asked),), -1, device=parallel.device)
    dist.all_reduce(tokens, op=dist.ReduceOp.MAX)
    return tokens[: len(batches)].tolist()


def _forward_to_logits(
    asked: Iterator[tuple[MicroBatch, int]],
    module: torch.nn.Module,
    cut: ContextSharding,
    place: _Place,
    vocab_size: int,
    parallel: Parallel,
) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    batch, position = next(asked)
    positions = torch.arange(batch.tokens.shape[1])[None]
    held = local_part(positions, cut)[0].tolist()
    place.local = held.index(position) if position in held else None
    tokens, positions = (local_part(each, cut) for each in (batch.tokens, positions.to(batch.tokens.device)))
    output = module(tokens, positions, batch.document_ids)
    return output, partial(_most_probable, place=place, vocab_size=vocab_size, parallel=parallel)


def _most_probable(
    logits: torch.Tensor, non_loss_data: bool, place: _Place, vocab_size: int, parallel: Parallel
) -> torch.Tensor:
    """Returns the most probable token by the logits [1, shards, V / tp] of all tensor-parallel ranks: int64, 0-d. If
    another context-parallel rank has the position, returns -1."""
    logits = logits[0, place.shard].float()
    first = len(logits) * parallel.tensor_rank
    logits = logits.masked_fill(
        torch.arange(first, first + len(logits), device=logits.device) >= vocab_size, -torch.inf
    )
    value, token = logits.max(0)
    values, tokens = value.new_empty(parallel.tensor_size), token.new_empty(parallel.tensor_size)
    dist.all_gather_into_tensor(values, value[None], group=parallel.groups.tp)
    dist.all_gather_into_tensor(tokens, token[None] + first, group=parallel.groups.tp)
    if place.local is None:
        return torch.full_like(token, -1)
    return tokens[values.argmax()]
