"""Write one HTML page about one or several runs: configs, events, and every panel of gsa_train.metrics.panels.

The page needs no server and no network, because it contains its style, its numbers and plotly's JavaScript. It is made
from the run folders only: during a run, after a run, or after a kill.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable
from pathlib import Path

from gsa_eval.report.charts import Chart, chart_of, layer_charts, pictures
from gsa_eval.report.evaluations import analyses_in_html, evaluations_in_html
from gsa_eval.report.events import KINDS, Event
from gsa_eval.report.goodput import goodput_in_html
from gsa_eval.report.run_files import RunFiles
from gsa_eval.report.run_series import names_of
from gsa_train.config.batch_ramp import batch_in_words
from gsa_train.files import write_atomically
from gsa_train.metrics.panels import PANELS, SECTIONS
from gsa_train.metrics.progress import compact, duration
from gsa_train.metrics.record_format import Record
from gsa_train.model.flops import count_parameters

MOST_EVENTS = 300
"""Largest number of rows in a run's table of events."""
MOST_SAMPLES = 50
"""Number of a run's newest validations whose samples are shown."""
SAMPLES_LINK = '<a href="#samples">Samples</a>'
EVALUATIONS_LINK = '<a href="#evaluations">Evaluations</a>'
ANALYSES_LINK = '<a href="#analyses">Analyses</a>'
SPIKE = (
    "A step is flagged where its loss or gradient norm rises above the limit of monitor.detector, or is not finite. "
    "All flagged steps with fewer than 10 others between neighbours are one spike. Spikes per 100K steps are the "
    "spikes of the run so far over the steps trained on, times 100,000. SpikeScore is OLMo-core's: the share of steps "
    "above mean + 6 standard deviations of the last 128."
)
READING = (
    "Linear axes show what follows the first tenth of a run, without outliers: double-click in a chart for all of it. "
    "Drag in a chart to zoom: the others follow."
)
PLOTLY = {"displaylogo": False, "displayModeBar": False, "doubleClick": "reset+autosize"}
ZOOM_TOGETHER = """
const charts = [...document.querySelectorAll(".plotly-graph-div")].filter((chart) => !chart.layout?.meta);
let following = false;
for (const chart of charts) chart.on("plotly_relayout", (change) => {
  const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0];
  const to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
  if (following || from === undefined) return;
  following = true;
  const others = charts.filter((other) => other !== chart);
  Promise.all(others.map((other) => Plotly.relayout(other, { "xaxis.range": [from, to] })))
    .finally(() => { following = false; });
});
"""
"""Script that applies zooming of one x axis to all charts over steps or tokens."""


def write_report(run_dirs: list[Path], path: Path) -> Path:
    """Write the page about these runs.

    Args:
        run_dirs: folders with a metrics.jsonl that has records.
    """
    runs = [RunFiles(name, folder) for name, folder in names_of(run_dirs).items()]
    title = " and ".join(run.name for run in runs)
    charts = _charts(runs)
    present = [section for section in SECTIONS if charts[section]]
    links = "".join(f'<a href="#{section}">{SECTIONS[section]}</a>' for section in present)
    plots = "".join(
        f'<h2 id="{section}">{SECTIONS[section]}</h2>{_note(section, runs)}'
        f'<div class="plots">{"".join(map(chart_html, charts[section]))}</div>'
        for section in present
    )
    samples = _samples(runs)
    evaluations = evaluations_in_html(runs)
    analyses = analyses_in_html(runs)
    body = f"""
<nav><a href="#runs">Runs</a><a href="#events">Events</a>{samples and SAMPLES_LINK}
{evaluations and EVALUATIONS_LINK}{links}
{analyses and ANALYSES_LINK}</nav>
<h2 id="runs">Runs</h2>{_table_of_runs(runs)}{"".join(map(_about, runs))}
<h2 id="events">Events</h2>{"".join(_table_of_events(run, len(runs)) for run in runs)}
{_legend_of_marks(runs)}{samples}{evaluations}
<noscript><p>The charts need JavaScript.</p></noscript>{plots}
{analyses}"""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file name may hold bytes that are not characters.
    write_atomically(path, document(title, body).encode(errors="replace"))
    return path


def document(title: str, body: str) -> str:
    """Returns a whole page, with style and plotly's JavaScript inside. Its charts zoom together.

    Args:
        title: plain text.
        body: HTML; charts as made by `chart_html`.
    """
    # Imported here, because the import is slow and only pages with charts need it.
    from plotly.offline import get_plotlyjs

    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{_text(title)}</title><style>{Path(__file__).with_name("report.css").read_text(encoding="utf-8")}</style>
<script>{get_plotlyjs()}</script></head><body>
<h1>{_text(title)}</h1><div class="soft">written {time.strftime("%Y-%m-%d %H:%M %Z")} by gsa_train</div>{body}
<script>{ZOOM_TOGETHER}</script></body></html>
"""


def _charts(runs: list[RunFiles]) -> dict[str, list[Chart]]:
    """Returns the charts of each section: panels, then pictures by layer, and by layer and head or expert."""
    charts: dict[str, list[Chart]] = {section: [] for section in SECTIONS}
    for panel in PANELS:
        if chart := chart_of(panel, runs):
            charts[panel.section].append(chart)
    charts["gsa"] += [chart for run in runs for chart in layer_charts(run, runs)]
    for section, of_section in charts.items():
        of_section += [chart for run in runs for chart in pictures(run, runs, section)]
    return charts


def chart_html(chart: Chart) -> str:
    from plotly.io import to_html

    # Not validated, because plotly would check each number in Python.
    drawn = to_html(chart.figure, PLOTLY, include_plotlyjs=False, full_html=False, validate=False)
    return f"<figure><figcaption>{_text(chart.title)}</figcaption>{drawn}</figure>"


# --- text ------------------------------------------------------------------------------------------------


def _table_of_runs(runs: list[RunFiles]) -> str:
    columns: dict[str, Callable[[RunFiles], str]] = {
        "run": lambda run: run.name,
        "state": lambda run: run.state,
        "steps": lambda run: _of_planned(f"{run.last_step:,}", run.planned_steps, "{:,}".format),
        "tokens": lambda run: _of_planned(run.tokens_at(run.last_step), run.planned_tokens, compact),
        "wall time": lambda run: "–" if run.wall_seconds is None else duration(run.wall_seconds),
        "ETTR": lambda run: "–" if run.goodput is None else f"{run.goodput.ettr:.1%}",
        "loss": lambda run: _shown(run.last("loss"), ".4f"),
        "validation loss": lambda run: _shown(run.last("validation_loss"), ".4f"),
        "validation perplexity": lambda run: _shown(run.last("validation_perplexity"), ".2f"),
        "recall (random)": _recalls,
        "tokens/s": lambda run: compact(run.median("tokens_per_second")),
        "MFU": lambda run: _shown(run.median("mfu"), ".1%"),
        "spikes": lambda run: _shown(run.last("spikes"), ".0f"),
        "skipped updates": lambda run: _shown(run.last("skipped_updates"), ".0f"),
        "rewinds": lambda run: _shown(run.last("rewinds"), ".0f"),
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


def _of_planned(done: str, planned: int | None, write: Callable[[int], str]) -> str:
    return done if planned is None or write(planned) == done else f"{done} of {write(planned)}"


def _recalls(run: RunFiles) -> str:
    recall, random = run.last("recall"), run.last("random_recall")
    return "–" if recall is None else f"{recall:.3f} ({_shown(random, '.3f')})"


def _about(run: RunFiles) -> str:
    last = run.starts[-1] if run.starts else {}
    facts = {
        "command": last.get("command", "unknown"),
        "model": _model(run),
        "data set": _data_set(run),
        "phases": ", ".join(f"{name} from step {step + 1}" for step, name in run.phases),
        "layout": last.get("layout", "unknown"),
        "device": f"{last.get('device', 'unknown')} on {last.get('host', 'unknown')}, torch {last.get('torch', '?')}",
        "commit": (last.get("commit") or "unknown").replace("+", " and uncommitted changes"),
        "folder": str(run.folder),
    }
    rows = "".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    starts = "".join(
        f"<tr><td>{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(start['unix_seconds']))}</td>"
        f"<td class=number>{_text(start['step'])}</td><td>{_text(start['layout'])}</td><td>{_text(start['host'])}</td>"
        f"<td>{_text((start.get('commit') or 'unknown')[:12])}</td></tr>"
        for start in run.starts
    )
    count = "1 start" if len(run.starts) == 1 else f"{len(run.starts)} starts"
    return (
        f"<h3>{_text(run.name)}</h3><table class=facts>{rows}</table>{goodput_in_html(run)}"
        f"<details><summary>{count}</summary><table><tr><th>time</th><th>after step</th>"
        f"<th>layout</th><th>host</th><th>commit</th></tr>{starts}</table></details>"
        f"<details><summary>config.yaml</summary><pre>{_text(run.config_yaml)}</pre></details>"
    )


def _model(run: RunFiles) -> str:
    if run.config is None:
        return "unknown"
    model, count = run.config.model, count_parameters(run.config.model, run.config.gsa, run.config.moe)
    active = f" ({count.active:,} active)" if count.idle else ""
    return (
        f"{count.total:,} parameters{active}, {count.overhead:,} of them gates and indexer; {model.num_layers} layers "
        f"of width {model.hidden_size}, {model.num_heads} query heads, vocabulary {model.vocab_size:,}"
    )


def _data_set(run: RunFiles) -> str:
    if run.config is None:
        return "unknown"
    data, train = run.config.data, run.config.train
    return (
        f"{data.train_dir}, tokenizer {data.tokenizer}; {batch_in_words(train)} sequences of "
        f"{train.seq_len_tokens:,} tokens a step, {run.planned_tokens:,} tokens in all phases"
    )


def _table_of_events(run: RunFiles, count: int) -> str:
    name = f"<h3>{_text(run.name)}</h3>" if count > 1 else ""
    if not run.events:
        return f"{name}<p>None: no spike, no skipped batch or update, no rewind, no restart, no fault.</p>"
    rows = "".join(_row(event, run) for event in run.events[:MOST_EVENTS])
    more = len(run.events) - MOST_EVENTS
    rest = f"<p class=soft>and {more} more, in metrics.jsonl</p>" if more > 0 else ""
    return (
        f'{name}<div class="scroll" style="max-height: 420px"><table><tr><th class=number>step</th>'
        f"<th class=number>tokens</th><th>phase</th><th>event</th><th></th></tr>{rows}</table></div>{rest}"
    )


def _samples(runs: list[RunFiles]) -> str:
    """Returns the models' texts after fixed prompts, or "" if no run has any. The newest validation of each run is
    open, and the others are folded."""
    parts = []
    for run in runs:
        if not run.samples:
            continue
        *others, newest = run.samples[-MOST_SAMPLES:]
        name = f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else ""
        folded = "".join(_table_of_samples(record) for record in reversed(others))
        more = f"<details><summary>earlier validations</summary>{folded}</details>" if others else ""
        parts.append(f"{name}{_table_of_samples(newest)}{more}")
    return f'<h2 id="samples">Samples</h2>{"".join(parts)}' if parts else ""


def _table_of_samples(record: Record) -> str:
    rows = "".join(
        f"<tr><td>{_text(each['prompt'])}</td><td>{_text(each['text'])}{'' if each['ended'] else ' …'}</td></tr>"
        for each in record["samples"]
    )
    head = f"<tr><th>prompt</th><th>greedy, after step {record['step']:,}</th></tr>"
    return f"<table>{head}{rows}</table>"


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
        f'<div class="marks">{keys}</div><p class=soft>{READING} Dashed lines: a phase begins. '
        "Triangles: an event.</p>"
    )


def _note(section: str, runs: list[RunFiles]) -> str:
    if section != "stability":
        return ""
    said = []
    for run in runs:
        spikes, rate = run.last("spikes"), run.last("spikes_per_100k_steps")
        if spikes is None or rate is None:
            continue
        steps = 1e5 * spikes / rate if rate else run.last_step
        name = f"{_text(run.name)}: " if len(runs) > 1 else ""
        said.append(f"{name}spikes in {steps:,.0f} steps: {spikes}, or {rate:.1f} per 100K steps.")
    return f"<p>{' '.join(said)} <span class=soft>{SPIKE}</span></p>" if said else ""


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _text(value: object) -> str:
    return html.escape(str(value))
