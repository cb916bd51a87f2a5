"""Tests the command that prepares a folder of tokens: run once, resumed after a kill, repaired after changes."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import prepare
import pytest
from data_corpus import write_corpus

from gsa_data.corpus import open_corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.prepare_tokens import check_tokens, prepare_tokens
from gsa_data.shards import build_manifest
from gsa_data.tokenize import Tokenizer


def test_command(corpus, tokenizer, tmp_path, capsys):
    out = str(tmp_path / "out")
    arguments = ["tokens", "--data", corpus.root, "--tokenizer", tokenizer.path, "--out", out]
    assert prepare.main([*arguments, "--workers", "2"]) == 0
    assert "5 shards, 200 documents" in capsys.readouterr().out
    written = {path: path.stat().st_mtime_ns for path in Path(out).rglob("*") if path.is_file()}
    assert len(written) == 5 * 3 + 1  # with the lock
    assert prepare.main(arguments) == 0
    assert "5 shards, 5 of them finished before" in capsys.readouterr().out
    assert prepare.main(["tokens", "--check", "--out", out]) == 0
    assert prepare.main([*arguments, "--check"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path(out).rglob("*") if path.is_file()} == written

    victims = [Path(out) / f"00000{shard}-chunk1-s{shard}.jsonl.zst" for shard in range(3)]
    ids = Path(f"{victims[0]}.bin")
    ids.write_bytes(ids.read_bytes()[:-1] + b"\1")
    capsys.readouterr()
    assert prepare.main([*arguments, "--check"]) == 1
    assert f"PROBLEM {ids}, its .idx or its .prepared.json is damaged" in capsys.readouterr().out
    Path(f"{victims[1]}.idx").unlink()
    Path(f"{victims[2]}.prepared.json").unlink()
    assert prepare.main([*arguments, "--check"]) == 1
    assert prepare.main(arguments) == 0  # this repairs it
    output = capsys.readouterr().out
    assert f"again: {ids}" in output
    assert "2 of them finished before" in output
    assert prepare.main([*arguments, "--check"]) == 0
    assert prepare.main(["tokens", "--check", "--out", corpus.root]) == 1  # holds none
    assert prepare.main([*arguments[:-1], corpus.root, "--data", out]) == 2


STOPS_AT_4 = """
import sys, threading, prepare
from gsa_data import prepare_tokens
shards = iter(range(1, 40))
class Bar(prepare_tokens.tqdm):
    def update(self):
        if next(shards) == 4:
            threading.Event().wait()
prepare_tokens.tqdm = Bar
sys.exit(prepare.main(sys.argv[1:]))
"""
"""The command, which pauses when four datasets are finished, because kills may be late on a busy machine."""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_command_goes_on(tokenizer: Tokenizer, tmp_path: Path, workers: int) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_corpus(source, num_shards=40, documents_per_shard=30)
    command = [sys.executable, "-c", STOPS_AT_4, "tokens", "--data", str(source), "--out", str(out)]
    command += ["--tokenizer", tokenizer.path, "--workers", str(workers)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=paths, start_new_session=True
    ) as process:
        while len(list(out.glob("*.idx"))) < 4:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 100
    with contextlib.suppress(ProcessLookupError):
        while os.killpg(process.pid, 0) is None:  # the workers end by themselves
            assert time.monotonic() < deadline, "workers of the killed command still run"
            time.sleep(0.01)

    kept = list(out.glob("*.idx"))
    times = [path.stat().st_mtime_ns for path in kept]
    assert 4 <= len(kept) < 40
    with pytest.raises(DataFault, match=r"prepared datasets of a text with 40 shards|is missing"):
        open_corpus(str(out))

    folder = prepare_tokens(str(source), tokenizer, out, 1, Reading())
    assert [path.stat().st_mtime_ns for path in kept] == times  # not done again
    assert len(list(out.iterdir())) == 3 * 40 + 1  # with the lock
    assert list(check_tokens(out, str(source), tokenizer)) == []
    reader, text = (
        shard_reader(each, tokenizer, Reading()) for each in (folder, build_manifest(str(source)))
    )
    for (name, _), (shard, _) in zip(reader.manifest.shards, text.manifest.shards, strict=True):
        ours, theirs = reader.open(name, 0, 1, Counter()), text.open(shard, 0, 1, Counter())
        assert [each.tokens.tolist() for each in ours] == [each.tokens.tolist() for each in theirs]


def test_restored_shards_are_done_again(tokenizer, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write_corpus(source, num_shards=3, documents_per_shard=10)
    shard = source / "chunk1/s1.jsonl.zst"
    good = shard.read_bytes()
    shard.write_bytes(good[:-5] + b"\0" * 5)
    skip = Reading("skip", max_bad_line_fraction=0.05)
    folder = prepare_tokens(str(source), tokenizer, out, 1, skip)
    assert [record.was_bad for record in folder.records.values()] == [False, True, False]
    shard.write_bytes(good)
    written = {path: path.stat().st_mtime_ns for path in out.glob("*s0*")}
    folder = prepare_tokens(str(source), tokenizer, out, 2, skip)
    assert not any(record.left_out for record in folder.records.values())
    assert {path: path.stat().st_mtime_ns for path in out.glob("*s0*")} == written
    assert list(check_tokens(out, str(source), tokenizer)) == []
    shard_reader(folder, tokenizer, Reading())


def test_a_full_disk_and_ctrl_c_are_said_in_a_line(tmp_path, monkeypatch, capsys):
    """The error must name --out: the system's message names no file, so the user cannot tell which disk is full."""
    command = ["tokenizer", "--shards", str(tmp_path), "--out", str(tmp_path / "a.model")]
    full = OSError(errno.ENOSPC, "No space left on device")
    said = f"--out {tmp_path}/a.model: [Errno 28] No space left on device; make room there, or give another --out"
    for ended, code, line in (
        (full, 2, f"error: {said}\n"),
        (KeyboardInterrupt(), 130, "interrupted; start the same command again\n"),
    ):
        monkeypatch.setattr("gsa_data.prepare.train_tokenizer", Mock(side_effect=ended))
        assert prepare.main(command) == code
        assert capsys.readouterr().err == line


BAD_INPUT = {
    "tokens --data {here}/none --tokenizer {model} --out {here}/out": "--data: data folder ",
    "tokens --data {here} --tokenizer {here}/none --out {here}/out": "--tokenizer: tokenizer file ",
    "tokens --data {here} --tokenizer {model} --out {here}/out": "--data {here}: no document in its 1 shards; give",
    "tokens --data {here} --tokenizer {model} --out /proc/none": "--out /proc/none: [Errno 2] No such file",
    "tokens --data {here} --tokenizer {model} --out {model}": "--out {model}: a file; give a folder for the tokens",
    "tokens --data {here} --out {here}/out": "",
    "tokens --check --out {here}/none": "--out {here}/none: no such folder; give the folder of prepared tokens",
    "tokens --data {here} --tokenizer {model} --out {here}/out --workers 0": "--workers=0 must be at least 1",
    "tokenizer --shards {here}/none --out {here}/out": "--shards: data folder ",
    "tokenizer --shards {here} --out {here}/out --vocab-size -5": "--vocab-size -5: not positive; give 1",
}


@pytest.mark.parametrize(("arguments", "said"), BAD_INPUT.items())
def test_bad_input_is_named_with_its_option(arguments, said, tokenizer, tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    names = {"here": tmp_path, "model": tokenizer.path}
    assert prepare.main(arguments.format(**names).split()) == 2
    assert f"error: {said.format(**names)}" in capsys.readouterr().err


def test_a_second_command_is_refused_and_no_documents_leave_nothing(corpus, tokenizer, tmp_path, capsys):
    """Two commands would write the same unfinished files. An empty dataset would refuse the corrected command."""
    out = tmp_path / "out"
    command = ["tokens", "--data", corpus.root, "--tokenizer", tokenizer.path, "--out", str(out)]
    assert prepare.main([*command, "--max-document-bytes", "1"]) == 2
    assert "give other text, --text-field or --max-document-bytes" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [".lock"]
    with (out / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert prepare.main(command) == 2
    assert f"--out {out}: another command writes there; wait for it" in capsys.readouterr().err
    assert prepare.main(command) == 0
