"""Write results of an evaluation to a separate folder, atomically."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gsa_eval.convert.export_hf import new_folder
from gsa_train import __version__
from gsa_train.metrics.record_format import to_strict
from gsa_train.run_folder.starts import SOURCE, source_commit

PACKAGES = ("torch", "transformers", "lm-eval", "triton", "numpy")


def result_folder(name: str, run_dir: Path | None, out: Path | None) -> Path:
    """Returns `<run>/evaluations/<name>`, or `<out>/<name>`.

    Raises:
        ValueError: the name is in use or invalid, or no folder is given.
    """
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"--name {name}: give letters, digits, _, - and . only")
    if out is None:
        if run_dir is None:
            raise ValueError("the model belongs to no run: give --out DIR for the results")
        out = run_dir / "evaluations"
    folder = out / name
    if folder.exists():
        raise ValueError(f"--name {name}: {folder} exists; give another name, or remove the folder")
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{folder}: {above} is not a writable folder; give another one by --out DIR")
    return folder


def write_results(folder: Path, results: dict[str, Any]) -> str:
    """Write results.json and table.md to a new folder, and return the table. A killed process leaves no such folder,
    because a temporary folder is renamed when both files are complete. NaN and infinity are written as strings."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    text = table(results)
    with new_folder(folder) as unfinished:
        numbers = {name: value for name, value in results.items() if name != "tables"}
        content = json.dumps(to_strict(numbers), indent=2, ensure_ascii=False, allow_nan=False, default=str)
        (unfinished / "results.json").write_text(content + "\n", encoding="utf-8")
        (unfinished / "table.md").write_text(text, encoding="utf-8")
    return text


def circumstances(arguments: Sequence[str]) -> dict[str, Any]:
    versions = {"gsa_train": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command": shlex.join(["gsa-evaluate", *arguments]),
        "commit": source_commit(SOURCE),
        "versions": versions,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "executable": sys.executable,
    }


def table(results: dict[str, Any]) -> str:
    model = results["model"]
    lines = [f"# {results['name']}", "", f"{model.get('checkpoint') or model['hf']}"]
    facts = [
        f"{name} {model[name]}"
        for name in ("step", "tokens_trained", "attention", "device", "dtype")
        if name in model
    ]
    lines += [", ".join(facts + model["settings"]), ""]
    if data := results.get("data"):
        scores = ("loss", "perplexity", "bits_per_byte")
        lines += _rows(
            ["text", *(score.replace("_", " ") for score in scores), "tokens"],
            [
                [name, *(_number(each.get(score)) for score in scores), str(each["tokens"])]
                for name, each in data.items()
            ],
        )
        losses = {
            name: {place["to"]: place["loss"] for place in each["loss_by_position"]}
            for name, each in data.items()
        }
        tops = sorted(set().union(*losses.values()))
        lines += ["", "Loss by the number of tokens that the model sees, up to:", ""]
        lines += _rows(
            ["text", *map(str, tops)],
            [[name, *(_number(each.get(top)) for top in tops)] for name, each in losses.items()],
        )
    for section in results.get("tables", []):
        lines += ["", section["title"], "", *_rows(section["head"], section["rows"])]
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.6g}"


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [head, ["-" * width for width in widths], *rows]
    ]
