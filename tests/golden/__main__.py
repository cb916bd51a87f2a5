"""Compares golden results: python -m golden compare | reference (see README.md in this folder).

Exit code 0 means that all compared values are equal bit for bit, and 1 that some differ. Exit code 2 means that the
golden file (the recorded results) is missing or comes from another processor, GPU or torch version.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from golden.compare import Results, fingerprint_differences, table
from golden.fingerprint import cpu_fingerprint, gpu_fingerprint
from golden.kernel_problems import run_problems
from golden.training_runs import CPU_RUNS, GPU_RUNS, train_all

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PARTS = ("cpu", "gpu_runs", "gpu_kernels")
CPU_RUNS_AT_A_TIME, GPU_RUNS_AT_A_TIME = 2, 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="golden", description="Golden comparison, bit for bit.")
    parser.add_argument("action", choices=("compare", "reference"))
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="those that this machine can run, if not given"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the golden files")
    parser.add_argument("--rev", help="with reference: the revision")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    parts = arguments.parts or [part for part in PARTS if cuda or part == "cpu"]
    if not cuda:
        wanted = [part for part in parts if part != "cpu"]
        if wanted:
            parser.error(f"{', '.join(wanted)}: there is no CUDA device; pass --parts cpu")
        print("gpu_runs, gpu_kernels: not compared, there is no CUDA device")
    if arguments.action == "compare":
        return compare_parts(arguments.results, parts)
    if not arguments.rev:
        parser.error("reference needs --rev: make golden-reference REV=b86c6f6")
    return make_reference(arguments.rev, arguments.results, parts)


def make(code: Path, operations: Path, commit: str, results: Path, parts: list[str]) -> int:
    """Write the golden files of `code`. An error replaces a run's or problem's values, and gives exit code 1."""
    results.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in parts:
        found = dict(run_part(part, code, operations))
        errors = {name: value for name, value in found.items() if isinstance(value, str)}
        for name, error in errors.items():
            print(f"{part}: {name} failed: {error}", file=sys.stderr)
        failed += len(errors)
        write(results / f"{part}.json", {"commit": commit, **fingerprint_of(part)}, found)
        print(f"{part}: {len(found)} results of {commit} in {results / f'{part}.json'}", flush=True)
    return 1 if failed else 0


def compare_parts(results: Path, parts: list[str]) -> int:
    codes = []
    for part in parts:
        path = results / f"{part}.json"
        if not path.exists():
            print(f"{part}: {path} does not exist; {how_to_refer('REV')}", file=sys.stderr)
            codes.append(2)
            continue
        golden = json.loads(path.read_text())
        made_at = dict(golden["made_at"])
        commit = made_at.pop("commit")
        other = fingerprint_differences(made_at, fingerprint_of(part))
        if other:
            print(
                f"{part}: {path} is of another machine or torch ({'; '.join(other)}), on which bits may differ; "
                f"{how_to_refer(commit)}",
                file=sys.stderr,
            )
            codes.append(2)
            continue
        today = dict(run_part(part, REPOSITORY, HERE / "operations.py"))
        lines, equal = table(golden["results"], today)
        print(f"\n{part}, today's code beside {commit}", lines, sep="\n", flush=True)
        codes.append(0 if equal else 1)
    return max(codes)


def how_to_refer(commit: str) -> str:
    return f"make a reference here: make golden-reference REV={commit[:12]}, then make golden REFERENCE=runs/golden"


def make_reference(rev: str, results: Path, parts: list[str]) -> int:
    """Run `make` with the code of a revision in a temporary worktree, by today's scripts."""
    commit = git("rev-parse", "--verify", f"{rev}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        code = Path(folder) / "code"
        git("worktree", "add", "--detach", str(code), commit)
        try:
            operations = operations_of(commit, Path(folder))
            return make(code, operations, commit, results, parts)
        finally:
            git("worktree", "remove", "--force", str(code))


def operations_of(commit: str, folder: Path) -> Path:
    """Write operations.py of a revision, or its first version if the revision has none. Return the path."""
    name = "tests/golden/operations.py"
    where = commit
    if subprocess.run(
        ["git", "cat-file", "-e", f"{commit}:{name}"], cwd=REPOSITORY, capture_output=True
    ).returncode:
        where = git("log", "--diff-filter=A", "--format=%H", "--", name).split()[-1]
    path = folder / "operations.py"
    path.write_text(git("show", f"{where}:{name}") + "\n")
    return path


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def fingerprint_of(part: str) -> dict[str, str]:
    return cpu_fingerprint() if part == "cpu" else gpu_fingerprint()


def run_part(part: str, code: Path, operations: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, values or error) of every run or problem, and print how long the part took."""
    started = time.monotonic()
    if part == "gpu_kernels":
        yield from run_problems(code, operations)
    else:
        runs, at_a_time = (CPU_RUNS, CPU_RUNS_AT_A_TIME) if part == "cpu" else (GPU_RUNS, GPU_RUNS_AT_A_TIME)
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            yield from train_all(runs, code, Path(folder), at_a_time)
    print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)


def write(path: Path, made_at: dict[str, str], results: Results) -> None:
    """Write JSON with one line for each record of a result. Floats have the shortest form that reads back to the same
    bits."""
    lines = ["{", f'"made_at": {json.dumps(made_at)},', '"results": {']
    for number, (name, values) in enumerate(results.items()):
        comma = "," if number < len(results) - 1 else ""
        if isinstance(values, str):
            lines.append(f"{json.dumps(name)}: {json.dumps(values)}{comma}")
            continue
        places = [f"  {json.dumps(place)}: {json.dumps(dict(keys))}" for place, keys in values.items()]
        lines += [f"{json.dumps(name)}: {{", ",\n".join(places), f"}}{comma}"]
    path.write_text("\n".join([*lines, "}", "}"]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
