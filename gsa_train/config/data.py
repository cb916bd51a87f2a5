"""`data.*`: text, its order, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    train_dir: str = "data/sample/train"
    """Folder, or fsspec address (s3://, gs://, hf://, ...), of the training data. All `*.jsonl`, `*.jsonl.zst`,
    `*.jsonl.gz` and `*.parquet` below it are read, or C4's `*.json.gz` if there are none. Instead, megatron-core's
    `*.bin` and `*.idx` (as from `prepare.py tokens`) may lie in the folder or in one sub-folder per source."""
    validation_dir: str = "data/sample/validation"
    """Folder or address of the validation text, in the formats of `train_dir`. The set is named `validation`. Ignored
    if `validation_sets` is set."""
    validation_sets: dict[str, str] = field(default_factory=dict)
    """Several validation sets, `name: folder`, which replace `validation_dir` and are scored separately. A name has
    letters, digits and _. Only the first set is used for `validation_loss`, attention statistics and n-gram
    baselines."""
    tokenizer: str = "data/sample/tokenizer.model"
    """Sentencepiece model or Hugging Face tokenizer.json, also at an fsspec address."""
    eos_token: str = ""
    """Token that ends each document. Empty: sentencepiece's EOS, or `</s>`, `<|endoftext|>`, ... of a
    tokenizer.json."""
    format: Literal["text", "chat"] = "text"
    """What a line of the data files holds. `text`: a document. `chat`: a conversation (field `messages`), where only
    the assistant's tokens have a loss. Needs the pip extra `hf`. Fixed for a run."""
    chat_template: str = ""
    """Jinja template (file or fsspec address) that turns a conversation into text. Empty: `chat_template.jinja`, or the
    template in `tokenizer_config.json`, in the folder of `tokenizer`. Fixed for a run."""
    text_field: str = "text"
    """Field of JSON lines, or column of Parquet, that holds a document's text. Fixed for a run."""
    seed: int = 0
    """Seed of the order of shards and documents, and of the choice of documents for source weights."""
    num_lanes: int = 8
    """Number of lanes: streams of documents that take turns to fill sequences, so that the order is the same for any
    number of ranks. Fixed for a run. Choose a multiple of ranks x workers. Otherwise several readers read each shared
    lane."""
    shuffle_documents: bool = True
    """Shuffle the documents within each shard."""
    source_weights: dict[str, float] = field(default_factory=dict, metadata={"any_names": True})
    """How often each document of a source appears in an epoch: 0 never, 0.5 every other epoch, 2 twice. Sources without
    a weight appear once. The source is the document's `meta.redpajama_set_name`, or for tokens (`*.bin`, `*.idx`) the
    sub-folder of `train_dir`, or else `unknown`. Weights may change at a resume."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """How documents fill training sequences. `concatenate`: one after another, cut where a sequence ends. `best_fit`:
    choose whole documents that fill the sequence best, and cut only documents longer than a sequence. Fixed for a
    run."""
    packing_pool_documents: int = 128
    """Documents of each lane among which `best_fit` chooses. A resume reads them again. Fixed for a run."""
    attend_across_documents: bool = False
    """False: attention, key selection and score variance use only keys of the query's document, and an EOS predicts
    nothing. True: a sequence is one context."""
    num_workers: int = 0
    """Reader processes per data-parallel rank. 0: the training process reads."""
    prefetch_blocks: int = 64
    """Sequences that all workers of a rank together read ahead."""
    on_bad_shard: Literal["fail", "skip"] = "fail"
    """What to do with a shard (data file) that is missing, unreadable, damaged, a copy of another, or has too many bad
    lines. `fail`: stop the run. `skip`: leave out the bad part, log it, and count it in `data_skipped_shards`.
    Validation always uses `fail`."""
    max_bad_line_fraction: float = 0.01
    """Largest share of unreadable lines in a shard. Such lines are left out and counted. A shard with a larger share is
    bad (`on_bad_shard`)."""
    max_document_bytes: int = 33554432
    """Longer documents are left out and counted. A reader takes about a second per MiB."""
    read_retries: int = 5
    """Number of retries of a read that failed or timed out, after 0.5, 1, 2, 4, ... seconds."""
    read_timeout_seconds: float = 60.0
    """Seconds without an answer after which opening, reading or listing files has failed. All tries together must take
    less than `parallel.timeout_minutes`. If a reader process hangs, the run ends a minute after its last try should
    have ended."""

    @property
    def validation_folders(self) -> dict[str, str]:
        """Return a dict from the names of the validation sets to their folders, in their order."""
        return self.validation_sets or {"validation": self.validation_dir}
