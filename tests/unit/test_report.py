"""The HTML report: one page with everything in it, out of whatever state a run left its folder in."""

import json
import math
import re
from pathlib import Path

import pytest

import gsa_train
from gsa_train.metrics.alerts import TITLES as TITLES_OF_ALERTS
from gsa_train.report.events import KINDS
from gsa_train.report.page import MOST_EVENTS, _thin, write_report
from gsa_train.report.panels import BEST, LAYERS, PANELS, SECTIONS, TITLES, tag_of
from gsa_train.report.run_series import token_knots, tokens_at
from gsa_train.run.starts import read_starts, source_commit

PHASES = ((30, "warm-up"), (60, "sparse"))
START = {"layout": "2 ranks on cpu", "device": "x86", "host": "node7", "commit": "abc123", "torch": "2.13"}
SPIKE = {"event": "spike", "phase": "sparse", "signal": "loss", "value": 9.0, "threshold": 7.5}


def write_run(folder, *events, every=10, starts=(0,)):
    folder.mkdir(parents=True)
    records = []
    for step in range(every, 61, every):
        phase = next(name for end, name in PHASES if step <= end)
        record = {"step": step, "phase": phase, "loss": 8.0 - step / 20, "tokens": 1000 * step, "spikes": 1}
        record |= {"spikes_per_100k_steps": 1e5 / 60, "spike_score": 0.0, "lrs": {"base": 1e-3}}
        record |= {
            "k_mean": 5.0,
            "k_min": 2.0,
            "k_max": 9.0,
            "layer_recall": [0.25, None if step < 20 else 0.5],
        }
        records.append(record)
    records += events
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.yaml").write_text("run:\n  name: <script>alert(1)</script>\n")
    lines = [json.dumps({"unix_seconds": 1e9 + step, "step": step, **START}) for step in starts]
    (folder / "starts.jsonl").write_text("\n".join(lines) + "\n" + '{"unix_sec')


def numbers_in(page):
    (found,) = re.findall(r'<script type="application/json" id="numbers">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def panel_of(page, label):
    return next(panel for panel in numbers_in(page)["panels"] if panel["label"] == label)


def test_a_page_of_one_run_holds_everything(tmp_path):
    run = tmp_path / "a<b"
    write_run(
        run,
        {**SPIKE, "step": 41, "action": "log"},
        {"event": "validation", "step": 60, "phase": "sparse", "validation_loss": "NaN"},
        {"event": "skipped_batches", "step": 50, "phase": "sparse", "last_step": 52},
        starts=(0, 40),
    )
    (run / "metrics_rewound.jsonl").write_text(json.dumps({**SPIKE, "step": 55, "action": "rewind"}) + "\n")
    fault = run / "faults" / "20260101-000000"
    fault.mkdir(parents=True)
    (fault / "report.txt").write_text(
        "rank 0: no progress\n  rank 0: x\n  rank 1: after step 44, for 60 s <--\n"
    )

    empty = run / "faults" / "20260102-000000"  # as a full disk leaves it
    empty.mkdir()
    (empty / "report.txt").touch()

    path = write_report([run], run / "report.html")
    page = path.read_text()
    # Nothing is fetched: the only address is the name of SVG.
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:link|img|iframe)|\ssrc=|url\((?!#)|@import", page)
    assert page.count("<script") == 2
    assert path.stat().st_size < 60_000
    assert "a&lt;b" in page
    assert "&lt;script&gt;alert(1)" in page
    for said in ("abc123", "2 ranks on cpu", "warm-up from step 1, sparse from step 31", "node7", "2 starts"):
        assert said in page
    assert "spikes in 60 steps: 1, or 1666.7 per 100K steps" in page
    assert "fewer than 10 others" in page
    for said in (
        "loss 9 above 7.5, action: log",
        "action: rewind; then rewound",
        "steps 50 to 52",
        "no progress",
    ):
        assert said in page

    numbers = numbers_in(page)
    (about,) = numbers["runs"]
    assert about["phases"] == [[0, "warm-up"], [30, "sparse"]]
    assert about["marks"] == [
        [40, "restart"],
        [41, "spike"],
        [44, "fault"],
        [50, "skipped_batches"],
        [55, "spike"],
    ]
    loss, validation = panel_of(page, "loss (nats per token)")["series"]
    assert loss["x"] == [10, 20, 30, 40, 50, 60]
    assert loss["y"] == [7.5, 7.0, 6.5, 6.0, 5.5, 5.0]
    assert (validation["y"][-1], validation["bad"]) == (None, [60])
    (budget,) = panel_of(page, "budget k_t (keys)")["series"]
    assert (budget["low"], budget["high"]) == ([2.0] * 6, [9.0] * 6)
    assert numbers["layers"][0]["rows"] == [[0.25] * 6, [None, 0.5, 0.5, 0.5, 0.5, 0.5]]
    assert {panel["section"] for panel in numbers["panels"]} == {"train", "gsa", "stability"}


def test_runs_are_compared_over_tokens(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", every=5)
    page = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "out" / "comparison.html").read_text()
    assert numbers_in(page)["axis"] == "tokens"
    lines = panel_of(page, "loss (nats per token)")["series"]
    assert [(line["run"], line["name"], len(line["x"])) for line in lines] == [
        (0, "a: train", 6),
        (1, "b: train", 12),
    ]
    assert page.count("no spike, no step left out") == 2


def test_tokens_of_a_run_whose_batch_became_larger(tmp_path):
    write_run(tmp_path / "a")
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records[3:]:  # from step 31 on four times as large
        record["tokens"] = 30_000 + 4_000 * (record["step"] - 30)
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    knots = token_knots(records)
    assert knots == [(0, 0), (30, 30_000), (60, 150_000)]
    assert tokens_at(knots, [15, 30, 45, 60, 70]) == [15_000, 30_000, 90_000, 150_000, 190_000]
    page = write_report([tmp_path / "a"], tmp_path / "report.html").read_text()
    assert numbers_in(page)["runs"][0]["tokens"] == [[0, 0], [30, 30_000], [60, 150_000]]
    assert "<td class=number>150k</td>" in page


def test_a_save_that_ended_in_the_next_phase_begins_no_phase_anew(tmp_path):
    write_run(tmp_path / "a")
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    late = {"event": "checkpoint", "step": 30, "phase": "warm-up", "checkpoint_save_seconds": 9.0}
    lines.insert(4, json.dumps(late))  # behind step 40
    lines[:3] = [json.dumps({**json.loads(line), "k_mean": None}) for line in lines[:3]]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = write_report([tmp_path / "a"], tmp_path / "report.html").read_text()
    assert numbers_in(page)["runs"][0]["phases"] == [[0, "warm-up"], [30, "sparse"]]
    (budget,) = panel_of(page, "budget k_t (keys)")["series"]
    assert budget["x"][-3:] == [40, 50, 60]  # no gap between
    assert budget["y"][-3:] == [5.0] * 3


def test_a_run_of_an_older_version_and_one_just_started(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "a", "loss": 3.0}\n')
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "unknown" in page
    assert "under way, or ended without a word" in page


def test_a_long_line_keeps_its_peaks_and_its_gaps():
    values = [math.sin(at / 300) for at in range(10_000)]
    values[4321], values[7000] = 50.0, math.nan
    kept = _thin(values, 600)
    assert len(kept) <= 610
    assert {0, 4321, 7000, 9999} <= set(kept)
    assert kept == sorted(kept)
    assert _thin(values[:600], 600) == list(range(600))


def test_thousands_of_flagged_steps_are_few_marks(tmp_path):
    spikes = [{**SPIKE, "step": step, "action": "log"} for step in range(1000, 9000)]
    write_run(tmp_path / "run", *spikes, every=10)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    marks = numbers_in(page)["runs"][0]["marks"]
    assert 300 < len(marks) <= 401
    assert marks[0] == [1000, "spike"]
    assert page.count("loss 9 above") == MOST_EVENTS
    assert f"and {8000 - MOST_EVENTS} more" in page


def test_every_event_that_is_logged_is_known():
    """A new one needs a row in the report, and, if a person should hear of it, an alert."""
    sources = "".join(path.read_text() for path in Path(gsa_train.__file__).parent.rglob("*.py"))
    logged = set(re.findall(r'(?:"event": |_event\(\s*)"(\w+)"', sources)) | {"checkpoint_failed"}
    assert logged >= {"spike", "rewind", "skipped_batches", "checkpoint_damaged", "warning"}
    # The last two are for W&B: metrics.jsonl cannot be written, or the thread that writes it hangs.
    elsewhere = {"validation", "checkpoint", "log_failed", "hang"}
    assert logged - elsewhere == set(KINDS) - {"restart", "fault"}
    assert set(TITLES_OF_ALERTS) < logged


def test_the_list_of_panels_is_one():
    assert {panel.section for panel in PANELS} == set(SECTIONS)
    assert {panel.figure for panel in PANELS} == set(TITLES)
    assert len({(panel.section, panel.label) for panel in PANELS}) == len(PANELS)
    shown = [tag for panel in PANELS for tag in panel.tags]
    assert len(shown) == len(set(shown)), "a metric stands in two panels"
    assert all(tag_of(key) for key in (*LAYERS, *BEST))
    assert [tag_of(key) for key in ("lr", "lrs", "tokens", "k_mean")] == [
        "train/lr",
        "lr",
        "train/tokens",
        "gsa/k_mean",
    ]
    assert set(BEST) <= {key for panel in PANELS for key in panel.keys} | {
        "validation_loss",
        "validation_perplexity",
    }


@pytest.mark.parametrize(("listed", "commit"), [("abc\n", "abc"), ("abc\n M x.py\n", "abc+")])
def test_the_commit_of_a_frozen_source(tmp_path, listed, commit):
    (tmp_path / "source").mkdir()
    (tmp_path / "commit.txt").write_text(listed)
    assert source_commit(tmp_path / "source") == commit
    assert source_commit(tmp_path) is None
    assert read_starts(tmp_path) == []


def test_a_run_that_hung_before_its_first_step(tmp_path):
    hang = {"event": "restart_after_hang", "step": 0, "phase": "", "reason": "rank 1 is silent"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(hang) + "\n")
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert numbers_in(page)["runs"][0]["marks"] == [[0, "restart_after_hang"]]
