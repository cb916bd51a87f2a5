"""Tests the checks of folders and files that a config names."""

import logging
import math
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gsa_train.config import DataConfig, file_checks
from gsa_train.config.file_checks import check_data


def test_data_files(tmp_path):
    empty, full, model = tmp_path / "empty", tmp_path / "full", tmp_path / "tokenizer.model"
    empty.mkdir()
    full.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jsonl.zst").touch()
    (full / "chunk1").symlink_to(tmp_path / "elsewhere")
    model.touch()
    assert check_data(DataConfig(train_dir=str(full), validation_dir=str(full), tokenizer=str(model))) == []
    (tmp_path / "tokens" / "wiki").mkdir(parents=True)
    (tmp_path / "tokens" / "wiki" / "text_document.idx").touch()
    assert check_data(DataConfig(str(tmp_path / "tokens"), "s3://a", tokenizer="s3://a")) == []
    assert check_data(DataConfig(train_dir="s3://a", validation_dir="gs://b", tokenizer="hf://c")) == []
    found = check_data(DataConfig(str(empty), str(tmp_path / "no"), tokenizer=str(empty)))
    said = ["train_dir = {}: holds no *.jsonl", "validation_dir = {}: no such folder"]
    said.append("tokenizer = {}: no such file")
    for line, start, place in zip(found, said, (empty, tmp_path / "no", empty), strict=True):
        assert line.startswith("data." + start.format(place))
    (line,) = check_data(DataConfig("~/text", "s3://a", tokenizer="hf://a"))
    assert line.startswith("data.train_dir = ~/text: no such folder, for only a shell fills in ~ and $; ")
    sets = {"good": full, "hollow": empty, "gone": tmp_path / "no", "far": "s3://a"}
    sets = {name: str(place) for name, place in sets.items()}
    data = DataConfig(str(full), validation_dir="not read", validation_sets=sets, tokenizer="hf://a")
    hollow, gone = check_data(data)
    assert hollow.startswith(f"data.validation_sets.hollow = {empty}: holds no ")
    assert gone.startswith(f"data.validation_sets.gone = {tmp_path / 'no'}: no such folder")


def test_a_share_that_does_not_answer_is_waited_for_and_then_named(tmp_path, monkeypatch, caplog):
    """The share's server is gone, so calls never end. The clock advances only during waits."""
    good, dead, model = tmp_path / "good", tmp_path / "dead", tmp_path / "tokenizer.model"
    for folder in (good, dead):
        folder.mkdir()
        (folder / "a.jsonl").touch()
    model.touch()
    is_dir, server_is_back = Path.is_dir, threading.Event()
    now, back_at = 0.0, math.inf

    def patient(path):
        if path == dead:
            server_is_back.wait(300)
        return is_dir(path)

    def join(question, timeout):
        nonlocal now
        if question.path == str(dead) and not server_is_back.is_set():
            now += timeout
            if now < back_at:
                return
            server_is_back.set()
        threading.Thread.join(question)

    monkeypatch.setattr(Path, "is_dir", patient)
    monkeypatch.setattr(file_checks._Question, "join", join)
    monkeypatch.setattr(file_checks, "time", SimpleNamespace(monotonic=lambda: now))
    limits = {"read_timeout_seconds": 0.1, "read_retries": 1}  # 0.7 s together
    data = DataConfig(str(dead), str(good), tokenizer=str(model), **limits)
    (problem,) = check_data(data)
    assert problem.startswith(f"data.train_dir = {dead}: no answer for 0.7 s; see that it is mounted")

    back_at = now + 0.4
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert check_data(data) == []
    assert caplog.messages == [f"data.train_dir = {dead}: no answer for 0 s"]


def test_a_folder_that_may_not_be_read_is_a_problem(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "t.model").touch()
    monkeypatch.setattr(Path, "is_dir", refused)
    (problem,) = check_data(DataConfig(str(tmp_path), "s3://a", tokenizer=str(tmp_path / "t.model")))
    assert problem.startswith(f"data.train_dir = {tmp_path}: cannot be read ([Errno 13] Permission denied); ")


@pytest.mark.parametrize("seconds", [-1.0, 0.0, float("inf"), float("nan"), 1e300])
def test_without_a_usable_limit_no_file_is_looked_for(tmp_path, seconds):
    assert check_data(DataConfig(str(tmp_path / "no"), read_timeout_seconds=seconds)) == []
