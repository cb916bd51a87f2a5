"""Tests the command that prepares a folder of tokens: run once, resumed after a kill, repaired after changes."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import orjson
import prepare
import pytest
from data_corpus import read_run, write_corpus

from gsa_data import BlockStream, DataFault, StreamConfig, Tokenizer, build_manifest
from gsa_data.corpus import open_corpus
from gsa_data.faults import Reading
from gsa_data.prepare_tokens import check_tokens, prepare_tokens
from gsa_data.token_files import JOURNAL_NAME, MANIFEST_NAME

CONFIG = StreamConfig(seq_len_tokens=32, num_lanes=8, seed=7, prefetch_blocks=24)
FAULTY = Reading("skip", max_bad_line_fraction=0.05)


def test_command(corpus, tokenizer, tmp_path, capsys):
    out = str(tmp_path / "out")
    arguments = ["tokens", "--data", corpus.root, "--tokenizer", tokenizer.path, "--out", out]
    assert prepare.main([*arguments, "--workers", "2"]) == 0
    assert "5 shards, 200 documents" in capsys.readouterr().out
    written = {path: path.stat().st_mtime_ns for path in Path(out).rglob("*") if path.is_file()}
    assert len(written) == 5 * 2 + 1
    assert prepare.main(arguments) == 0
    assert "5 shards, 5 of them finished before" in capsys.readouterr().out
    assert prepare.main(["tokens", "--check", "--out", out]) == 0
    assert prepare.main([*arguments, "--check"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path(out).rglob("*") if path.is_file()} == written

    victim = Path(out) / "chunk1/s3.jsonl.zst.tokens"
    victim.write_bytes(victim.read_bytes()[:-2])
    capsys.readouterr()
    assert prepare.main([*arguments, "--check"]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    assert prepare.main(arguments) == 0  # this repairs it
    output = capsys.readouterr().out
    assert f"again: {victim} has" in output
    assert "4 of them finished before" in output
    assert prepare.main([*arguments, "--check"]) == 0
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
"""The command, which pauses when its journal has four shards, because kills may be late on a busy machine."""


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
        journal = out / JOURNAL_NAME
        while not journal.is_file() or journal.read_bytes().count(b"\n") < 1 + 4:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 100
    with contextlib.suppress(ProcessLookupError):
        while os.killpg(process.pid, 0) is None:  # the workers end by themselves
            assert time.monotonic() < deadline, "workers of the killed command still run"
            time.sleep(0.01)

    finished = journal.read_bytes().split(b"\n")[1:-1]
    assert len(finished) == 4
    assert not (out / MANIFEST_NAME).exists()
    with pytest.raises(DataFault, match="unfinished"):
        open_corpus(str(out))
    assert any("unfinished" in problem for problem in check_tokens(out, None, None))
    with journal.open("ab") as file:
        file.write(b'{"path": "cut o')
    kept = [out / f"{orjson.loads(record)['path']}.tokens" for record in finished]
    times = [path.stat().st_mtime_ns for path in kept]

    folder = prepare_tokens(str(source), tokenizer, out, 1, Reading())
    assert [path.stat().st_mtime_ns for path in kept] == times  # not done again
    assert len(list(out.rglob("*.jsonl.zst.*"))) == 2 * 40
    assert not journal.exists()
    assert list(check_tokens(out, str(source), tokenizer)) == []
    streamed = read_run(build_manifest(str(source)), tokenizer, CONFIG, steps=3)
    assert read_run(folder, tokenizer, CONFIG, steps=3).samples == streamed.samples


def test_restored_shards_are_done_again_and_removed_copies_forgotten(tokenizer, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write_corpus(source, num_shards=3, documents_per_shard=10)
    shutil.copyfile(source / "chunk1/s0.jsonl.zst", source / "chunk1/s2.jsonl.zst")
    shard = source / "chunk1/s1.jsonl.zst"
    good = shard.read_bytes()
    shard.write_bytes(good[:-5] + b"\0" * 5)
    folder = prepare_tokens(str(source), tokenizer, out, 1, FAULTY)
    assert folder.records["chunk1/s1.jsonl.zst"].was_bad() == "shards_damaged"
    assert folder.manifest.duplicates == ("chunk1/s2.jsonl.zst",)
    shard.write_bytes(good)
    (source / "chunk1/s2.jsonl.zst").unlink()
    of_first = out / "chunk1/s0.jsonl.zst.tokens"
    written = of_first.stat().st_mtime_ns
    folder = prepare_tokens(str(source), tokenizer, out, 2, FAULTY)
    assert folder.records["chunk1/s1.jsonl.zst"].documents == 10
    assert folder.manifest.duplicates == ()
    assert of_first.stat().st_mtime_ns == written
    assert list(check_tokens(out, str(source), tokenizer)) == []
    BlockStream(folder, tokenizer, replace(CONFIG, reading=replace(FAULTY, on_bad_shard="fail")), 0, 1)


def test_a_full_disk_and_ctrl_c_are_said_in_a_line(tmp_path, monkeypatch, capsys):
    """The system's message names no file if a write fails, and the text is on another disk."""
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


def test_shards_and_tokens_have_folders_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A shared folder would be read as tokens only, and a killed command could not resume in it."""
    write_corpus(tmp_path, num_shards=1, documents_per_shard=3)
    with pytest.raises(DataFault, match=r"--out .* is the folder of the shards"):
        prepare_tokens(str(tmp_path), tokenizer, tmp_path / "chunk1" / "..", 1, Reading())
    assert [path.name for path in tmp_path.rglob("*.*")] == ["s0.jsonl.zst"]


BAD_INPUT = {
    "tokens --data {here}/none --tokenizer {model} --out {here}/out": "--data: data folder ",
    "tokens --data {here} --tokenizer {here}/none --out {here}/out": "--tokenizer: tokenizer file ",
    "tokens --data {here} --tokenizer {model} --out {here}/out": "--data {here}: no document in its 1 shards; give",
    "tokens --data {here} --tokenizer {model} --out /proc/none": "--out /proc/none: [Errno 2] No such file",
    "tokens --data {here} --tokenizer {model} --out {model}": "--out {model}: a file; give a folder for the tokens",
    "tokens --data {here} --out {here}/out": "",
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
