"""Open a data folder with the reader for its content. Only this module distinguishes text, tokens and conversations."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fsspec.implementations.local import LocalFileSystem

from gsa_data.chat import ChatFolder, ChatReader
from gsa_data.chat_template import ChatTemplate
from gsa_data.faults import DEFAULT_READING, DataFault, Reading
from gsa_data.fetch import file_system
from gsa_data.indexed import IndexedFolder, IndexedReader
from gsa_data.listing import FORMATS, count_endings, list_files, retried
from gsa_data.reader import ShardReader, TextReader
from gsa_data.shards import Manifest, manifest_of
from gsa_data.source_weights import NO_WEIGHTS
from gsa_data.tokenize import Tokenizer

LARGE_SHARD_BYTES = 1 << 30
"""A larger shard gives a warning, because a reader holds a decompressed shard in memory."""

logger = logging.getLogger(__name__)

Corpus = Manifest | ChatFolder | IndexedFolder


def open_corpus(root: str, text_field: str = "text", reading: Reading = DEFAULT_READING) -> Corpus:
    """Open the corpus of a folder, and log whether the folder holds tokens instead of text.

    If the folder or a sub-folder has .idx files, the corpus is tokens (megatron-core's datasets). Otherwise it is text.

    Raises DataFault if the folder is missing, empty or damaged, or has both text and tokens. Tokens raise DataFault if
    they lie deeper than one sub-folder, or are not on a local or mounted file system.
    """
    filesystem, base = file_system(root, reading)
    files = list_files(root, reading)
    if not holds_tokens(files, root):
        manifest = manifest_of(root, files, text_field, reading)
        _log_text(manifest, files)
        return manifest
    if not isinstance(filesystem, LocalFileSystem):
        raise DataFault(f"{root!r} holds tokens, which only local files can map; copy or mount it")
    return retried(lambda pulse: IndexedFolder.open(base, pulse), root, reading)


def open_chat(root: str, template: ChatTemplate, reading: Reading = DEFAULT_READING) -> ChatFolder:
    """Open the conversations of a folder: JSON lines or Parquet with `messages` (chat.py).

    Raises DataFault for a missing folder, or a folder without conversations.
    """
    files = list_files(root, reading)
    holds_tokens(files, root)
    manifest = manifest_of(root, files, "text", reading, is_chat=True)
    _log_text(manifest, files)
    return ChatFolder(manifest, template)


def _log_text(manifest: Manifest, files: Mapping[str, int]) -> None:
    used = {*manifest.size_bytes_of, *manifest.duplicates}
    others = count_endings(path for path in files if path not in used)
    largest, size_bytes = max(manifest.shards, key=lambda shard: shard[1])
    is_large = size_bytes > LARGE_SHARD_BYTES
    logger.info(
        "%s holds %s: %s, %.4g GB together%s%s",
        manifest.root,
        "conversations" if manifest.is_chat else "text",
        count_endings(path for path, _ in manifest.shards),
        sum(size for _, size in manifest.shards) / 1e9,
        f"; not read: {others}" if others else "",
        f"; each reader holds a whole shard, so better split {largest} and the like" if is_large else "",
    )


def holds_tokens(files: Mapping[str, int], root: str) -> bool:
    """Returns whether the files are indexed datasets. Raises DataFault for datasets with text beside them, and for a
    dataset deeper than one sub-folder, because a part of the data would be ignored."""
    datasets = sorted(
        path
        for path in files
        if path.endswith(".idx") and ("/" not in path or f"{path.removesuffix('.idx')}.bin" in files)
    )
    text = sorted(path for path in files if path.endswith(FORMATS))
    if datasets and text:
        raise DataFault(
            f"data folder {root!r} holds both indexed datasets ({datasets[0]}) and text ({text[0]}); only "
            "one kind can be read; give each a folder of its own"
        )
    for path in datasets:
        if path.count("/") > 1:
            raise DataFault(
                f"data folder {root!r}: the indexed dataset {path} lies too deep; put the .bin and .idx files into the "
                "folder, or into one sub-folder for each source (links will do)"
            )
    return bool(datasets)


def shard_reader(
    corpus: Corpus, tokenizer: Tokenizer, reading: Reading, weights: Mapping[str, float] = NO_WEIGHTS
) -> ShardReader:
    """Returns the reader of the corpus.

    The sources of a text corpus are known only after reading. An unknown source name in `weights` is therefore an error
    only for a tokenized corpus. For text, the log lists the name as a source without tokens.

    Raises:
        DataFault: another tokenizer made the tokens, or `weights` names a source that the tokens do not have
        TokenizerError: the chat template does not fit the tokenizer
    """
    if isinstance(corpus, ChatFolder):
        return ChatReader(corpus, tokenizer, reading)
    if isinstance(corpus, IndexedFolder):
        return IndexedReader(corpus, tokenizer, reading, weights)
    return TextReader(corpus, tokenizer, reading)
