"""Tests when CUDA_DEVICE_MAX_CONNECTIONS is set, and that this is before torch is imported."""

import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from gsa_train.config import ParallelConfig
from gsa_train.distributed.cuda_connections import VARIABLE, compute_capability, prepare_connections
from helpers.runs import CONFIG, REPOSITORY

HOPPER, BLACKWELL = 9, 10
TP, CP = ParallelConfig(tensor=2), ParallelConfig(context=2)
ZERO_3 = ParallelConfig(tensor=2, strategy="deepspeed", zero_stage=3)


def prepare(layouts: list[ParallelConfig], capability: int | None = HOPPER, **environment: str) -> Any:
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
        ([ParallelConfig()], HOPPER, {}),
        ([CP], HOPPER, {}),
        ([ZERO_3], HOPPER, {}),
        ([TP], BLACKWELL, {}),
        ([TP], None, {}),
        ([TP], HOPPER, {"CUDA_VISIBLE_DEVICES": ""}),
        ([TP], BLACKWELL, {VARIABLE: "8"}),
        ([TP], HOPPER, {VARIABLE: "1"}),
    ],
)
def test_otherwise_it_is_left_alone(caplog, layouts, capability, environment):
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


FIRST_TORCH = """
import os, runpy, sys
from gsa_train.distributed import cuda_connections

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.write(1, ("\\n" + os.environ.get(cuda_connections.VARIABLE, "not set")).encode())
            os._exit(0)

sys.meta_path.insert(0, Finder())
cuda_connections.compute_capability = lambda: 9
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit("torch was not imported")
"""


@pytest.mark.parametrize(
    ("command", "with_tensor", "without"),
    [
        (["launch/pretrain.py", "--config", CONFIG], "parallel.tensor=2", "parallel.context=2"),
        (["benchmarks/bench_training.py", "--config", CONFIG, "--layouts"], "tp=1;tp=2", "tp=1;pp=2"),
    ],
)
def test_launchers_set_it_before_torch_is_imported(command, with_tensor, without, tmp_path):
    """An import may query CUDA, and then it is too late."""
    hidden = (VARIABLE, "CUDA_VISIBLE_DEVICES")
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    environment |= {"RANK": "0", "WORLD_SIZE": "2"}
    for layout, expected in ((with_tensor, "1"), (without, "not set")):
        arguments = [*command, layout]
        if command[0] == "launch/pretrain.py":
            arguments.append(f"run.dir={tmp_path}")
        words = [sys.executable, "-c", FIRST_TORCH, *arguments]
        outputs = {"capture_output": True, "text": True, "check": False}
        done = subprocess.run(words, cwd=REPOSITORY, env=environment, **outputs)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == expected
