"""Tests pages of results from records and bench files, with the paper's claims and a person's text."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure

from gsa_study.commands.results import main
from gsa_study.efficiency_cases import forward_ratio, prefill_ratio
from gsa_study.figure import arm_dots, write_study_figure
from gsa_study.study_file import load_study
from gsa_study.tables import read_results
from gsa_train.config import Config, GSAConfig, ModelConfig
from helpers.result_pages import finish, lines_of, study_files

BENCH = {"environment": {"gpu": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "commit": "0123456"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return study_files(tmp_path, monkeypatch)


def test_a_study_without_a_finished_run_has_no_page(folder: Path) -> None:
    assert main() == 0
    assert {path.name for path in (folder / "out").iterdir()} == {"README.md", "efficiency.md"}
    assert lines_of(folder / "out" / "README.md", "| [Two") == []
    assert (
        "Not run yet: `make bench` and `make bench-models`." in (folder / "out" / "efficiency.md").read_text()
    )


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
    (out / "small.md").write_text(
        page.replace("No verdict yet.\n", said).replace("| 2 | 1 of 2 |", "| 9 | 9 |")
    )
    overview = (out / "README.md").read_text()
    (out / "README.md").write_text(overview.replace("# Results\n", "# Results\n\nTake one.\n"))
    assert main() == 0
    assert (out / "small.md").read_text() == page.replace("No verdict yet.\n", said)
    assert (out / "small.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "README.md").read_text().startswith("# Results\n\nTake one.\n\n## Studies\n\n| study")
    row = "| [Two models](small.md) | 3 of 4 | Reproduced in small. |"
    assert lines_of(out / "README.md", "| [Two") == [row]


def test_the_page_shows_the_metrics_that_the_study_lists(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    results = read_results(load_study(folder / "studies" / "small.yaml", need_data=False), {})
    of_loss = [(row.arm, row.values, row.mean) for row in arm_dots(results, results.columns[0])]
    assert of_loss == [("two", (15.0, 17.0), 16.0), ("one", (25.0,), 25.0)]
    for shown in (results, replace(results, columns=())):
        assert write_study_figure(shown, folder / "dots.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("without", "panels"), [((), 3), (("one",), 3), (("one", "two"), 1)])
def test_losses_are_shown_where_half_the_arms_have_recorded_theirs(
    folder: Path, without: tuple[str, ...], panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arm in ("one", "two"):
        finish(folder, arm, 1, 20.0)
    results = read_results(load_study(folder / "studies" / "small.yaml", need_data=False), {})
    runs = tuple(replace(each, losses=()) if each.run.arm in without else each for each in results.runs)
    seen: list[int] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _path: seen.append(len(figure.axes)))
    write_study_figure(replace(results, runs=runs), folder / "dots.png")
    assert seen == [panels]


def test_wrong_folders_and_damaged_benches_write_no_pages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing folder would otherwise replace existing pages by empty ones."""
    for option in ("--studies", "--benches"):
        monkeypatch.setattr(
            "sys.argv", ["results.py", "--studies", "studies", "--out", "out", option, "typo"]
        )
        with pytest.raises(SystemExit, match="2"):
            main()
        assert f"{option} typo: no such folder" in capsys.readouterr().err
    assert not (folder / "out").exists()
    words = ["results.py", "--studies", "studies", "--benches", "benches", "--out"]
    monkeypatch.setattr("sys.argv", [*words, "studies/small.yaml"])
    assert main() == 2
    assert "not all was written: " in capsys.readouterr().err
    (folder / "benches" / "bench_gsa.json").write_text("{")
    monkeypatch.setattr("sys.argv", [*words, "out"])
    assert main() == 2
    assert "bench_gsa.json: 1 problem\n  damaged (JSONDecodeError" in capsys.readouterr().err


# ---- time and memory


def test_time_and_memory_over_dense_attention(folder: Path) -> None:
    common = {"shape": "1.7B", "length": 131072, "both_kl_ms": None}
    rows = [
        {"check": "GSA = dense"},
        {
            **common,
            "attention": "torch cuDNN",
            "r": None,
            "forward_ms": 100.0,
            "both_ms": 400.0,
            "peak_gib": 2.0,
        },
        {**common, "attention": "GSA token", "r": 4, "forward_ms": 50.0, "both_ms": 100.0, "peak_gib": 3.0},
    ]
    generated = [
        {"batch": 1, "length": 131072, "model": "standard", "step_ms": 4.0, "bound_ms": 2.0},
        {"batch": 1, "length": 131072, "model": "GSA", "step_ms": 3.0, "bound_ms": 1.0},
        {"prefill": 32768, "model": "standard", "ms": 10.0},
        {"prefill": 32768, "model": "GSA", "ms": 5.0},
        {"prefill": 131072, "model": "standard", "ms": 100.0, "peak_gib": 10.0},
        {"prefill": 131072, "model": "GSA", "ms": 20.0, "peak_gib": 11.0, "commit": "89abcde"},
    ]
    for name, content in (("bench_long", rows), ("bench_generate", generated)):
        (folder / "benches" / f"{name}.json").write_text(json.dumps({**BENCH, "rows": content}))
    assert main() == 0
    page = folder / "out" / "efficiency.md"
    (line,) = lines_of(page, "| 1.7B ")
    assert line == "| 1.7B | 131072 | token | 4 | 0.50 | 0.09 | 0.25 | – | 1.50 |"
    assert (
        lines_of(page, "| decode")[1]
        == "| decode | 131072 | 1 | GSA | 3.00 | 0.75 | 0.50 | – | – | 0123456 |"
    )
    _, short, _, long = lines_of(page, "| prefill")
    assert short == "| prefill | 32768 | 1 | GSA | 5.00 | 0.50 | 0.56 | – | – | 0123456 |"
    assert long == "| prefill | 131072 | 1 | GSA | 20.00 | 0.20 | 0.24 | 11.0 | 1.10 | 89abcde |"
    assert lines_of(page, "- `bench_long`") == [
        "- `bench_long`: NVIDIA H200, torch 2.11, Triton 3.6, 0123456"
    ]
    assert "2 of 6 benches | No verdict yet." in (folder / "out" / "README.md").read_text()

    where = "by bench_long,0.25,benches/bench_long.json,,0123456\n"
    assert f",forward_backward,{where}" in (folder / "out" / "efficiency.csv").read_text()


def test_the_theory_of_one_layer_by_hand() -> None:
    model = ModelConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    config = Config(model=model, gsa=GSAConfig(indexer_heads=1, indexer_dim=3, k_base=2))
    # Queries of 4 tokens have 1 to 4 causal keys, and select 1, 2, 2 and 2; a score takes 2 (3 + 1) operations.
    dense, selected, scores = 4 * 16 * 2.5, 4 * 16 * 1.75, 8 * 2.5
    assert forward_ratio(config, 4) == pytest.approx((selected + scores) / dense)
    assert forward_ratio(None, 4) is None


def test_steps_over_lengths(folder: Path) -> None:
    """The page shows a case's newest row divided by the standard model's of the same device, commit and micro-batch.
    Whole models use their own steps if measured, and scaled ones otherwise. The page shows the deepest models."""
    common = {"gpu": "H200", "commit": "b", "shape": "94m", "length": 8192, "layers": 12, "peak_gib": 10.0}
    gsa = {**common, "model": "gsa", "flops_limit": 1.25, "r": 3.5}
    rows = [
        {**common, "model": "standard", "step_ms": 90.0, "speed_up": 1.0, "flops_limit": 1.0},
        {**gsa, "commit": "a", "step_ms": 300.0, "speed_up": 0.3, "peak_gib": 20.0},
        {**gsa, "step_ms": 180.0, "speed_up": 0.5, "peak_gib": 15.0},
        {**common, "model": "shared", "step_ms": None, "speed_up": None, "flops_limit": 2.0},
        {"gpu": "H200", "commit": "a", "shape": "94m", "length": 8192, "model": "gsa", "whole_ms": 300.0,
         "whole_speed_up": 0.3},
        {"gpu": "H200", "commit": "b", "shape": "94m", "length": 8192, "model": "gsa", "whole_ms": 200.0,
         "whole_speed_up": 0.4},
        *({**gsa, "micro_batch": size, "layers": 24, "step_ms": 350.0 + size, "speed_up": 0.8, "peak_gib": 10.0 * size,
           "model": model} for model, sizes in (("standard", (1, 2)), ("gsa_rope", (2, 1))) for size in sizes),
        {"gpu": "H200", "commit": "b", "shape": "94m", "length": 8192, "model": "gsa_rope", "layers": 24,
         "micro_batch": 1, "whole_ms": 351.0, "whole_speed_up": 0.8},
    ]  # fmt: skip
    (folder / "benches" / "bench_step_lengths.json").write_text(json.dumps({**BENCH, "rows": rows}))
    assert main() == 0
    _, measured, scaled = lines_of(folder / "out" / "efficiency.md", "| 94m")  # the deepest
    assert measured == "| 94m | 8192 | all | gsa_rope | 3.5 | 351.0 | 1.25 | 0.80 | 10.0 | 1.00 | b |"
    assert scaled == "| 94m | 8192 | all, scaled | gsa | – | 200.0 | 2.50 | – | – | – | b |"
    with (folder / "out" / "efficiency.csv").open(newline="") as file:
        values = {(row["arm"], row["key"]): float(row["value"]) for row in csv.DictReader(file)}
    assert values["step_94m_8192_12_layers_gsa", "time"] == 2.0
    assert values["step_94m_8192_12_layers_gsa", "memory"] == 1.5
    assert values["step_94m_8192_gsa", "time"] == 2.5
    assert ("step_94m_8192_gsa", "memory") not in values  # not measured
    assert values["step_94m_8192_gsa_rope", "time"] == 1.25
    assert ("step_94m_8192_24_layers_gsa_rope", "time") not in values


def test_the_theory_of_prefill_by_hand() -> None:
    model = ModelConfig(
        num_layers=3, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=8, ffn_hidden_size=5, vocab_size=7
    )
    gsa = GSAConfig(indexer_heads=1, indexer_dim=3, k_base=2, value_gate=True, output_gate=True)
    config = Config(model=model, gsa=gsa)
    of_both = 2 * (4 * (16 + 2 * 8) + 16 * 4) + 2 * 3 * 4 * 5  # projections, feed-forward layer
    gates = 2 * (4 * 8 + 4 * 16)
    indexer = 2 * 4 * (3 + 1 + 3) + 8 * 2.5  # queries, head weight and key; scores of the causal keys
    ratio = (of_both + gates + indexer + 4 * 16 * 1.75) / (of_both + 4 * 16 * 2.5)
    assert prefill_ratio(config, 4) == pytest.approx(ratio)
    assert prefill_ratio(None, 4) is None
