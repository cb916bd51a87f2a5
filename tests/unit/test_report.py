"""Tests the HTML report: one self-contained page, whatever the state of the run's folder."""

import errno
import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

import gsa_train
from gsa_eval.commands.plot import main
from gsa_eval.report.charts import thin
from gsa_eval.report.events import KINDS
from gsa_eval.report.page import MOST_EVENTS, write_report
from gsa_eval.report.run_files import RunFiles
from gsa_eval.report.run_series import flat, known_of, shown_range, token_knots, tokens_at, with_all_lines
from gsa_train.config import load_config
from gsa_train.metrics.alerts import TITLES as TITLES_OF_ALERTS
from gsa_train.metrics.panels import BEST, LAYERS, PANELS, SECTIONS, tag_of
from gsa_train.model.flops import count_parameters
from gsa_train.run_folder.starts import command_line, source_commit
from helpers.report_runs import SPIKE, write_run

ROOT = Path(__file__).parents[2]
CONFIG = load_config("configs/demo.yaml")
CHART = re.compile(r'<figure><figcaption>(.*?)</figcaption>.*?Plotly\.newPlot\(\s*"[^"]+",\s*', re.DOTALL)


def charts_in(page):
    """Map a title to (lines, layout), as plotly's JavaScript gets them."""
    found, decoder = {}, json.JSONDecoder()
    for match in CHART.finditer(page):
        lines, end = decoder.raw_decode(page, match.end())
        layout, _ = decoder.raw_decode(page, re.compile(r",\s*").match(page, end).end())
        found[html.unescape(match[1])] = lines, layout
    return found


def lines_of(page, title):
    return [line for line in charts_in(page)[title][0] if line["type"] == "scatter" and "yaxis" not in line]


def marks_in(page, title="loss (nats per token)"):
    lines, _ = charts_in(page)[title]
    return {line["name"]: line["x"] for line in lines if line.get("yaxis") == "y2"}


def without_plotly(page):
    (before, after) = page.split(get_plotlyjs())
    return before + after


def page_of(*folders):
    return write_report([*folders], folders[0].parent / "out" / "page.html").read_text()


def edit_records(folder, edit):
    """Write the records of a run again as the list `edit(records)`."""
    path = folder / "metrics.jsonl"
    records = edit([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return records


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
    (fault / "report.txt").write_text("rank 0: no progress\n  rank 1: after step 44, for 60 s <--\n")
    empty = run / "faults" / "20260102-000000"  # as a full disk leaves it
    empty.mkdir()
    (empty / "report.txt").touch()
    page = page_of(run)
    # Plotly's JavaScript is included once, and nothing is fetched.
    own = without_plotly(page)
    assert not re.findall(r"https?://[^\"'\s<]+", own)
    assert not re.search(r"<(?:link|img|iframe)|\ssrc=|url\((?!#)|@import", own)
    assert len(own) < 120_000
    assert "a&lt;b" in page
    assert "&lt;script&gt;alert(1)" in page
    for said in ("abc123", "2 ranks on cpu", "warm-up from step 1, sparse from step 31", "node7", "2 starts"):
        assert said in page
    for said in ("spikes in 60 steps: 1, or 1666.7 per 100K steps", "fewer than 10 others", "steps 50 to 52"):
        assert said in page
    for said in ("loss 9 above 7.5, action: log", "action: rewind; then rewound", "no progress"):
        assert said in page

    marks = {"restart": [40], "spike": [41, 55], "fault": [44], "batches skipped": [50], "not finite": [60]}
    assert marks_in(page) == marks
    loss, validation = lines_of(page, "loss (nats per token)")
    assert loss["x"] == [10, 20, 30, 40, 50, 60]
    assert loss["y"] == [7.5, 7.0, 6.5, 6.0, 5.5, 5.0]
    assert validation["y"][-1] is None
    low, high, budget = lines_of(page, "budget k_t (keys)")
    assert (low["y"], high["y"], budget["y"]) == ([2.0] * 6, [9.0] * 6, [5.0] * 6)
    assert high["fill"] == "tonexty"
    ((picture,), _) = charts_in(page)["recall by layer"]
    assert picture["z"] == [[0.25] * 6, [None, 0.5, 0.5, 0.5, 0.5, 0.5]]
    assert picture["x"] == [0, 10, 20, 30, 40, 50, 60]
    ((heads,), layout) = charts_in(page)["attention to the document's first token, newest step"]
    assert heads["z"] == [[0.1, 0.5], [0.6, None]]
    assert layout["meta"]  # its x axis does not zoom
    positions = lines_of(page, "attention by the key's position in its document")
    assert [(line["name"], line["y"][0]) for line in positions] == [("0", 0.25), ("1-3", 0.75)]
    assert set(re.findall(r'<h2 id="(\w+)"', page)) == {"runs", "events", "train", "gsa", "stability"}


def test_the_loss_axis_is_not_ruled_by_the_first_steps_nor_by_a_spike(tmp_path):
    steps = list(range(1, 1001))
    falling = [3.0 + 0.5 * math.cos(step / 20) + 9.0 / step for step in steps]
    low, high = shown_range([(steps, falling)])
    assert low < 2.5 < 3.5 < high < 4 < 12 < falling[0]
    falling[700] = 50.0
    assert shown_range([(steps, falling)])[1] < 4.5
    assert shown_range([(steps[:9], falling[:9])]) is None
    assert shown_range([(steps, [1.0] * 1000)]) == pytest.approx((0.9, 1.1))
    assert shown_range([(steps, [None, math.nan] * 500)]) is None

    write_run(tmp_path / "a", every=1)
    (tmp_path / "a" / "summary.json").write_text('{"steps": 60, "unigram_perplexity": 1e6}')
    lines, layout = charts_in(page_of(tmp_path / "a"))["loss (nats per token)"]
    unigram = ("unigram model", pytest.approx(math.log(1e6)))
    assert [(line["name"], line["y"][0]) for line in lines] == [("train", 7.95), unigram]
    assert layout["yaxis"]["range"] == pytest.approx(shown_range([(lines[0]["x"], lines[0]["y"])]))


def test_the_head_says_what_ran_on_what_for_how_long(tmp_path):
    folder = tmp_path / "a"
    write_run(folder, starts=(0, 40))
    (folder / "config.yaml").write_text(Path("configs/demo.yaml").read_text())
    more = {"mfu": 0.415, "recall": 0.75, "random_recall": 0.5}
    records = edit_records(folder, lambda old: [{**each, **more, "time": 1e9 + each["step"]} for each in old])
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()[:2]]
    starts[1]["command"] = "torchrun --nproc_per_node=2 launch/pretrain.py --config configs/demo.yaml"
    (folder / "starts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in starts))
    page = without_plotly(page_of(folder))
    count = count_parameters(CONFIG.model, CONFIG.gsa, CONFIG.moe)
    planned = sum(phase.steps for phase in CONFIG.phases)
    trained = max(record["tokens"] for record in records)  # in other batches than the config's
    for said in (
        f"{count.total:,} parameters",
        f"60 of {planned}",
        f"{trained + (planned - 60) * 8 * 256:,} tokens in all phases",
        "data/sample/train",
        starts[1]["command"],
        "<td class=number>50s</td>",  # 30 s to step 30, 20 s from step 40, where the second start began, to step 60
        "<td class=number>41.5%</td>",
        "0.750 (0.500)",
    ):
        assert said in page, said


def test_the_command_of_a_start():
    words = ["launch/pretrain.py", "--config", "a b.yaml", "data.train_dir=s3://me:secret@host/x"]
    alone = command_line(words, {})
    assert alone == "python launch/pretrain.py --config 'a b.yaml' data.train_dir=s3://host/x"
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert command_line(words[:1], torchrun) == "torchrun --nproc_per_node=8 --nnodes=2 launch/pretrain.py"
    assert command_line(["/x/gsa_train/__main__.py", "y=1"], {}) == "python -m gsa_train y=1"
    assert command_line(["/x/bin/gsa-pretrain", "y=1"], {}) == "/x/bin/gsa-pretrain y=1"


def test_runs_are_compared_over_tokens_also_where_a_batch_became_larger(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", every=5)

    def grow(records):  # four times as large from step 31 on
        return [{**each, "tokens": 1000 * (each["step"] + 3 * max(0, each["step"] - 30))} for each in records]

    knots = token_knots(edit_records(tmp_path / "a", grow))
    assert knots == [(0, 0), (30, 30_000), (60, 150_000)]
    assert tokens_at(knots, [15, 30, 45, 60, 70]) == [15_000, 30_000, 90_000, 150_000, 190_000]
    assert "<td class=number>150k of " in page_of(tmp_path / "a")  # of the planned ones
    page = page_of(tmp_path / "a", tmp_path / "b")
    grown, plain = lines_of(page, "loss (nats per token)")
    assert (grown["name"], plain["name"]) == ("a: train", "b: train")
    assert grown["x"] == [10_000, 20_000, 30_000, 70_000, 110_000, 150_000]
    assert plain["x"] == [5000 * number for number in range(1, 13)]
    assert charts_in(page)["loss (nats per token)"][1]["xaxis"]["title"]["text"] == "tokens"
    assert page.count("no spike, no skipped batch") == 2


def test_a_save_that_ended_in_the_next_phase_begins_no_phase_again(tmp_path):
    write_run(tmp_path / "a")
    late = {"event": "checkpoint", "step": 30, "phase": "warm-up", "checkpoint_save_seconds": 9.0}

    def edit(records):
        warm_up = [{**each, "k_mean": None} for each in records[:3]]
        return [*warm_up, records[3], late, *records[4:]]  # after step 40

    edit_records(tmp_path / "a", edit)
    page = page_of(tmp_path / "a")
    _, layout = charts_in(page)["loss (nats per token)"]
    assert [(name["x"], name["text"]) for name in layout["annotations"]] == [(0, "warm-up"), (30, "sparse")]
    assert [line["x0"] for line in layout["shapes"]] == [30]
    *_, budget = lines_of(page, "budget k_t (keys)")
    assert budget["x"][-3:] == [40, 50, 60]  # without a gap
    assert budget["y"][:3] + budget["y"][-3:] == [None] * 3 + [5.0] * 3


def test_a_long_line_keeps_its_peaks_and_its_gaps():
    values = [math.sin(at / 300) for at in range(10_000)]
    values[4321], values[7000] = 50.0, math.nan
    kept = thin(values, 600)
    assert len(kept) <= 610
    assert {0, 4321, 7000, 9999} <= set(kept)
    assert kept == sorted(kept)
    assert thin(values[:600], 600) == list(range(600))


def test_thousands_of_flagged_steps_are_few_marks(tmp_path):
    spikes = [{**SPIKE, "step": step, "action": "log"} for step in range(1000, 9000)]
    write_run(tmp_path / "run", *spikes, every=10)
    page = page_of(tmp_path / "run")
    marks = marks_in(page)["spike"]
    assert 300 < len(marks) <= 401
    assert marks[0] == 1000
    assert page.count("loss 9 above") == MOST_EVENTS
    assert f"and {8000 - MOST_EVENTS} more" in page


def test_every_event_that_is_logged_is_known():
    """A new event needs a row in the report, and, if a person should know of it, an alert."""
    sources = "".join(path.read_text() for path in Path(gsa_train.__file__).parent.rglob("*.py"))
    logged = set(re.findall(r'(?:"event": |_event\(\s*)"(\w+)"', sources)) | {"checkpoint_failed"}
    assert logged >= {"spike", "rewind", "skipped_batches", "checkpoint_damaged", "warning"}
    # The last three are for W&B: metrics.jsonl cannot be written, can again, or the thread that writes it hangs.
    elsewhere = {"validation", "samples", "tasks", "checkpoint", "log_failed", "log_written", "hang"}
    assert logged - elsewhere == set(KINDS) - {"restart", "fault"}
    assert set(TITLES_OF_ALERTS) < logged


def test_the_list_of_panels_is_one():
    assert {panel.section for panel in PANELS} == set(SECTIONS)
    assert len({(panel.section, panel.label) for panel in PANELS}) == len(PANELS)
    shown = [tag for panel in PANELS for tag in panel.tags]
    assert len(shown) == len(set(shown)), "a metric stands in two panels"
    assert all(tag_of(key) for key in (*LAYERS, *BEST))
    tags = {"lr": "train/lr", "lrs": "lr", "tokens": "train/tokens", "k_mean": "gsa/k_mean"}
    assert {key: tag_of(key) for key in tags} == tags
    keys = {key for panel in PANELS for key in panel.keys}
    assert set(BEST) <= keys | {"validation_loss", "validation_perplexity"}


@pytest.mark.parametrize(("listed", "commit"), [("abc\n", "abc"), ("abc\n M x.py\n", "abc+")])
def test_the_commit_of_a_frozen_source(tmp_path, listed, commit, monkeypatch):
    monkeypatch.delenv("GSA_COMMIT", raising=False)
    (tmp_path / "source").mkdir()
    (tmp_path / "commit.txt").write_text(listed)
    assert source_commit(tmp_path / "source") == commit
    assert source_commit(tmp_path) is None
    monkeypatch.setenv("GSA_COMMIT", "def")
    assert source_commit(tmp_path / "source") == commit
    assert source_commit(ROOT) == source_commit(tmp_path) == "def"  # a checkout may be newer than its git


def test_a_run_that_hung_before_its_first_step(tmp_path):
    (tmp_path / "run").mkdir()
    hang = {"event": "restart_after_hang", "step": 0, "phase": "", "reason": "rank 1 is silent"}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(hang) + "\n")
    page = page_of(tmp_path / "run")
    assert "restart after a hang" in without_plotly(page)
    assert "running, or killed" in page
    assert charts_in(page) == {}


@pytest.mark.parametrize("name", ["summary.json", "stopped.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_a_damaged_file_is_named_and_left_out(tmp_path, caplog, name, content):
    write_run(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    assert RunFiles("run", tmp_path / "run").state == "running, or killed"
    assert f"{name} is damaged" in caplog.text


# --- the command, and a line for each set ------------------------------------------------------------------

PLOT = Path(__file__).parents[2] / "launch" / "plot.py"

SEVERAL_SETS = {"validation_set": "web", "validation_loss": 2.0, "validation_code_loss": 2.5}
SEVERAL_SETS |= {"validation_loss_by_source": {"C4": 3.0}, "validation_code_bits_per_byte": None}


def test_a_line_for_each_validation_set_and_source():
    losses, by_source, bits = (panel for panel in PANELS if panel.per_set)
    known = known_of([flat({"event": "validation", "step": 60, "phase": "sparse", **SEVERAL_SETS})])
    lines = [with_all_lines(panel, known).lines for panel in (losses, by_source, bits)]
    names = {"validation_loss": "validation web", "validation_code_loss": "validation code"}
    assert lines[0] == {"loss": "train", **names}
    assert lines[1]["validation_loss_by_source: C4"] == "web: C4"
    assert lines[2]["validation_code_bits_per_byte"] == "validation code"


@pytest.mark.parametrize("options", [[], ["--out", "."]])
def test_the_command_writes_one_page_and_no_picture(tmp_path, options):
    write_run(tmp_path / "x" / "run")
    write_run(tmp_path / "y" / "run")
    runs = ["x/run", "y/run"] if options else ["x/run"]
    command = [sys.executable, str(PLOT), *runs, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    folder = Path("." if "--out" in options else "x/run")
    page = tmp_path / folder / ("comparison.html" if options else "report.html")
    assert tmp_path / done.stdout.strip() == page
    assert set(tmp_path.rglob("*.html")) == {page}
    assert not [*tmp_path.rglob("*.png")]


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
            main()
        assert refused.value.code == 2
        assert message in capsys.readouterr().err
    assert not [*tmp_path.rglob("*.html")]


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
    monkeypatch.setattr(sys, "argv", ["plot.py", str(tmp_path / "run")])
    assert main() == 0
    before = (tmp_path / "run" / "report.html").read_bytes()
    monkeypatch.setattr("gsa_train.files.os.fsync", full)
    assert main() == 2
    assert "no report was written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").read_bytes() == before
