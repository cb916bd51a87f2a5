"""Stream blocks of tokens from shards of JSON lines or Parquet, in a fixed order that a resume continues exactly.

Read the files in this order: whole_files, faults, fetch, listing, unpack, parquet, copies, shards, documents, tokenize,
tokenizer_json, pack, source_weights, reader, marks, chat_template, chat, prepared, indexed, corpus,
content, stream_config, lanes, best_fit, rank_samples, stream, validation, ngram.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsa_data.faults import DataFault, Reading
    from gsa_data.ngram import NgramModel, fit_ngrams
    from gsa_data.pack import document_ids, loss_mask
    from gsa_data.shards import Manifest, build_manifest
    from gsa_data.stream import BlockStream, StreamConfig, merge_states, replay_blocks
    from gsa_data.tokenize import Tokenizer
    from gsa_data.validation import ValidationSet, read_validation_set

__version__ = "0.1.0"

__all__ = [
    "BlockStream",
    "DataFault",
    "Manifest",
    "NgramModel",
    "Reading",
    "StreamConfig",
    "Tokenizer",
    "ValidationSet",
    "build_manifest",
    "document_ids",
    "fit_ngrams",
    "loss_mask",
    "merge_states",
    "read_validation_set",
    "replay_blocks",
]

_MODULES = {
    "faults": ("DataFault", "Reading"),
    "ngram": ("NgramModel", "fit_ngrams"),
    "pack": ("document_ids", "loss_mask"),
    "shards": ("Manifest", "build_manifest"),
    "stream": ("BlockStream", "StreamConfig", "merge_states", "replay_blocks"),
    "tokenize": ("Tokenizer",),
    "validation": ("ValidationSet", "read_validation_set"),
}


def __getattr__(name: str) -> Any:
    """Import names lazily, because a tokenizer does not need torch, whose import is slow."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"gsa_data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
