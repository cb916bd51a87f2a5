"""Render the report's sections of evaluations (one table of all, the tables of each) and of analyses (the
pictures of `gsa-analyze`)."""

from __future__ import annotations

import base64
import html
import logging
from pathlib import Path
from typing import Any

from gsa_data.whole_files import parse_json
from gsa_eval.report.run_files import RunFiles
from gsa_eval.report.run_series import is_own
from gsa_train.metrics.record_checks import is_number
from gsa_train.metrics.record_format import numbers_back

EVALUATIONS, ANALYSES = "evaluations", "analysis"
CAPTIONS = {
    "attention": "Attention, scores of the indexer and selected keys",
    "sink": "Attention on the first token",
    "gates": "Gates",
    "keys": "Selected keys by position",
}
"""Name of an analysis's picture -> caption."""
TEXT_SCORES = ("perplexity", "bits_per_byte", "word_perplexity")
REQUEST_SCORES = ("accuracy", "length_normalised_accuracy", "bits_per_byte")

logger = logging.getLogger(__name__)


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    """Returns `<score>/<text, task or length>` -> value, from a results.json."""
    found: dict[str, Any] = {}
    for name, each in _tables(results, "data"):
        found |= {f"{score}/{name}": each.get(score) for score in TEXT_SCORES}
    for name, each in _tables(results, "requests"):
        found |= {f"{score}/{name}": each.get(score) for score in REQUEST_SCORES}
    for name, each in _tables(_table_in(results, "tasks"), "results"):
        metrics = {key.partition(",")[0]: value for key, value in each.items()}
        found |= {f"{key}/{name}": value for key, value in metrics.items() if not key.endswith("_stderr")}
    for score, key in (("ruler", "ruler"), ("ruler_bits_per_byte", "ruler_gold")):
        means = _table_in(_table_in(results, key), "mean")
        found |= {f"{score}/{length}": mean for length, mean in means.items()}
    return {name: float(value) for name, value in found.items() if is_number(value)}


def _table_in(results: dict[str, Any], key: str) -> dict[str, Any]:
    found = results.get(key)
    return found if isinstance(found, dict) else {}


def _tables(results: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, each) for name, each in _table_in(results, key).items() if isinstance(each, dict)]


def evaluations_in_html(runs: list[RunFiles]) -> str:
    """Returns the section, or "" if no run has evaluations."""
    parts = []
    for run in runs:
        found = [(folder, results) for folder in _folders(run.folder) if (results := _read(folder))]
        if not found:
            continue
        title = f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(title + _table(found) + "".join(_details(*each) for each in found))
    return f'<h2 id="evaluations">Evaluations</h2>{"".join(parts)}' if parts else ""


def analyses_in_html(runs: list[RunFiles]) -> str:
    """Returns the section, or "" if no run has pictures of an analysis."""
    parts = []
    for run in runs:
        of_run = f"{run.name}: " if len(runs) > 1 else ""
        for folder in sorted((run.folder / ANALYSES).glob("[!.]*/")):
            if shown := _pictures(folder):
                parts.append(f"<h3>{_text(of_run + folder.name)}</h3>{shown}")
    return f'<h2 id="analyses">Analyses</h2>{"".join(parts)}' if parts else ""


def _folders(run_dir: Path) -> list[Path]:
    found = (run_dir / EVALUATIONS).glob("[!.]*")
    folders = [path for path in found if path.is_dir() and not (path / "results.json").is_fifo()]
    return sorted(folders, key=lambda folder: folder.stat().st_mtime)


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = numbers_back(parse_json((folder / "results.json").read_text(encoding="utf-8")))
        model = found.get("model") if isinstance(found, dict) else None
        if isinstance(model, dict) and isinstance(model.get("settings", []), list):
            return found
        fault = "it is not an object with model"
    except (OSError, ValueError, RecursionError) as error:
        fault = str(error)
    logger.warning("%s: no evaluation in it (%s); left out", folder, fault)
    return {}


def _table(found: list[tuple[Path, dict[str, Any]]]) -> str:
    """Returns a table with a column per evaluation, and a row per score."""
    scores = [scores_of(results) for _, results in found]
    models = [results["model"] for _, results in found]
    rows = {
        "step": [str(model.get("step", "")) for model in models],
        "changed": [", ".join(map(str, model.get("settings", []))) for model in models],
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
    has_table = table.is_file() and is_own(table, folder.parent)
    text = table.read_text(encoding="utf-8", errors="replace") if has_table else ""
    command = _text(results.get("command", ""))
    title = f"<summary>{_text(folder.name)}</summary>"
    return f"<details>{title}<p><code>{command}</code></p><pre>{_text(text)}</pre></details>"


def _pictures(folder: Path) -> str:
    """Returns HTML with the embedded pictures of an analysis."""
    found = ((folder / f"{name}.png", caption) for name, caption in CAPTIONS.items())
    return "".join(
        f'<figure><img alt="{caption}" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{caption}</figcaption></figure>"
        for path, caption in found
        if path.is_file() and is_own(path, folder.parent)
    )


def _text(value: str) -> str:
    return html.escape(str(value))
