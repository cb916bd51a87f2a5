"""Tests that reports of damaged or foreign run folders are written, and list what they leave out."""

import base64
import json
import os
import re

import pytest

from gsa_eval.report.page import write_report
from helpers.report_runs import SPIKE, START, write_run

ODD = ["x", "NaN", "\ud800", -1, 1.5, True, 10**400, 1e300, [], [1, [2]], {}, {"a": [1]}, {"a": {"b": 1}}]
"""Values of other types, and beyond the limits of files and pictures."""


def write_all_that_a_report_reads(folder):
    skipped = {"event": "skipped_batches", "step": 40, "phase": "sparse", "last_step": 41}
    validation = {"event": "validation", "step": 60, "phase": "sparse", "time": 1e9 + 70}
    validation["validation_set"] = "web"
    losses = {"loss": 2.0, "loss_by_source": {"C4": 3.0}, "code_loss": 2.5}
    validation |= {f"validation_{name}": loss for name, loss in losses.items()}
    saved = {"step": 70, **SAVED, "time": 1e9 + 80}
    write_run(folder, SPIKE | {"step": 30, "action": "log"}, skipped, validation, saved, starts=(0, 40))
    (folder / "starts.jsonl").write_text("".join(each + "\n" for each in STARTS))
    (folder / "metrics_rewound.jsonl").write_text(json.dumps(SPIKE | {"step": 45, "action": "rewind"}) + "\n")
    sample = {"prompt": "One", "text": " day", "ended": False}
    record = {"event": "samples", "step": 60, "phase": "sparse", "time": 1e9, "samples": [sample]}
    (folder / "samples.jsonl").write_text(json.dumps(record) + "\n")
    line = {"step": 0, "time": 1e9 + 5, "seconds": {"import": 5.0}}
    lines = [{"kind": "start", "began": 1e9, **line}, {"kind": "steps", "phase": "sparse", **line, "step": 9}]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    alive = {"began": 1e9, "time": 1e9 + 9, "progress": 1e9 + 8, "step": 9, "seconds": {"import": 5.0}}
    (folder / "alive.json").write_text(json.dumps(alive))
    (folder / "summary.json").write_text(json.dumps({"steps": 60, "unigram_perplexity": 900.0}))
    (folder / "stopped.json").write_text(json.dumps({"step": 60, "reason": "SIGTERM", "unix_seconds": 1.0}))
    evaluation = folder / "evaluations" / "a"
    evaluation.mkdir(parents=True)
    scores = {"data": {"web": {"perplexity": 9.0}}, "tasks": {"results": {"piqa": {"acc,none": 0.5}}}}
    scores |= {"requests": {"piqa": {"accuracy": 0.5}}, "ruler": {"mean": {"4096": 0.5}}}
    model = {"step": 60, "settings": ["gsa.k_max = 64"]}
    results = {"model": model, "command": "gsa-evaluate", **scores}
    (evaluation / "results.json").write_text(json.dumps(results))


SAVED = {"event": "checkpoint", "phase": "sparse", "checkpoint_bytes": 9, "checkpoint_save_seconds": 1.0}
ANY_START = {"run_id": "a", **START}
STARTS = [json.dumps({"unix_seconds": 1e9 + step, "step": step, **ANY_START}) for step in (0, 40, 50)]


def places_in(value, path=()):
    """Return every nested key of dicts and index of lists, as paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*path, key)
        yield from places_in(each, (*path, key))


def changed(value, path, change):
    """Return a copy in which `change(container, key)` was applied at the path."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    change(inner, path[-1])
    return copy


def flip_key(container, key):
    if isinstance(container, dict):
        container[chr(ord(key[0]) ^ 4) + key[1:]] = container.pop(key)


def damages(line):
    """Return the line with a flipped bit in each key, and with each odd value in each place."""
    for path in places_in(line):
        yield "key", changed(line, path, flip_key)
        for odd in ODD:
            yield odd, changed(line, path, lambda inner, key, odd=odd: inner.__setitem__(key, odd))


def walk(folder, name, kinds, check):
    """Damage the first, a middle and the last line of a file, and check each."""
    path = folder / name
    before = path.read_text()
    lines = before.splitlines()
    for at in sorted({0, len(lines) // 2, len(lines) - 1}):
        for kind, damaged in damages(json.loads(lines[at])):
            if kinds(kind):
                path.write_text("\n".join([*lines[:at], json.dumps(damaged), *lines[at + 1 :]]) + "\n")
                check(damaged)
    path.write_text(before)


READ = ["metrics.jsonl", "metrics_rewound.jsonl", "samples.jsonl", "starts.jsonl", "goodput.jsonl"]
READ += ["alive.json", "summary.json", "stopped.json", "evaluations/a/results.json"]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kinds", ["flipped keys", pytest.param("odd values", marks=pytest.mark.nightly)])
def test_no_damaged_record_keeps_a_report_from_being_written(tmp_path, name, kinds):
    """A finished run once failed forever: training ended, and drawing raised KeyError."""
    folder = tmp_path / "run"
    write_all_that_a_report_reads(folder)
    count = 0

    def check(damaged):
        nonlocal count
        count += 1
        page = write_report([folder], folder / "report.html").read_text()
        assert '<h2 id="runs">' in page, damaged

    walk(folder, name, lambda kind: (kind == "key") == (kinds == "flipped keys"), check)
    assert count > 1


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("metrics.jsonl", "phase", r"metrics\.jsonl: record 3 of 10 has no phase; left out"),
        ("metrics.jsonl", "step", r"metrics\.jsonl: record 3 of 10 is not an object with a step; left out"),
        ("starts.jsonl", "layout", r"starts\.jsonl: start 3 has no layout; left out"),
        ("starts.jsonl", "unix_seconds", r"starts\.jsonl: start 3 is not an object with unix_seconds; left"),
        ("goodput.jsonl", "kind", r"goodput\.jsonl: record 2 of 2 is not what lines of its kind are; left"),
        ("samples.jsonl", "samples", r"samples\.jsonl: record 1 of 1 is of event samples without samples"),
        ("metrics_rewound.jsonl", "signal", r"record 1 of 1 is of event spike without signal; left out"),
    ],
)
def test_a_flipped_bit_in_a_key_is_counted_and_named(tmp_path, caplog, name, key, said):
    folder = tmp_path / "run"
    write_all_that_a_report_reads(folder)
    lines = (folder / name).read_text().splitlines()
    at = min(2, len(lines) - 1)
    lines[at] = json.dumps(changed(json.loads(lines[at]), (key,), flip_key))
    (folder / name).write_text("\n".join(lines) + "\n")
    write_report([folder], folder / "report.html")
    assert re.search(said, caplog.text)


def test_a_comma_for_a_point_in_a_list_by_layer_is_noticed(tmp_path, caplog):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace("[0.25, 0.5]", "[0,25, 0.5]", 1))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "1 records have lists for another number of layers; left out" in caplog.text


LINKED = ["config.yaml", "evaluations/a/table.md", "analysis/a/sink.png", "faults/a/report.txt"]


@pytest.mark.parametrize("name", LINKED)
def test_a_report_shows_nothing_that_a_link_leads_out_to(tmp_path, caplog, name):
    """Who draws another's run and shows the page must not reveal their own file."""
    folder, secret = tmp_path / "run", tmp_path / "secret"
    write_all_that_a_report_reads(folder)
    secret.write_bytes(b"my own words")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(secret)
    page = write_report([folder], folder / "report.html").read_text()
    assert "my own words" not in page
    assert base64.b64encode(secret.read_bytes()).decode() not in page
    assert re.search(rf"{name} is a link that leads out of .*; left out", caplog.text)


@pytest.mark.parametrize("name", [each for each in READ if each != "metrics.jsonl"] + ["config.yaml"])
def test_a_pipe_is_no_file_that_a_report_waits_for(tmp_path, name):
    folder = tmp_path / "run"
    write_all_that_a_report_reads(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    write_report([folder], folder / "report.html")
