"""Tests validation text: which labels count, how many bytes they spell, and the same text by source."""

from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from data_corpus import document, line, write_shard

from gsa_data.corpus import Corpus, open_corpus
from gsa_data.faults import DataFault, Reading
from gsa_data.prepare_tokens import prepare_tokens
from gsa_data.shards import Manifest, build_manifest
from gsa_data.source_weights import NO_SOURCE
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import MOST_THREADS, ValidationSet, is_scored, read_validation_set

SOURCES = ("Wikipedia", "ArXiv", "")
L = 24


def source_of(number: int) -> str:
    return SOURCES[number % 3 if number < 30 else 0]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Write 60 documents: three sources in turn, from the 30th on only one."""
    root = tmp_path_factory.mktemp("mixed")
    for shard in range(2):
        numbers = range(shard * 30, shard * 30 + 30)
        write_shard(root / f"s{shard}.jsonl.zst", [line(document(n), source_of(n)) for n in numbers])
    return build_manifest(str(root))


def read(
    mixed: Corpus, tokenizer: Tokenizer, max_blocks: int = 30, across: bool = False, split: bool = True
) -> ValidationSet:
    return read_validation_set("set", mixed, tokenizer, L, max_blocks, Reading(), across, split)


def stream_of(blocks: np.ndarray, lengths: np.ndarray) -> list[int]:
    """Return the tokens that were packed, without padding."""
    tokens = [int(blocks[0, 0])]
    for block, length in zip(blocks, lengths, strict=True):
        tokens += block[1 : length + 1].tolist()
    return tokens


def test_sources_hold_the_text_of_the_set_and_nothing_else(mixed: Manifest, tokenizer: Tokenizer) -> None:
    found = read(mixed, tokenizer)
    assert found.text.blocks.shape == (30, L + 1)
    assert found.text.lengths.tolist() == [L] * 30
    tokens_left, expected = 30 * L + 1, {source: list[int]() for source in ("ArXiv", "Wikipedia", NO_SOURCE)}
    for number in range(60):
        tokens = [*tokenizer.encode(document(number)).tolist(), tokenizer.eos_id][:tokens_left]
        expected[source_of(number) or NO_SOURCE] += tokens
        tokens_left -= len(tokens)
    assert tokens_left == 0
    assert list(found.by_source) == ["ArXiv", "Wikipedia", NO_SOURCE]
    for source, text in found.by_source.items():
        assert stream_of(text.blocks, text.lengths) == expected[source]
        assert text.blocks.dtype == np.int32
        assert set(text.lengths[:-1]) <= {L}
        filling = text.blocks[-1, text.lengths[-1] + 1 :]
        assert set(filling.tolist()) <= {tokenizer.eos_id}
    parts = found.by_source.values()
    assert sum(text.scored_tokens for text in parts) == found.text.scored_tokens
    assert sum(text.text_bytes for text in parts) == found.text.text_bytes
    assert read(mixed, tokenizer, split=False).by_source == {}


def test_tokens_of_a_text_give_the_scores_of_the_text(mixed, tokenizer, tmp_path):
    folder = open_corpus(str(prepare_tokens(mixed.root, tokenizer, tmp_path, 1, Reading()).root))
    tokens, text = read(folder, tokenizer).text, read(mixed, tokenizer).text
    assert np.array_equal(tokens.blocks, text.blocks)
    assert tokens.blocks.dtype == np.int32
    assert (tokens.scored_tokens, tokens.text_bytes) == (text.scored_tokens, text.text_bytes)


def test_bytes_match_the_scored_text(mixed: Manifest, tokenizer: Tokenizer) -> None:
    """Documents are isolated, so everything counts except the first token of each, which nothing predicts."""
    found = read(mixed, tokenizer, max_blocks=10**6)
    expected, tokens_left = 0, len(found.text.blocks) * L + 1
    for number in range(60):
        tokens = tokenizer.encode(document(number))[:tokens_left]
        if len(tokens):
            expected += len(tokenizer.decode(tokens)) - len(tokenizer.decode(tokens[:1]))
        tokens_left = max(0, tokens_left - len(tokens) - 1)
    assert found.text.text_bytes == expected


def test_attention_across_documents_scores_every_label(mixed: Manifest, tokenizer: Tokenizer) -> None:
    """All labels count except the stream's first, but not spaces that the tokenizer adds before documents."""
    isolated, across = read(mixed, tokenizer), read(mixed, tokenizer, across=True)
    assert across.text.scored_tokens == 30 * L > isolated.text.scored_tokens
    stream = stream_of(across.text.blocks, across.text.lengths)
    ends = [-1, *np.flatnonzero(np.array(stream) == tokenizer.eos_id).tolist(), len(stream)]
    documents = [stream[end + 1 : after] for end, after in pairwise(ends)]
    expected = sum(len(tokenizer.decode(each)) for each in documents) - len(tokenizer.decode(stream[:1]))
    assert across.text.text_bytes == expected


def test_token_bytes(sample_folder: Path) -> None:
    tokenizer = Tokenizer(str(sample_folder / "tokenizer.model"))
    for text in ("gate  sparse é 日本 🙂\n\t", "  x", "日"):
        tokens = tokenizer.encode(text)
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode()) + 1  # sentencepiece's leading space
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[tokenizer.eos_id] == 0


def test_what_is_scored() -> None:
    blocks, lengths = np.array([[5, 6, 2, 7, 8], [5, 6, 7, 8, 9]], np.int32), np.array([4, 2])
    for across, first in ((False, [True, True, False, True]), (True, [True] * 4)):
        assert is_scored(blocks, lengths, 2, across).tolist() == [first, [True, True, False, False]]


def test_a_small_set_tokenizes_few_documents(
    mixed: Manifest, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Mock(side_effect=tokenizer.encode)
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text: encode(text))
    assert len(read(mixed, tokenizer, max_blocks=1).text.blocks) == 1
    assert MOST_THREADS <= encode.call_count < MOST_THREADS + 5  # the tokenizer's own properties encode, too
    with pytest.raises(ValueError, match="max_blocks=0"):
        read(mixed, tokenizer, max_blocks=0)


def test_a_set_that_cannot_be_used(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_shard(tmp_path / "s.jsonl.zst", [line("gate")])
    with pytest.raises(DataFault, match=f"{tmp_path.name}.*shorter than one block of {L + 1}"):
        read(build_manifest(str(tmp_path)), tokenizer)
    write_shard(tmp_path / "s.jsonl.zst", [line("gate " * 100), b"{"])
    manifest, skip = build_manifest(str(tmp_path)), Reading(on_bad_shard="skip")
    with pytest.raises(DataFault, match=r"restore it \(on_bad_shard=skip leaves no validation text out\)"):
        read_validation_set("set", manifest, tokenizer, L, 4, skip, False, False)
