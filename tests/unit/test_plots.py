"""Tests that figures need only metrics.jsonl, whatever the state of the run."""

import errno
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from gsa_eval.commands.plot import main
from gsa_eval.report import plots
from gsa_eval.report.plots import write_comparison, write_plots
from gsa_eval.report.run_series import flat, known_of, phase_starts, series, with_all_lines
from gsa_train.metrics.panels import PANELS

PLOT = Path(__file__).parents[2] / "launch" / "plot.py"
ALWAYS = ["checkpoints", "data", "gates", "loss", "optimizer", "sink", "stability", "step_time", "throughput"]
ALL = sorted(["budget", "indexer", "layers", "selection", *ALWAYS])

SEVERAL_SETS = {
    "event": "validation",
    "step": 60,
    "phase": "sparse",
    "validation_set": "web",
    "validation_loss": 2.0,
    "validation_bits_per_byte": 0.9,
    "validation_loss_by_source": {"C4": 3.0, "ArXiv": None},
    "validation_code_loss": 2.5,
    "validation_code_bits_per_byte": None,
}


def write_run(run_dir, steps=60, every=10, sparse=True, tail=""):
    run_dir.mkdir(parents=True)
    lines = []
    for step in range(every, steps + 1, every):
        phase = "warm-up" if step <= 20 else "sparse"
        record = {"step": step, "phase": phase, "loss": 8.0 - step / 20, "tokens": 2048 * step}
        record |= {"lr": 3e-4, "lrs": {"base": 3e-4, "indexer": 0.0}, "grad_norm": 1.0}
        record |= {"spikes": 0, "step_seconds": 0.2, "checkpoint_stall_seconds": 0.1}
        record |= {"tokens_per_second": 1e4, "mfu": None, "data_wait": 0.01}
        record |= {"value_gate_mean": 0.5, "output_gate_low": 0.1, "max_activation": 30.0}
        keys = ("indexer_kl", "recall", "random_recall", "adjacent_overlap", "union_ratio_32")
        record |= dict.fromkeys(keys, 0.4 if sparse else None)
        has_budget = sparse and phase == "sparse"
        record |= {"k_mean": 64.0, "k_min": 8, "k_max": 128} if has_budget else {"k_mean": None}
        record |= {"layer_k_mean": [60.0, 68.0] if has_budget else None}
        record |= {"layer_recall": [0.3, 0.5]} if sparse else {}
        lines.append(json.dumps(record))
        if step % 20 == 0:
            event = {"event": "validation", "step": step, "phase": phase, "validation_loss": 8.1 - step / 20}
            lines.append(json.dumps(event | {"validation_recall": 0.4 if sparse else None}))
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)


def names(paths):
    return sorted(path.stem for path in paths)


def assert_picture(path):
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = matplotlib.image.imread(path)
    height, width = pixels.shape[:2]
    assert 300 < height < 2000
    assert 900 < width < 2000
    assert pixels.std() > 0.02, f"{path} is blank"


def test_every_figure_of_a_complete_run(tmp_path):
    write_run(tmp_path / "run", tail=json.dumps(SEVERAL_SETS) + "\n")
    (tmp_path / "run" / "summary.json").write_text(
        '{"steps": 300, "unigram_perplexity": 600.0, "bigram_perplexity": 90.0}'
    )
    written = write_plots(tmp_path / "run")
    assert names(written) == ALL
    assert sorted((tmp_path / "run" / "plots").iterdir()) == sorted(written)
    for path in written:
        assert_picture(path)


def draw_only(monkeypatch, *figures):
    """Draw only some figures, because each takes a fifth of a second."""
    monkeypatch.setattr(plots, "TITLES", {name: plots.TITLES[name] for name in figures})
    monkeypatch.setattr(plots, "LAYERS", {})


def test_the_loss_axis_follows_the_later_steps(tmp_path, monkeypatch):
    draw_only(monkeypatch, "loss")
    write_run(tmp_path / "run", steps=200, every=2)
    limits = {}
    finish = plots._finish

    def finish_and_note(figure, axes, records, path):
        limits[path.stem] = axes[0].get_ylim()
        return finish(figure, axes, records, path)

    monkeypatch.setattr(plots, "_finish", finish_and_note)
    write_plots(tmp_path / "run")
    losses = {step: 8.0 - step / 20 for step in range(2, 201, 2)}
    assert limits["loss"][1] < losses[4]
    assert limits["loss"][0] <= losses[200]


def test_small_counts_are_written_out(tmp_path, monkeypatch):
    """Nobody reads `800m` spikes as a number."""
    draw_only(monkeypatch, "stability", "throughput")
    write_run(tmp_path / "run")
    axes_of = {}
    finish = plots._finish

    def finish_and_note(figure, axes, records, path):
        axes_of[path.stem] = axes
        return finish(figure, axes, records, path)

    monkeypatch.setattr(plots, "_finish", finish_and_note)
    write_plots(tmp_path / "run")
    labels = [label.get_text() for ax in axes_of["stability"] for label in ax.get_yticklabels()]
    assert labels
    assert not any("m" in label for label in labels)
    assert "10k" in [label.get_text() for label in axes_of["throughput"][0].get_yticklabels()]


@pytest.mark.parametrize("rates", [[12000.0], [None, None, 12000.0], [math.nan, math.inf, 12000.0]])
def test_large_counts_are_short_whatever_comes_before_them(rates):
    panel = next(panel for panel in PANELS if "tokens_per_second" in panel.lines)
    phases = ["warm-up", "warm-up", "sparse"][-len(rates) :]
    records = [
        {"step": step, "phase": phase, "tokens_per_second": rate}
        for step, (phase, rate) in enumerate(zip(phases, rates, strict=True), 1)
    ]
    ax = Figure().add_subplot()
    plots._draw(ax, panel, records)
    assert ax.yaxis.get_major_formatter()(12000) == "12k"


def test_a_line_for_each_validation_set_and_source():
    losses, by_source, bits = (panel for panel in PANELS if panel.figure == "loss")
    known = known_of([flat(SEVERAL_SETS)])
    lines = [with_all_lines(panel, known).lines for panel in (losses, by_source, bits)]
    expected = {
        "loss": "train",
        "validation_loss": "validation web",
        "validation_code_loss": "validation code",
    }
    assert lines[0] == expected
    assert lines[1]["validation_loss_by_source: C4"] == "web: C4"
    assert lines[2]["validation_code_bits_per_byte"] == "validation code"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a$b_{$c", "a\udcffb", "a\x1b[2J\nb"])
def test_words_of_a_run_are_no_formulas(tmp_path, monkeypatch, name):
    """matplotlib parsed `$b_{$` in the name of a run, a phase or a source as mathematics, and failed."""
    draw_only(monkeypatch, "loss")
    write_run(tmp_path / name)
    path = tmp_path / name / "metrics.jsonl"
    words = json.dumps(name.replace("\udcff", ""))[1:-1]
    by_source = json.dumps({words: 2.0, "_b": 3.0, "c": None})
    line = (
        f'{{"event": "validation", "step": 60, "phase": "{words}", "validation_loss_by_source": {by_source}}}'
    )
    path.write_text(path.read_text().replace("sparse", words) + line + "\n")
    (loss,) = write_plots(tmp_path / name)
    assert_picture(loss)


def test_layers_without_a_value_are_gaps(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "TITLES", {})  # only the layers' titles
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace("[0.3, 0.5]", "[0.3, null]", 1))
    assert "layers" in names(write_plots(tmp_path / "run"))


@pytest.mark.filterwarnings("error")
def test_figures_without_data_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    write_run(tmp_path / "run", sparse=False)
    assert names(write_plots(tmp_path / "run")) == ALWAYS


@pytest.mark.nightly
def test_a_killed_run(tmp_path):
    write_run(tmp_path / "run", steps=10, tail='{"step": 70, "phase": "spa')
    for path in write_plots(tmp_path / "run"):
        assert_picture(path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("content", ["", '{"steps": 3, "unigram_perpl', "[]", "{}"])
def test_a_damaged_summary_costs_the_lines_of_the_baselines_alone(tmp_path, monkeypatch, content):
    draw_only(monkeypatch, "loss")
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(content)
    assert names(write_plots(tmp_path / "run")) == ["loss"]


def test_a_run_that_diverged(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "phase": "a", "loss": 3.0, "grad_norm": "Infinity", "lrs": {"base": 0.0}}\n'
        '{"step": 2, "phase": "a", "loss": "NaN", "grad_norm": "NaN", "lr": 0.0}\n'
        '{"step": 3, "phase": "a", "loss": "Infinity", "grad_norm": "NaN", "lr": 0.0}\n'
    )
    assert names(write_plots(tmp_path)) == ["loss", "optimizer"]


def test_series_skips_missing_values_but_leaves_a_phase_without_any_open():
    records = [
        {"step": 1, "phase": "a", "recall": 0.1},
        {"step": 2, "phase": "a", "recall": None},
        {"step": 3, "phase": "a", "recall": 0.3},
        {"step": 4, "phase": "dense", "recall": None},
        {"step": 5, "phase": "b", "recall": 0.5},
    ]
    steps, values = series(records, "recall")
    assert steps == [1, 3, 4, 5]
    assert values[:2] == [0.1, 0.3]
    assert math.isnan(values[2])
    assert values[3] == 0.5


def test_a_phase_starts_after_the_last_step_of_the_one_before():
    phases = [(10, "a"), (20, "a"), (20, "a"), (30, "b"), (40, "c")]
    records = [{"step": step, "phase": phase} for step, phase in phases]
    assert phase_starts(records) == [(0, "a"), (20, "b"), (30, "c")]
    assert phase_starts(records[3:4]) == [(29, "b")]


def test_comparison_of_runs_with_the_same_name(tmp_path):
    write_run(tmp_path / "x" / "run")
    write_run(tmp_path / "y" / "run", sparse=False)
    path = write_comparison([tmp_path / "x" / "run", tmp_path / "y" / "run"], tmp_path / "out")
    assert path == tmp_path / "out" / "comparison.png"
    assert_picture(path)


def test_command_draws_every_run_and_the_comparison(tmp_path):
    """Runs without other logs show two figures; the test above names the figures of a whole run."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [{"step": step, "phase": "a", "loss": 3.0 / step, "grad_norm": 1.0} for step in (1, 2, 3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(PLOT), str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    written = [Path(line).relative_to(tmp_path) for line in done.stdout.splitlines()]
    figures = [
        Path(name, "plots", f"{figure}.png") for name in ("a", "b") for figure in ("loss", "optimizer")
    ]
    assert sorted(written[:-1]) == figures
    assert written[-1] == Path("a", "plots", "comparison.png")
    assert all((tmp_path / path).is_file() for path in written)


def test_command_refuses_what_is_not_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "good")
    (tmp_path / "other").mkdir()
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "metrics.jsonl").write_text("")
    for arguments, message in (
        (["good", "missing"], "missing: no such folder"),
        (["good", "other"], "it has no metrics.jsonl"),
        (["started"], "nothing has been logged yet"),
        (["good", "--out", "x"], "give at least two runs"),
        (["good", "good", "--out", "good/metrics.jsonl"], "a file; give a folder"),
    ):
        monkeypatch.setattr(sys, "argv", [str(PLOT), *arguments])
        with pytest.raises(SystemExit) as refused:
            runpy.run_path(str(PLOT), run_name="__main__")
        assert refused.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "good" / "plots").exists()


def test_the_command_says_which_file_of_a_run_is_closed_to_it(tmp_path, monkeypatch, capsys):
    def closed(path, fault_of):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write_run(tmp_path / "run")
    monkeypatch.setattr("gsa_eval.report.run_series.read_records", closed)
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"Permission denied: '{tmp_path}/run/metrics.jsonl'" in capsys.readouterr().err


def test_a_full_disk_leaves_the_report_that_was_there(tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_run(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "run"), "--html"])
    assert main() == 0
    before = (tmp_path / "run" / "report.html").read_bytes()
    monkeypatch.setattr("gsa_train.files.os.fsync", full)
    assert main() == 2
    assert "not all was drawn: [Errno 28] No space left on device" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").read_bytes() == before
