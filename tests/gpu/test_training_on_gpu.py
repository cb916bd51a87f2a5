"""Runs training on CUDA devices over NCCL: `make test-gpu`."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.runs import CONFIG, REPOSITORY, SMALL, Run, kill, start
from helpers.tiers import needs_devices


def test_a_gpu_run_never_loads_the_cpu_backend(tmp_path: Path) -> None:
    program = (
        "import sys; from gsa_train.cli import parse_arguments; from gsa_train.config import load_config\n"
        "from gsa_train.reliability.stop_signals import StopRequest; from gsa_train.train import train\n"
        "arguments = parse_arguments(sys.argv[1:])\n"
        "train(load_config(arguments.config_path, arguments.overrides, 1), arguments, StopRequest())\n"
        "assert 'gsa_train.distributed.cpu_backend' not in sys.modules\n"
        "print('no CPU patch')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--config", CONFIG, *SMALL, f"run.dir={tmp_path}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("no CPU patch\n")


def test_a_resumed_bf16_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    options = (*SMALL, "checkpoint.every_steps=6")
    whole = start(tmp_path, *options, name="whole", real=True).wait()
    first = start(tmp_path, *options, name="resumed", real=True)
    first.wait_until(lambda: len(first.steps()) >= 15)
    kill(first)
    again = start(tmp_path, *options, name="resumed", real=True).wait()
    for key in ("loss", "indexer_kl", "grad_norm"):
        assert again.series(key) == whole.series(key)


LAYOUT = (*SMALL, "train.precision=fp32", "gsa.k_min=128", "gsa.k_base=128")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return start(tmp_path_factory.mktemp("one"), *LAYOUT, real=True).wait()


@needs_devices(2)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ("parallel.tensor=2",)),
        (2, ("parallel.pipeline=2",)),
        (2, ()),
        pytest.param(4, ("parallel.tensor=2", "parallel.pipeline=2"), marks=needs_devices(4)),
        pytest.param(
            4, ("parallel.optimizer_instances=2", "parallel.overlap_grad_reduce=true"), marks=needs_devices(4)
        ),
    ],
)
def test_a_layout_over_nccl_follows_one_rank(tmp_path, one_rank, ranks, layout):
    many = start(tmp_path, *LAYOUT, *layout, ranks=ranks, real=True).wait()
    for key in ("loss", "grad_norm", "indexer_kl"):
        pairs = zip(one_rank.series(key), many.series(key), strict=True)
        worst = max(abs(a - b) / abs(a) for a, b in pairs)
        print(f"{layout or 'data=2'} {key}: largest relative difference {worst:.2e}")
        assert worst <= 1e-5
