"""Deterministic, resumable streaming of tokenized blocks from jsonl.zst shards.

Read in this order: shards, documents, tokenize, pack, lanes, stream, ngram.
"""

from gsa_data.ngram import NgramModel, fit_ngrams
from gsa_data.pack import document_ids, loss_mask
from gsa_data.shards import DataFault, Manifest, build_manifest
from gsa_data.stream import BlockStream, StreamConfig, merge_states, replay_blocks, validation_blocks
from gsa_data.tokenize import Tokenizer

__all__ = [
    "BlockStream",
    "DataFault",
    "Manifest",
    "NgramModel",
    "StreamConfig",
    "Tokenizer",
    "build_manifest",
    "document_ids",
    "fit_ngrams",
    "loss_mask",
    "merge_states",
    "replay_blocks",
    "validation_blocks",
]
