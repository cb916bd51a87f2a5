from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from gsa_data import Tokenizer

PROBE = "def f(x):\n\n\tif x:  # naïve 日本 😀 \0 </s>\n        return 1234"


def test_round_trip_without_eos(tokenizer: Tokenizer, sample_folder: Path) -> None:
    for each in (tokenizer, Tokenizer(str(sample_folder / "tokenizer.model"))):
        tokens = each.encode(PROBE)
        assert tokens.dtype == np.int32
        assert each.eos_id == 2
        assert each.eos_id not in tokens  # nor from the text "</s>"
        assert tokens.max() < each.vocab_size
        assert np.array_equal(tokens, each.encode(PROBE.encode()))
        assert len(each.encode("")) == 0
    assert each.decode(tokens) == PROBE  # white space is kept by the bundled model


def test_bundled_tokenizer_has_4096_entries(sample_folder: Path) -> None:
    assert Tokenizer(str(sample_folder / "tokenizer.model")).vocab_size == 4096


def test_pickle_and_fingerprint(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert np.array_equal(copy.encode(PROBE), tokenizer.encode(PROBE))
    assert copy.fingerprint == tokenizer.fingerprint
    assert tokenizer.fingerprint == hashlib.sha256(Path(tokenizer.path).read_bytes()).hexdigest()


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.model' does not exist"):
        Tokenizer(str(tmp_path / "missing.model"))
    (tmp_path / "junk.model").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"junk\.model' is not a sentencepiece model"):
        Tokenizer(str(tmp_path / "junk.model"))
    with (tmp_path / "no_eos.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c"] * 9), model_writer=file, vocab_size=280, model_type="bpe",
            byte_fallback=True, eos_id=-1, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    with pytest.raises(ValueError, match="has no EOS token"):
        Tokenizer(str(tmp_path / "no_eos.model"))
