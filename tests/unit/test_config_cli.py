"""Tests the command line of pretrain.py."""

import signal
import socket

import pytest

from gsa_train import cli
from gsa_train.arguments import DEVICE
from gsa_train.cli import parse_arguments, refuse
from gsa_train.reliability.stop_signals import StopRequest


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


def test_options_and_overrides_in_any_order(tmp_path):
    words = ["a.b=1", "--config", "c.yaml", "x[0].y=2", "--resume-from", str(tmp_path), "z="]
    arguments = parse_arguments(words)
    assert arguments.config_path == "c.yaml"
    assert arguments.overrides == ("a.b=1", "x[0].y=2", "z=")
    assert arguments.resume_from == str(tmp_path)
    assert (arguments.no_resume, arguments.dry_run, arguments.world_size) == (False, False, 1)
    assert (arguments.device, arguments.mfu, arguments.accept_new_data) == (DEVICE, None, False)
    assert parse_arguments(["--config=c.yaml", "--accept-new-data"]).accept_new_data
    assert parse_arguments(["--config=c.yaml", "--no-resume"]).no_resume
    arguments = parse_arguments(["--config", "c", "--dry-run", "--mfu", "0.4", "--device", "NVIDIA B200"])
    assert (arguments.device, arguments.mfu) == ("NVIDIA B200", 0.4)


def test_world_size(monkeypatch):
    assert parse_arguments(["--config", "c", "--dry-run", "--world-size", "64"]).world_size == 64
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse_arguments(["--config", "c", "--dry-run"]).world_size == 4
    assert parse_arguments(["--config", "c", "--dry-run", "--world-size", "8"]).world_size == 8
    monkeypatch.setenv("RANK", "3")
    assert parse_arguments(["--config", "c"]).world_size == 4


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ([], "--config"),
        (["--config", "c", "--world-size", "8"], "--dry-run"),
        (["--config", "c", "--dry-run", "--world-size", "0"], "below 1"),
        (["--config", "c", "--resume-from", "/no/such/folder"], "no such folder"),
        (["--config", "c", "--resume-from", ".", "--no-resume"], "not allowed with"),
        (["--config", "c", "--accept-new-data", "--no-resume"], "--no-resume, which starts from scratch"),
        (["--config", "c", "--resume", "."], "did you mean --resume-from or --resume-after-stop?"),
        (["--config", "c", "--worldsize=2"], "--worldsize=2: no such option; did you mean --world-size?"),
        (["--config", "c", "--tp", "2"], "fields of the config have no dashes; write parallel.tensor=VALUE"),
        (
            ["--config", "c", "--hlpp", "2"],
            "--hlpp: no such option; --help lists them; fields of the config are",
        ),
        (["--config", "c", "--seed", "3"], "write run.seed=VALUE or data.seed=VALUE"),
        (["--config", "c", "--model.num_layers=3"], "write model.num_layers=3"),
        (["--config", "c", "--mfu", "0.4"], "--mfu needs --dry-run"),
        (["--config", "c", "--dry-run", "--mfu", "40"], "at most 1"),
        (["--config", "c", "--dry-run", "--device", "H200"], "give one of NVIDIA A100-SXM4-40GB, "),
    ],
)
def test_wrong_use_exits_with_2(argv, fragment, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv)
    assert caught.value.code == 2
    assert fragment in capsys.readouterr().err


@pytest.mark.parametrize("world_size", ["eight", "2"])
def test_a_broken_environment_exits_with_2(monkeypatch, capsys, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size)  # without RANK
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--config", "c"])
    assert caught.value.code == 2
    assert f"WORLD_SIZE={world_size}" in capsys.readouterr().err


def test_a_refusal_is_said_by_rank_0_else_by_who_is_let_live(monkeypatch, capsys):
    """A rank that torchrun's signal ends prints nothing, because rank 0 has printed the error."""
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    assert refuse("no tokenizer") == 2
    assert capsys.readouterr().err == "no tokenizer\n"
    assert slept == []

    request = StopRequest()
    monkeypatch.setenv("RANK", "3")
    assert refuse("no tokenizer", 13, request) == 13
    assert capsys.readouterr().err == f"rank 3 on {socket.gethostname()}: no tokenizer\n"
    assert slept == [cli.HEAD_START_SECONDS]
    request._note(signal.SIGTERM, None)
    assert refuse("no tokenizer", request=request) == 2
    assert capsys.readouterr().err == ""
