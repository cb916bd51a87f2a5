"""Tests that the notebooks in examples/ run from first to last cell, and that their results match the text."""

import json
from pathlib import Path

import pytest

from helpers.notebooks import code_cells
from helpers.runs import run_script
from helpers.tiers import with_nightly

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LARGEST_BYTES = 150_000

SHOWN = {
    "one_layer.ipynb": """
few = names["few"]
assert (names["full"].out - names["sparse"].out)[:, few].abs().max() < 1e-6, "few keys: sparse is dense"
assert (names["decoded"] - names["output"]).abs().max() < 1e-5, "decoded is one forward"
assert (names["weights"][0, 0, 40] > 0).sum() < 41, "sparse"
assert names["kl_curve"][-1] < names["kl_curve"][0] / 2
assert names["recall_curve"][-1] > names["random_recall"] + 0.3, "the indexer has learned"
""",
    "quick_start.ipynb": """
losses = [record["loss"] for record in names["steps"]]
assert losses[-1] < losses[0] - 1
assert [record["step"] for record in names["steps"]] == list(range(1, len(losses) + 1))
""",
}


@pytest.mark.parametrize("name", with_nightly(SHOWN, {"quick_start.ipynb"}))  # it trains the demo
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    """The notebook runs in its folder, as under Jupyter, and really starts its runs."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os; from pathlib import Path; from helpers.notebooks import run\n"
        f"os.chdir({str(EXAMPLES)!r}); names, _ = run(Path({name!r}))\n{SHOWN[name]}"
    )
    on_cpus = {"CUDA_VISIBLE_DEVICES": ""}
    run_script([str(script)], tmp_path / "log", 1, launcher="python", environment=on_cpus)


def test_every_notebook_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_notebook_shows_is_there_and_small(name: str) -> None:
    path = EXAMPLES / name
    assert path.stat().st_size < LARGEST_BYTES
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    printing = [cell for cell, code in zip(cells, code_cells(path), strict=True) if "print(" in code]
    assert all(cell["outputs"] for cell in printing), "run tests/helpers/notebooks.py on it"
