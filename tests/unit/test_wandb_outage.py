"""Tests W&B's server hanging, refusing, failing, or leaving and returning: training continues, and records remain."""

import os
import subprocess
import sys
import threading
from pathlib import Path

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


def said(caplog):
    return [each.getMessage() for each in caplog.records if each.name.startswith("gsa_train")]


def sync_as(line):
    """Send what a line of the log says, as a user would type it in a shell."""
    command = line[line.index("for start in ") :]
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    sent = subprocess.run(command, shell=True, env=environ, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr


@pytest.mark.parametrize("does", [pytest.param("hang", marks=pytest.mark.nightly), 500])
def test_a_start_without_a_server_keeps_its_records_for_sync(does, server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(wandb_outage, "INIT_SECONDS", 2.0)
    server.does = does
    sink = open_wandb(LOGGING, tmp_path, "test", {}, "abc")
    sink.log(STEP, {"train/loss": 0.5})
    sink.close(0)
    (line,) = said(caplog)
    assert line.startswith("W&B cannot be used: ")
    assert "\n" not in line
    assert sink.place() == ()
    server.does = "answer"
    sync_as(line)
    assert server.steps("abc") == [1]


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
