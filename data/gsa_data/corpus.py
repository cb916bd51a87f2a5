"""What a data folder holds, and the reader for it: the one place that tells shards of text and of tokens apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fsspec.implementations.local import LocalFileSystem

from gsa_data.faults import DataFault, Reading
from gsa_data.fetch import file_system, with_retries
from gsa_data.indexed import IndexedFolder, IndexedReader
from gsa_data.reader import ShardReader, TextReader
from gsa_data.shards import Manifest, build_manifest
from gsa_data.source_weights import check_known, check_weights
from gsa_data.token_files import JOURNAL_NAME, MANIFEST_NAME, TokenFolder, TokenReader
from gsa_data.tokenize import Tokenizer

Corpus = Manifest | TokenFolder | IndexedFolder


def open_corpus(root: str, text_field: str = "text", reading: Reading | None = None) -> Corpus:
    """The corpus of a folder; the log says when it holds tokens instead of text.

    It holds tokens when tokens.json (or the journal of an unfinished `prepare.py tokens`) lies in it, and
    megatron-core's datasets when .idx files lie in it; else its shards are text.

    Raises DataFault for a missing, empty or damaged folder, and for tokens that cannot be mapped because they
    are not on a local (or mounted) file system.
    """
    reading = reading or Reading()
    filesystem, base = file_system(root)

    def listing() -> list[str]:
        return [str(path).rpartition("/")[2] for path in filesystem.ls(base, detail=False)]

    try:
        names = with_retries(listing, reading, Counter()) if filesystem.isdir(base) else []
    except OSError as error:
        raise DataFault(
            f"data folder {root!r} cannot be read ({error!r}); check address and access"
        ) from error
    prepared = MANIFEST_NAME in names or JOURNAL_NAME in names
    indexed = any(name.endswith(".idx") for name in names)
    if not prepared and not indexed:
        return build_manifest(root, text_field=text_field, reading=reading)
    if not isinstance(filesystem, LocalFileSystem):
        raise DataFault(f"{root!r} holds tokens, which only local files can map; copy or mount it")
    if prepared and indexed:
        raise DataFault(f"{root!r} holds both {MANIFEST_NAME} and .idx files; give each a folder of its own")
    if indexed:
        return IndexedFolder.open(base)
    folder = TokenFolder.open(base)
    if folder.manifest.text_field != text_field:
        raise DataFault(
            f"token folder {root!r} was made of text_field={folder.manifest.text_field}, this run has {text_field}; "
            f"set text_field={folder.manifest.text_field}, or prepare the tokens again"
        )
    return folder


def shard_reader(corpus: Corpus, tokenizer: Tokenizer, reading: Reading) -> ShardReader:
    """Raises DataFault for tokens made by another tokenizer, or with other limits than `reading` has."""
    if isinstance(corpus, TokenFolder):
        return TokenReader(corpus, tokenizer, reading)
    if isinstance(corpus, IndexedFolder):
        return IndexedReader(corpus, tokenizer)
    return TextReader(corpus, tokenizer, reading)


def check_sources(corpus: Corpus, weights: Mapping[str, float]) -> None:
    """Whether a corpus can be read with these weights, as far as it is known before reading.

    Raises ValueError for a bad weight, and DataFault for a corpus that knows no sources and for names that none of
    its documents has. Text is only known when read: there a wrong name shows as a source without tokens.
    """
    check_weights(weights)
    if not weights:
        return
    if isinstance(corpus, IndexedFolder):
        raise DataFault(
            f"{str(corpus.root)!r} holds megatron-core's datasets, which do not know the sources of their documents, "
            "so source_weights cannot be used; read the text, or tokens made by `prepare.py tokens`"
        )
    if isinstance(corpus, TokenFolder):
        check_known(weights, corpus.documents_by_source, str(corpus.root))
