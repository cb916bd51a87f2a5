"""Evaluations of a run in its report: a table of all, and each one's tables and pictures."""

from __future__ import annotations

import base64
import html
import logging
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json
from gsa_train.metrics.record_format import numbers_back
from gsa_train.report.run_files import RunFiles

EVALUATIONS = "evaluations"
TEXT_SCORES = ("perplexity", "bits_per_byte", "word_perplexity")
REQUEST_SCORES = ("accuracy", "length_normalised_accuracy", "bits_per_byte")

logger = logging.getLogger(__name__)


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    """`<score>/<text, task or length>` -> value, of a results.json."""
    found: dict[str, Any] = {}
    for name, each in results.get("data", {}).items():
        found |= {f"{score}/{name}": each.get(score) for score in TEXT_SCORES}
    for name, each in results.get("requests", {}).items():
        found |= {f"{score}/{name}": each.get(score) for score in REQUEST_SCORES}
    for name, each in results.get("tasks", {}).get("results", {}).items():
        metrics = {key.partition(",")[0]: value for key, value in each.items()}
        found |= {f"{key}/{name}": value for key, value in metrics.items() if not key.endswith("_stderr")}
    ruler = results.get("ruler", {})
    found |= {f"ruler/{length}": mean for length, mean in ruler.get("mean", {}).items()}
    gold = results.get("ruler_gold", {})
    found |= {f"ruler_bits_per_byte/{length}": mean for length, mean in gold.get("mean", {}).items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def evaluations_in_html(runs: list[RunFiles]) -> str:
    """Empty where no run has any."""
    parts = []
    for run in runs:
        found = [(folder, results) for folder in _folders(run.folder) if (results := _read(folder))]
        if not found:
            continue
        title = f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(title + _table(found) + "".join(_details(*each) for each in found))
    return f'<h2 id="evaluations">Evaluations</h2>{"".join(parts)}' if parts else ""


def _folders(run_dir: Path) -> list[Path]:
    """In the order of their making; of one under way there is none."""
    folders = [path for path in (run_dir / EVALUATIONS).glob("[!.]*") if path.is_dir()]
    return sorted(folders, key=lambda folder: folder.stat().st_mtime)


def _read(folder: Path) -> dict[str, Any]:
    """Empty where it is damaged, which is said."""
    try:
        found = numbers_back(parse_json((folder / "results.json").read_text(encoding="utf-8")))
        if isinstance(found, dict) and "model" in found:
            return found
        fault = "it is no object with model"
    except (OSError, ValueError) as error:
        fault = str(error)
    logger.warning("%s: no evaluation in it (%s); left out", folder, fault)
    return {}


def _table(found: list[tuple[Path, dict[str, Any]]]) -> str:
    """A column an evaluation, a row a score that at least one has."""
    scores = [scores_of(results) for _, results in found]
    models = [results["model"] for _, results in found]
    rows = {
        "step": [str(model.get("step", "")) for model in models],
        "changed": [", ".join(model.get("settings", [])) for model in models],
    }
    for name in dict.fromkeys(name for each in scores for name in each):
        values = [each.get(name) for each in scores]
        rows[name] = ["" if value is None else f"{value:.5g}" for value in values]
    head = "".join(f"<th class=number>{_text(folder.name)}</th>" for folder, _ in found)
    body = "".join(
        f"<tr><td>{_text(name.replace('_', ' '))}</td>"
        + "".join(f"<td class=number>{_text(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows.items()
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _details(folder: Path, results: dict[str, Any]) -> str:
    table = folder / "table.md"
    text = table.read_text(encoding="utf-8") if table.exists() else ""
    pictures = "".join(map(_picture, sorted(folder.glob("*.png"))))
    command = _text(results.get("command", ""))
    return (
        f"<details><summary>{_text(folder.name)}</summary><p><code>{command}</code></p><pre>{_text(text)}</pre>"
        f'<div class="plots">{pictures}</div></details>'
    )


def _picture(path: Path) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    name = _text(path.stem.replace("_", " "))
    return f'<figure><img alt="{name}" src="data:image/png;base64,{content}"><figcaption>{name}</figcaption></figure>'


def _text(value: str) -> str:
    return html.escape(str(value))
