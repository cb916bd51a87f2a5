"""Starts, watches and kills training runs: torchrun launch/pretrain.py on the bundled text, real or forked."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from gsa_train.metrics.record_format import read_records
from helpers.forked import OF_RANKS, ForkedAgent, ForkedRanks

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = "configs/tiny.yaml"
"""A minimal model on sequences of 64 tokens, two at a time, whose steps are short on CPUs. The learning rates rise more
slowly than in the demo, because every step amplifies a changed bit."""
MARK = "GSA_TEST_RUN"
"""Environment variable that all processes of one run inherit, including workers in their own sessions."""
SHARED = "GSA_TEST_SHARED_RUNS"
"""Environment variable with the folder of the `finished` runs, for all processes of a test session (conftest.py)."""

FAULTS = "GSA_TEST_FAULTS"
"""Environment variable with a run's faults and the folder of its marks, as JSON (faults.py)."""

ENVIRONMENT = {name: OF_RANKS[name] for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE")}


def inherited() -> dict[str, str]:
    """Return the tests' environment without this process's W&B service, which treats a killed run as running."""
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}


SMALL = (
    *("model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "model.ffn_hidden_size=352"),
    *("gsa.indexer_heads=4", "gsa.indexer_dim=32", "gsa.k_min=32", "gsa.k_base=64", "gsa.k_max=128"),
    *("train.seq_len_tokens=128", "train.micro_batch_size=1"),
)
"""Overrides that train the demo's model instead of the tiny one, for tests that depend on the model's size, such as
tests of GPU kernels."""

STEPS = 20
LONGEST_WAIT_SECONDS = 1500
"""Time limit for anything a run does on a busy machine."""

SHOWN = 5000
"""Characters shown of a failed run's output, from its first error and from its end."""
ERROR = re.compile(
    r"^(\[rank\d+\]: )?(Traceback \(most recent|Fatal Python error: |terminate called )", re.MULTILINE
)

TIMING = ("time", "tokens_per_second", "step_seconds", "data_wait", "slowest_rank", "slowest_rank_ratio")
TIMING += ("tflops_per_second", "tflops_per_second_dense_equivalent", "data_wait_seconds")
TIMING += ("forward_backward_seconds", "gradient_reduction_seconds", "optimizer_seconds")
TIMING += ("eval_seconds", "eval_time_share", "ettr", "lost_seconds")
"""Keys that differ between two runs of the same steps."""
OF_A_GPU = ("memory_allocated_bytes", "memory_peak_bytes", "mfu", "mfu_dense_equivalent")
"""Keys that exist only on GPUs. Their values differ between runs of the same steps if one run does additional work."""


QUICK_STEPS = 10
QUICK = (
    "train.micro_batch_size=2",
    "checkpoint.every_steps=1000",
    *(f"phases.{phase}.{field}" for phase in (0, 1) for field in ("steps=5", "warmup_steps=4")),
)
"""Half the steps, in larger micro-batches, and one checkpoint at the end."""

ALL_KEYS = (*QUICK, "gsa.k_min=64", "gsa.k_base=64", "gsa.k_max=64")
"""Every query selects all its causal keys, so that rounding cannot change a selection."""

TENSOR_X_PIPELINE = ("parallel.tensor=2", "parallel.pipeline=2")
WHOLE = (*ALL_KEYS, "checkpoint.every_steps=4", "evaluate.max_blocks=15")
"""Saves in the warm-up, in the sparse phase and at the end; the validation text has two sources."""


def numbers_of(
    records: Iterable[dict[str, Any]], without: Sequence[str] = (), keys: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return what two runs of the same steps share to the last bit: everything except saves and times.

    Args:
        without: further events to leave out.
        keys: further keys to leave out.
    """
    return [
        {key: value for key, value in record.items() if key not in (*TIMING, *keys)}
        for record in records
        if record.get("event") not in ("checkpoint", *without)
    ]


def shown(output: str) -> str:
    """Return the first error and the end of a run's output, without the long output between them."""
    end = max(0, len(output) - SHOWN)
    error = ERROR.search(output)
    first = end if error is None else min(error.start(), end)
    if first + SHOWN >= end:
        return output[first:]
    return f"{output[first : first + SHOWN]}\n[...]\n{output[end:]}"


def check_code(process: object, code: int, expected: int, output: str) -> None:
    ends = process.ends if isinstance(process, ForkedRanks) else ""
    assert code == expected, f"{ends or f'exit code {code}'}, expected {expected}:\n{shown(output)}"


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen[bytes] | ForkedRanks | ForkedAgent | None
    """None for a copy, and for a run of another process of the test session."""
    log: Path
    """Output of this start."""
    mark: str

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def latest(self) -> str:
        """Return the name of the checkpoint that a resume would load; empty if there is none."""
        pointer = self.checkpoints / "latest"
        return pointer.read_text() if pointer.exists() else ""

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records() if record.get("event") == kind]

    def records(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return read_records(path) if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records() if "event" not in record]

    def steps_printed(self) -> list[int]:
        return [int(step) for step in re.findall(r"^step +(\d+)/.* gnorm ", self.output, re.MULTILINE)]

    def series(self, key: str) -> list[Any]:
        return [record[key] for record in self.steps()]

    def wait(self, expected: int = 0, seconds: float = LONGEST_WAIT_SECONDS) -> Run:
        try:
            code = self.process.wait(seconds)
        except (subprocess.TimeoutExpired, TimeoutError):
            if isinstance(self.process, ForkedRanks):
                self.process.end_with_stacks()
            kill(self)
            raise AssertionError(f"not over after {seconds} s:\n{shown(self.output)}") from None
        check_code(self.process, code, expected, self.output)
        return self

    def wait_until(self, condition: Callable[[], object], seconds: float = LONGEST_WAIT_SECONDS) -> None:
        """Poll until the condition holds; fail if the run or the time ends first."""
        deadline = time.monotonic() + seconds
        looked = time.thread_time()
        while not condition():
            over = self.process.poll() is not None or time.monotonic() > deadline
            if over and not condition():
                kill(self)
                raise AssertionError(f"the run did not get there:\n{shown(self.output)}")
            # Some conditions read all records or query all processes. They may take a thirtieth of a core.
            time.sleep(max(0.01, 29 * (time.thread_time() - looked)))
            looked = time.thread_time()


def start(
    run_dir: Path,
    *overrides: str,
    ranks: int = 1,
    config: str = CONFIG,
    name: str = "run",
    launcher: Literal["torchrun", "python"] = "torchrun",
    real: bool = False,
    agent: bool = False,
    faults: Mapping[str, Any] | None = None,
    torchrun: Sequence[str] = (),
    mark: str = "",
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Start a run in `run_dir/name`; the overrides may include options such as --no-resume.

    Args:
        real: whether to start the real launcher. By default ranks are forked (forked.py), which is much faster.
        agent: whether torchrun forks the ranks or, with `real`, whether the launcher has a session of its own.
        faults: faults to inject into the ranks (faults.py).
        torchrun: options of torchrun, in place of the options for `ranks` ranks on this machine.
        mark: string by which the processes of a start are found. To start a further node of a job, pass the mark of the
            first node.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    mark = mark or uuid.uuid4().hex
    log = run_dir / f"{name}-{uuid.uuid4().hex[:8]}.log"
    script, of_faults = faulty_launcher(run_dir, faults)
    command = [script, "--config", config, f"run.dir={run_dir}", f"run.name={name}", *overrides]
    of_run = {**inherited(), **ENVIRONMENT, **of_faults, **(environment or {})}
    torchrun = torchrun or ("--standalone", f"--nproc_per_node={ranks}")
    process: Any
    if real:
        python = ("-m", "torch.distributed.run", *torchrun) if launcher == "torchrun" else ()
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *python, *command],
                cwd=REPOSITORY,
                env=of_run | {MARK: mark},
                stdin=subprocess.DEVNULL,
                start_new_session=agent,  # a terminal's foreground process group, for Ctrl-C
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    elif agent:
        process = ForkedAgent(torchrun, command, REPOSITORY, of_run, {MARK: mark}, log)
    else:
        process = ForkedRanks(command, REPOSITORY, of_run, {MARK: mark}, log, ranks, launcher == "torchrun")
    return Run(run_dir / name, process, log, mark)


def demo_config(folder: Path, sections: dict[str, dict[str, Any]], phases: list[dict[str, Any]]) -> str:
    """Write the demo's config with changes to these sections and with these phases; return its path."""
    config = yaml.safe_load((REPOSITORY / "configs/demo.yaml").read_text())
    changed = {section: {**config.get(section, {}), **fields} for section, fields in sections.items()}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, **changed, "phases": phases}))
    return str(path)


def wait_for(*started: tuple[Run, int]) -> dict[str, Run]:
    """Wait for runs that were started together, and check the exit codes of all ranks; return them by name."""
    found = {run.folder.name: run.wait(expected=code) for run, code in started}
    assert all(run.process.codes <= {code} for run, code in started), [run.process.ends for run, _ in started]
    return found


def faulty_launcher(run_dir: Path, faults: Mapping[str, Any] | None) -> tuple[str, dict[str, str]]:
    """Return the file that ranks run, and its environment."""
    if faults is None:
        return "launch/pretrain.py", {}
    paths = os.pathsep.join(filter(None, sys.path))
    marked = json.dumps([faults, str(run_dir / "marks")])
    return "tests/helpers/faulty_rank.py", {FAULTS: marked, "PYTHONPATH": paths}


def run_script(
    command: Sequence[str],
    log: Path,
    ranks: int,
    *,
    expected: int = 0,
    launcher: Literal["torchrun", "python"] = "torchrun",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run another file than the launcher on forked ranks, check the exit code, and return the output."""
    on_cpus = {"CUDA_VISIBLE_DEVICES": ""}  # forked ranks can only run on CPUs
    environment = {**inherited(), **ENVIRONMENT, **on_cpus, **(environment or {})}
    forked = ForkedRanks(command, REPOSITORY, environment, {}, log, ranks, rendezvous=launcher == "torchrun")
    try:
        code = forked.wait(LONGEST_WAIT_SECONDS)
    except TimeoutError:
        forked.end_with_stacks()
        said = shown(log.read_text())
        raise AssertionError(f"not over after {LONGEST_WAIT_SECONDS} s:\n{said}") from None
    output = log.read_text()
    check_code(forked, code, expected, output)
    return output


def results_of(script: str, tmp_path_factory: Any, ranks: int, wanted: Any = None) -> Any:
    folder = tmp_path_factory.mktemp(script)
    (folder / "wanted.json").write_text(json.dumps(wanted))
    run_script([f"tests/helpers/{script}.py", str(folder)], folder / "log", ranks)
    return json.loads((folder / "results.json").read_text())


def train(run_dir: Path, *overrides: str, ranks: int = 1, **options: Any) -> Run:
    return start(run_dir, *overrides, ranks=ranks, **options).wait()


@cache
def finished(*overrides: str, ranks: int = 1, real: bool = False) -> Run:
    """Return a complete run, made once per test session and shared: do not change its folder."""
    digest = hashlib.sha256(repr((overrides, ranks, real)).encode()).hexdigest()[:16]
    folder = Path(os.environ[SHARED]) / digest
    log = folder / "finished.log"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the session may create it
        if not log.exists():
            run = train(folder, *overrides, ranks=ranks, real=real)
            run.log.rename(log)
    return Run(folder / "run", None, log, "")


def whole_run(layout: Literal["one rank", "tensor x pipeline", "context"]) -> Run:
    """Return a `finished` run of `WHOLE` in one of three layouts."""
    if layout == "tensor x pipeline":
        return finished(*WHOLE, *TENSOR_X_PIPELINE, ranks=4)
    if layout == "context":
        # torchrun's own ranks have their own orders of sets; all other finished runs are forked from one process.
        return finished(*WHOLE, "parallel.context=2", ranks=2, real=True)
    return finished(*WHOLE)


def processes_of(run: Run) -> list[psutil.Process]:
    """List every living process of a run: launcher, ranks, readers, checkpoint writers."""
    sessions = run.process.pids if isinstance(run.process, (ForkedRanks, ForkedAgent)) else []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            # Other processes see the server's environment in place of the fork's environment.
            belongs = os.getsid(process.pid) in sessions or process.environ().get(MARK) == run.mark
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_of(run: Run, seconds: float = 100) -> list[psutil.Process]:
    """List the processes that outlive a run by this time: W&B's service and readers end after their ranks."""
    deadline = time.monotonic() + seconds
    while (found := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def kill(run: Run, at_once: Sequence[psutil.Process] = ()) -> list[int]:
    """Send SIGKILL first to the processes in `at_once`, and then to all other processes of the run. When all are dead,
    return their ids."""
    killed: list[int] = []
    deadline = time.monotonic() + 100
    alive = list(at_once) or processes_of(run)
    while alive:
        assert time.monotonic() < deadline, f"survived SIGKILL: {alive}"
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(process.pid)
        run.process.wait(100)
        alive = processes_of(run)
    return sorted(set(killed))
