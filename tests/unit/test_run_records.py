"""Tests that model cards of damaged or foreign run folders are written, and list what they leave out."""

import json
import os
import re
from pathlib import Path

import pytest

import gsa_train
from gsa_eval.convert.model_card import model_card
from gsa_eval.run_records import KINDS
from gsa_train.metrics.alerts import TITLES as TITLES_OF_ALERTS
from gsa_train.metrics.goodput.ledger import read_account
from helpers.checkpoints import CONFIG, run_state

ODD = ["x", "NaN", "\ud800", -1, 1.5, True, 10**400, 1e300, [], [1, [2]], {}, {"a": [1]}, {"a": {"b": 1}}]
"""Values of other types, and beyond the limits of files."""
PHASES = ((30, "warm-up"), (60, "sparse"))
START = {"layout": "2 ranks on cpu", "device": "x86", "host": "node7", "commit": "abc123", "torch": "2.13"}
SPIKE = {"event": "spike", "phase": "sparse", "signal": "loss", "value": 9.0, "threshold": 7.5}


def write_run(folder, *events, every=10, starts=(0,)):
    folder.mkdir(parents=True)
    records = []
    for step in range(every, 61, every):
        phase = next(name for end, name in PHASES if step <= end)
        record = {"step": step, "phase": phase, "loss": 8.0 - step / 20, "tokens": 1000 * step}
        record |= {"lrs": {"base": 1e-3}, "layer_recall": [0.25, None if step < 20 else 0.5]}
        record |= {"head_first_token_attention": [[0.1, 0.5], [step / 100, "NaN"]]}
        records.append(record)
    records += events
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (folder / "config.yaml").write_text("run:\n  name: <script>alert(1)</script>\n")
    lines = [json.dumps({"unix_seconds": 1e9 + step, "step": step, **START}) for step in starts]
    (folder / "starts.jsonl").write_text("\n".join(lines) + "\n" + '{"unix_sec')


def write_all_that_is_read(folder):
    skipped = {"event": "skipped_batches", "step": 40, "phase": "sparse", "last_step": 41}
    validation = {"event": "validation", "step": 60, "phase": "sparse", "time": 1e9 + 70}
    validation["validation_set"] = "web"
    losses = {"loss": 2.0, "perplexity": 7.4, "loss_by_source": {"C4": 3.0}, "code_loss": 2.5}
    validation |= {f"validation_{name}": loss for name, loss in losses.items()}
    saved = {"step": 70, **SAVED, "time": 1e9 + 80}
    write_run(folder, SPIKE | {"step": 30, "action": "log"}, skipped, validation, saved, starts=(0, 40))
    (folder / "starts.jsonl").write_text("".join(each + "\n" for each in STARTS))
    (folder / "metrics_rewound.jsonl").write_text(json.dumps(SPIKE | {"step": 45, "action": "skip"}) + "\n")
    line = {"step": 0, "time": 1e9 + 5, "seconds": {"import": 5.0}}
    lines = [{"kind": "start", "began": 1e9, **line}, {"kind": "steps", "phase": "sparse", **line, "step": 9}]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    alive = {"began": 1e9, "time": 1e9 + 9, "progress": 1e9 + 8, "step": 9, "seconds": {"import": 5.0}}
    (folder / "alive.json").write_text(json.dumps(alive))
    fault = folder / "faults" / "20260101-000000"
    fault.mkdir(parents=True)
    (fault / "report.txt").write_text("rank 0: no progress\n  rank 1: after step 44, for 60 s <--\n")
    empty = folder / "faults" / "20260102-000000"  # as a full disk leaves it
    empty.mkdir()
    (empty / "report.txt").touch()


def read(folder):
    """Return the model card, after the account of the run's time was read."""
    read_account(folder)
    return model_card("model", CONFIG, run_state(60), folder, "float32", [])


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


def test_a_card_names_the_commit_the_validation_and_the_events(tmp_path):
    write_all_that_is_read(tmp_path / "run")
    card = read(tmp_path / "run")
    assert "| gsa-train commit | abc123 |" in card
    assert "| web | 60 | 2.0000 | 7.40 |" in card
    for said in (
        "- step 30: spike: loss 9 above 7.5, action: log\n",
        "- step 40: skipped_batches: steps 40 to 41\n",
        "- step 44: fault: 20260101-000000: rank 0: no progress (",
        "- step 45: spike: loss 9 above 7.5, action: skip; then rewound\n",
    ):
        assert said in card, said


def test_every_event_that_is_logged_is_known():
    """A new event needs a place in KINDS, and, if a person should know of it, an alert."""
    sources = "".join(path.read_text() for path in Path(gsa_train.__file__).parent.rglob("*.py"))
    logged = set(re.findall(r'(?:"event": |_event\(\s*)"(\w+)"', sources)) | {"checkpoint_failed"}
    assert logged >= {"spike", "skipped_batches", "checkpoint_damaged", "warning"}
    # The last three are for W&B: metrics.jsonl cannot be written, can again, or the thread that writes it hangs.
    elsewhere = {"validation", "tasks", "checkpoint", "log_failed", "log_written", "hang"}
    assert logged - elsewhere == set(KINDS)
    assert set(TITLES_OF_ALERTS) < logged


READ = ["metrics.jsonl", "metrics_rewound.jsonl", "starts.jsonl", "goodput.jsonl", "alive.json"]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kinds", ["flipped keys", pytest.param("odd values", marks=pytest.mark.nightly)])
def test_no_damaged_record_keeps_a_card_from_being_written(tmp_path, name, kinds):
    folder = tmp_path / "run"
    write_all_that_is_read(folder)
    count = 0

    def check(damaged):
        nonlocal count
        count += 1
        assert "## Training" in read(folder), damaged

    walk(folder, name, lambda kind: (kind == "key") == (kinds == "flipped keys"), check)
    assert count > 1


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("metrics.jsonl", "phase", r"metrics\.jsonl: record 3 of 10 has no phase; left out"),
        ("metrics.jsonl", "step", r"metrics\.jsonl: record 3 of 10 is not an object with a step; left out"),
        ("starts.jsonl", "layout", r"starts\.jsonl: start 3 of 3 has no layout; left out"),
        (
            "starts.jsonl",
            "unix_seconds",
            r"starts\.jsonl: start 3 of 3 is not an object with unix_seconds; left",
        ),
        ("goodput.jsonl", "kind", r"goodput\.jsonl: record 2 of 2 is not what lines of its kind are; left"),
        ("metrics_rewound.jsonl", "signal", r"record 1 of 1 is of event spike without signal; left out"),
    ],
)
def test_a_flipped_bit_in_a_key_is_counted_and_named(tmp_path, caplog, name, key, said):
    folder = tmp_path / "run"
    write_all_that_is_read(folder)
    lines = (folder / name).read_text().splitlines()
    at = min(2, len(lines) - 1)
    lines[at] = json.dumps(changed(json.loads(lines[at]), (key,), flip_key))
    (folder / name).write_text("\n".join(lines) + "\n")
    read(folder)
    assert re.search(said, caplog.text)


def test_a_comma_for_a_point_in_a_list_by_layer_is_noticed(tmp_path, caplog):
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace("[0.25, 0.5]", "[0,25, 0.5]", 1))
    read(tmp_path / "run")
    assert "1 records have lists for another number of layers; left out" in caplog.text


def test_a_card_shows_nothing_that_a_link_leads_out_to(tmp_path, caplog):
    """A user who exports another user's run must not reveal an own file."""
    folder, secret = tmp_path / "run", tmp_path / "secret"
    write_all_that_is_read(folder)
    secret.write_bytes(b"my own words after step 44 <--")
    path = folder / "faults" / "20260101-000000" / "report.txt"
    path.unlink()
    path.symlink_to(secret)
    assert "my own words" not in read(folder)
    assert re.search(r"report\.txt is a link that leads out of .*; left out", caplog.text)


@pytest.mark.parametrize("name", [each for each in READ if each != "metrics.jsonl"])
def test_a_pipe_is_no_file_that_a_card_waits_for(tmp_path, name):
    folder = tmp_path / "run"
    write_all_that_is_read(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    read(folder)
