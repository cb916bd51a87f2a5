"""Runs training on CUDA devices over NCCL: `make test-gpu`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.runs import CONFIG, REPOSITORY, SMALL, Run, kill, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEDIUM = (
    "model.hidden_size=768",
    "model.num_layers=12",
    "model.num_heads=12",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "model.ffn_hidden_size=2048",
    "gsa.indexer_dim=64",
    "gsa.k_base=512",
    "gsa.k_min=256",
    "gsa.k_max=1024",
    "train.seq_len_tokens=4096",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "phases.0.steps=50",
    "phases.1.steps=150",
    "phases.1.lr=1e-3",
    "phases.1.min_lr=1e-4",
    "evaluate.every_steps=0",
    "evaluate.max_blocks=8",
    "checkpoint.every_steps=1000",
    "logging.wandb=disabled",
)


def needs_devices(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")


@pytest.mark.slow
def test_a_12_layer_model_of_width_768_trains_at_4096_tokens_in_bf16(tmp_path: Path) -> None:
    run = start(tmp_path, *MEDIUM, real=True).wait(seconds=900)
    print(run.output[-6000:])
    losses = run.series("loss")
    assert run.steps()[-1]["step"] == 200
    assert losses[-1] < losses[0] - 2.0
    assert run.steps()[-1]["mfu"] is None or run.steps()[-1]["mfu"] > 0
    # The health check, which is on, takes most of the free memory.
    assert 0 < run.steps()[-1]["memory_peak_bytes"] < torch.cuda.mem_get_info()[1] / 2


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
