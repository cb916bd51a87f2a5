"""Every start of a run, in `starts.jsonl` of its folder: what ran where, from which step, by which source."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json
from gsa_train.metrics.wandb_sink import without_credentials

STARTS = "starts.jsonl"
SOURCE = Path(__file__).resolve().parents[2]
"""The checkout, or the folder that the package is installed in."""


def new_run_id() -> str:
    """Made at a run's step 0: two runs of one name are told apart by it. Its end is the checksum of its beginning."""
    token = secrets.token_hex(6)
    return f"{token}{zlib.crc32(token.encode()):08x}"


def run_id_of(run_dir: Path) -> str:
    """Which run the folder belongs to, by its newest start that says so; "" where none does, or all are damaged."""
    ids = [str(start.get("run_id", "")) for start in read_starts(run_dir)]
    intact = [each for each in ids if f"{zlib.crc32(each[:12].encode()):08x}" == each[12:]]
    return intact[-1] if intact else ""


def note_start(run_dir: Path, step: int, layout: str, device: str, run_id: str) -> None:
    """Append this start, which begins behind `step`."""
    start = {
        "run_id": run_id,
        "unix_seconds": time.time(),
        "step": step,
        "layout": layout,
        "device": device,
        "host": socket.gethostname(),
        "commit": source_commit(SOURCE),
        "torch": version("torch"),
        "command": command_line(sys.argv, os.environ),
    }
    path = run_dir / STARTS
    is_cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a kill or a full disk
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * is_cut + json.dumps(start) + "\n")


def command_line(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The command of this job, to be typed again, with torchrun's own words as far as its processes know them; without
    credentials in addresses."""
    words = list(argv)
    if Path(words[0]).name == "__main__.py":
        words[:1] = ["-m", Path(words[0]).parent.name]
    starter = ["python"] if words[0].endswith(".py") or words[0] == "-m" else []
    if "TORCHELASTIC_RUN_ID" in environ:
        ranks, of_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        starter = ["torchrun", f"--nproc_per_node={of_node}"]
        starter += [f"--nnodes={ranks // of_node}"] if ranks > of_node else []
    return shlex.join(without_credentials([*starter, *words]))


def read_starts(run_dir: Path) -> list[dict[str, Any]]:
    """In their order; empty for a run of a version that did not note them. A damaged line, as one
    that a kill or a full disk cut off, is left out."""
    path = run_dir / STARTS
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    starts = []
    for line in lines:
        with contextlib.suppress(ValueError):
            start = parse_json(line)
            if isinstance(start, dict) and isinstance(start.get("unix_seconds"), float):
                starts.append(start)
    return starts


def source_commit(source: Path) -> str | None:
    """The commit that runs: of a frozen source the one that was frozen, else what the environment variable GSA_COMMIT
    says, else git's; with `+` where files were changed after it. None where nothing tells."""
    frozen = (
        source.parent / "commit.txt"
    )  # launch/slurm/submit.py: the commit, and a line for each changed file
    if source.name == "source" and frozen.is_file():
        commit, *changed = frozen.read_text(encoding="utf-8").splitlines()
        return commit + "+" * bool(changed)
    if said := os.environ.get("GSA_COMMIT"):
        return said
    if not (source / ".git").exists():  # a checkout further up is not ours
        return None
    try:
        commit = _git(source, "rev-parse", "HEAD")
        return commit + "+" * bool(_git(source, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(source: Path, *words: str) -> str:
    command = ["git", "-C", str(source), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
