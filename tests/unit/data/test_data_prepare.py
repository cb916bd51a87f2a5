import shutil
from pathlib import Path

import pytest
import verify
import zstandard
from data_corpus import line, write_shard
from prepare import main
from verify import verify_corpus

from gsa_data import Tokenizer
from gsa_data.prepare import pieces_of


def test_sample_corpus_is_sound(sample_folder: Path) -> None:
    reports, problems = verify_corpus(sample_folder)
    assert problems == []
    assert {source for report in reports for source in report.sources} == {"PythonStdlib", "RustBooks"}
    assert len([report for report in reports if report.relpath.startswith("train/")]) >= 12
    for licence in ("LICENSE.python", "LICENSE.rust-MIT", "LICENSE.rust-APACHE"):
        assert (sample_folder / licence).stat().st_size > 1000


def test_verify_finds_damage(sample_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(sample_folder, tmp_path / "sample")
    folder = tmp_path / "sample" / "train" / "chunk1"
    victim = folder / "example_train_3.jsonl.zst"
    packed = victim.read_bytes()
    place = len(packed) // 2
    flipped = packed[:place] + bytes([packed[place] ^ 1]) + packed[place + 1 :]
    for wrong in (flipped, zstandard.compress(line("")), None):
        victim.unlink()
        if wrong is not None:
            victim.write_bytes(wrong)
        problems = verify_corpus(tmp_path / "sample")[1]
        assert problems
        assert all("train_3" in problem for problem in problems)
    victim.write_bytes(packed)
    write_shard(folder / "more.jsonl.zst", [line("x")])
    (problem,) = verify_corpus(tmp_path / "sample")[1]
    assert "more" in problem


def test_verify_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "good" / "s [0] *.jsonl.zst", [line("text")])
    write_shard(tmp_path / "bad" / "s.jsonl.zst", [b"{"])
    codes = {name: verify.main([str(tmp_path / name)]) for name in ("good", "bad", "missing")}
    assert codes == {"good": 0, "bad": 1, "missing": 2}
    assert "Traceback" not in capsys.readouterr().err
    for content in ("[]", "{}", "nonsense", '{"shards": [{}]}'):
        (tmp_path / "good" / "manifest.json").write_text(content)
        assert verify.main([str(tmp_path / "good")]) == 2
        assert "manifest.json is not one that prepare.py wrote" in capsys.readouterr().err


def test_tokenizer_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is in another field, which verify.py takes, too."""
    write_shard(tmp_path / "shards" / "s.jsonl.zst", [b'{"content": "plain text of some words"}'])
    shards, out = str(tmp_path / "shards"), tmp_path / "t.model"
    train = ["tokenizer", "--shards", shards, "--out", str(out), "--vocab-size", "280"]
    assert main(train) == 2
    assert not out.exists()
    assert main([*train, "--text-field", "content"]) == 0
    assert f"{out}: a tokenizer of 280 tokens, from the text of {shards}" in capsys.readouterr().out
    assert Tokenizer(str(out)).vocab_size == 280
    packing = ["--tokenizer", str(out), "--seq-len", "4", "--num-lanes", "1"]
    assert verify.main([shards, *packing]) == 1
    assert verify.main([shards, *packing, "--text-field", "content"]) == 0
    assert "packing at 4 tokens, 1 lanes: 1 documents" in capsys.readouterr().out
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
