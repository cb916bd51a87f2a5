"""Tests W&B without a network: what is sent and what never is."""

import math
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import wandb

from gsa_train.config import LoggingConfig
from gsa_train.metrics import wandb_outage
from gsa_train.metrics.alerts import IN_A_ROW, INTERVAL_SECONDS, SLOW_HISTORY, Alerts
from gsa_train.metrics.panels import BEST
from gsa_train.metrics.record_format import read_records
from gsa_train.metrics.sinks import Sinks, open_sinks
from gsa_train.metrics.wandb_sink import (
    WandbRefused,
    WandbSink,
    define_metrics,
    open_wandb,
    wandb_mode,
    without_credentials,
)

API_KEY = "0123456789abcdef" * 2 + "fedcba98"


def step_record(step, **values):
    return {"step": step, "phase": "sparse", "loss": 1.0 / step, "tokens": 64 * step, **values}


def event(name, step=7, **values):
    return {"event": name, "step": step, "phase": "sparse", **values}


def test_an_offline_run_keeps_its_id_after_a_resume_and_no_secret(tmp_path, monkeypatch, capfd):
    password = "hunter2"
    address = f"s3://key:{password}@bucket/shards"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", f"data.train_dir={address}"])
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)
    config = {"run": {"name": "test"}, "data": {"train_dir": address}, "phases": [{"name": "sparse"}]}
    logging = LoggingConfig(tensorboard=False, wandb="offline", wandb_project="unit")

    places = []

    def open_run(resume_step, wandb_run_id):
        wandb_sink = open_wandb(logging, tmp_path, "test", config, wandb_run_id)
        places.append(wandb_sink.place())
        return open_sinks(logging, tmp_path, ["sparse"], resume_step, wandb_sink)

    with closing(open_run(None, None)) as sinks:
        run_id = sinks.wandb_run_id
        sinks.log(step_record(1, loss=math.nan, layer_recall=[0.5]))
        sinks.log(step_record(2))
    assert list(tmp_path.glob(f"wandb/offline-run-*-{run_id}"))
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").write_text("{}")
    with closing(open_run(1, run_id)) as sinks:
        assert sinks.wandb_run_id == run_id
        sinks.log(step_record(2))  # runs again: not rejected, unlike a repeated W&B step
        sinks.log(event("checkpoint", 2, checkpoint_bytes=5))
        sinks.log(event("spike", 2, signal="loss", value=math.inf, threshold=2.0, action="log"))
        sinks.finish({"steps": 2})

    assert places == [(f"kept offline; to send it: {wandb_outage.sync_command(tmp_path, run_id)}",)] * 2
    folders = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}*"))
    assert len(folders) == 2
    reference = f"file://{tmp_path}/checkpoints/step_00000002/manifest.json".encode()
    in_both = (b"train/loss", b"s3://bucket/shards", b"tokens", b"config.yaml", b"train/phase_index")
    for folder, words in zip(folders, (in_both, (*in_both, reference, b"Spike")), strict=True):
        path = folder / f"run-{run_id}.wandb"
        deadline = time.monotonic() + 60  # W&B's process writes the file some time after it reports success.
        while missing := [word for word in words if word not in path.read_bytes()]:
            assert time.monotonic() < deadline, missing
            time.sleep(0.05)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret.encode() in content for content in written for secret in (password, API_KEY))
    assert capfd.readouterr() == ("", "")


def test_an_online_run_is_where_its_address_says_and_a_failed_one_nowhere(tmp_path):
    (tmp_path / "log").touch()
    settings = Mock(log_internal=str(tmp_path / "log"), sync_file=str(tmp_path / "run-abc.wandb"))
    run = Mock(id="abc", offline=False, url="https://wandb.ai/team/project/runs/abc", settings=settings)
    sink = WandbSink(run, tmp_path, Alerts(1.5))
    assert sink.place() == ("https://wandb.ai/team/project/runs/abc",)
    sink.close(0)
    assert sink.place() == ()
    assert (tmp_path / "run-abc.wandb.synced").exists()  # `wandb sync` has nothing to send


@pytest.mark.parametrize(("asked", "choice"), [("", "offline"), ("dryrun", "auto")])
def test_neither_mode_nor_id_in_the_environment_refuse_or_name_a_new_run(
    tmp_path, monkeypatch, asked, choice
):
    monkeypatch.setenv("WANDB_MODE", asked)
    monkeypatch.setenv("WANDB_RUN_ID", "left-there")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    logging = LoggingConfig(tensorboard=False, wandb=choice, wandb_project="unit")
    sink = open_wandb(logging, tmp_path, "test", {}, None, copied_from="of-another")
    opened = sink._run
    try:
        assert opened.offline
        assert sink.id == opened.id != "left-there"
        assert opened.config["continues_wandb_run"] == "of-another"
    finally:
        sink.close(0)


def test_group_tags_and_owner_come_from_the_config(tmp_path, monkeypatch):
    init = Mock(side_effect=wandb.Error("enough"))
    monkeypatch.setattr(wandb, "init", init)
    named = {"wandb_entity": "team", "wandb_group": "ablation", "wandb_tags": ["1.7b", "adaptive"]}
    for fields, expected in ((named, ("team", "ablation", ["1.7b", "adaptive"])), ({}, (None, None, []))):
        said = r"logging\.wandb = offline: .*enough.*logging\.wandb=disabled"
        with pytest.raises(WandbRefused, match=said):
            open_wandb(LoggingConfig(wandb="offline", **fields), tmp_path, "x", {}, "id1")
        sent = init.call_args.kwargs
        assert (sent["entity"], sent["group"], sent["tags"]) == expected
        assert (sent["id"], sent["resume"]) == ("id1", "allow")


def test_tokens_are_the_axis_and_the_best_value_is_kept():
    run = Mock()
    define_metrics(run)
    run.define_metric.assert_any_call("*", step_metric="tokens")
    run.define_metric.assert_any_call("validation/loss", step_metric="tokens", summary="min,last")
    run.define_metric.assert_any_call("gsa/recall", step_metric="tokens", summary="max,last")
    assert run.define_metric.call_count == 3 + len(BEST)


def test_records_phases_and_alerts_are_sent(tmp_path):
    run = Mock(id="abc")
    wandb_sink = WandbSink(run, tmp_path, Alerts(1.5))
    sinks = Sinks(tmp_path, None, wandb_sink, ["warm-up", "sparse"])
    sinks.log(step_record(1))
    sinks.log(event("checkpoint", 9))  # its folder is gone
    for step in (5, 6):
        sinks.log(event("spike", step, signal="loss", value=9.0, threshold=7.0, action="skip"))
    first = {"train/loss": 1.0, "train/tokens": 64, "train/phase_index": 1}
    assert run.log.call_args_list[0] == call({**first, "step": 1, "tokens": 64, "phase": "sparse"})
    (alert,) = run.alert.call_args_list
    assert alert.kwargs["title"] == "Spike"
    assert alert.kwargs["text"] == "step 5, signal loss, value 9, threshold 7, action skip"
    run.log_artifact.assert_not_called()
    sinks.close(3)
    run.finish.assert_called_once_with(exit_code=3)


def test_a_run_outlives_its_wandb_service(tmp_path, caplog):
    service = Mock(id="abc")
    service.log.side_effect = ConnectionResetError("connection lost")
    sinks = Sinks(tmp_path, None, WandbSink(service, tmp_path, Alerts(1.5)))
    for step in (1, 2):
        sinks.log(step_record(step))
    sinks.close()
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    assert caplog.messages == ["W&B gets no more records in this start, its service failed: connection lost"]
    service.finish.assert_not_called()


@pytest.mark.parametrize(
    ("choice", "environment", "mode"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ("disabled", {"WANDB_API_KEY": "x"}, "disabled"),
        ("auto", {"WANDB_MODE": "dryrun"}, "offline"),
        *(("auto", {"WANDB_MODE": mode}, mode) for mode in ("online", "shared", "disabled")),
        ("offline", {"WANDB_MODE": "onlin"}, "offline"),
        ("auto", {"NETRC": "keys"}, "online"),
        ("auto", {"NETRC": "keys", "WANDB_BASE_URL": "http://localhost:8080/"}, "online"),
        ("auto", {"NETRC": "keys", "WANDB_BASE_URL": "https://wandb.example.org"}, "offline"),
        ("auto", {"NETRC": "nonsense"}, "offline"),
    ],
)
def test_auto_is_online_only_with_a_key(tmp_path, monkeypatch, choice, environment, mode):
    monkeypatch.chdir(tmp_path)
    keys = [f"machine {host} login user password x" for host in ("api.wandb.ai", "localhost:8080")]
    Path("keys").write_text("\n".join(keys))
    Path("nonsense").write_text("machine api.wandb.ai nonsense x")
    warns = pytest.warns(UserWarning, match="cannot read its API key")
    with warns if environment.get("NETRC") == "nonsense" else nullcontext():
        assert wandb_mode(choice, {"NETRC": "none"} | environment) == mode


def test_a_wrong_mode_in_the_environment_is_refused():
    with pytest.raises(
        WandbRefused, match="WANDB_MODE = onlin in the environment: not one of online, offline, "
    ):
        wandb_mode("auto", {"WANDB_MODE": "onlin"})


def test_credentials_are_cut_out_of_addresses():
    config = {"data": [{"dir": "filecache::https://u:p@host/a"}, "s3://k@bucket"], "seed": 1, "at": "a@b"}
    without = {"data": [{"dir": "filecache::https://host/a"}, "s3://bucket"], "seed": 1, "at": "a@b"}
    assert without_credentials(config) == without


# --- alerts ----------------------------------------------------------------------------------------------


def test_alerts_of_one_kind_wait():
    now = [0.0]
    alerts = Alerts(1.5, clock=lambda: now[0])
    assert [each.title for each in alerts.of(event("spike"))] == ["Spike"]
    assert alerts.of(event("spike")) == alerts.of(event("spike")) == []
    (failed,) = alerts.of(event("checkpoint_failed", checkpoint_error="full"))
    assert failed.level == "ERROR"
    now[0] = INTERVAL_SECONDS
    (again,) = alerts.of(event("spike", 99))
    assert again.text == "step 99 (and 2 more since the last alert)"
    for quiet in ("checkpoint", "validation", "skipped_batches", "warning"):
        assert alerts.of(event(quiet)) == []


def test_stalls_are_said():
    def titles(*records, ratio=1.5):
        alerts = Alerts(ratio)
        return [each.title for record in records for each in alerts.of(record)]

    usual = [step_record(step, step_seconds=1.0) for step in range(1, SLOW_HISTORY + 1)]
    assert titles(*usual, step_record(99, step_seconds=3.5)) == ["Slow steps"]
    assert titles(*usual, step_record(99, step_seconds=2.5)) == []
    assert titles(*usual[1:], step_record(99, step_seconds=3.5)) == []
    assert titles(*usual, step_record(99, step_seconds=3.5) | {"phase": "next"}) == []
    hungry = [step_record(step, data_wait=0.5) for step in range(1, IN_A_ROW + 1)]
    assert titles(*hungry) == ["Waiting for data"]
    assert titles(*hungry[1:], step_record(98, data_wait=0.1), hungry[0]) == []
    slow = [step_record(step, slowest_rank=3, slowest_rank_ratio=1.6) for step in range(1, IN_A_ROW + 1)]
    assert titles(*slow) == ["Slow rank"]
    assert titles(*slow, ratio=1.7) == []
