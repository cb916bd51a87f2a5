"""Tests reports of a study's records: mean and spread, equal tokens and equal time, tables and cost."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from gsa_study.caveats import close_lines, notes
from gsa_study.commands.study import main
from gsa_study.cost import arm_costs
from gsa_study.report import markdown
from gsa_study.run_metrics import first_reached, interpolate, time_knots, token_knots
from gsa_study.spread import Spread, close_pairs, difference, written
from gsa_study.study_file import Study
from gsa_study.tables import (
    FORMULA,
    csv_text,
    read_results,
    run_rows,
    seed_rows,
    word_of,
)
from helpers.studies import TOKENS_A_STEP, load, log_run, record


def test_arms_are_compared_seed_by_seed() -> None:
    worse_text = {1: 30.0, 2: 40.0, 3: 50.0}  # effect of a seed on all arms
    near = {1: 31.0, 2: 39.5, 3: 50.4}  # 1, -0.5 and 0.4 from it: mean 0.3, deviation 0.755
    far = {1: 28.0, 2: 38.5, 3: 47.5, 4: 1.0}  # -2, -1.5, -2.5: mean -2, deviation 0.5
    assert difference(far, worse_text) == Spread(3, -2.0, 0.5, 0)
    assert difference({1: 2.0, 2: None, 3: math.nan}, worse_text) == Spread(1, -28.0, None, 1)
    ((*pair, apart),) = close_pairs({"a": worse_text, "b": near, "c": far, "d": {1: 30.0}})
    assert pair == ["a", "b"]
    assert written(apart) == "-0.30 ± 0.75"


def test_interpolation_is_on_the_line_between_neighbours() -> None:
    points = [(100.0, 5.0), (200.0, 4.0), (400.0, 3.0)]
    assert [interpolate(points, x) for x in (99, 200, 250, 401)] == [None, 4.0, 3.75, None]
    unknown = interpolate([(1.0, math.nan), (3.0, 1.0)], 2)
    assert math.isnan(unknown)


def test_training_time_counts_each_step_with_the_median_of_its_phase() -> None:
    seconds = {2: 90.0, 4: 1.0, 6: 2.0, 8: 3.0, 10: 5.0}  # the first compiles
    records = [record(step, 1.0, each) for step, each in seconds.items()]
    events = [{"event": "validation", "step": 10, "phase": "sparse", "validation_loss": 1.0}]
    assert time_knots([*records, *events]) == [(0.0, 0.0), (6.0, 12.0), (10.0, 28.0)]
    assert time_knots([]) == []
    # The batch became four times as large after step 30.
    tokens = [{"step": step, "tokens": 1000 * (step + 3 * max(0, step - 30))} for step in range(10, 61, 10)]
    assert token_knots(tokens) == [(0, 0), (30, 30_000), (60, 150_000)]


@pytest.fixture
def compared(tmp_path: Path) -> Study:
    """Create a study of two arms (configs) with falling losses. A step takes 1 s in arm one, and 2 s in arm two. Arm
    two has an unfinished run."""
    metrics = [
        {"key": "loss", "at_tokens": [5 * TOKENS_A_STEP]},
        {"key": "loss", "equal_time": True, "reaches": "one"},
        {"key": "val_loss", "source": "summary", "label": "validation"},
        {"key": "recal"},
    ]
    study = load(tmp_path, metrics=metrics)
    offsets = {"one-seed1": 0.0, "one-seed2": 1.0, "two-seed1": 0.5}
    for run in study.runs:
        pace = 1.0 if run.arm == "one" else 2.0
        offset = offsets.get(run.name)
        last = 10 if offset is not None else 6
        first = 20.0 + (offset or 0.0)
        records = [record(step, first - step, pace, recall=0.5) for step in range(2, last + 1, 2)]
        log_run(run, records, None if offset is None else {"val_loss": 8.0 + offset})
    return study


def test_equal_tokens_equal_time_and_the_end(compared: Study) -> None:
    results = read_results(compared, {"two-seed2 train": "exit code 1: out of memory"})
    at_tokens, at_the_end, at_time, *reached, validation, unknown = results.columns
    assert at_tokens.values == {"one-seed1": 15.0, "one-seed2": 16.0, "two-seed1": 15.5}
    assert at_the_end.values == {"one-seed1": 10.0, "one-seed2": 11.0, "two-seed1": 10.5}
    # All have 10 s, which are 5 steps of arm two.
    assert at_time.values == {"one-seed1": 10.0, "one-seed2": 11.0, "two-seed1": 15.5}
    assert at_time.at == "at 10s of training"
    # With seed 1, arm two ends at a loss of 10.5 and so never reaches arm one's 10.
    assert [each.values["two-seed1"] for each in reached] == [None, None]
    assert [each.values["one-seed1"] for each in reached] == [10 * TOKENS_A_STEP, 10 / 60]
    assert [first_reached([(0, 9.0), (4, 7.0), (6, 3.0)], y) for y in (9, 8, 4, 2)] == [0, 2.0, 5.5, None]
    assert validation.values == {"one-seed1": 8.0, "one-seed2": 9.0, "two-seed1": 8.5}
    assert set(unknown.values.values()) == {None}
    assert results.spread("one", validation) == Spread(2, 8.5, math.sqrt(0.5), 0)
    states = ["finished"] * 3 + ["failed: exit code 1: out of memory"]
    assert [each.state for each in results.runs] == states
    said = "\n".join(notes(results))
    assert "1 of 4 runs are not finished and in no mean: two-seed2" in said
    assert "No run has recal (at 2.56k tokens); did you mean recall?" in said
    assert "several" not in said
    with (compared.runs[0].folder / "starts.jsonl").open("a") as file:
        later = {"unix_seconds": 2.0, "commit": "fedcba9876543210+", "device": "NVIDIA H100 80GB HBM3"}
        file.write(json.dumps(later) + "\n")
    said = "\n".join(notes(read_results(compared, {})))
    assert "have several commits: 0123456789ab, fedcba987654+." in said
    assert "have several devices: NVIDIA H100 80GB HBM3, NVIDIA H200." in said
    assert "texts" not in said
    for run, text in zip(compared.runs, ("1f", "2e", "1f"), strict=False):
        summary = json.loads((run.folder / "summary.json").read_text())
        (run.folder / "summary.json").write_text(json.dumps({**summary, "data_fingerprint": text}))
    assert "have several training texts: 1f, 2e." in "\n".join(notes(read_results(compared, {})))
    assert close_lines(results) == [], "of one arm only a single seed is there"


def test_differences_of_arms_match_their_seeds(compared: Study, tmp_path: Path) -> None:
    assert seed_rows(read_results(compared, {})) == [], "arm two has one finished run"
    last = next(run for run in compared.runs if run.name == "two-seed2")
    log_run(last, [record(step, 20.0 - step, 2.0) for step in range(2, 11, 2)], {"val_loss": 9.25})
    results = read_results(compared, {})
    # After 5 steps the losses of seed 1 are 15 (arm one) and 15.5 (arm two), of seed 2 they are 16 and 15.
    head = ["arm", "seeds", f"{results.columns[0].title}, less one"]
    assert seed_rows(results) == [head, ["two", "2", "-0.2 ± 1.1"]]
    assert "| two | 2 | -0.2 ± 1.1 |" in markdown(results, tmp_path)
    (line,) = close_lines(results)
    assert line.endswith(", seed by seed: one and two (0.2 ± 1.1 over 2 seeds).")


def test_every_number_of_the_report_has_run_config_and_commit(compared, monkeypatch):
    monkeypatch.setattr("sys.argv", ["study.py", "--study", str(compared.path), "--report"])
    assert main() == 0
    out = compared.folder / "report"
    assert {path.name for path in out.iterdir()} == {"tables.md", "arms.csv", "values.csv"}
    text = (out / "tables.md").read_text()
    configs = [f"[config](../{each.name}/config.yaml)" for each in compared.runs]
    assert all(said in text for said in ("| one | ", "8.50 ± 0.71", "0123456789ab", *configs))
    lines = (out / "values.csv").read_text().splitlines()
    line = next(each for each in lines if each.startswith("one,2,validation"))
    folder = compared.folder / "one-seed2"
    assert line == f"one,2,validation,val_loss,at the end,9.0,{folder},{folder}/config.yaml,0123456789abcdef"
    arms = (out / "arms.csv").read_text()
    assert f"one,validation,val_loss,at the end,2,8.5,{math.sqrt(0.5)!r},0" in arms
    assert run_rows(read_results(compared, {}), out)[4][1] == "after step 6 of 10"


def test_a_metric_of_an_evaluation_may_be_in_a_list(tmp_path: Path) -> None:
    key = "data.text.loss_by_position"
    metrics = [{"key": f"{key}.1.loss", "source": "evaluation"}]
    metrics.append({"key": f"{key}.7.loss", "source": "evaluation", "evaluations": ["end"]})
    evaluations = [{"name": "end"}, {"name": "more"}]
    study = load(tmp_path, seeds=[1], evaluations=evaluations, metrics=metrics)
    run = study.runs[0]
    log_run(run, [record(2, 5.0)], {})
    (run.folder / "evaluations" / "end").mkdir(parents=True)
    content: Any = {"data": {"text": {"loss_by_position": [{"loss": 4.0}, {"loss": 3.0}]}}}
    path = run.folder / "evaluations" / "end" / "results.json"
    path.write_text(json.dumps(content))
    there, of_more, beyond = read_results(study, {}).columns
    assert (there.at, of_more.at, beyond.at) == ("evaluation end", "evaluation more", "evaluation end")
    assert [each.values["one-seed1"] for each in (there, of_more, beyond)] == [3.0, None, None]
    assert "No run has data.text.loss_by_position.7.loss (evaluation end)." in notes(read_results(study, {}))
    for infinite in ("Infinity", math.inf):  # strict JSON, and Python's own from earlier versions
        content["data"]["text"]["loss_by_position"][1]["loss"] = infinite
        path.write_text(json.dumps(content))
        assert read_results(study, {}).columns[0].values["one-seed1"] == math.inf


def test_a_diverged_run_is_counted_beside_the_mean(compared: Study) -> None:
    run = compared.runs[0]
    log_run(run, [record(2, 18.0), record(10, "NaN")], {"val_loss": "NaN"})
    results = read_results(compared, {})
    validation = next(column for column in results.columns if column.title == "validation")
    assert results.spread("one", validation) == Spread(1, 9.0, None, 1)
    found = [written(each) for each in (results.spread("one", validation), Spread(0, None, None, 2))]
    assert found == ["9; 1 diverged", "2 diverged"]


def test_the_cost_matches_the_dry_run(compared: Study) -> None:
    values = read_results(compared, {}).values
    one, two = arm_costs(values, "NVIDIA H200", 0.25)
    assert (one.runs, one.finished, two.finished) == (2, 2, 1)
    assert one.tokens == 2 * 10 * TOKENS_A_STEP
    assert one.gpu_hours == pytest.approx(one.operations / (989e12 * 0.25) / 3600)
    assert one.gpu_hours_left == 0
    assert two.gpu_hours_left == pytest.approx(two.gpu_hours / 2 * 0.4)
    (unknown, _) = arm_costs(values, "NVIDIA H200", None)
    assert (unknown.gpu_hours, unknown.source) == (None, "unknown: give --mfu")
    log_run(compared.runs[0], [record(2, 1.0, mfu=0.2), record(10, 1.0, mfu=0.4)], {})
    (measured, _) = arm_costs(read_results(compared, {}).values, "NVIDIA H200", None)
    assert measured.source == "measured in one-seed1"
    assert measured.gpu_hours == pytest.approx(one.gpu_hours * 0.25 / 0.3)


def test_scores_of_tasks_have_a_mean_and_one_number_of_each(tmp_path: Path) -> None:
    key = "eval_bits_per_byte"
    study = load(tmp_path, seeds=[1], metrics=[{"key": key}, {"key": f"{key}: piqa", "statistic": "last"}])
    for run, bits in zip(study.runs, (1.0, 3.0), strict=True):
        scores = {"event": "tasks", key: {"piqa": bits, "lambada": 2.0}, "eval_accuracy": {}}
        log_run(run, [record(5, 2.0), record(10, 1.0), record(10, 0.0, **scores)], {})
    mean, of_one = read_results(study, {}).columns
    assert of_one.at == "at the end of each run"
    assert list(mean.values.values()) == [1.5, 2.5]
    assert list(of_one.values.values()) == [1.0, 3.0]


def test_runs_that_are_not_there_are_named_by_arm(tmp_path: Path) -> None:
    study = load(tmp_path, arms=[{"name": "one"}, {"name": "two"}, {"name": "three", "seeds": [1]}])
    log_run(study.runs[0], [record(10, 1.0)], {})
    log_run(study.runs[1], [record(3, 1.0)])
    said = "4 of 5 runs are not finished and in no mean: two-seed1 (after step 3 of 10); three-seed1 (not begun); "
    assert any(line.startswith(said) for line in notes(read_results(study, {})))
    arms = [{"name": "one"}, {"name": "two", "seeds": [1]}]
    others = load(tmp_path, name="other", seeds=[1, 2, 3], arms=arms)
    log_run(next(run for run in others.runs if run.arm == "two"), [record(10, 1.0)], {})
    assert any("one, seeds 1, 2, 3 (not begun)" in line for line in notes(read_results(others, {})))


def test_no_word_of_a_csv_is_a_formula():
    words = ["=HYPERLINK(1)", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1"]
    words += ["-1.5", "-inf", "1e-3", "a=b", "'x"]
    (read,) = csv.reader(io.StringIO(csv_text([words]), newline=""))
    assert [cell for cell in read if cell.startswith(FORMULA)] == ["-1.5", "-inf"]
    assert [word_of(cell) for cell in read] == words
