"""Tests that a refused start gives the reason, exits with code 2 and leaves no trace. test_run_folders.py tests refused
starts on two ranks, with W&B."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from gsa_train import train
from gsa_train.process.exit_codes import REFUSED
from gsa_train.reliability.stop_signals import StopRequest
from helpers.damage import cut
from helpers.run_contents import contents
from helpers.runs import CONFIG, REPOSITORY, Run
from helpers.single_rank import single_rank

pytestmark = pytest.mark.slow

Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    # The groups are this process's, for all tests.
    monkeypatch.setattr(train, "init_parallel", lambda *of_config: single_rank())
    # The watchdog's thread outlives a rejected start.
    monkeypatch.setattr("gsa_train.run.open.HangWatchdog", lambda *limits: _NoWatchdog())
    for method in ("watch", "listen"):  # signals are pytest's
        monkeypatch.setattr(StopRequest, method, lambda request: None)
    monkeypatch.chdir(REPOSITORY)

    def start(run_dir: Path, *overrides: str, name: str = "run") -> str:
        arguments = ["--config", CONFIG, f"run.dir={run_dir}", f"run.name={name}", *overrides]
        monkeypatch.setattr("sys.argv", ["pretrain.py", *arguments])
        assert runpy.run_path("launch/pretrain.py")["main"]() == REFUSED
        return capsys.readouterr().err

    return start


class _NoWatchdog:
    def heartbeat(self, step: int, place: str) -> None:
        pass


def test_a_refused_new_run_leaves_no_trace(old_run: Run, refusal: Refusal, tmp_path: Path) -> None:
    short = tmp_path / "validation"
    short.mkdir()
    (short / "short.jsonl").write_text('{"text": "hi"}\n')
    goes_on = "checkpoint.initial_state=continue"
    warm_up = f"checkpoint.initial_weights={old_run.checkpoints / 'step_00000005'}"
    for overrides, expected in (
        (
            [f"data.validation_dir={short}"],
            f"validation_dir = {short}: split '{short}' is shorter than one block",
        ),
        (
            [goes_on, warm_up, "phases.0.train=all", "phases.0.attention=sparse"],
            "phases.0.train = all here, indexer in the checkpoint; set it so, or",
        ),
        ([goes_on, warm_up, "data.seed=3"], "set checkpoint.initial_state=fresh."),
    ):
        assert expected in refusal(tmp_path, *overrides, name="new")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("fault", "override", "expected"),
    [
        ("incomplete", "gsa.indexer_dim=16", "step_00000015: no complete checkpoint there"),
        ("damaged", "gsa.indexer_dim=16", "step_00000015 is damaged: __0_0.distcp has"),
        ("", "gsa.indexer_dim=32", "gsa.indexer_dim = 32 here, 16 in the checkpoint"),
        ("", "phases.0.steps=12", "began at step 10; in the config phase 1 is sparse and begins at step 12"),
        ("", "phases.1.train=base", "phases.1.train = base, which its optimizer does not fit"),
        ("", "data.seed=3", "cannot go on with this data"),
        ("", "gsa.attention_impl=triton", "gsa.attention_impl = triton: there is no CUDA device"),
    ],
    ids=["incomplete", "damaged", "another model", "other steps", "other weights", "other data", "no device"],
)
def test_a_refused_resume_leaves_no_trace(old_run, refusal, fault, override, expected):
    checkpoint = old_run.checkpoints / "step_00000015"
    if fault == "incomplete":
        (checkpoint / "metadata.json").unlink()
    elif fault == "damaged":
        cut(checkpoint / "__0_0.distcp")
    options = ("--resume-from", str(checkpoint), override)
    before = contents(old_run.folder)
    for name in ("new", old_run.folder.name):
        assert expected in refusal(old_run.folder.parent, *options, name=name)
    assert not (old_run.folder.parent / "new").exists()
    assert contents(old_run.folder) == before
