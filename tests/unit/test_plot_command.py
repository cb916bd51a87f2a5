"""Tests the command that writes reports, and the series that reports draw."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from gsa_eval.commands.plot import main
from gsa_eval.report.run_series import flat, known_of, with_all_lines
from gsa_train.metrics.panels import PANELS
from helpers.report_runs import write_run

PLOT = Path(__file__).parents[2] / "launch" / "plot.py"

SEVERAL_SETS = {
    "validation_set": "web",
    "validation_loss": 2.0,
    "validation_loss_by_source": {"C4": 3.0, "ArXiv": None},
    "validation_code_loss": 2.5,
    "validation_code_bits_per_byte": None,
}


def test_a_line_for_each_validation_set_and_source():
    losses, by_source, bits = (panel for panel in PANELS if panel.per_set)
    known = known_of([flat({"event": "validation", "step": 60, "phase": "sparse", **SEVERAL_SETS})])
    lines = [with_all_lines(panel, known).lines for panel in (losses, by_source, bits)]
    names = {"validation_loss": "validation web", "validation_code_loss": "validation code"}
    assert lines[0] == {"loss": "train", **names}
    assert lines[1]["validation_loss_by_source: C4"] == "web: C4"
    assert lines[2]["validation_code_bits_per_byte"] == "validation code"


@pytest.mark.parametrize("options", [[], ["--html"], ["--out", "."]])
def test_the_command_writes_one_page_and_no_picture(tmp_path, options):
    """--html, which older versions needed, changes nothing."""
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
