"""Tests sentencepiece models of all kinds as tokenizer.json: sentencepiece's ids, or an error."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from gsa_data.tokenize import Tokenizer
from gsa_eval.convert.tokenizer import PROBES, check_same_ids, write_tokenizer
from helpers.chats import make_tokenizer
from helpers.runs import REPOSITORY

EXACT: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
"""Models that reproduce all text."""
KINDS: dict[str, dict[str, Any]] = {
    "BPE, default flags": {"model_type": "bpe"},
    "BPE with a space in front, as Llama 2": {"model_type": "bpe", **EXACT},
    "BPE with symbols": {
        "model_type": "bpe",
        **EXACT,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["\n", "\t", "<|x|>"],
    },
    "unigram, default flags": {"model_type": "unigram"},
    "unigram, exact": {"model_type": "unigram", **EXACT, "add_dummy_prefix": False},
}


def trained(path: Path, **flags: Any) -> Tokenizer:
    text = (REPOSITORY / "docs" / "concepts.md").read_text().splitlines()
    lines = [line for line in text if line.strip()]
    file = io.BytesIO()
    settings = {"vocab_size": 420, "minloglevel": 2, "hard_vocab_limit": False, "num_threads": 1, **flags}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **settings)
    path.write_bytes(file.getvalue())
    return Tokenizer(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_match_sentencepiece(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "some.model", **KINDS[kind])
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(tokenizer, out, 64)
    theirs = AutoTokenizer.from_pretrained(out)
    text = "<|x|> An indexer  scores\n\tkeys, naïve 日本 ½\n  twice "
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    if "byte_fallback" in KINDS[kind]:
        for probe in PROBES:
            tokens = tokenizer.encode(probe)
            assert theirs.decode(tokens.tolist()) == tokenizer.decode(tokens)


def test_a_kind_without_counterpart_is_refused(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "some.model", model_type="word", vocab_size=100)
    with pytest.raises(ValueError, match=r"some\.model: a sentencepiece model of words or characters has no"):
        write_tokenizer(tokenizer, tmp_path, 64)


def test_other_ids_are_refused(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path / "some.model", model_type="bpe")
    other = trained(tmp_path / "other.model", model_type="bpe", **EXACT)
    for name, each in (("mine", tokenizer), ("others", other)):
        (tmp_path / name).mkdir()
        write_tokenizer(each, tmp_path / name, 64)
    shutil.copy(tmp_path / "others" / "tokenizer.json", tmp_path / "mine")
    with pytest.raises(ValueError, match=r"transformers gives .* the ids \[.*\], training \[.*\]"):
        check_same_ids(tokenizer, tmp_path / "mine")


def test_no_token_in_front_that_training_did_not_have(tmp_path: Path) -> None:
    """The default call adds no token. An imported and exported model keeps its tokenizer's additions."""
    path = make_tokenizer(tmp_path)
    adding = TokenizersTokenizer.from_file(str(path))
    bos = adding.token_to_id("<|im_start|>")
    adding.post_processor = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", bos)])
    adding.save(str(path))
    tokenizer = Tokenizer(str(path))
    expected = tokenizer.encode("key").tolist()
    for was_trained, front in ((True, []), (False, [bos])):
        out = tmp_path / str(was_trained)
        out.mkdir()
        write_tokenizer(tokenizer, out, 64, was_trained=was_trained)
        assert AutoTokenizer.from_pretrained(out)("key")["input_ids"] == front + expected
