"""Blocks of tokens for every rank: one rank per model-parallel group reads, the others receive.

All pipeline stages need the tokens (documents bound attention in every layer), so one broadcast per step carries
them, before the pipeline schedule starts; inside it stages are at different micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gsa_data.pack import document_ids, loss_mask
from gsa_data.shards import build_manifest
from gsa_data.stream import BlockStream, StreamConfig, merge_states, replay_blocks, validation_blocks
from gsa_data.tokenize import Tokenizer
from gsa_train.config import Config
from gsa_train.parallel import Parallel


@dataclass(frozen=True)
class MicroBatch:
    tokens: torch.Tensor
    """int64 [B, L]"""
    labels: torch.Tensor
    """int64 [B, L]"""
    document_ids: torch.Tensor | None
    """int32 [B, L], or None when attention crosses documents"""
    loss_mask: torch.Tensor
    """float32 [B, L]: 0 where nothing is to be predicted"""


def to_micro_batch(blocks: torch.Tensor, eos_id: int, attend_across_documents: bool) -> MicroBatch:
    """int32 [B, L + 1] -> inputs, labels, documents and loss mask, derived alike on every rank."""
    blocks = blocks.long()
    tokens, labels = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
    return MicroBatch(
        tokens,
        labels,
        None if attend_across_documents else document_ids(tokens, eos_id),
        loss_mask(tokens, eos_id, attend_across_documents),
    )


def stream_config(config: Config) -> StreamConfig:
    data = config.data
    return StreamConfig(
        seq_len_tokens=config.train.seq_len_tokens,
        num_lanes=data.num_lanes,
        seed=data.seed,
        shuffle_documents=data.shuffle_documents,
        on_bad_shard=data.on_bad_shard,
        max_bad_line_fraction=data.max_bad_line_fraction,
        num_workers=data.num_workers,
        prefetch_blocks=data.prefetch_blocks,
    )


def load_tokenizer(config: Config) -> Tokenizer:
    """Raises ValueError when the model's embedding is too small for the tokenizer."""
    tokenizer = Tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {config.model.vocab_size}: {config.data.tokenizer} has {tokenizer.vocab_size} "
            f"tokens; set model.vocab_size to at least that"
        )
    return tokenizer


class TrainBatches:
    """This data-parallel replica's share of each global batch, and the position in the text.

    Args:
        state: what `state()` returned, to go on from there; None starts at the beginning.
    """

    def __init__(
        self, config: Config, parallel: Parallel, tokenizer: Tokenizer, state: dict[str, Any] | None
    ) -> None:
        self._config, self._parallel, self._eos_id = config, parallel, tokenizer.eos_id
        self._stream: BlockStream | None = None
        if parallel.reads_data:
            self._stream = BlockStream(
                build_manifest(config.data.train_dir),
                tokenizer,
                stream_config(config),
                rank=parallel.data_rank,
                world_size=parallel.data_size,
                state=state,
            )

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of one optimizer step. Collective over the model-parallel group."""
        train = self._config.train
        per_rank = train.global_batch_size // self._parallel.data_size
        blocks = None if self._stream is None else self._stream.next_blocks(per_rank)
        shared = share_blocks(blocks, (per_rank, train.seq_len_tokens + 1), self._parallel)
        return [
            to_micro_batch(part, self._eos_id, self._config.data.attend_across_documents)
            for part in shared.split(train.micro_batch_size)
        ]

    @property
    def wait_seconds(self) -> float:
        """Time this process has spent waiting for text."""
        return 0.0 if self._stream is None else self._stream.wait_seconds

    def state(self) -> dict[str, Any]:
        """Position in the text over all ranks, for the checkpoint. Collective over all ranks."""
        local = None if self._stream is None else self._stream.local_state()
        states: list[Any] = [None] * self._parallel.world_size
        dist.all_gather_object(states, local)
        return merge_states([state for state in states if state is not None])

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def share_blocks(blocks: np.ndarray | None, shape: tuple[int, int], parallel: Parallel) -> torch.Tensor:
    """Broadcast int32 blocks [n, L + 1] from the reading rank over its model-parallel group."""
    if blocks is None:
        tensor = torch.empty(shape, dtype=torch.int32, device=parallel.device)
    else:
        tensor = torch.from_numpy(blocks)
        if parallel.device.type == "cuda":  # from pageable memory the host would wait for the device
            tensor = tensor.pin_memory()
        tensor = tensor.to(parallel.device, non_blocking=True)
        assert tuple(tensor.shape) == shape
    if parallel.groups.mp.size() > 1:
        dist.broadcast(tensor, parallel.model_source_rank, group=parallel.groups.mp)
    return tensor


def read_validation_blocks(config: Config, tokenizer: Tokenizer) -> np.ndarray:
    """The validation sequences, int32 [n, L + 1] with n <= evaluate.max_blocks."""
    return validation_blocks(
        build_manifest(config.data.validation_dir),
        tokenizer,
        config.train.seq_len_tokens,
        config.evaluate.max_blocks,
        config.data.max_bad_line_fraction,
    )


def replay_training_blocks(config: Config, tokenizer: Tokenizer, samples: int) -> Iterator[np.ndarray]:
    """The first `samples` sequences of the run again, in arrays int32 [n, L + 1]."""
    return replay_blocks(build_manifest(config.data.train_dir), tokenizer, stream_config(config), samples)
