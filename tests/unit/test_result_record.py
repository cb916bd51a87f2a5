"""Tests docs/results: the record of a study, pages without run folders, and new runs next to recorded ones."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gsa_study.caveats import notes
from gsa_study.commands.results import main
from gsa_study.figure import arm_dots, shown_range, write_study_figure
from gsa_study.record import MOST_POINTS, read_record, recorded_results, thin
from gsa_study.study_file import Study, load_study
from gsa_study.tables import read_results
from helpers.studies import log_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two studies, one with a question, in a folder where `launch/results.py` now starts."""
    (tmp_path / "studies").mkdir()
    base = {"phases": [{"name": "sparse", "steps": 10}]}
    (tmp_path / "studies" / "base.yaml").write_text(yaml.safe_dump(base))
    study: dict[str, Any] = {
        "name": "small", "title": "Two models", "question": "Which is better?", "dir": str(tmp_path / "runs"),
        "config": "base.yaml", "arms": [{"name": "one"}, {"name": "two"}], "seeds": [1, 2],
        "metrics": [
            {"key": "loss", "at_tokens": [50, 90], "paper": {"two": "2.5 | less"}},
            {"key": "val_loss", "source": "summary"},
        ],
    }  # fmt: skip
    (tmp_path / "studies" / "small.yaml").write_text(yaml.safe_dump(study))
    silent = {name: value for name, value in study.items() if name != "question"}
    (tmp_path / "studies" / "silent.yaml").write_text(yaml.safe_dump(silent))
    monkeypatch.setattr("sys.argv", ["results.py", "--studies", "studies", "--out", "out"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finish(folder: Path, arm: str, seed: int, loss: float, pace: float = 1.0, text: str = "") -> None:
    """Write a finished run; `pace` sets the seconds of each step, `text` the fingerprint of the training text."""
    run = next(each for each in small(folder).runs if (each.arm, each.seed) == (arm, seed))
    records = [
        {"step": step, "phase": "sparse", "tokens": 10 * step, "loss": loss - step, "step_seconds": pace}
        for step in (5, 9, 10)
    ]
    log_run(run, records, {"val_loss": loss, **({"data_fingerprint": text} if text else {})})


def lines_of(path: Path, start: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(start)]


def small(folder: Path) -> Study:
    return load_study(folder / "studies" / "small.yaml", need_data=False)


def ask(folder: Path, **fields: Any) -> None:
    path = folder / "studies" / "small.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **fields}))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}


def lose_folders(folder: Path) -> None:
    shutil.rmtree(folder / "runs")


def values(folder: Path) -> dict[tuple[str, str, str], float]:
    return dict(read_record(small(folder), folder / "out").values)


def test_a_clone_without_run_folders_writes_the_same_bytes(folder: Path) -> None:
    ask(folder, metrics=[{"key": "loss", "equal_time": True}, {"key": "val_loss", "source": "summary"}])
    finish(folder, "one", 1, 20.0 + 1 / 3, pace=0.1)
    finish(folder, "two", 1, math.nan, pace=0.3)
    assert main() == 0
    before = contents(folder)
    assert {path.name for path in before} >= {"small.csv", "small_runs.csv", "small_curves.csv", "small.png"}
    assert f",val_loss,val_loss,at the end,{20 + 1 / 3!r}," in before[folder / "out" / "small.csv"].decode()
    lose_folders(folder)
    assert main() == 0
    assert contents(folder) == before


def test_the_pages_of_this_repository_match_their_record(monkeypatch, tmp_path):
    """The test runs in another folder, so that run folders of this machine do not count."""
    shutil.copytree(ROOT / "docs/results", tmp_path / "docs/results")
    for name in ("studies", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["results.py"])
    assert main() == 0
    for path in (ROOT / "docs/results").rglob("*"):
        if path.suffix in (".md", ".csv"):
            here = tmp_path / path.relative_to(ROOT)
            assert here.read_bytes() == path.read_bytes(), f"{path}: run launch/results.py"
        if path.suffix == ".md":
            said = [line for line in path.read_text().splitlines() if not line.startswith("|")]
            assert len(" ".join(said).split()) <= 500, f"{path}: at most 500 words without its tables"


def test_a_run_of_another_machine_joins_those_whose_folders_are_gone(folder: Path) -> None:
    for arm, seed, loss in (("one", 1, 20.0), ("two", 1, 30.0), ("one", 2, 21.0)):
        finish(folder, arm, seed, loss, text="1f" if seed == 2 else "")
    assert main() == 0
    before = values(folder)
    page = folder / "out" / "small.md"
    lose_folders(folder)
    finish(folder, "two", 2, 33.0, text="1f")
    assert main() == 0
    assert before.items() <= values(folder).items()
    assert "4 of 4 runs are finished. Each run trained on 100 tokens" in page.read_text()
    (row,) = (each for each in page.read_text().splitlines() if "31.5 ± 2.1" in each)
    assert row.endswith("| 20.50 ± 0.71 | 31.5 ± 2.1 |")
    assert "- The training text of 2 of the 4 finished runs was not recorded." in page.read_text()
    assert "several training texts" not in page.read_text()
    runs = [row["run"] for row in csv.DictReader((folder / "out/records/small_curves.csv").open())]
    assert list(dict.fromkeys(runs)) == ["one-seed1", "two-seed1", "one-seed2", "two-seed2"]


def test_a_run_that_is_here_again_replaces_what_was_recorded_of_it(folder: Path) -> None:
    finish(folder, "one", 1, 20.0)
    finish(folder, "two", 1, 30.0)
    assert main() == 0
    lose_folders(folder)
    finish(folder, "one", 1, 19.0, pace=2.0)
    assert main() == 0
    at_the_end = {run: value for (run, metric, _), value in values(folder).items() if metric == "val_loss"}
    assert at_the_end == {"one-seed1": 19.0, "two-seed1": 30.0}
    of_one, of_two = recorded_results(small(folder), folder / "out").finished
    assert (of_one.seconds, of_two.seconds) == (20.0, 10.0)
    assert [point.loss for point in of_one.losses] == [14.0, 10.0, 9.0]
    (of_one.folder / "summary.json").write_text('{"steps": 5}')  # trained again, and not yet finished
    before = contents(folder)
    assert main() == 0
    assert contents(folder) == before


def test_recorded_runs_keep_the_equal_time_at_which_they_were_compared(folder: Path) -> None:
    """Recorded runs have a value only at the training time at which they were compared. New runs are therefore compared
    at that training time, and have no value if they end earlier."""
    ask(folder, metrics=[{"key": "loss", "equal_time": True}])
    finish(folder, "one", 1, 20.0)
    assert main() == 0
    lose_folders(folder)
    finish(folder, "two", 1, 30.0, pace=0.5)
    finish(folder, "two", 2, 31.0, pace=2.0)
    assert main() == 0
    at_time = {run: value for (run, _, at), value in values(folder).items() if at == "at 10s of training"}
    assert at_time == {"one-seed1": 10.0, "two-seed2": 26.0}  # after 5 steps of 2 s
    assert not any("5s" in at for _, _, at in values(folder))
    lose_folders(folder)
    before = contents(folder)
    assert main() == 0
    assert contents(folder) == before


def test_what_the_study_no_longer_asks_for_is_left_out(folder, capsys):
    for arm, seed in (("one", 1), ("one", 2), ("two", 1)):
        finish(folder, arm, seed, 20.0)
    assert main() == 0
    assert "left out" not in capsys.readouterr().out
    lose_folders(folder)
    ask(folder, arms=[{"name": "one"}], seeds=[1], metrics=[{"key": "loss", "at_tokens": [50, 90]}])
    assert main() == 0
    said = "left out of out/small.csv, as studies/small.yaml does not ask for it: "
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert lines == [said + each for each in ("two-seed1", "one-seed2", "val_loss (at the end)")]
    assert {run for run, _, _ in values(folder)} == {"one-seed1"}
    assert "1 of 1 runs are finished." in (folder / "out" / "small.md").read_text()
    assert main() == 0
    assert "left out" not in capsys.readouterr().out


def test_a_figure_stays_where_no_losses_are_recorded(folder, capsys):
    finish(folder, "one", 1, 20.0)
    assert main() == 0
    lose_folders(folder)
    curves, figure = folder / "out/records/small_curves.csv", folder / "out/small.png"
    curves.write_text(curves.read_text().splitlines()[0] + "\n")
    figure.write_bytes(b"as it was made of folders")
    assert main() == 0
    assert figure.read_bytes() == b"as it was made of folders"
    assert "kept out/small.png: the losses of its runs are not recorded" in capsys.readouterr().out
    finish(folder, "two", 1, 30.0)
    assert main() == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    page = (folder / "out" / "small.md").read_text()
    assert "The figure lacks 1 of the runs, because the records have no losses for them." in page


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("small.csv", "at the end,20.0,", "at the end,20.o,", "line 4: could not convert string to float: '20.o'"),
        ("small.csv", "one,1,val_loss", "one,3,val_loss", "line 4: out/records/small_runs.csv has no run one-seed3"),
        ("small.csv", "arm,seed", "arm,seeds", "line 1: not the columns arm,seed,metric,"),
        ("records/small_runs.csv", "one,1,100,", "one,1,", "line 2: 9 cells, not 10"),
        ("records/small_runs.csv", "one,1,100,", 'one,1,"100,', "line 2: "),
        ("records/small_runs.csv", "one,1,100,", "one,1,many,", "line 2: invalid literal for int() with base 10"),
        ("records/small_curves.csv", "one-seed1,50.0,", "one-seed1,,", "line 2: could not convert string to float: ''"),
        ("small.csv", None, "", "not there, but out/records/small_runs.csv has runs"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_refused(folder, capsys, name, old, new, said):
    finish(folder, "one", 1, 20.0)
    assert main() == 0
    path = folder / "out" / name
    text = path.read_text()
    path.unlink()
    if old is not None:
        assert old in text
        path.write_text(text.replace(old, new, 1))
    before = contents(folder)
    assert main() == 2
    error = capsys.readouterr().err
    assert f"out/{name}: 1 problem\n  {said}" in error
    assert "; take the file as it was committed (git restore), or remove the line" in error or old is None
    assert contents(folder) == before


def test_long_curves_are_thinned(folder: Path) -> None:
    finish(folder, "one", 1, 20.0)
    run = small(folder).runs[0]
    with (run.folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 1001):
            record = {"step": step, "phase": "sparse", "tokens": 10 * step, "step_seconds": 1.0}
            file.write(json.dumps({**record, "loss": float(step == 500)}) + "\n")
    assert main() == 0
    (of_one,) = recorded_results(small(folder), folder / "out").finished
    assert len(of_one.losses) <= MOST_POINTS + 2
    assert (5000.0, 500.0, 1.0) in of_one.losses  # a spike stays


def test_a_run_that_began_with_another_config_is_no_run_of_the_arm(folder, monkeypatch, capsys):
    def left_out() -> list[str]:
        assert main() == 0
        return [line for line in capsys.readouterr().out.splitlines() if "left out" in line]

    now = [{"name": "one", "set": {"gsa.k_base": 512}}, {"name": "two"}]
    ask(folder, arms=[{"name": "one"}, now[1]])
    finish(folder, "one", 1, 20.0)
    finish(folder, "two", 1, 18.0)
    runs = folder / "runs" / "small"
    config = runs / "one-seed1" / "config.yaml"
    config.write_text(config.read_text().replace("data/sample/", "/of/another/machine/"))
    assert left_out() == []
    ask(folder, arms=now)
    finish(folder, "one", 2, 21.0)
    (of_one,) = left_out()
    assert "gsa.k_base: 2048 -> 512" in of_one
    assert {run for run, _, _ in values(folder)} == {"one-seed1", "one-seed2", "two-seed1"}, "as recorded"
    shutil.rmtree(folder / "out")
    (line,) = left_out()
    assert line.startswith(f"left out {runs / 'one-seed1'}, as it began with another config")
    assert {run for run, _, _ in values(folder)} == {"one-seed2", "two-seed1"}
    ask(folder, arms=[{"name": "one"}, {"name": "two"}])
    monkeypatch.setattr("sys.argv", [*sys.argv, "gsa.k_base=512"])  # as the second had it
    assert len(left_out()) == 2, "both with seed 1"


def test_a_run_whose_records_are_cut_off_is_left_out(folder, capsys):
    ask(folder, metrics=[{"key": "loss"}])
    finish(folder, "one", 1, 20.0)
    finish(folder, "two", 1, 18.0)
    cut = folder / "runs" / "small" / "two-seed1" / "metrics.jsonl"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:-1])[:-9])
    assert main() == 0
    assert "two-seed1: it is finished, and its records end at step 5 of 10; " in capsys.readouterr().out
    found = list(values(folder))
    assert found == [("one-seed1", "loss", "at 100 tokens")], "not at 50, where the other's end"
    (line,) = (line for line in notes(read_results(small(folder), {})) if "two-seed1" in line)
    assert line.startswith("The records of two-seed1 end at step 5 of 10")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("summary.json", '{"steps": 1', "its summary.json is damaged; copy the whole file"),
        ("metrics.jsonl", "", "it is finished, and its records end at step 0 of 10; "),
        ("metrics.jsonl", '{"step": 10, "phase": "sparse"}', "no `tokens` in its metrics.jsonl"),
    ],
)
def test_a_run_with_a_damaged_file_is_left_out_by_a_line(folder, capsys, name, content, said):
    finish(folder, "one", 1, 20.0)
    (folder / "runs/small/one-seed1" / name).write_text(content)
    assert main() == 0
    assert f"left out {folder}/runs/small/one-seed1: {said}" in capsys.readouterr().out


def test_two_studies_of_one_name_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(folder, "one", 1, 20.0)
    assert main() == 0
    before = contents(folder)
    copied = yaml.safe_load((folder / "studies" / "small.yaml").read_text())
    (folder / "studies" / "tried.yaml").write_text(yaml.safe_dump({**copied, "arms": [{"name": "two"}]}))
    assert main() == 2
    assert "name = small: also the name of studies/small.yaml; give it its own" in capsys.readouterr().err
    assert contents(folder) == before


# --- pages: the paper's claims and a person's text ------------------------------------------------


def test_a_study_without_a_finished_run_has_no_page(folder: Path) -> None:
    assert main() == 0
    assert {path.name for path in (folder / "out").iterdir()} == {"README.md"}
    assert lines_of(folder / "out" / "README.md", "| [Two") == []


def test_numbers_stand_beside_the_papers_and_the_verdict(folder: Path) -> None:
    for arm, seed, loss in (("one", 1, 20.0), ("one", 2, 21.0), ("two", 1, 30.0)):
        finish(folder, arm, seed, loss)
    assert main() == 0
    out = folder / "out"
    table = lines_of(out / "small.md", "| ")
    assert table[0] == "| arm | one | two |"
    assert table[3:7] == [
        "| runs | 2 | 1 of 2 |",
        "| loss, at 90 tokens | 11.50 ± 0.71 | 21 |",
        r"| loss, at 90 tokens: the paper |  | 2.5 \| less |",
        "| val_loss | 20.50 ± 0.71 | 30 |",
    ]
    assert "one,2,val_loss,val_loss,at the end,21.0," in (out / "small.csv").read_text()
    assert lines_of(out / "README.md", "| [Two") == ["| [Two models](small.md) | 3 of 4 | No verdict yet. |"]

    # A person's text stays: a page's verdict, and the text above the table of studies.
    said = "Reproduced in small.\n\nOne is better.\n"
    page = (out / "small.md").read_text()
    assert page.endswith("\n## Verdict\n\nNo verdict yet.\n")
    edited = page.replace("No verdict yet.\n", said).replace("| 2 | 1 of 2 |", "| 9 | 9 |")
    (out / "small.md").write_text(edited)
    overview = (out / "README.md").read_text()
    (out / "README.md").write_text(overview.replace("# Results\n", "# Results\n\nTake one.\n"))
    assert main() == 0
    assert (out / "small.md").read_text() == page.replace("No verdict yet.\n", said)
    assert (out / "small.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "README.md").read_text().startswith("# Results\n\nTake one.\n\n## Studies\n\n| study")
    row = "| [Two models](small.md) | 3 of 4 | Reproduced in small. |"
    assert lines_of(out / "README.md", "| [Two") == [row]


@pytest.mark.parametrize("heading", ["## verdict", "## Verdict\n\nA.\n\n## Verdict"])
def test_a_page_whose_verdict_cannot_be_found_is_refused(folder, capsys, heading):
    finish(folder, "one", 1, 20.0)
    assert main() == 0
    page = folder / "out" / "small.md"
    page.write_text(page.read_text().replace("## Verdict", heading))
    before = contents(folder)
    finish(folder, "two", 1, 20.0)
    assert main() == 2
    error = capsys.readouterr().err
    assert "out/small.md: 1 problem\n  " in error
    assert "headings `## Verdict`; write one, above the verdict" in error
    assert contents(folder) == before


def test_the_page_shows_the_metrics_that_the_study_lists(folder, capsys):
    finish(folder, "one", 1, 20.0)
    file = folder / "studies" / "small.yaml"
    study = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**study, "table": ["val_loss"]}))
    assert main() == 0
    page = (folder / "out" / "small.md").read_text()
    assert "| val_loss | 20 | – |" in page
    assert "loss, at 90 tokens" not in page
    assert ",loss,at 90 tokens," in (folder / "out" / "small.csv").read_text()
    file.write_text(yaml.safe_dump({**study, "table": ["val_los"]}))
    assert main() == 2
    assert "table = val_los: the study has no such metric" in capsys.readouterr().err


def test_the_figure_has_a_row_for_each_arm_and_a_dot_for_each_finished_run(folder: Path) -> None:
    for arm, seed, loss in (("one", 1, 30.0), ("one", 2, math.inf), ("two", 1, 20.0), ("two", 2, 22.0)):
        finish(folder, arm, seed, loss)
    results = read_results(small(folder), {})
    of_loss = [(row.arm, row.values, row.mean) for row in arm_dots(results, results.columns[0])]
    assert of_loss == [("two", (15.0, 17.0), 16.0), ("one", (25.0,), 25.0)]
    for shown in (results, replace(results, columns=())):
        assert write_study_figure(shown, folder / "dots.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_folders_write_no_pages(folder, monkeypatch, capsys):
    """A missing folder would otherwise replace existing pages by empty ones."""
    monkeypatch.setattr("sys.argv", ["results.py", "--studies", "typo", "--out", "out"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--studies typo: no such folder" in capsys.readouterr().err
    assert not (folder / "out").exists()
    (folder / "empty").mkdir()
    monkeypatch.setattr("sys.argv", ["results.py", "--studies", "empty", "--out", "out"])
    assert main() == 2
    assert "--studies empty: no study has a question" in capsys.readouterr().err
    assert not (folder / "out").exists()
    monkeypatch.setattr("sys.argv", ["results.py", "--studies", "studies", "--out", "studies/small.yaml"])
    assert main() == 2
    assert "not all was written: " in capsys.readouterr().err


def test_the_loss_axis_is_not_ruled_by_the_first_steps_nor_by_a_spike():
    steps = list(range(1, 1001))
    falling = [3.0 + 0.5 * math.cos(step / 20) + 9.0 / step for step in steps]
    low, high = shown_range([(steps, falling)])
    assert low < 2.5 < 3.5 < high < 4 < 12 < falling[0]
    falling[700] = 50.0
    assert shown_range([(steps, falling)])[1] < 4.5
    assert shown_range([(steps[:9], falling[:9])]) is None
    assert shown_range([(steps, [1.0] * 1000)]) == pytest.approx((0.9, 1.1))
    assert shown_range([(steps, [None, math.nan] * 500)]) is None


def test_a_long_line_keeps_its_peaks_and_its_gaps():
    values = [math.sin(at / 300) for at in range(10_000)]
    values[4321], values[7000] = 50.0, math.nan
    kept = thin(values, 600)
    assert len(kept) <= 610
    assert {0, 4321, 7000, 9999} <= set(kept)
    assert kept == sorted(kept)
    assert thin(values[:600], 600) == list(range(600))
