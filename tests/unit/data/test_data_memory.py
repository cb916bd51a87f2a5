"""Tests that readers use bounded memory over time. `benchmarks/bench_memory.py` does the same over 10 GB."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiers import with_nightly

BENCH = Path(__file__).parents[3] / "benchmarks" / "bench_memory.py"
CASES = {
    "text, one worker": "--kind text --gigabytes 0.02 --shard-megabytes 3.5 --workers 1",
    "tokens": "--kind tokens --gigabytes 0.1 --shard-megabytes 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", with_nightly(CASES, {"text, one worker"}))
def test_the_resident_memory_stays_flat(name: str, sample_folder: Path, tmp_path: Path) -> None:
    """A separate process runs it, because this one has free memory that would hide a leak."""
    corpus = ["--data", f"{sample_folder}/validation", "--tokenizer", f"{sample_folder}/tokenizer.model"]
    command = [sys.executable, str(BENCH), *corpus, *CASES[name].split(), "--scratch", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "peak of the second half - peak of the first:" in result.stdout
    assert not list(tmp_path.iterdir())  # the gigabytes are gone
