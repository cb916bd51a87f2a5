"""Stream token blocks from JSON-lines or Parquet shards in a fixed order. A resumed run continues this order exactly.

Read the files in this order: whole_files, faults, fetch, listing, unpack, parquet, copies, shards, documents, tokenize,
tokenizer_json, pack, source_weights, reader, marks, chat_template, chat, prepared, indexed, corpus,
content, stream_config, lanes, best_fit, rank_samples, stream, validation, ngram.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsa_data.faults import DataFault as DataFault
    from gsa_data.faults import Reading as Reading
    from gsa_data.ngram import NgramModel as NgramModel
    from gsa_data.ngram import fit_ngrams as fit_ngrams
    from gsa_data.pack import document_ids as document_ids
    from gsa_data.pack import loss_mask as loss_mask
    from gsa_data.shards import Manifest as Manifest
    from gsa_data.shards import build_manifest as build_manifest
    from gsa_data.stream import BlockStream as BlockStream
    from gsa_data.stream import StreamConfig as StreamConfig
    from gsa_data.stream import merge_states as merge_states
    from gsa_data.stream import replay_blocks as replay_blocks
    from gsa_data.tokenize import Tokenizer as Tokenizer
    from gsa_data.validation import ValidationSet as ValidationSet
    from gsa_data.validation import read_validation_set as read_validation_set

__version__ = "0.1.0"

_MODULES = {
    "faults": ("DataFault", "Reading"),
    "ngram": ("NgramModel", "fit_ngrams"),
    "pack": ("document_ids", "loss_mask"),
    "shards": ("Manifest", "build_manifest"),
    "stream": ("BlockStream", "StreamConfig", "merge_states", "replay_blocks"),
    "tokenize": ("Tokenizer",),
    "validation": ("ValidationSet", "read_validation_set"),
}

__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    """Import names lazily, because a tokenizer does not need torch, whose import is slow."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"gsa_data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
