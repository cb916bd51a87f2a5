"""Tests W&B's server hanging, refusing, failing, or leaving and returning: training continues, and records remain."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import wandb

from gsa_train.config import LoggingConfig
from gsa_train.metrics import wandb_outage
from gsa_train.metrics.wandb_sink import WandbRefused, open_wandb
from helpers.fake_wandb import FakeWandb

LOGGING = LoggingConfig(tensorboard=False, wandb="online", wandb_project="unit")
STEP = {"step": 1, "phase": "sparse", "loss": 0.5}


@pytest.fixture
def server(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 2 + "fedcba98")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    wandb.teardown()  # the service of earlier tests knows another address
    monkeypatch.setenv("WANDB_BASE_URL", fake.url)
    yield fake
    fake.close()
    wandb.teardown()


def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def said(caplog):
    return [each.getMessage() for each in caplog.records if each.name.startswith("gsa_train")]


def log_start(folder, steps, server, then="answer"):
    """Start the run `abc`, log these steps, and change how the server answers at its end."""
    wandb.teardown()  # the service ends with each start
    sink = open_wandb(LOGGING, folder, "test", {}, "abc", has_begun=True)
    for step in steps:
        sink.log({**STEP, "step": step}, {"train/loss": 0.5})
    if then != "answer":
        server.does = then
    sink.close(0)


def cut_last_record(folder):
    wandb.teardown()  # its service has written everything when it ends
    newest = max(folder.glob("wandb/run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(newest, newest.stat().st_size - 10)


def sync_as(line):
    """Send what a line of the log says, as a user would type it in a shell."""
    command = line[line.index("for start in ") :]
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    sent = subprocess.run(command, shell=True, env=environ, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr


@pytest.mark.parametrize("does", [pytest.param("hang", marks=pytest.mark.nightly), 500])
def test_a_start_without_a_server_keeps_its_records_for_sync(does, server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wandb_outage, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(wandb_outage, "INIT_SECONDS", 2.0)
    server.does = does
    sink = open_wandb(LOGGING, tmp_path, "test", {}, "abc")
    sink.log(STEP, {"train/loss": 0.5})
    sink.close(0)
    (line,) = said(caplog)
    assert line.startswith(f"W&B at {server.url} cannot be used: ")
    assert "\n" not in line
    assert sink.place() == ()
    server.does = "answer"
    sync_as(line)
    assert server.steps("abc") == [1]


def test_a_server_without_address_or_port_is_away_and_a_look_up_has_a_limit(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    refused = wandb_outage.why_no_answer(f"http://127.0.0.1:{closed_port()}", 10.0)
    assert "refused" in refused.lower()
    unknown = socket.gaierror(-2, "Name not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    assert "Name not known" in wandb_outage.why_no_answer("http://no-such-host.invalid", 10.0)
    ended = threading.Event()

    def look_up(*_, **__):
        ended.wait()
        raise unknown  # the caller knows this error; another one would end a later test

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert wandb_outage.why_no_answer("http://example.org", 0.1) == "no answer in 0.1 s"
    ended.set()


def test_a_wrong_key_refuses_a_new_run_and_no_restart(server, tmp_path, caplog):
    server.does = 401
    with pytest.raises(WandbRefused, match="401"):
        open_wandb(LOGGING, tmp_path, "test", {}, "abc")
    wandb.teardown()
    sink = open_wandb(LOGGING, tmp_path, "test", {}, "abc", has_begun=True)
    assert sink.id == "abc"
    assert "offline" in sink.place()[0]
    assert "401" in said(caplog)[-1]
    sink.close(0)


def test_a_server_away_in_the_middle_gets_all_when_it_is_back(server, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wandb_outage, "FINISH_SECONDS", 60.0)
    sink = open_wandb(LOGGING, tmp_path, "test", {}, "abc")
    server.does = 503
    sink.log(STEP, {"train/in_the_outage": 0.5})
    threading.Timer(0.5, setattr, (server, "does", "answer")).start()
    sink.close(0)
    assert server.got("train/in_the_outage")
    assert not [line for line in said(caplog) if "sync" in line]


@pytest.mark.nightly
def test_a_server_that_hangs_ends_neither_steps_nor_the_run(server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wandb_outage, "FINISH_SECONDS", 2.0)
    sink = open_wandb(LOGGING, tmp_path, "test", {}, "abc")
    monkeypatch.setattr(wandb_outage, "ANSWER_SECONDS", 1.0)
    server.does = "hang"
    folder = tmp_path / "checkpoints" / "step_00000001"
    folder.mkdir(parents=True)
    for _ in range(2):
        sink.log(STEP, {"train/late": 0.5})
        sink.log({"event": "checkpoint", "step": 1, "phase": "sparse"}, {})
    assert not sink._on_their_way[-1].done()  # its thread waits for the server, unlike this one
    sink.close(0)
    assert "W&B has not taken the last records in 2 s" in said(caplog)[-1]
    server.does = "answer"
    sync_as(said(caplog)[-1])
    assert server.got("train/late")


@pytest.mark.nightly
def test_a_service_that_answers_no_more_does_not_hold_the_end(server, tmp_path, caplog, monkeypatch):
    """W&B's own service sometimes hangs with the server, and ignores its own limit."""
    sink = open_wandb(LOGGING, tmp_path, "test", {}, "abc")
    sink.log(STEP, {"train/loss": 0.5})
    for name, seconds in (("FINISH_SECONDS", 1.0), ("ANSWER_SECONDS", 0.5), ("SERVICE_END_SECONDS", 1.0)):
        monkeypatch.setattr(wandb_outage, name, seconds)
    (service,) = (each for each in psutil.Process().children() if each.name() == wandb_outage.SERVICE)
    service.suspend()
    sink.close(0)
    assert "W&B has not taken the last records in 1 s" in said(caplog)[-1]
    assert psutil.wait_procs([service], 100)[1] == []  # killed; when it is gone depends on the machine


def test_starts_within_one_second_are_named_in_their_order(tmp_path, caplog):
    """W&B distinguishes their folders by a number after the id; a start without a server has its own name."""
    names = ["run-20261126_162634-abc-9", "run-20261126_162635-abc-1", "offline-run-20261126_162635-abc"]
    for place, name in enumerate([*names, "run-20261126_162636-abc"]):
        folder = tmp_path / "wandb" / name
        folder.mkdir(parents=True)
        (folder / "run-abc.wandb").touch()
        os.utime(folder / "run-abc.wandb", ns=(place, place))
    wandb_outage.warn_of_unsent(tmp_path, "abc", but=folder)
    (line,) = said(caplog)
    places = [line.index(f"/{name}") for name in names]
    assert places == sorted(places)


def test_a_restart_names_the_starts_that_were_not_sent(server, tmp_path, caplog):
    """The second start is killed while the server fails, and the fourth start is offline."""
    log_start(tmp_path, (1, 2), server)
    assert server.steps("abc") == [1, 2]
    log_start(tmp_path, (3, 4), server, then=403)
    cut_last_record(tmp_path)
    server.does = "answer"
    log_start(tmp_path, (5,), server)
    (line,) = (line for line in said(caplog) if "earlier starts" in line)
    assert line.startswith("W&B may lack records of earlier starts of this run (1);")
    server.refuse()
    log_start(tmp_path, (6,), server)
    server.come_back()
    caplog.clear()
    log_start(tmp_path, (7,), server)
    assert server.steps("abc") == [1, 2, 5, 7]
    (line,) = (line for line in said(caplog) if "earlier starts" in line)
    assert "(2)" in line
    sync_as(line)
    assert server.steps("abc") == [1, 2, 5, 7, 3, 4, 6]
    caplog.clear()
    log_start(tmp_path, (8,), server)
    (line,) = (line for line in said(caplog) if "sync" in line)
    assert "(1)" in line  # the killed one: `wandb sync` marks no incomplete file
