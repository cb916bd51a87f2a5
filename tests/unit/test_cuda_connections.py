"""CUDA_DEVICE_MAX_CONNECTIONS: when it is set, when it is left alone, and that it is before CUDA could start."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gsa_train import cuda_connections
from gsa_train.config import ParallelConfig
from gsa_train.cuda_connections import VARIABLE, compute_capability, prepare_connections
from helpers.runs import CONFIG, REPOSITORY

HOPPER, BLACKWELL = 9, 10
TP, CP = ParallelConfig(tensor=2), ParallelConfig(context=2)
ZERO_3 = ParallelConfig(tensor=2, strategy="deepspeed", zero_stage=3)


def prepare(
    layouts: list[ParallelConfig], capability: int | None = HOPPER, **environment: str
) -> dict[str, str]:
    prepare_connections(layouts, environment, capability)
    return environment


def test_tensor_parallelism_sets_it_once_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environment = prepare([ParallelConfig(), TP])
    assert environment == {VARIABLE: "1"}
    prepare([TP], **environment)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "parallel.tensor=2" in caplog.text
    assert prepare([TP], RANK="1") == {VARIABLE: "1", "RANK": "1"}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("layouts", "capability", "environment"),
    [
        ([], HOPPER, {}),
        ([ParallelConfig()], HOPPER, {}),
        ([CP], HOPPER, {}),
        ([ParallelConfig(pipeline=2)], HOPPER, {}),
        ([ZERO_3], HOPPER, {}),
        ([TP], BLACKWELL, {}),
        ([TP], None, {}),
        ([TP], HOPPER, {"CUDA_VISIBLE_DEVICES": ""}),
        ([TP], BLACKWELL, {VARIABLE: "8"}),
        ([CP], HOPPER, {VARIABLE: "8"}),
        ([TP], HOPPER, {VARIABLE: "1"}),
    ],
)
def test_otherwise_it_is_left_alone(
    caplog: pytest.LogCaptureFixture,
    layouts: list[ParallelConfig],
    capability: int | None,
    environment: dict[str, str],
) -> None:
    caplog.set_level(logging.INFO)
    assert prepare(layouts, capability, **environment) == environment
    assert not caplog.records


def test_another_value_of_the_users_stays_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert prepare([TP], **{VARIABLE: "8"}) == {VARIABLE: "8"}
    prepare([TP], **{VARIABLE: "8"}, RANK="3")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{VARIABLE}=8: with parallel.tensor=2" in record.getMessage()


def test_no_driver_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert compute_capability() is None


def test_the_launcher_sets_it_before_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(cuda_connections, "compute_capability", lambda: HOPPER)
    train = SimpleNamespace(train=lambda *unused: seen.append(os.environ.get(VARIABLE)))
    monkeypatch.setitem(sys.modules, "gsa_train.train", train)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back in the end
    for layout in ("parallel.tensor=2", "parallel.context=2"):
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr(sys, "argv", ["pretrain.py", "--config", CONFIG, layout, f"run.dir={tmp_path}"])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(REPOSITORY / "launch" / "pretrain.py"), run_name="__main__")
    assert seen == ["1", None]


def test_the_module_loads_no_torch() -> None:
    """Whose import may start CUDA."""
    program = "import sys, gsa_train.cuda_connections; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False).returncode == 0
