"""Render the report's section of analyses: pictures that `gsa-analyze` wrote into a run's folder."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from gsa_eval.report.run_series import is_own

FOLDER = "analysis"
PICTURES: Mapping[str, str] = {
    "attention": "Attention, scores of the indexer and selected keys",
    "sink": "Attention on the first token",
    "gates": "Gates",
    "keys": "Selected keys by position",
}
"""Name of the file -> caption."""


def section_of_analyses(runs: Mapping[str, Path]) -> str:
    """Returns HTML with the embedded pictures, or "" if no run has any."""
    parts = []
    for name, folder in runs.items():
        of_run = f"{name}: " if len(runs) > 1 else ""
        for analysis in sorted((folder / FOLDER).glob("[!.]*/")):
            if figures := [_figure(path, text) for path, text in _pictures(analysis)]:
                parts.append(f"<h3>{html.escape(of_run + analysis.name)}</h3>{''.join(figures)}")
    return f'<h2 id="analyses">Analyses</h2>{"".join(parts)}' if parts else ""


def _pictures(analysis: Path) -> Sequence[tuple[Path, str]]:
    found = ((analysis / f"{name}.png", text) for name, text in PICTURES.items())
    return [(path, text) for path, text in found if path.is_file() and is_own(path, analysis.parent)]


def _figure(path: Path, text: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img src="data:image/png;base64,{content}" alt="{text}" style="max-width: 100%"></p>'
