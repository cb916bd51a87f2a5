"""Lists the golden training runs, and reads exact numbers from the launcher's metrics.jsonl."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parent / "model.yaml"
TIMEOUT_SECONDS = 600

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # the order of a sum depends on the number of threads
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS guarantees equal bits for this setting
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled at run time, and the import is a second faster
}

NOT_COMPARED = ("second", "mfu", "memory", "slowest_rank", "data_wait", "time", "ettr")
"""Parts of names of times, rates and memory sizes, which differ between two runs of the same code."""


@dataclass(frozen=True)
class TrainingRun:
    name: str
    overrides: tuple[str, ...] = ()
    """key=value, applied to model.yaml."""
    ranks: int = 1


CONSTANT = "phases.1.decay=constant"
"""Keeps the learning rate at its peak in runs with one step after the warm-up, as when the golden files were made."""

CPU_RUNS = (
    TrainingRun("cpu-tp2-pp2", ("parallel.tensor=2", "parallel.pipeline=2"), ranks=4),
    TrainingRun("cpu-cp2", ("parallel.context=2",), ranks=2),
    TrainingRun("cpu-1-rank"),
)

_GPU = (
    *("train.precision=bf16", "train.seq_len_tokens=2048", "train.global_batch_size=2"),
    *("model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=2", "model.head_dim=64"),
    *("model.ffn_hidden_size=1024", "model.init_std=0.02"),
    *("gsa.indexer_dim=64", "gsa.k_base=512", "gsa.k_min=128", "gsa.k_max=1024"),
    *("phases.0.steps=3", "phases.1.steps=4", "phases.1.lr=1.5e-3", CONSTANT),
)
_NO_INDEXER = (
    "gsa.attention=dense",
    "phases=[{name: dense, steps: 3, attention: dense, train: all, lr: 1.5e-3, min_lr: 1.5e-3, warmup_steps: 2}]",
)
_NO_GATES = ("gsa.value_gate=false", "gsa.output_gate=false")
_TWO_STEPS_EACH = tuple(
    f"phases.{phase}.{field}" for phase in (0, 1) for field in ("steps=2", "warmup_steps=1")
)

GPU_RUNS = (
    TrainingRun("gpu-gsa", _GPU),
    TrainingRun("gpu-gsa-key-lists", (*_GPU, "gsa.attention_kernel=gathered")),
    TrainingRun("gpu-sparse-only", (*_GPU, *_NO_GATES, *_TWO_STEPS_EACH)),
    TrainingRun("gpu-gated-only", (*_GPU, *_NO_INDEXER)),
    TrainingRun("gpu-standard", (*_GPU, *_NO_INDEXER, *_NO_GATES)),
)


class RunFailed(Exception):
    """Says that a run ended with an exit code other than 0. The message has the end of its log."""


def train(run: TrainingRun, code: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Train with the launcher of the checkout `code`, and return the logged numbers by record ("step 3", ...)."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"),
        *("launch/pretrain.py", "--config", str(CONFIG), f"run.dir={folder}", f"run.name={run.name}"),
        *run.overrides,
    ]
    log = folder / f"{run.name}.log"
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=code,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": import_path(code)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    if done.returncode != 0:
        end = log.read_text(errors="replace")[-3000:]
        raise RunFailed(f"{run.name} ended with exit code {done.returncode}; its log ends\n{end}")
    lines = (folder / run.name / "metrics.jsonl").read_text().splitlines()
    return dict(numbers_of(json.loads(line) for line in lines if line.strip()))


def import_path(code: Path) -> str:
    """Return a PYTHONPATH that takes the packages from `code` before installed ones."""
    ours = [str(code), str(code / "kernels"), str(code / "data")]
    return os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])


def numbers_of(records: Iterator[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the record, its numbers) for each step and each validation. Numbers whose names contain a part in
    `NOT_COMPARED` are left out."""
    for record in records:
        event = record.get("event")
        if event in (None, "validation"):
            label = f"step {record['step']}" + (f" {event}" if event else "")
            yield label, dict(_flat("", record))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, number) of every number in `value`. Examples of names are layer_recall[2] and lrs.indexer."""
    if any(part in name for part in NOT_COMPARED):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}[{index}]", inner)
    elif isinstance(value, (int, float)):
        yield name, value


def train_all(
    runs: tuple[TrainingRun, ...], code: Path, folder: Path, at_a_time: int
) -> Iterator[tuple[str, dict[str, dict[str, Any]] | str]]:
    """Yield (name, numbers) of each run in the order of `runs`. A failed run gives an error instead of numbers."""

    def one(run: TrainingRun) -> dict[str, dict[str, Any]] | str:
        try:
            return train(run, code, folder)
        except (RunFailed, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(at_a_time) as pool:
        for run, result in zip(runs, pool.map(one, runs), strict=True):
            yield run.name, result
