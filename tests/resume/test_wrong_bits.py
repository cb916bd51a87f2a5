"""Tests that a run finds a wrong bit on one rank and names the rank. The checks do not change a run without wrong
bits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gsa_train.process.exit_codes import CORRUPTED, UNHEALTHY
from helpers.launchers import launch
from helpers.runs import LONGEST_WAIT_SECONDS, Run, demo_config, left_of, numbers_of, start, wait_for

pytestmark = pytest.mark.slow

SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 64},
    "gsa": {"indexer_heads": 2, "indexer_dim": 16, "k_base": 16, "k_min": 8, "k_max": 32},
    "train": {"seq_len_tokens": 64, "micro_batch_size": 1, "global_batch_size": 6},
    "data": {"num_lanes": 6},
    "evaluate": {"every_steps": 0, "max_blocks": 1, "ngram_baselines": False},
    "checkpoint": {"every_steps": 100},
    "logging": {"every_steps": 1, "wandb": "disabled", "tensorboard": False},
}
PHASES = [
    {"name": "warm-up", "steps": 2, "attention": "dense", "train": "indexer", "lr": 1e-3},
    {"name": "sparse", "steps": 6, "lr": 2e-3},
]
TWICE, SEVENTH = "monitor.recheck_every_steps=1", "monitor.recheck_every_steps=7"
LOG = "monitor.on_corruption=log"
AT_ONCE = "train.micro_batch_size=3"
"""A rank's three sequences in one micro-batch, for tests that do not need several."""
SPIKES = "monitor.recheck_spikes=true"
REPLICAS = "monitor.compare_replicas_every_steps=4"
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
COPIES = "parallel.distributed_optimizer=false"
"""Each replica updates its weights itself, so that a wrong weight stays wrong."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("corruption")
    config = demo_config(folder, SECTIONS, PHASES)

    def run(name: str, *overrides: str, ranks: int = 2, **faults: Any) -> Run:
        return start(folder, *overrides, config=config, name=name, ranks=ranks, faults=faults)

    faults = {"wrong_output": [7, 0], "nan_in": [5, 1, "gradient"], "full_disk": [2, 3]}
    replicas = (REPLICAS, COPIES, "train.micro_batch_size=2")
    return {
        **wait_for((run("clean", AT_ONCE), 0), (run("checked", AT_ONCE, TWICE, SPIKES, REPLICAS), 0)),
        **wait_for(
            (run("overlap", TWICE, *OVERLAP, wrong_gradient=[7, 1]), CORRUPTED),
            (run("nan", AT_ONCE, SPIKES, nan_in=[5, 1, "gradient"]), CORRUPTED),
        ),
        **wait_for((run("log", AT_ONCE, SEVENTH, SPIKES, LOG, **faults), 0)),
        **wait_for((run("weight", *replicas, ranks=3, flipped_bit=[6, 3, 1]), CORRUPTED)),
    }


def found(run: Run) -> list[dict[str, Any]]:
    return [record for record in run.records() if record.get("event") == "corruption"]


def numbers(run: Run) -> list[dict[str, Any]]:
    return numbers_of(run.records(), without=["corruption"])


def test_a_clean_run_has_no_report_and_its_own_numbers(runs: dict[str, Run]) -> None:
    """The runs have both phases, because in the warm-up layers run their own backward passes."""
    assert not found(runs["checked"])
    assert len(numbers(runs["clean"])) == 9  # 8 steps and a validation
    assert numbers(runs["checked"]) == numbers(runs["clean"])


def test_a_wrong_gradient_is_found_in_the_step_and_on_the_rank_where_it_was(runs: dict[str, Run]) -> None:
    """The check runs before the reduction spreads the error. The reduction overlaps with the backward pass."""
    wrong = runs["overlap"]
    (event,) = found(wrong)
    assert (event["step"], event["ranks"], event["corruption"]) == (7, [1], "recheck")
    assert "silent data corruption at step 7" in wrong.output
    (report,) = (path.read_text() for path in (wrong.folder / "faults").glob("*/report.txt"))
    assert report == f"{event['reason']}\nno update was made after step 6 <--\n"
    assert f"rank 1 on {os.uname().nodename}: gradients" in wrong.output
    assert [record["step"] for record in numbers(wrong)] == [1, 2, 3, 4, 5, 6]


def test_where_it_is_only_logged_the_second_numbers_count(runs: dict[str, Run]) -> None:
    """Only the repeated computation trains the model, after a wrong output or a NaN. A full disk delays
    records."""
    logged = runs["log"]
    corruptions = [(event["step"], event["ranks"], event["action"]) for event in found(logged)]
    assert corruptions == [(5, [1], "log"), (7, [0], "log")]
    assert "metrics.jsonl is written again, with 2 records that waited; it lacks none" in logged.output
    assert numbers(logged) == numbers(runs["clean"])


def test_a_spike_is_computed_again_before_it_is_acted_upon(runs: dict[str, Run]) -> None:
    """The spike is a NaN. Without the check, monitor.action=log would end with exit code 13 and name no rank."""
    nan = runs["nan"]
    assert [(event["step"], event["ranks"]) for event in found(nan)] == [(5, [1])]


def test_a_flipped_bit_in_one_weight_is_found_and_its_rank_named(runs: dict[str, Run]) -> None:
    """Three replicas decide by majority, and the update of this step is not made."""
    weight = runs["weight"]
    (event,) = found(weight)
    assert (event["step"], event["ranks"], event["corruption"]) == (8, [1], "weights")
    assert "what was saved after step 4 may hold them" in weight.output


def test_a_rank_whose_device_multiplies_wrongly_is_named_before_anything_else(tmp_path: Path) -> None:
    config = demo_config(tmp_path, SECTIONS, PHASES)
    run = start(tmp_path, config=config, name="sick", ranks=2, faults={"wrong_product": 1})
    log = run.wait(expected=UNHEALTHY).output
    assert "1 of 2 devices are not healthy:" in log
    assert f"CPU of local rank 1 on {os.uname().nodename}: " in log
    assert "local rank 0" not in log
    assert not (tmp_path / "sick").exists()


def test_torchrun_does_not_start_ranks_again_on_a_device_that_is_not_healthy(tmp_path: Path) -> None:
    torchrun = ("--standalone", "--nproc_per_node=2", "--max-restarts=3")
    run = launch(tmp_path, torchrun=torchrun, faults={"wrong_product": 1})
    assert run.process.wait(LONGEST_WAIT_SECONDS) != 0
    assert run.output.count("1 of 2 devices are not healthy:") == 1
    assert run.output.count("loading torch and megatron-core") == 1
    assert not left_of(run)
