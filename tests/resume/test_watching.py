"""Tests that a profiled run trains the same, and that a run logs every metric of every panel."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from gsa_data.best_fit import COUNTERS
from gsa_train.config import DataConfig, ProfileConfig
from gsa_train.metrics.panels import BEST, PANELS, tag_of
from gsa_train.metrics.record import data_metrics, data_totals
from gsa_train.metrics.record_format import to_scalars
from gsa_train.model.probes.stats import MEANS
from gsa_train.profiling.profiler import ProfileError, StepProfiler
from helpers.cpu_only import cpu_only  # noqa: F401
from helpers.runs import finished, numbers_of, train

CPU = torch.device("cpu")


@pytest.mark.slow
def test_profiling_changes_no_number(tmp_path: Path) -> None:
    """Steps 10 and 11 are the last one of the warm-up and the first one of sparse training."""
    profiled = ("profile.start_step=10", "profile.steps=2", "profile.ranks=[]")
    run = train(tmp_path, *profiled, ranks=2, faults={"all_operations": True})
    plain = finished(ranks=2)
    assert numbers_of(run.records()) == numbers_of(plain.records())
    assert [record.keys() for record in run.steps()] == [record.keys() for record in plain.steps()]

    folder = run.folder / "profile" / "steps_00000010-00000011"
    written = [f"rank_0000{rank}.{ending}" for rank in (0, 1) for ending in ("json.gz", "txt")]
    assert sorted(path.name for path in folder.iterdir()) == written
    with gzip.open(folder / "rank_00001.json.gz") as file:
        events = json.load(file)["traceEvents"]
    named = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    expected = {"ProfilerStep#10": 1, "ProfilerStep#11": 1, "forward_backward": 2, "data": 2}
    # There are 2 layers and one micro-batch in each step. The warm-up selects only because it is measured.
    expected |= dict.fromkeys(("indexer", "selection", "mlp"), 4)
    expected["attention"] = 8  # half of them for the projections that are launched inside `selection`
    assert {name: named[name] for name in expected} == expected
    table = (folder / "rank_00001.txt").read_text()
    milliseconds = {row.split()[0]: float(row.split()[1]) for row in table.splitlines()[4:16]}
    assert not table.startswith("steps 10 to 11: 0.0 ms"), table
    for part in ("attention", "indexer", "selection", "kl", "mlp", "loss", "communication", "optimizer"):
        assert milliseconds[part] > 0, table
    products = [row.split() for row in table.splitlines() if row.startswith(("aten::mm ", "aten::bmm "))]
    parts = {part for _, part, *_ in products}
    assert parts >= {"attention", "mlp", "loss"}, table
    assert "other" not in parts, table
    assert not (plain.folder / "profile").exists()


def profile_steps(folder: Path, config: ProfileConfig, *steps: int) -> list[str]:
    profiler = StepProfiler(config, folder, rank=0, device=CPU)
    for step in steps:
        profiler.before_step(Mock(step=step))
        torch.ones(3).sum()
        profiler.after_step(Mock(step=step))
    profiler.on_stop()
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("steps", "written"),
    [
        (range(1, 9), ["steps_00000004-00000006"]),
        (range(5, 9), ["steps_00000005-00000006"]),  # resumed inside the window
        ([6], ["steps_00000006-00000006"]),
        (range(1, 6), ["steps_00000004-00000005"]),  # stopped inside it
        (range(1, 4), []),  # stopped during warm-up
        (range(7, 9), []),
    ],
)
def test_the_window(tmp_path: Path, steps: list[int], written: list[str]) -> None:
    assert profile_steps(tmp_path / "profile", ProfileConfig(start_step=4, steps=3), *steps) == written


def test_only_the_ranks_asked_for(tmp_path: Path) -> None:
    assert profile_steps(tmp_path / "a", ProfileConfig(start_step=1, steps=1, ranks=[1]), 1, 2) == []
    assert profile_steps(tmp_path / "b", ProfileConfig(start_step=1, steps=1, ranks=[]), 1, 2) != []
    with pytest.raises(ProfileError, match=r"profile\.memory_snapshot = true"):
        StepProfiler(ProfileConfig(start_step=1, memory_snapshot=True), tmp_path, 0, CPU)


def test_a_profile_that_cannot_be_written_costs_the_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiler = StepProfiler(ProfileConfig(start_step=1, steps=1), tmp_path / "profile", rank=0, device=CPU)
    (tmp_path / "profile").touch()  # not a folder
    for step in (1, 2):
        profiler.before_step(Mock(step=step))
        profiler.after_step(Mock(step=step))
    profiler.on_stop()
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert error.startswith("the profile of steps 1 to 1 cannot be written")


@pytest.mark.slow
def test_every_metric_of_a_panel_is_logged_by_a_run() -> None:
    records = finished(ranks=2).records()
    keys = {key for record in records for key in record}
    tags = {tag for record in records for tag in to_scalars(record)}
    # This run does not use other packing, source weights and GPU kernels.
    used = DataConfig(packing="best_fit", source_weights={"a": 1.0})
    # The run has no experts, no z-loss and no batch ramp.
    keys |= {"expert_load_max", "expert_load_min", "z_loss", "global_batch_size"}
    # The run has no queries with 64 causal keys.
    keys |= {"first_token_attention", "first_token_attention_spread", "sink_by_position"}
    # The run scores no `evaluate.tasks`.
    keys |= {"eval_accuracy", "eval_length_normalised_accuracy", "eval_bits_per_byte", "eval_time_share"}
    elsewhere = {*data_metrics(data_totals(dict.fromkeys(COUNTERS, 1), used)), *MEANS}
    for panel in PANELS:
        missing = {*panel.keys, *filter(None, [panel.per_entry])} - keys - elsewhere
        # The first set is `validation_loss`. Without a CUDA device some keys have no value.
        assert not missing, f"{panel.label}: no run logs {missing}"
        if panel.per_set:
            pattern = f"({'|'.join(panel.tags)})"
            assert any(re.fullmatch(pattern, tag) for tag in tags - {"train/loss"}), panel.label
    assert set(BEST) <= keys
    assert {tag_of("phase_index"), tag_of("lrs")} == {"train/phase_index", "lr"}
