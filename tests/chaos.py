"""Checks that a run with many faults ends with the same weights as an undisturbed run: `make chaos`.

Four ranks under torchrun train a small model on the bundled text. Some shards of the text are damaged, and the run
skips them (data.on_bad_shard=skip). A seed determines which faults occur, and when: a rank or torchrun is killed, the
run gets SIGTERM, a rank freezes, the newest checkpoint is damaged, or a disk is full. torchrun restarts failed ranks.
If torchrun itself has ended, this script starts the same command again, as a Slurm job would.

For each fault the script prints the log line that reports the fault, the seconds until training continued, and the
number of steps that were trained again. At the end it prints the run's own time accounting. It also prints the ETTR
(the productive share of the run's time) twice: from this accounting, and from an independent calculation.

The exit code is 0 only if all checks pass. The last checkpoint and the logged numbers must be equal, bit for bit, to
the results of an undisturbed run. The two values of the ETTR (productive share of the time) must agree within 0.003.
The run must skip damaged shards and report every fault. It must report a hang for each frozen rank, and for nothing
else.

Only root can test the full disk, because the script mounts a file system for this fault.

For example, --steps 380 --faults 8 causes a fault about every 45 steps. --keep DIR stores the logs and the run's
folder, without checkpoints. `launch/goodput.py --run DIR/disturbed` then shows the lost time.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gsa_train.metrics.goodput.ledger import read_account
from gsa_train.metrics.goodput.run_clock import process_began
from gsa_train.metrics.goodput.words import about_run
from gsa_train.run_folder.starts import read_starts

sys.path.insert(0, str(Path(__file__).parent))

from helpers.chaos_times import Happened, productive_by_hand
from helpers.damage import cut, flip
from helpers.launchers import is_running, launch, ranks_of
from helpers.runs import REPOSITORY, Run, kill, numbers_of, processes_of

RANKS = 4
SAVE_EVERY_STEPS = 5
MODEL = (
    "train.micro_batch_size=1",
    "phases.1.min_lr=0",
    "evaluate.split_by_source=false",
    "evaluate.max_blocks=4",
    "data.on_bad_shard=skip",
    f"checkpoint.every_steps={SAVE_EVERY_STEPS}",
    "checkpoint.keep_last=3",
    "checkpoint.save_retries=50",
    "checkpoint.retry_after_steps=1",
    "logging.straggler_ratio=1000",  # with four ranks on two cores, the slowest rank is meaningless
)
COUNTS = {
    "rank killed": 10, "torchrun killed": 4, "SIGTERM": 4, "checkpoint damaged": 5, "disk full": 3,
    "rank frozen": 2,
}  # fmt: skip
DISK_BYTES = 256 << 20
LEFT_BYTES = 256 << 10
"""Free space on the full disk: enough for lines of metrics, but not for a checkpoint."""
SAME_ETTR = 0.003
"""Allowed difference of the ETTRs. The independent calculation replaces each start's first step by a mean."""


@dataclass(frozen=True)
class Planned:
    kind: str
    step: int
    """The fault happens once this step is logged, counted from 1."""
    rank: int
    delay_seconds: float


def draw_plan(counts: dict[str, int], seed: int, steps: int, number: int | None = None) -> list[Planned]:
    """Draw faults in random order, each at a different step between the second save and the run's end.

    Args:
        number: how many to return; None for all.
    """
    chance = random.Random(seed)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    chance.shuffle(kinds)
    kinds = kinds[:number]
    first = 2 * SAVE_EVERY_STEPS + 1
    room = (steps - SAVE_EVERY_STEPS - first) // len(kinds)
    assert room > 0, f"{steps} steps have no room for {len(kinds)} faults"
    return [
        Planned(
            kind,
            first + place * room + chance.randrange(room),
            chance.randrange(RANKS),
            chance.uniform(0, 0.1),
        )
        for place, kind in enumerate(kinds)
    ]


class Disturbed:
    """Tracks the run over all its starts, and the faults that happen to it."""

    def __init__(self, folder: Path, command: tuple[str, ...], patience_seconds: float, seed: int) -> None:
        """
        Args:
            folder: on the disk that is filled, if any is.
            patience_seconds: limit for any single wait.
        """
        self._folder, self._command, self._patience = folder, command, patience_seconds
        self._chance = random.Random(seed + 1)
        self._starts: list[Run] = []
        self._start()
        self.wait_until(lambda: 0 in ranks_of(self.run), "rank 0")
        self.began = process_began(ranks_of(self.run)[0].pid)
        """Start of rank 0's process in Unix seconds."""

    # --- what the run does -----------------------------------------------------------------------------------

    def _start(self) -> None:
        torchrun = ("--standalone", f"--nproc_per_node={RANKS}", "--max-restarts=100")
        # Under load a save may take longer than the 30 seconds that torchrun gives its ranks.
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self._patience))}
        self._starts.append(
            launch(self._folder, *self._command, torchrun=torchrun, environment=environment, real=True)
        )

    @property
    def run(self) -> Run:
        return self._starts[-1]

    @property
    def _output(self) -> str:
        return "".join(run.output for run in self._starts)

    def last_step(self) -> int:
        path = self.run.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20000))
            found = re.findall(rb'^\{"step": (\d+)', file.read(), re.MULTILINE)
        return int(found[-1]) if found else 0

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Poll the condition; start the command again if it has ended, as a job scheduler would.

        Raises:
            RuntimeError: the wait takes too long, or the run is over.
        """
        deadline = time.monotonic() + self._patience
        while not condition():
            code = self.run.process.poll()
            if code is not None and not processes_of(self.run):
                if condition():
                    return
                if code == 0:
                    raise RuntimeError(f"the run was over before this: {what}\n{self.run.output[-2000:]}")
                self._start()
            if time.monotonic() > deadline:
                raise RuntimeError(f"too long without this: {what}\n{self._output[-5000:]}")
            time.sleep(0.1)

    def finish(self) -> None:
        self.wait_until(lambda: self.run.process is not None and self.run.process.poll() == 0, "the end")

    def end(self) -> None:
        for run in self._starts:
            kill(run)

    @property
    def starts(self) -> tuple[int, int]:
        """Count the starts by this script, and all starts."""
        return len(self._starts), 1 + self._resumes()

    def _resumes(self) -> int:
        return self._output.count("resuming from")

    def _goes_on(self) -> bool:
        return (
            re.search(r"^step +\d+/.* gnorm ", self._output.rpartition("resuming from")[2], re.MULTILINE)
            is not None
        )

    # --- what happens to it ----------------------------------------------------------------------------------

    def suffer(self, planned: Planned) -> Happened:
        """Wait for the step, cause the fault, and wait until the run has recovered."""
        self.wait_until(lambda: self.last_step() >= planned.step, f"step {planned.step}")
        time.sleep(planned.delay_seconds)
        if planned.kind == "disk full":
            return self._fill_disk(planned)
        resumes, seen = self._resumes(), len(self._output)
        damage = self._damage_newest() if planned.kind == "checkpoint damaged" else ""
        ranks = [process.pid for process in ranks_of(self.run).values()]
        at = time.time()
        self._strike(planned)
        happened = Happened(planned.kind, self.last_step(), at)
        self.wait_until(lambda: not any(map(is_running, ranks)), f"the end of all ranks: {planned}")
        self.wait_until(lambda: self._resumes() > resumes and self._goes_on(), f"a restart after: {planned}")
        happened.seconds = time.time() - at
        resumed = int(re.findall(r"resuming from \S+ at step (\d+)", self._output)[-1])
        happened.steps_lost = max(0, happened.step - resumed)
        happened.noticed = self._noticed(planned, self._output[seen:], damage)
        return happened

    def _strike(self, planned: Planned) -> None:
        if planned.kind in ("rank killed", "checkpoint damaged", "rank frozen"):
            self.wait_until(lambda: planned.rank in ranks_of(self.run), f"rank {planned.rank}")
            how = signal.SIGSTOP if planned.kind == "rank frozen" else signal.SIGKILL
            ranks_of(self.run)[planned.rank].send_signal(how)
        else:
            how = signal.SIGKILL if planned.kind == "torchrun killed" else signal.SIGTERM
            self.run.process.send_signal(how)

    def _damage_newest(self) -> str:
        """Flip a bit of, truncate or remove a file of the newest checkpoint, right after it was written."""
        before = self.run.latest
        self.wait_until(lambda: self.run.latest != before, "the next checkpoint")
        path = self._chance.choice(sorted((self.run.checkpoints / self.run.latest).glob("*.distcp")))
        damages = {"a bit of {} flipped": flip(0.5), "{} cut": cut, "{} removed": Path.unlink}
        how = self._chance.choice([*damages])
        damages[how](path)
        return f"{self.run.latest}: {how.format(path.name)}"

    def _fill_disk(self, planned: Planned) -> Happened:
        def events(kind: str) -> int:
            return sum(record.get("event") == kind for record in self.run.records())

        failed, happened = events("checkpoint_failed"), Happened(planned.kind, self.last_step(), time.time())
        ballast = self._folder / "ballast"
        with ballast.open("wb") as file:

            def a_save_fails() -> bool:
                """Fill the disk repeatedly, because a running save may delete files."""
                room = shutil.disk_usage(self._folder).free - LEFT_BYTES
                with suppress(OSError):  # the disk is full, or a save was faster
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), room)
                return events("checkpoint_failed") > failed

            self.wait_until(a_save_fails, "a save that fails")
        errors = [r["checkpoint_error"] for r in self.run.records() if r.get("event") == "checkpoint_failed"]
        ballast.unlink()
        saved = events("checkpoint")
        self.wait_until(lambda: events("checkpoint") > saved, "a save that succeeds again")
        happened.noticed = re.sub(r"\S+/", "", errors[-1])[:60]
        happened.seconds = time.time() - happened.at
        return happened

    def _noticed(self, planned: Planned, output: str, damage: str) -> str:
        """Return the log line that reports the fault, or a remark that nothing did."""
        patterns = {
            "rank killed": rf"did not end by itself: .*without last words, as if killed: .*\brank {planned.rank}\b",
            "torchrun killed": r"stopped by the end of torchrun after step \d+|torchrun is gone",
            "SIGTERM": r"stopped by SIGTERM after step \d+",
            "checkpoint damaged": r"checkpoint \S+ is damaged: [^\n]*",
            "rank frozen": r"rank \d+ on \S+ \(process \d+\): [^\n]*<--",
        }
        found = re.search(patterns[planned.kind], output)
        text = found[0] if found else "nothing said"
        if planned.kind == "rank killed" and found:
            # torchrun's line has the exit code of a rank that may have ended only because it lost its peer.
            codes = ", ".join(re.findall(r"failed \((exitcode: -?\d+)\)", output))
            text = f"rank {planned.rank} without last words; torchrun: {codes}"
        if planned.kind == "rank frozen":
            text = re.sub(r" on \S+ \(process \d+\)", "", text)
        return f"{damage}; {text}" if damage else text


@contextmanager
def disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        # The unmount is lazy, because after an error a killed process may still be ending there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def damaged_corpus(folder: Path) -> None:
    """Copy the bundled text with every third shard truncated in its first half."""
    shutil.copytree(REPOSITORY / "data" / "sample" / "train", folder)
    for shard in sorted(folder.rglob("*.jsonl.zst"))[::3]:
        shard.write_bytes(shard.read_bytes()[:2000])


def keep(run_dir: Path, target: Path) -> None:
    """Copy the run's folder without checkpoints, and its logs."""
    shutil.copytree(run_dir, target / "disturbed", ignore=shutil.ignore_patterns("checkpoints"))
    for log in run_dir.parent.glob("*.log"):
        shutil.copy2(log, target)


def numbers(run: Run) -> list[dict[str, Any]]:
    """Return every logged number except times, the saves, and what a restart reports about an earlier hang."""
    without = ("checkpoint_failed", "checkpoint_damaged", "restart_after_hang")
    return numbers_of(run.records(), without)


def tensors_of(run: Run, scratch: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(run.checkpoints / run.latest, scratch)
    loaded: dict[str, Any] = torch.load(scratch, weights_only=False)
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos.py", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--faults", type=int, metavar="N", help="only the first N (default: all)")
    parser.add_argument(
        "--timeout-minutes", type=float, default=2, help="of the hang watch, except for steps (default: 2)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="for the run's folder and logs; a new one")
    parser.add_argument("--patience-seconds", type=float, default=300, help="for one thing to happen")
    arguments = parser.parse_args()
    counts = dict(COUNTS)
    if os.geteuid() != 0:
        print("not root: no disk is filled")
        del counts["disk full"]
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
    plan = draw_plan(counts, arguments.seed, arguments.steps, arguments.faults)
    with tempfile.TemporaryDirectory(prefix="gsa_chaos_") as name:
        scratch = Path(name)
        damaged_corpus(scratch / "text")
        command = (*MODEL, f"phases.1.steps={arguments.steps - 10}", f"data.train_dir={scratch / 'text'}")
        command += (
            f"parallel.timeout_minutes={arguments.timeout_minutes}",
            f"data.read_timeout_seconds={4 * arguments.timeout_minutes}",  # shorter for all attempts together
        )
        if os.geteuid() != 0:
            return go(scratch, scratch, command, plan, arguments)
        with disk(scratch / "disk", DISK_BYTES) as folder:
            return go(scratch, folder, command, plan, arguments)


def go(
    scratch: Path, folder: Path, command: tuple[str, ...], plan: list[Planned], arguments: argparse.Namespace
) -> int:
    torchrun = ("--standalone", f"--nproc_per_node={RANKS}")
    began = time.monotonic()
    calm = launch(scratch / "calm", *command, torchrun=torchrun, real=True).wait(
        seconds=6 * arguments.patience_seconds
    )
    print(f"undisturbed: {arguments.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    began = time.monotonic()
    disturbed = Disturbed(folder / "disturbed", command, arguments.patience_seconds, arguments.seed)
    try:
        happened = []
        print(f"{'':>2} {'fault':<18} {'step':>4} {'seconds':>7} {'lost':>4}  noticed", flush=True)
        for number, planned in enumerate(plan, start=1):
            each = disturbed.suffer(planned)
            happened.append(each)
            print(
                f"{number:>2} {each.kind:<18} {each.step:>4} {each.seconds:>7.1f} {each.steps_lost:>4}  {each.noticed}",
                flush=True,
            )
        disturbed.finish()
    finally:
        disturbed.end()
        if arguments.keep is not None:
            keep(disturbed.run.folder, arguments.keep)
    by_script, all_starts = disturbed.starts
    skipped = disturbed.run.series("data_skipped_shards")[-1]
    print(
        f"{len(happened)} faults, {dict(Counter(each.kind for each in happened))}, and {skipped} damaged shards left "
        f"out: finished after {all_starts} starts ({by_script} of torchrun) in {time.monotonic() - began:.0f} s, "
        f"{sum(each.steps_lost for each in happened)} steps trained again"
    )
    expected, found = (tensors_of(run, scratch / "tensors.pt") for run in (calm, disturbed.run))
    same = expected.keys() == found.keys() and all(
        torch.equal(expected[key].reshape(-1).view(torch.uint8), found[key].reshape(-1).view(torch.uint8))
        for key in expected
    )
    logged = numbers(calm) == numbers(disturbed.run)
    unnoticed = [each for each in happened if each.noticed.endswith("nothing said")]
    print(f"{len(expected)} tensors of the last checkpoint {'equal, bit for bit' if same else 'DIFFER'}")
    print(f"logged numbers of all {arguments.steps} steps {'equal' if logged else 'DIFFER'}")
    if not logged:
        pairs = zip_longest(numbers(calm), numbers(disturbed.run))
        first = next((mine, theirs) for mine, theirs in pairs if mine != theirs)
        print("first difference, undisturbed and disturbed:", *first, sep="\n  ")
    print(f"faults that nothing noticed: {len(unnoticed)}")
    hangs = len([*disturbed.run.folder.glob("faults/*/report.txt")])
    frozen = sum(each.kind == "rank frozen" for each in happened)
    print(f"hangs reported: {hangs}, of {frozen} frozen ranks")
    account = read_account(disturbed.run.folder)
    assert account is not None
    print(about_run("the disturbed run", account))
    opened = [start["unix_seconds"] for start in read_starts(disturbed.run.folder)]
    records = disturbed.run.records()
    by_hand = productive_by_hand(records, opened) / (records[-1]["time"] - disturbed.began)
    is_equal = abs(by_hand - account.ettr) <= SAME_ETTR
    print(
        f"ETTR by hand, from the stamps of metrics.jsonl: {by_hand:.2%}, {'equal' if is_equal else 'DIFFERENT'}"
    )
    return 0 if same and logged and skipped and not unnoticed and hangs == frozen and is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
