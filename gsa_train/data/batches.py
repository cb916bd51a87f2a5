"""Distribute blocks of tokens: one rank of each data-parallel replica reads them and sends them to the other ranks.

All pipeline stages need the tokens, because in every layer a query attends only to its document, and the tokens say
where documents end. One broadcast per step sends them before the pipeline schedule starts, because inside the schedule
the stages work on different micro-batches.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gsa_data.content import changed_files, sample_contents
from gsa_data.corpus import Corpus, open_chat, open_corpus
from gsa_data.faults import DataFault, Reading
from gsa_data.lanes import LONG_CONVERSATIONS
from gsa_data.marks import TOKEN_ID, UNSCORED
from gsa_data.pack import FILLER, document_ids, document_starts, loss_mask
from gsa_data.source_weights import never_met
from gsa_data.stream import (
    BlockStream,
    StateMismatch,
    StreamConfig,
    merge_states,
    replay_blocks,
    whole_epochs,
)
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import TooLittleText, ValidationSet, read_validation_set
from gsa_train.config import Config
from gsa_train.config.batch_ramp import batch_size
from gsa_train.config.file_checks import trained_validation_fields, validation_fields
from gsa_train.data.tokenizer import chat_template_of, reading_of
from gsa_train.distributed.parallel import Parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MicroBatch:
    tokens: torch.Tensor
    """int64 [B, L]"""
    labels: torch.Tensor
    """int64 [B, L]"""
    document_ids: torch.Tensor | None
    """int32 [B, L], the document of each token; None if attention crosses documents"""
    loss_mask: torch.Tensor
    """float32 [B, L]: 0 where nothing is to be predicted"""

    def causal_keys(self) -> torch.Tensor:
        """Returns the number of causal keys of each query, within its document: int32 [B, L]."""
        length, device = self.tokens.shape[1], self.tokens.device
        before = torch.arange(1, length + 1, dtype=torch.int32, device=device).expand_as(self.tokens)
        return before if self.document_ids is None else before - document_starts(self.document_ids)


def mean_causal_keys(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Returns the mean number of causal keys over all queries: fp64, 0-d, on the device."""
    counts = [batch.causal_keys() for batch in micro_batches]
    return torch.stack([each.sum() for each in counts]).sum().double() / sum(each.numel() for each in counts)


def counted_rows(micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Returns the number of queries with at least two causal keys: fp32, 0-d, on the device. Other queries (first
    tokens of documents, filler) have no choice of keys, so means over the indexer's queries leave them out."""
    return torch.stack([(batch.causal_keys() >= 2).sum() for batch in micro_batches]).sum().float()


def to_micro_batch(blocks: torch.Tensor, eos_id: int, attend_across_documents: bool) -> MicroBatch:
    """Derive inputs, labels, documents and loss mask from tokens int32 [B, L + 1], equal on every rank.

    Each FILLER token (padding) becomes an EOS that is a document by itself, so no other query sees it. FILLER tokens
    and tokens with the mark UNSCORED get no loss. An EOS with this mark, for example inside a conversation, does not
    end the document.
    """
    is_scored = (blocks[:, 1:] & UNSCORED) == 0  # FILLER is not scored either
    blocks = blocks.long().masked_fill(blocks == FILLER, eos_id)
    ends = blocks[:, :-1] & ~UNSCORED  # equals the EOS only where a document ends
    tokens = blocks & TOKEN_ID
    return MicroBatch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        None if attend_across_documents else document_ids(ends, eos_id),
        loss_mask(ends, eos_id, attend_across_documents) * is_scored,
    )


def open_training_corpus(config: Config) -> Corpus:
    return _open(config, config.data.train_dir, reading_of(config))


def _open(config: Config, folder: str, reading: Reading) -> Corpus:
    if config.data.format == "chat":
        return open_chat(folder, chat_template_of(config), reading)
    return open_corpus(folder, config.data.text_field, reading)


def stream_config(config: Config) -> StreamConfig:
    data = config.data
    return StreamConfig(
        seq_len_tokens=config.train.seq_len_tokens,
        num_lanes=data.num_lanes,
        seed=data.seed,
        shuffle_documents=data.shuffle_documents,
        source_weights=data.source_weights,
        packing=data.packing,
        packing_pool_documents=data.packing_pool_documents,
        reading=reading_of(config),
        num_workers=data.num_workers,
        prefetch_blocks=data.prefetch_blocks,
    )


class TrainBatches:
    """Reads this data-parallel replica's share of each global batch, and holds the position in the text.

    Args:
        state: result of `state()`, to continue from that position; None starts at the beginning.
        accept_new_data: what to do if `state` belongs to other text or another order. True: start at the
            beginning of the config's text and continue the state's counters. False: refuse the state.

    Raises, on every rank alike:
        StateMismatch: `state` does not fit the config's data.
        DataFault: the training text cannot be opened, or ranks see different files in its folder.
    """

    def __init__(
        self,
        config: Config,
        parallel: Parallel,
        tokenizer: Tokenizer,
        state: dict[str, Any] | None,
        accept_new_data: bool = False,
    ) -> None:
        self._config, self._parallel, self._eos_id = config, parallel, tokenizer.eos_id
        self._stream: BlockStream | None = None
        self._epochs = 0 if state is None else whole_epochs(state)
        self._files: dict[str, Any] = {}
        """Result of gsa_data.content.sample_contents for the text."""
        self._long_conversations = 0
        outcome: DataFault | StateMismatch | dict[str, Any] | None = None
        corpus, changed = self._open_corpus(state)
        try:
            if isinstance(corpus, DataFault):
                outcome = corpus
            elif corpus is not None and parallel.reads_data:
                self._stream = self._open(corpus, changed, tokenizer, state, accept_new_data)
                self._stream.start()  # the first step's text is read while the model is built
                outcome = self._stream.identity
        except (DataFault, StateMismatch) as error:
            outcome = error
        check_same(gather_outcomes(outcome, parallel), "data.train_dir")

    def _open_corpus(self, state: dict[str, Any] | None) -> tuple[Corpus | DataFault | None, str]:
        """Returns the text (None on ranks that do not need it), and the names of files that differ from those in
        `state`. The main rank compares the files for all. Collective."""
        corpus: Corpus | DataFault | None = None
        shared: list[Any] = ["", {}]
        try:
            if self._parallel.reads_data or self._parallel.is_main:
                corpus = open_training_corpus(self._config)
                if self._parallel.is_main:
                    for field in trained_validation_fields(self._config.data):
                        logger.warning(
                            "%s: it lies in data.train_dir, so the model is trained on its validation text",
                            field,
                        )
                    files = sample_contents(corpus, reading_of(self._config))
                    shared = [changed_files((state or {}).get("files"), files), files]
        except DataFault as fault:
            corpus = fault
        dist.broadcast_object_list(shared, src=0)
        changed, self._files = shared
        return corpus, changed

    def _open(
        self,
        corpus: Corpus,
        changed: str,
        tokenizer: Tokenizer,
        state: dict[str, Any] | None,
        accept_new_data: bool,
    ) -> BlockStream:
        open_stream = partial(
            BlockStream,
            corpus,
            tokenizer,
            stream_config(self._config),
            rank=self._parallel.data_rank,
            world_size=self._parallel.data_size,
        )
        try:
            stream = open_stream(state=state)
            if changed:
                stream.close()
                message = f"text in {corpus.root} differs from the saved run's: {changed}; restore it"
                raise StateMismatch(f"{message}, or start a new run", other_data=True)
        except StateMismatch as error:
            if state is None or not accept_new_data or not error.other_data:
                if changed and changed not in str(error):
                    raise StateMismatch(f"{error}\nOther files: {changed}", error.other_data) from error
                raise
            if self._parallel.is_main:
                logger.warning("--accept-new-data: the text starts at its beginning, as the %s", error)
            return open_stream(carried_counters=state["counters"])
        if stream.readers_per_lane > 1 and self._parallel.is_main:
            logger.info(
                "data.num_lanes = %d: readers share lanes, %d to each, and each makes %d sequences for one that it "
                "hands out; the order of the text is the same",
                self._config.data.num_lanes,
                stream.readers_per_lane,
                stream.readers_per_lane,
            )
            if self._config.data.on_bad_shard == "skip":
                logger.warning(
                    "data.on_bad_shard = skip: if only some readers of a shared lane lose a shard, documents of the "
                    "lane may be lost or repeated until the next resume; set it to fail, or data.num_workers so that "
                    "data-parallel ranks x workers divides data.num_lanes"
                )
        weights, before = self._config.data.source_weights, (state or {}).get("source_weights", {})
        if state is not None and weights != before and self._parallel.is_main:
            logger.warning("data.source_weights: %s from here on, %s before this checkpoint", weights, before)
        if self._parallel.is_main and not tokenizer.keeps_newlines:
            logger.warning(
                "data.tokenizer: %s loses newlines, so the model never sees any. In natural text and code they have "
                "meaning: docs/how_to/own_data.md has the flags with which sentencepiece keeps them",
                tokenizer.path,
            )
        return stream

    def next_step(self, step: int = 0) -> list[MicroBatch]:
        """Returns the micro-batches of one optimizer step, with whole sequences. Collective over the replica.

        Args:
            step: number of earlier steps of the run, which decides the batch size of a ramp.
        """
        train = self._config.train
        per_rank = batch_size(train, step) // self._parallel.data_size
        blocks = None if self._stream is None else self._stream.next_blocks(per_rank)
        shared = share_blocks(blocks, (per_rank, train.seq_len_tokens + 1), self._parallel)
        return [
            to_micro_batch(part, self._eos_id, self._config.data.attend_across_documents)
            for part in shared.split(train.micro_batch_size)
        ]

    @property
    def counters(self) -> dict[str, int]:
        """Returns what this process has read and left out (gsa_data.faults). The sum over the ranks describes the whole
        run."""
        return {} if self._stream is None else self._stream.counters

    def checksum(self) -> int:
        """Returns the checksum of this rank's share of the last step's text. The sum over ranks is the same in every
        layout."""
        return 0 if self._stream is None else self._stream.checksum()

    @property
    def wait_seconds(self) -> float:
        return 0.0 if self._stream is None else self._stream.wait_seconds

    def state(self) -> dict[str, Any]:
        """Returns the position in the text over all ranks, for the checkpoint. Collective over all ranks."""
        local = None if self._stream is None else self._stream.local_state()
        states: list[Any] = [None] * self._parallel.world_size
        dist.all_gather_object(states, local)
        merged = merge_states([state for state in states if state is not None])
        epochs = whole_epochs(merged)
        if epochs > self._epochs and self._parallel.is_main:
            logger.warning("the training text is in epoch %d: its documents repeat", epochs + 1)
        self._epochs = epochs
        long_conversations = merged["counters"].get(LONG_CONVERSATIONS, 0)
        if long_conversations > self._long_conversations and self._parallel.is_main:
            logger.warning(
                "%d of the %d conversations read so far have more tokens than train.seq_len_tokens = %d and are cut; "
                "tokens after a cut do not see tokens before it",
                long_conversations,
                merged["counters"]["documents"],
                self._config.train.seq_len_tokens,
            )
        self._long_conversations = long_conversations
        unknown = never_met(self._config.data.source_weights, merged["counters"])
        if unknown and self._parallel.is_main:
            logger.warning(
                "data.source_weights: no document of %s among the %d read so far; is the name right?",
                ", ".join(unknown),
                merged["counters"].get("documents", 0),
            )
        return {**merged, "files": self._files} if self._files else merged

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def share_blocks(blocks: np.ndarray | None, shape: tuple[int, int], parallel: Parallel) -> torch.Tensor:
    """Broadcast int32 blocks [n, L + 1] from the reading rank over its data-parallel replica."""
    if blocks is None:
        tensor = torch.empty(shape, dtype=torch.int32, device=parallel.device)
    else:
        tensor = torch.from_numpy(blocks)
        if parallel.device.type == "cuda":  # a copy from pageable memory would block the host
            tensor = tensor.pin_memory()
        tensor = tensor.to(parallel.device, non_blocking=True)
        assert tuple(tensor.shape) == shape
    groups = parallel.groups
    if parallel.context_size > 1 and parallel.tensor_rank == parallel.pipeline_rank == 0:
        dist.broadcast(tensor, group=groups.cp, group_src=0)
    if groups.mp.size() > 1:
        dist.broadcast(tensor, group=groups.mp, group_src=0)
    return tensor


def read_validation_sets(config: Config, tokenizer: Tokenizer) -> list[ValidationSet]:
    """Read the validation sets in the config's order, and at most `evaluate.max_blocks` sequences of each set.

    Raises:
        TooLittleText: a set is shorter than a sequence, or has nothing to score. The message names the set's field.
        DataFault: a set cannot be read.
    """
    data, sets = config.data, []
    for field, (name, folder) in zip(validation_fields(data), data.validation_folders.items(), strict=True):
        try:
            found = read_validation_set(
                name,
                # A duplicate shard is an error, regardless of data.on_bad_shard.
                _open(config, folder, reading_of(config).for_validation()),
                tokenizer,
                config.train.seq_len_tokens,
                config.evaluate.max_blocks,
                reading_of(config),
                data.attend_across_documents,
                config.evaluate.split_by_source,
            )
        except TooLittleText as fault:
            raise TooLittleText(f"{field} = {folder}: {fault}") from fault
        sets.append(found)
    return sets


def shared_validation_sets(config: Config, tokenizer: Tokenizer, parallel: Parallel) -> list[ValidationSet]:
    """Read the validation sets on every rank. Collective. Raises DataFault on every rank if a rank cannot read them,
    or if ranks have different text or tokenizers."""
    sets: list[ValidationSet] = []
    outcome: DataFault | dict[str, str]
    try:
        sets = read_validation_sets(config, tokenizer)
        outcome = fingerprints(sets, tokenizer)
    except DataFault as fault:
        outcome = fault
    check_same(gather_outcomes(outcome, parallel), "data.tokenizer and the validation folders")
    return sets


def fingerprints(sets: list[ValidationSet], tokenizer: Tokenizer) -> dict[str, str]:
    """Returns fingerprints of the text and tokenizer that every rank reads separately."""
    found = {"tokenizer_fingerprint": tokenizer.fingerprint}
    for each in sets:
        digest = hashlib.sha256()
        for text in (each.text, *each.by_source.values()):
            digest.update(text.blocks.tobytes())
            digest.update(text.lengths.tobytes())
        found[f"validation set {each.name}"] = digest.hexdigest()
    return found


def gather_outcomes(
    outcome: Exception | Mapping[str, Any] | None, parallel: Parallel
) -> dict[int, Mapping[str, Any]]:
    """Gather each rank's outcome: an error, a result or None. Returns a dict rank -> result. Collective. Raises
    the first error on every rank, so that no rank waits for a rank that has failed."""
    outcomes: list[Exception | Mapping[str, Any] | None] = [None] * parallel.world_size
    dist.all_gather_object(outcomes, outcome)
    found: dict[int, Mapping[str, Any]] = {}
    for rank, each in enumerate(outcomes):
        if isinstance(each, Exception):
            raise each
        if each is not None:
            found[rank] = each
    return found


def check_same(identities: Mapping[int, Mapping[str, Any]], where: str) -> None:
    """Raise DataFault unless all ranks have the same data. Folders on the nodes' own disks may differ.

    Args:
        identities: rank -> what it found.
        where: the fields of the config to check.
    """
    first, expected = min(identities.items())
    for rank, identity in identities.items():
        for name, value in identity.items():
            if value != expected[name]:
                raise DataFault(
                    f"rank {rank} has {name} {value}, rank {first} has {expected[name]}: the nodes see different "
                    f"files at {where}; copy them again, or use a shared file system"
                )


def replay_training_blocks(
    config: Config, tokenizer: Tokenizer, end: Mapping[str, Any]
) -> Iterator[np.ndarray]:
    """Re-yields the sequences that the run had read by the state `end`, in int32 arrays [n, L + 1].

    Raises StateMismatch after the last sequence if the replay does not end at the positions in `end`, because the run
    has then read other sequences.
    """
    return replay_blocks(open_training_corpus(config), tokenizer, stream_config(config), end)
