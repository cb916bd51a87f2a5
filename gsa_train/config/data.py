"""`data.*`: text, its order, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    train_dir: str = "data/sample/train"
    """Folder, or fsspec address (s3://, gs://, hf://, ...), of the training shards: all `*.jsonl`, `*.jsonl.zst`,
    `*.jsonl.gz` and `*.parquet` below it, mixed as they come; or of tokens that `prepare.py tokens` made of them,
    or of megatron-core's indexed datasets (`*.bin` and `*.idx`)."""
    validation_dir: str = "data/sample/validation"
    """The same for validation: one set, named `validation`. Not read when `validation_sets` names any."""
    validation_sets: dict[str, str] = field(default_factory=dict)
    """Several validation sets, `name: folder`, each scored apart; they take the place of `validation_dir`. A name is
    letters, digits and _. `validation_loss`, the attention's statistics and the n-gram baselines are of the first."""
    tokenizer: str = "data/sample/tokenizer.model"
    """Sentencepiece model or Hugging Face tokenizer.json, also at an fsspec address."""
    eos_token: str = ""
    """Token that ends each document; empty: sentencepiece's EOS, or tokenizer.json's `</s>`, `<|endoftext|>`, ..."""
    text_field: str = "text"
    """Field (of JSON lines) or column (of Parquet) that holds a document's text. Fixed for a run."""
    seed: int = 0
    """Seed of the order of shards and documents, and of which documents a weight leaves out."""
    num_lanes: int = 8
    """Interleaved streams that fix the global order; a multiple of data-parallel ranks x workers. Fixed for a run."""
    shuffle_documents: bool = True
    """Shuffle the documents of each shard."""
    source_weights: dict[str, float] = field(default_factory=dict, metadata={"any_names": True})
    """How often each document of a source (`meta.redpajama_set_name`; `unknown` where a line names none) comes in an
    epoch: 0 leaves the source out, 0.5 takes it every other epoch, 2 twice; sources without a weight come once. May
    change at a resume. Text and tokens of `prepare.py tokens` only."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Training sequences: documents in a row, cut where a sequence ends; or whole documents chosen to fill it, so that
    only those longer than a sequence are cut (data/gsa_data/best_fit.py). Fixed for a run."""
    packing_pool_documents: int = 128
    """Documents of each lane among which `best_fit` chooses; each resume reads them again. Fixed for a run."""
    attend_across_documents: bool = False
    """False: attention, selection and variance stop at the document's start, and an EOS predicts nothing."""
    num_workers: int = 0
    """Reader processes per data-parallel rank; 0 reads in the training process."""
    prefetch_blocks: int = 64
    """Blocks that each rank reads ahead when it has workers, all of them together."""
    on_bad_shard: Literal["fail", "skip"] = "fail"
    """What a shard does that is missing, unreadable, damaged, a copy of another or too full of bad lines: stop the
    run, or be left out as far as it is bad, with a log line and in `data_skipped_shards`. Validation always fails."""
    max_bad_line_fraction: float = 0.01
    """Lines without readable text are left out and counted; a shard with a larger share of them is a bad shard."""
    max_document_bytes: int = 33554432
    """Longer documents are left out and counted; one MiB takes a reader about a second."""
    read_retries: int = 5
    """Times that a read which failed or timed out is tried again, after 0.5, 1, 2, 4, ... seconds."""
    read_timeout_seconds: float = 60.0
    """A read, an opening or a listing that brings nothing for so long has failed. All tries together take less than
    `parallel.timeout_minutes`. A reader process that hangs stops the run a minute after the last retry must have
    ended."""

    @property
    def validation_folders(self) -> dict[str, str]:
        """name -> folder of the validation sets in their order."""
        return self.validation_sets or {"validation": self.validation_dir}
