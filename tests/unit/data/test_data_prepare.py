from pathlib import Path

import pytest
from data_corpus import line, write_shard
from prepare import main

from gsa_data.prepare import pieces_of
from gsa_data.tokenize import Tokenizer


def test_tokenizer_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shards" / "s.jsonl.zst", [b'{"content": "plain text of some words"}'])
    shards, out = str(tmp_path / "shards"), tmp_path / "t.model"
    train = ["tokenizer", "--shards", shards, "--out", str(out), "--vocab-size", "280"]
    assert main(train) == 2
    assert not out.exists()
    assert main([*train, "--text-field", "content"]) == 0
    assert f"{out}: a tokenizer of 280 tokens, from the text of {shards}" in capsys.readouterr().out
    assert Tokenizer(str(out)).vocab_size == 280
    before = out.read_bytes()
    assert main([*train, "--vocab-size", "281"]) == 2
    assert f"error: --out {out}: exists; give another file, or remove that one" in capsys.readouterr().err
    assert out.read_bytes() == before  # checkpoints and tokens may depend on it


@pytest.mark.parametrize(
    ("texts", "size", "said"),
    [
        (["", " \n"], "300", "no text in them"),
        (["a short text"], "4096", "--vocab-size 4096: no tokenizer of this size"),
        (["a short text"], "10", "Vocabulary size is smaller than required_chars"),
    ],
)
def test_text_that_makes_no_tokenizer(tmp_path, capsys, texts, size, said):
    """The error has one line, and no file of that name is written."""
    write_shard(tmp_path / "text" / "a.jsonl.zst", [line(text) for text in texts])
    out = tmp_path / "tokenizer.model"
    command = ["tokenizer", "--shards", str(tmp_path / "text"), "--vocab-size", size, "--out"]
    assert main([*command, str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, str(tmp_path)]) == 2
    assert f"--out {tmp_path}: a folder" in capsys.readouterr().err
    write_shard(tmp_path / "text" / "a.jsonl.zst", [b"{"])
    assert main([*command, str(out)]) == 2
    assert capsys.readouterr().err.endswith("restore it\n")  # this command has no on_bad_shard=skip


def test_a_tokenizer_learns_from_long_lines(tmp_path: Path) -> None:
    """sentencepiece skips lines of more than 4192 bytes, which are frequent in web text and Chinese."""
    word = "\u6f22" * 3000
    lines = ["", "a b", "quartz sphinx " * 400, word, f" {'x' * 5000}  y"]
    pieces = [list(pieces_of(each)) for each in lines]
    assert pieces[:2] == [[], ["a b"]]
    assert all(len(piece.encode()) <= 4192 for each in pieces for piece in each)
    assert " ".join(pieces[2]) == lines[2]
    assert "".join(pieces[3]) == word
    assert "".join(pieces[4]).count("x") == 5000
    write_shard(tmp_path / "s.jsonl.zst", [line("a b"), line("quartz sphinx " * 400)])
    command = ["tokenizer", "--shards", str(tmp_path), "--out", str(tmp_path / "t"), "--vocab-size", "285"]
    assert main(command) == 0
    assert len(Tokenizer(str(tmp_path / "t")).encode("quartz sphinx")) == 2
