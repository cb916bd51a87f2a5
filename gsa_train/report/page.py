"""One HTML page about one run or several: what ran, what happened, and every panel of gsa_train.report.panels.

The page needs no server and no network: style, script and numbers are inside (report.css, report.js). It is made of the
run folders alone: during a run, after it, or after it was killed.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from gsa_train.metrics.progress import compact
from gsa_train.metrics.record_format import Record
from gsa_train.report.events import KINDS, Event, events_of
from gsa_train.report.panels import LAYERS, PANELS, SECTIONS, Panel
from gsa_train.report.run_series import (
    first_step,
    flat,
    has,
    names_of,
    phase_starts,
    records_of,
    series,
    token_knots,
    tokens_at,
    with_all_lines,
    with_key,
)
from gsa_train.run.starts import read_starts

MOST_POINTS = 600
"""Of a line; a plot is 530 pixels wide."""
MOST_COLUMNS = 160
"""Of a picture by layers."""
MOST_MARKS = 400
"""Along the x axis."""
MOST_EVENTS = 300
"""Rows of a run's table."""
SPIKE = (
    "A step is flagged where its loss or gradient norm rises above the limit of monitor.detector, or is not finite. "
    "All flagged steps with fewer than 10 others between neighbours are one spike. Spikes per 100K steps are the "
    "spikes of the run so far over the steps trained on, times 100,000. SpikeScore is OLMo-core's: the share of steps "
    "above mean + 6 standard deviations of the last 128."
)


class RunFiles:
    """What a report reads of one run."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.records = [flat(record) for record in records_of(folder)]
        self.steps = [record for record in self.records if "event" not in record]
        self.starts = read_starts(folder)
        self.summary: Record = _read_json(folder / "summary.json")
        self.stopped: Record = _read_json(folder / "stopped.json")
        config = folder / "config.yaml"
        self.config = config.read_text(encoding="utf-8") if config.exists() else ""
        self.phases = phase_starts(self.records)
        self.token_knots = token_knots(self.records)
        self.events = events_of(folder, self.records, self.starts)

    @property
    def last_step(self) -> int:
        return max(record["step"] for record in self.records)

    def tokens_at(self, step: int) -> str:
        """In short; a dash where they are unknown."""
        return compact(tokens_at(self.token_knots, [step])[0]) if self.token_knots else "–"

    @property
    def state(self) -> str:
        if self.summary:
            return "complete"
        if self.stopped:
            return (
                f"stopped after step {self.stopped['step']} by {self.stopped['reason']}, to be started again"
            )
        return "under way, or ended without a word"

    def last(self, key: str) -> Any:
        """The newest value of a metric; None where there is none."""
        values = [record[key] for record in self.records if record.get(key) is not None]
        return values[-1] if values else None


def write_report(run_dirs: list[Path], path: Path) -> Path:
    """Write the page about these runs.

    Args:
        run_dirs: folders with a metrics.jsonl that has records.
    """
    runs = [RunFiles(name, folder) for name, folder in names_of(run_dirs).items()]
    here = Path(__file__)
    title = " and ".join(run.name for run in runs)
    data = _data(runs)
    numbers = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    present = [each for each in SECTIONS if any(panel["section"] == each for panel in data["panels"])]
    links = "".join(f'<a href="#{section}">{SECTIONS[section]}</a>' for section in present)
    axes = "".join(f'<button data-axis="{axis}">{axis}</button>' for axis in ("step", "tokens"))
    plots = "".join(
        f'<h2 id="{section}">{SECTIONS[section]}</h2>{_note(section, runs)}'
        f'<div class="plots" id="plots-{section}"></div>'
        for section in present
    )
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{_text(title)}</title><style>{here.with_name("report.css").read_text(encoding="utf-8")}</style></head><body>
<h1>{_text(title)}</h1><div class="soft">written {time.strftime("%Y-%m-%d %H:%M %Z")} by gsa_train</div>
<nav><a href="#runs">Runs</a><a href="#events">Events</a>{links}
<span class="tools">x axis {axes}<button id="reset">whole range</button></span></nav>
<h2 id="runs">Runs</h2>{_table_of_runs(runs)}{"".join(map(_about, runs))}
<h2 id="events">Events</h2>{"".join(_table_of_events(run, len(runs)) for run in runs)}
{_legend_of_marks(runs)}<noscript><p>The plots need JavaScript; <code>launch/plot.py</code> without --html draws
pictures.</p></noscript>{plots}
<script type="application/json" id="numbers">{numbers}</script>
<script>{here.with_name("report.js").read_text(encoding="utf-8")}</script></body></html>
"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


# --- numbers for the script ------------------------------------------------------------------------------


def _data(runs: list[RunFiles]) -> dict[str, Any]:
    tokens_known = all(run.token_knots for run in runs)
    return {
        "axis": "tokens" if len(runs) > 1 and tokens_known else "step",
        "kinds": KINDS,
        "runs": [
            {
                "name": run.name,
                "tokens": run.token_knots or [(0, 0), (1, 1)],
                "first": first_step(run.records),
                "last": run.last_step,
                "phases": run.phases,
                "marks": _marks(run),
            }
            for run in runs
        ],
        "panels": [data for panel in PANELS if (data := _panel(panel, runs))],
        "layers": [data for number, run in enumerate(runs) for data in _layers(number, run)],
    }


def _marks(run: RunFiles) -> list[tuple[int, str]]:
    """One of each kind per part of the axis: a spike of a thousand steps is one mark, not a thousand in every plot."""
    width = max(1, run.last_step) / MOST_MARKS
    found = {
        (event.step // width, event.kind): event for event in reversed(run.events) if event.step is not None
    }
    return sorted((event.step, event.kind) for event in found.values() if event.step is not None)


def _panel(panel: Panel, runs: list[RunFiles]) -> dict[str, Any] | None:
    lines = []
    for number, run in enumerate(runs):
        own = with_all_lines(panel, run.records)
        for kind, (key, name) in enumerate(own.lines.items()):
            if not has(run.records, key):
                continue
            steps, values = series(run.records, key)
            kept = _thin(values, MOST_POINTS)
            line: dict[str, Any] = {"run": number, "kind": kind, "x": [steps[at] for at in kept]}
            line["name"] = f"{run.name}: {name}" if len(runs) > 1 else name
            line["y"] = [_number(values[at]) for at in kept]
            # A missing value is a gap; a value that is not a number is news.
            records = {record["step"]: record.get(key) for record in run.records if key in record}
            bad = [step for step, value in records.items() if value is not None and not math.isfinite(value)]
            if bad:
                line["bad"] = bad[:MOST_POINTS]
            if panel.band and kind == 0 and all(has(run.records, edge) for edge in panel.band):
                for edge, edge_key in zip(("low", "high"), panel.band, strict=True):
                    at_step = dict(zip(*series(run.records, edge_key), strict=True))
                    line[edge] = [_number(at_step.get(steps[at], math.nan)) for at in kept]
            lines.append(line)
    if not lines:
        return None
    return {"section": panel.section, "label": panel.label, "scale": panel.scale, "series": lines}


def _layers(number: int, run: RunFiles) -> list[dict[str, Any]]:
    """Pictures: a row per layer, a column for one logged step or the mean of several."""
    found = []
    for key, label in LAYERS.items():
        if not has(run.records, key):
            continue
        having = [record for record in with_key(run.records, key) if "event" not in record]
        num_layers = max(len(record[key]) for record in having if record.get(key) is not None)
        table = [record.get(key) or [math.nan] * num_layers for record in having]
        size = -(-len(table) // MOST_COLUMNS)
        parts = [table[at : at + size] for at in range(0, len(table), size)]
        rows = [[_mean(each[layer] for each in part) for part in parts] for layer in range(num_layers)]
        known = [value for row in rows for value in row if value is not None]
        if known:
            ends = {"first": first_step(having), "last": having[-1]["step"]}
            span = {"low": 0, "high": 1} if key == "layer_recall" else {"low": min(known), "high": max(known)}
            found.append({"run": number, "label": label, "rows": rows, **span, **ends})
    return found


def _thin(values: list[float], most: int) -> list[int]:
    """Places to keep: all, or the least and the largest value of each part, so that no spike is lost."""
    if len(values) <= most:
        return list(range(len(values)))
    kept: set[int] = {0, len(values) - 1}
    parts = most // 2
    for part in range(parts):
        places = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        finite = [at for at in places if math.isfinite(values[at])]
        if len(finite) < len(places):
            kept.add(next(at for at in places if not math.isfinite(values[at])))  # a gap stays one
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return sorted(kept)


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _mean(values: Any) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return float(f"{statistics.fmean(finite):.3g}") if finite else None


# --- text ------------------------------------------------------------------------------------------------


def _table_of_runs(runs: list[RunFiles]) -> str:
    columns = {
        "run": lambda run: run.name,
        "state": lambda run: run.state,
        "steps": lambda run: f"{run.last_step:,}",
        "tokens": lambda run: run.tokens_at(run.last_step),
        "loss": lambda run: _shown(run.last("loss"), ".4f"),
        "validation loss": lambda run: _shown(run.last("validation_loss"), ".4f"),
        "perplexity": lambda run: _shown(run.last("validation_perplexity"), ".2f"),
        "recall": lambda run: _shown(run.last("recall"), ".3f"),
        "tokens/s": lambda run: compact(_median(run.steps, "tokens_per_second")),
        "spikes": lambda run: _shown(run.last("spikes"), "d"),
        "per 100K steps": lambda run: _shown(run.last("spikes_per_100k_steps"), ".1f"),
        "left out": lambda run: _shown(run.last("skipped_updates"), "d"),
        "rewinds": lambda run: _shown(run.last("rewinds"), "d"),
        "restarts": lambda run: str(max(0, len(run.starts) - 1)),
    }
    numbers = set(columns) - {"run", "state"}
    head = "".join(f"<th{' class=number' * (name in numbers)}>{name}</th>" for name in columns)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' * (name in numbers)}>{_text(value(run))}</td>"
            for name, value in columns.items()
        )
        + "</tr>"
        for run in runs
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _about(run: RunFiles) -> str:
    """Commit, layout, phases, starts and config of a run."""
    last = run.starts[-1] if run.starts else {}
    phases = ", ".join(f"{name} from step {step + 1}" for step, name in run.phases)
    facts = {
        "folder": str(run.folder),
        "commit": (last.get("commit") or "unknown").replace("+", " and uncommitted changes"),
        "layout": last.get("layout", "unknown"),
        "device": f"{last.get('device', 'unknown')} on {last.get('host', 'unknown')}, torch {last.get('torch', '?')}",
        "phases": phases,
    }
    rows = "".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    starts = "".join(
        f"<tr><td>{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(start['unix_seconds']))}</td>"
        f"<td class=number>{start['step']}</td><td>{_text(start['layout'])}</td><td>{_text(start['host'])}</td>"
        f"<td>{_text((start['commit'] or 'unknown')[:12])}</td></tr>"
        for start in run.starts
    )
    return (
        f"<h3>{_text(run.name)}</h3><table>{rows}</table>"
        f"<details><summary>{len(run.starts)} starts</summary><table><tr><th>time</th><th>after step</th>"
        f"<th>layout</th><th>host</th><th>commit</th></tr>{starts}</table></details>"
        f"<details><summary>config.yaml</summary><pre>{_text(run.config)}</pre></details>"
    )


def _table_of_events(run: RunFiles, count: int) -> str:
    name = f"<h3>{_text(run.name)}</h3>" if count > 1 else ""
    if not run.events:
        return f"{name}<p>None: no spike, no step left out, no rewind, no restart, no fault.</p>"
    rows = "".join(_row(event, run) for event in run.events[:MOST_EVENTS])
    more = len(run.events) - MOST_EVENTS
    rest = f"<p class=soft>and {more} more, in metrics.jsonl</p>" if more > 0 else ""
    return (
        f'{name}<div class="scroll" style="max-height: 420px"><table><tr><th class=number>step</th>'
        f"<th class=number>tokens</th><th>phase</th><th>event</th><th></th></tr>{rows}</table></div>{rest}"
    )


def _row(event: Event, run: RunFiles) -> str:
    title, color = KINDS[event.kind]
    step = "" if event.step is None else f"{event.step:,}"
    tokens = "" if event.step is None else run.tokens_at(event.step)
    return (
        f"<tr><td class=number>{step}</td><td class=number>{tokens}</td><td>{_text(event.phase)}</td>"
        f'<td><span class="key"><span class="tick" style="background:{color}"></span>{title}</span></td>'
        f"<td>{_text(event.text)}</td></tr>"
    )


def _legend_of_marks(runs: list[RunFiles]) -> str:
    present = {event.kind for run in runs for event in run.events if event.step is not None}
    keys = "".join(
        f'<span class="key"><span class="tick" style="background:{color}"></span>{title}</span>'
        for kind, (title, color) in KINDS.items()
        if kind in present
    )
    return (
        f'<div class="marks">{keys}<span>Dashed lines: a phase begins. Drag in a plot to zoom all of them, '
        "double-click for the whole range.</span></div>"
    )


def _note(section: str, runs: list[RunFiles]) -> str:
    if section != "stability":
        return ""
    said = []
    for run in runs:
        spikes, rate = run.last("spikes"), run.last("spikes_per_100k_steps")
        if spikes is None or rate is None:
            continue
        steps = round(1e5 * spikes / rate) if rate else run.last_step
        name = f"{_text(run.name)}: " if len(runs) > 1 else ""
        said.append(f"{name}spikes in {steps:,} steps: {spikes}, or {rate:.1f} per 100K steps.")
    return f"<p>{' '.join(said)} <span class=soft>{SPIKE}</span></p>" if said else ""


def _read_json(path: Path) -> Record:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _median(records: list[Record], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return statistics.median(values) if values else None


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _text(value: str) -> str:
    return html.escape(str(value))
