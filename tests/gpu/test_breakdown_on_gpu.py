"""Compares the breakdown of a step's time with the device's own clock, also over NCCL."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gsa_train.config import ProfileConfig, load_config
from gsa_train.distributed.cuda_connections import VARIABLE, compute_capability
from gsa_train.profiling.profiler import StepProfiler
from helpers.runs import REPOSITORY
from helpers.single_rank import single_rank
from helpers.tiers import needs_devices
from whole_steps.step_bench import OurTrainee, random_batches
from whole_steps.step_trace import in_columns, trace_steps

SMALL = (
    *("model.num_layers=4", "model.vocab_size=8192", "data.num_workers=0", "train.recompute=full"),
    *("train.seq_len_tokens=4096", "train.micro_batch_size=2", "train.global_batch_size=8"),
)


class Marks:
    """Holds a trainee's steps, each between two events on the device's clock."""

    def __init__(self) -> None:
        path = REPOSITORY / "configs" / "gsa_1.7b.yaml"
        config = load_config(path, SMALL, world_size=1, need_data=False)
        self.trainee = OurTrainee(config, config.phases[-1], single_rank())
        self.batches = random_batches(config, single_rank())
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in range(2):
            self.step()  # this compiles

    def step(self) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self.trainee.step(self.batches)
        after.record()
        self.events.append((before, after))

    def milliseconds_of_last(self, steps: int) -> float:
        torch.cuda.synchronize()
        return self.events[-steps][0].elapsed_time(self.events[-1][1])


def test_a_breakdown_adds_up_to_the_steps_it_is_of(tmp_path: Path) -> None:
    marks = Marks()
    try:
        traced = trace_steps(marks.step, 2)
        by_clock = marks.milliseconds_of_last(2) / 2
        columns = in_columns(traced, 2)
        print({name: round(value, 3) for name, value in columns.items()}, f"by events: {by_clock:.3f}")
        beside = columns.pop("overlapped_communication_ms")
        assert columns.pop("traced_step_ms") == pytest.approx(by_clock, rel=0.02)
        assert sum(columns.values()) == pytest.approx(by_clock, rel=0.02)
        assert beside == columns["exposed_communication_ms"] == 0, "one rank sends nothing"
        for part in ("attention", "indexer", "kl", "mlp", "loss", "optimizer"):
            assert columns[f"{part}_ms"] > 0, part
        # `other` is elementwise work on gradient buffers. Everything else has a name, also when it is recomputed.
        assert columns["other_ms"] < 0.2 * by_clock

        profiler = StepProfiler(ProfileConfig(start_step=5, steps=2), tmp_path, 0, torch.device("cuda", 0))
        for step in (4, 5, 6):
            profiler.before_step(Mock(step=step))
            marks.step()
            profiler.after_step(Mock(step=step))
        by_clock = marks.milliseconds_of_last(2) / 2
        table = (tmp_path / "steps_00000005-00000006" / "rank_00000.txt").read_text()
        print(table)
        rows = table.split("\n\n")[1].splitlines()[1:]
        assert sum(float(row[24:34]) for row in rows) == pytest.approx(by_clock, rel=0.02)
    finally:
        marks.trainee.close()


@needs_devices(2)
def test_communication_of_two_ranks(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["benchmarks/bench_training.py", "--config", "configs/gsa_1.7b.yaml", "--breakdown"]
    command += ["--megatron", "configs/standard_1.7b.yaml", "--attention", "sdpa", "--seq-len", "2048"]
    command += ["--layers", "4", "--layouts", "tp=1;tp=2", "--steps", "3", "--sequences-per-device", "4"]
    command += ["--json", str(report)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=580, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    content = json.loads(report.read_text())
    assert len(content["rows"]) == 4
    if (compute_capability() or 0) < 10:
        assert content["environment"][VARIABLE] == "1"
    for row in content["rows"]:
        columns = row["breakdown"]
        beside = columns.pop("overlapped_communication_ms")
        assert sum(columns.values()) == pytest.approx(2 * columns["traced_step_ms"])
        assert columns["exposed_communication_ms"] + beside > 0
        assert len(row["exposed_communication_ms"]) == 2
        for part in ("attention", "mlp", "loss", "optimizer"):
            assert columns[f"{part}_ms"] > 0, (row["model"], part)
