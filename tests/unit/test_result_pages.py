"""Tests pages of results from records and bench files, with the paper's claims and a person's text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gsa_study.commands.results import main
from gsa_study.efficiency_cases import forward_ratio, prefill_ratio
from gsa_study.figure import arm_dots, write_study_figure
from gsa_study.study_file import load_study
from gsa_study.tables import read_results
from gsa_train.config import Config, GSAConfig, ModelConfig
from helpers.result_pages import finish, lines_of, study_files


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
    results = read_results(load_study(folder / "studies" / "small.yaml", need_data=False), {})
    of_loss = [(row.arm, row.values, row.mean) for row in arm_dots(results, results.columns[0])]
    assert of_loss == [("two", (15.0, 17.0), 16.0), ("one", (25.0,), 25.0)]
    for shown in (results, replace(results, columns=())):
        assert write_study_figure(shown, folder / "dots.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_folders_and_damaged_benches_write_no_pages(folder, monkeypatch, capsys):
    """A missing folder would otherwise replace existing pages by empty ones."""
    for option in ("--studies", "--benches"):
        words = ["results.py", "--studies", "studies", "--out", "out", option, "typo"]
        monkeypatch.setattr("sys.argv", words)
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


def test_the_theory_of_one_layer_by_hand() -> None:
    model = ModelConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    config = Config(model=model, gsa=GSAConfig(indexer_heads=1, indexer_dim=3, k_base=2))
    # Queries of 4 tokens have 1 to 4 causal keys, and select 1, 2, 2 and 2; a score takes 2 (3 + 1) operations.
    dense, selected, scores = 4 * 16 * 2.5, 4 * 16 * 1.75, 8 * 2.5
    assert forward_ratio(config, 4, 1) == pytest.approx((selected + scores) / dense)
    assert forward_ratio(config, 4, 2) == pytest.approx((selected + scores / 2) / dense)
    assert forward_ratio(None, 4, 1) is None


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
    assert prefill_ratio(config, 4, is_shared=False) == pytest.approx(ratio)
    assert prefill_ratio(None, 4, is_shared=False) is None
