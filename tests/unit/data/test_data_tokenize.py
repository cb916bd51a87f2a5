import hashlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import sentencepiece

from gsa_data.tokenize import Tokenizer, TokenizerError
from gsa_data.whole_files import MOST_BYTES

PROBE = "def f(x):\n\n\tif x:  # naïve 日本 😀 \0 </s>\n        return 1234"


def trained(path: Path, **options: Any) -> str:
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the token of a lane"] * 9), model_writer=file, vocab_size=280, model_type="bpe",
            hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
    return str(path)


def round_trip(each: Tokenizer, text: str) -> np.ndarray:
    """Check what must hold for all tokenizers, and return the tokens of `text`. If the text spells the EOS, it must be
    encoded as ordinary text, not as the EOS token."""
    tokens = each.encode(text)
    assert tokens.dtype == np.int32
    assert each.eos_id not in tokens
    assert tokens.max() < each.vocab_size
    assert np.array_equal(tokens, each.encode(text.encode()))
    assert len(each.encode("")) == 0
    assert each.decode(tokens.tolist()) == each.decode(tokens)
    assert hashlib.sha256(each.file).hexdigest() == each.fingerprint
    copy = pickle.loads(pickle.dumps(each))
    assert np.array_equal(copy.encode(text), tokens)
    assert copy.fingerprint == each.fingerprint
    return tokens


def test_round_trip_without_eos(tokenizer: Tokenizer, sample_folder: Path) -> None:
    bundled = Tokenizer(str(sample_folder / "tokenizer.model"))
    for each in (tokenizer, bundled):
        tokens = round_trip(each, PROBE)
        assert each.eos_id == 2
        assert each.file_name == "tokenizer.model"
    assert bundled.decode(tokens) == PROBE  # it keeps white space
    assert bundled.vocab_size == 4096


def test_lost_newlines_are_noticed(tmp_path: Path, sample_folder: Path, byte_level: Path) -> None:
    for kept, flags in ((False, {}), (True, {"normalization_rule_name": "identity", "byte_fallback": True})):
        tokenizer = Tokenizer(trained(tmp_path / "t.model", **flags))
        assert tokenizer.keeps_newlines == kept
        assert ("\n" in tokenizer.decode(tokenizer.encode("a\nb"))) == kept
    assert Tokenizer(str(sample_folder / "tokenizer.model")).keeps_newlines
    assert Tokenizer(str(byte_level)).keeps_newlines


def test_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "junk.model").write_bytes(b"junk")
    trained(tmp_path / "no_eos.model", eos_id=-1)
    for name, message in (
        ("missing", r"missing\.model' does not exist"),
        ("junk", r"junk\.model' is not a sentencepiece model"),
        ("no_eos", "has no EOS token"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer(str(tmp_path / f"{name}.model"))


# tokenizer.json


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a byte-level BPE like GPT-2's, which also asks to truncate its output."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["the token of a lane of a shard"] * 9, trainer)
    model.enable_truncation(5)
    model.enable_padding(length=7)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    model.save(str(path))
    return path


def edited(path: Path, folder: Path, **changes: Any) -> str:
    content = json.loads(path.read_text()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


def test_tokenizer_json(byte_level: Path) -> None:
    each = Tokenizer(str(byte_level))
    text = f"{PROBE} <|endoftext|>"
    tokens = round_trip(each, text)
    assert each.eos_id == 0
    assert each.vocab_size <= 300
    assert each.decode(tokens) == text  # nothing is truncated or padded
    assert each.token_bytes[tokens].sum() == len(text.encode())
    assert each.token_bytes[each.eos_id] == 0
    assert each.file == byte_level.read_bytes()


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "ByteLevel"])
def test_marks_of_words_are_no_bytes(tmp_path: Path, kind: str) -> None:
    """Bits per byte must not count the marks `##` inside a word and `</w>` at its end."""
    tokenizers = pytest.importorskip("tokenizers")
    options = {"special_tokens": ["[UNK]", "</s>"], "show_progress": False, "vocab_size": 50}
    if kind == "WordPiece":
        model = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
        trainer = tokenizers.trainers.WordPieceTrainer(**options)
    else:
        model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
        trainer = tokenizers.trainers.BpeTrainer(end_of_word_suffix="</w>", **options)
    splits = [tokenizers.pre_tokenizers.BertPreTokenizer()]
    if kind == "ByteLevel":  # as in CLIP
        splits.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(splits)
    model.train_from_iterator(["the token of a lane of a shard", "né"] * 9, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    each, text = Tokenizer(str(tmp_path / "tokenizer.json")), "then a lane né shaken torn of a hen"
    tokens = each.encode(text)
    assert len(tokens) > 11  # 9 words
    assert each.token_bytes[tokens].sum() == len(text.encode()) + 1  # a space for each word


def test_a_tokenizer_that_was_trained_with_dropout(byte_level: Path, tmp_path: Path) -> None:
    """Text must have the same tokens at each resume; the file's dropout is for its training."""
    model = json.loads(byte_level.read_text())["model"] | {"dropout": 0.5}
    each, text = Tokenizer(edited(byte_level, tmp_path, model=model)), "the token of a lane of a shard"
    for one in (each, pickle.loads(pickle.dumps(each))):
        found = [one.encode(text) for _ in range(4)]
        assert all(np.array_equal(tokens, Tokenizer(str(byte_level)).encode(text)) for tokens in found)


def test_ids_with_gaps_are_below_the_vocabulary_size(byte_level: Path, tmp_path: Path) -> None:
    tokens = json.loads(byte_level.read_text())["added_tokens"]
    far = tokens[0] | {"id": 999, "content": "<pad>"}
    far_model = json.loads(byte_level.read_text())["model"]
    far_model["vocab"]["<pad>"] = 999
    each = Tokenizer(edited(byte_level, tmp_path, added_tokens=[*tokens, far], model=far_model))
    assert each.vocab_size == 1000
    assert each.token_bytes.shape == (1000,)


def test_eos_of_a_tokenizer_json(byte_level: Path, tmp_path: Path) -> None:
    (token,) = json.loads(byte_level.read_text())["added_tokens"]
    end, stop = token | {"id": 1, "content": "</s>"}, token | {"content": "<stop>"}
    plain = token | {"content": "of", "special": False}
    for added, eos, message in (
        ([token, end], None, r"several tokens that may end a document \(</s>, <\|endof.*eos_token"),
        ([stop], None, r"no token known to end a document \(special tokens: <stop>\)"),
        ([token, plain], "of", "text that spells 'of' would end its document"),
    ):
        with pytest.raises(TokenizerError, match=message):
            Tokenizer(edited(byte_level, tmp_path, added_tokens=added), eos)
    each = Tokenizer(edited(byte_level, tmp_path, added_tokens=[token, end]), "</s>")
    assert each.decode(np.array([each.eos_id])) == "</s>"


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "BPE"])
def test_an_eos_of_a_tokenizer_json_that_text_spells(tmp_path: Path, kind: str) -> None:
    """Text that spells "</s>" gets the special token's id, because the model's own vocabulary holds "</s>"."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "</s>": 1, "a": 2}
    model = {
        "Unigram": lambda: tokenizers.models.Unigram([(word, -1.0) for word in words], 0),
        "WordLevel": lambda: tokenizers.models.WordLevel(words, unk_token="<unk>"),
        "BPE": lambda: tokenizers.models.BPE(words, [], unk_token="<unk>", ignore_merges=True),
    }[kind]()
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = str(tmp_path / "tokenizer.json")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(path)
    remedy = "add a special token that its model does not hold to the file's added_tokens"
    with pytest.raises(TokenizerError, match=rf"ends documents with '</s>', and so would text .*; {remedy}"):
        Tokenizer(path)
    with pytest.raises(TokenizerError, match=rf"text that spells '</s>' would end its document; {remedy}"):
        Tokenizer(path, "</s>")
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(path)
    each = Tokenizer(path, "<stop>")  # the remedy
    assert each.eos_id == 3
    assert 3 not in each.encode("a <stop> a")


def test_another_eos_is_another_fingerprint(tokenizer: Tokenizer) -> None:
    assert Tokenizer(tokenizer.path, "</s>").fingerprint == tokenizer.fingerprint
    other = Tokenizer(tokenizer.path, "<s>")
    assert (other.eos_id, other.fingerprint) == (1, f"{tokenizer.fingerprint} eos=1")
    assert pickle.loads(pickle.dumps(other)).eos_id == 1
    with pytest.raises(TokenizerError, match=r"has no token '<nothing>'; give another eos_token"):
        Tokenizer(tokenizer.path, "<nothing>")


@pytest.mark.parametrize("token", ["<stop>", "<unk>", "\u2581", "<0x0A>"])
def test_an_eos_that_text_holds_is_refused(tmp_path: Path, token: str) -> None:
    """Text may contain these tokens, which would then end a document too early."""
    path = trained(tmp_path / "t.model", user_defined_symbols=["<stop>"], byte_fallback=True)
    message = rf"{token}' is not a control symbol, so text would end .*eos_token"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(path, token)
    assert Tokenizer(path).eos_id == Tokenizer(path, "</s>").eos_id == 2


def test_an_eos_that_is_a_control_symbol(tmp_path: Path) -> None:
    each = Tokenizer(trained(tmp_path / "t.model", control_symbols=["<stop>"]), "<stop>")
    assert each.eos_id not in each.encode("a <stop> b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nIg== 1\n", "it is a tiktoken file, as Llama 3's tokenizer.model is"),
        (b'{"model": ', "is not JSON"),
        (b'{"model": ' + b"[" * 10_000, "lists and objects are nested more than 64 levels deep"),
        (b'{"model": {}}', "is not a tokenizer.json that `tokenizers` reads"),
    ],
)
def test_tokenizer_files_of_another_kind(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(str(tmp_path / "t"))


def test_what_is_no_file_to_read(tmp_path: Path, byte_level: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening a pipe waits for a writer
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    for path, message in (
        (tmp_path / "pipe", "is a pipe, no regular file"),
        ("/dev/zero", "is a device, no regular file"),
        (tmp_path / "large", "has more than the 268435456 bytes"),
        (tmp_path, "does not exist"),
    ):
        with pytest.raises(TokenizerError, match=message):
            Tokenizer(str(path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerError, match=r"pip install '\.\[hf\]'"):
        Tokenizer(str(byte_level))


def test_tokenizer_at_an_address(tokenizer: Tokenizer) -> None:
    with fsspec.open("memory://gsa_tokenizer/t.model", "wb") as file:
        file.write(Path(tokenizer.path).read_bytes())
    assert Tokenizer("memory://gsa_tokenizer/t.model").fingerprint == tokenizer.fingerprint
