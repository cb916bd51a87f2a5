"""Tests the console line: its columns, its placeholders, and the remaining time."""

import fcntl
import math
import os
import pty
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

from gsa_data.faults import warn_once
from gsa_train.metrics.progress import Progress
from gsa_train.validation.perplexity import describe

RECORD = {"step": 120, "phase": "warm-up", "loss": 5.1234, "indexer_kl": 0.5123, "recall": 0.412}
RECORD |= {"random_recall": 0.38, "grad_norm": 0.87, "lr": 3e-4, "tokens_per_second": 12345.0}
RECORD |= {"mfu": None, "data_wait": 0.004}
EMPTY = dict.fromkeys(RECORD) | {"step": 121, "phase": "sparse"}


def test_plain_line(capsys):
    now = [0.0]
    progress = Progress(600, start_step=100, interactive=False, clock=lambda: now[0])
    now[0] = 20.0
    progress.show(RECORD)
    progress.close()
    out, err = capsys.readouterr()
    assert out == (
        "step    120/600  warm-up   loss  5.1234  kl  0.5123  recall 0.412 (random 0.380)  gnorm     0.87  "
        "lr 3.0e-04   12.3k tok/s  mfu    --  data  0.4%  eta 8m00s\n"
    )
    assert err == ""


def test_columns_stay_in_place_without_values(capsys):
    progress = Progress(600)  # a pipe is not a terminal
    progress.show(RECORD)
    progress.show(EMPTY)
    progress.show(RECORD | {"loss": math.nan, "grad_norm": math.inf, "tokens_per_second": math.nan})
    first, empty, broken = capsys.readouterr().out.splitlines()
    for label in ("loss", "kl", "recall", "gnorm", "lr", "tok/s", "mfu", "data", "eta"):
        assert first.index(f"{label} ") == empty.index(f"{label} ") == broken.index(f"{label} ")
    assert "loss      --  kl      --  recall    -- (random    --)" in empty
    assert "loss     nan" in broken


def test_each_further_validation_set_has_a_line(capsys):
    event = {"event": "validation", "step": 120, "phase": "sparse", "validation_loss": 3.5}
    event |= {"validation_code_loss": 1.25, "validation_code_perplexity": 3.49, "validation_recall": 0.5}
    event |= {"validation_random_recall": 0.25}
    Progress(600, interactive=False).show(event | {"validation_perplexity": 33.1})
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("validation loss  3.5000  perplexity    33.10  recall 0.500 (random 0.250)")
    assert second == "step    120/600  sparse    validation loss  1.2500  perplexity     3.49  code"


def test_time_left_follows_a_change_of_speed(capsys):
    now = [0.0]
    progress = Progress(100, interactive=False, clock=lambda: now[0])
    for step, now[0] in ((10, 10.0), (20, 20.0), (30, 130.0)):
        progress.show(RECORD | {"step": step})
    etas = [line.split("eta ")[1] for line in capsys.readouterr().out.splitlines()]
    # Steps take 1 s; a step of 11 s counts with 0.3: 0.7 * 1 + 0.3 * 11 = 4 s, for 70 steps.
    assert etas == ["1m30s", "1m20s", "4m40s"]


def test_bar_and_messages_on_a_terminal(capsys):
    progress = Progress(600, start_step=100, interactive=True)
    progress.show(RECORD)
    progress.message("checkpoint saved")
    progress.show(EMPTY)
    progress.close()
    out, err = capsys.readouterr()
    assert out.strip() == "checkpoint saved"
    assert "100/600" in err
    assert "120/600  warm-up  loss 5.1234  kl 0.5123  recall 0.412 (random 0.380)  12.3k tok/s" in err
    assert "121/600  sparse  loss --  kl --  recall -- (random --)  -- tok/s" in err


@pytest.mark.parametrize(("columns", "is_bar"), [(140, True), (0, False)])
def test_a_terminal_with_a_width_gets_the_bar(columns, is_bar):
    code = f"from gsa_train.metrics.progress import Progress; p = Progress(600); p.show({RECORD}); p.close()"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=300, check=True)
    assert done.stdout.startswith("step    120/600  warm-up") is not is_bar
    os.write(theirs, b"end")
    shown = b""
    while not shown.endswith(b"end"):  # the kernel delivers it in pieces
        shown += os.read(ours, 10_000)
    assert (b"120/600  warm-up  loss 5.1234" in shown) is is_bar
    os.close(ours)
    os.close(theirs)


def test_words_of_the_users_data_begin_no_line_and_move_no_cursor(capsys, caplog):
    """Sources of documents have any name, and logs quote the data's own templates."""
    word = "\x1b[2J a\nb\u2028\x9b"
    shown = r"\x1b[2J a\nb\u2028\x9b"
    progress = Progress(10, interactive=False)
    place = {"step": 5, "phase": "sparse"}
    progress.show({"event": "tasks", **place, "eval_accuracy": {word: 0.5}})
    progress.show({"event": "stop", **place, "reason": word})
    text = SimpleNamespace(scored_tokens=7, blocks=[])
    progress.message(describe(SimpleNamespace(name="web", text=text, by_source={word: text})))
    warn_once(f"shard a: {word}")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert all(shown in line for line in [*said, *caplog.messages])
    assert caplog.messages
