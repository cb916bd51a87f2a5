"""Tests three warnings of a run: a large model trains on CPUs; documents are so short that queries attend to all keys;
indexers select no better than at random. The third comes once per phase, but not while the indexer is still
learning."""

import dataclasses
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gsa_data.pack import FILLER
from gsa_train.config import PhaseConfig, load_config
from gsa_train.data.batches import to_micro_batch
from gsa_train.model.flops import flops_per_token
from gsa_train.run.warnings import (
    FLOPS_PER_CORE,
    BlindIndexerWarning,
    cores_of_the_job,
    cpu_warning,
    dense_queries_warning,
    warn_of_cpus,
)
from helpers.single_rank import DENSE, EOS, SPARSE, WARM_UP, tiny_config

LARGE = load_config("gsa_1.7b")
CONFIG = tiny_config([WARM_UP, SPARSE], gsa={"k_base": 5, "k_min": 2, "k_max": 9})
START = 20
LONG_SPARSE = PhaseConfig(name="sparse", attention="sparse", steps=300, warmup_steps=30)


def test_the_estimate_and_the_remedy() -> None:
    said = cpu_warning(LARGE, cores=64)
    phase, train = LARGE.phases[-1], LARGE.train
    per_token = flops_per_token(LARGE.model, LARGE.gsa, LARGE.moe, phase, train.seq_len_tokens).total
    seconds = per_token * train.global_batch_size * train.seq_len_tokens / (64 * FLOPS_PER_CORE)
    assert f"a step of phase {phase.name} takes about {int(seconds / 3600)}h" in said
    assert "Start it on a machine with GPUs" in said
    assert cpu_warning(load_config("demo"), cores=1) is None, "made for CPUs"


@pytest.mark.parametrize(
    ("world_size", "local", "threads", "cores"),
    [(1, None, 4, 4), (1, None, 99, 8), (2, "2", 1, 2), (16, "4", 1, 16), (16, "4", 99, 32)],
)
def test_the_cores_are_those_that_the_ranks_use(monkeypatch, world_size, local, threads, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert cores_of_the_job(world_size, threads) == cores


@pytest.mark.parametrize(("rank", "device", "warnings"), [(0, "cpu", 1), (1, "cpu", 0), (0, "cuda", 0)])
def test_rank_0_warns_on_cpus(caplog, rank, device, warnings):
    parallel: Any = SimpleNamespace(is_main=rank == 0, device=torch.device(device), world_size=1)
    with caplog.at_level(logging.WARNING):
        warn_of_cpus(LARGE, parallel)
    assert len(caplog.records) == warnings


def blocks(documents: list[int], filler: int = 0) -> torch.Tensor:
    """Create one sequence of 16 tokens and its last token's label; lengths include the EOS."""
    tokens = [token for length in documents for token in [*[7] * (length - 1), EOS]]
    return torch.tensor([[*tokens, *[FILLER] * filler]], dtype=torch.int32)


def test_the_share_matches_the_text_as_it_is_packed() -> None:
    short = blocks([6, 6, 5])  # two of 16 queries have more than 5 keys
    said = dense_queries_warning(CONFIG, [to_micro_batch(short, EOS, False)])
    assert said.startswith("only 15% of the queries see more than gsa.k_base = 5 keys of its document (of 13")
    assert "data.attend_across_documents=true" in said
    assert dense_queries_warning(CONFIG, [to_micro_batch(short, EOS, True)]) is None  # 11 of 15
    assert dense_queries_warning(CONFIG, [to_micro_batch(blocks([17]), EOS, False)]) is None
    half = [to_micro_batch(each, EOS, False) for each in (blocks([17]), short)]
    assert "46%" in (dense_queries_warning(CONFIG, half) or "")  # 13 of 28 with two keys
    with_filler = to_micro_batch(blocks([12], filler=5), EOS, False)
    assert dense_queries_warning(CONFIG, [with_filler]) is None  # 7 of 11; of all 16: less than half


def test_queries_that_attend_to_all_by_rule_count_as_dense() -> None:
    config = dataclasses.replace(CONFIG, gsa=dataclasses.replace(CONFIG.gsa, dense_below=13))
    said = dense_queries_warning(config, [to_micro_batch(blocks([17]), EOS, False)]) or ""
    assert said.startswith("only 27% of the queries see more than 12 (gsa.dense_below) keys")  # 4 of 15


def test_runs_that_select_nothing_say_nothing_and_no_advice_is_about_documents_that_do_not_matter() -> None:
    short = blocks([6, 6, 5])
    for other in (tiny_config([DENSE]), tiny_config([DENSE], gsa={"attention": "dense"})):
        assert dense_queries_warning(other, [to_micro_batch(short, EOS, False)]) is None
    config = tiny_config(gsa={"k_base": 9, "k_max": 9}, data={"attend_across_documents": True})
    said = dense_queries_warning(config, [to_micro_batch(short, EOS, True)])
    assert "attend_across" not in said


def messages(
    caplog: pytest.LogCaptureFixture,
    recalls: Iterable[float | None],
    phase: PhaseConfig = LONG_SPARSE,
    random: float = 0.2,
) -> list[str]:
    """Return the warnings of a phase that begins after step 20 and logs every tenth step, with these recalls."""
    warning = BlindIndexerWarning()
    warning.begin_phase(phase, START)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for number, recall in enumerate(recalls, start=1):
            step = START + 10 * number
            record = {"step": step, "recall": recall, "random_recall": random, "indexer_saturated": 0.96}
            warning.on_record(record, None)
    return caplog.messages


def test_it_is_said_once_after_the_warm_up_of_the_rate_and_some_steps(caplog):
    (said,) = messages(caplog, [0.21] * 28)
    # The warm-up has 30 steps, and 100 more follow: steps 150, 160 and 170 count.
    assert said.startswith(
        "step 170: the indexer selects hardly better than at random: recall 0.210, of random keys 0.200; 96% of its "
        "activations have no slope. Usual reasons: "
    )


WARMS_UP = PhaseConfig(name="warm-up", attention="dense", train="indexer", steps=300)


@pytest.mark.parametrize(
    ("recalls", "phase", "random", "is_said"),
    [
        ([0.239] * 28, LONG_SPARSE, 0.2, True),
        ([0.241] * 28, LONG_SPARSE, 0.2, False),  # finds 0.041 of the 0.8 that random keys miss
        ([0.905] * 28, LONG_SPARSE, 0.9, False),
        ([0.21] * 14, LONG_SPARSE, 0.2, False),  # still learning
        ([0.2, 0.2, 0.5] * 9, LONG_SPARSE, 0.2, False),  # single steps
        ([None] * 28, LONG_SPARSE, 0.2, False),
        ([0.2] * 28, WARMS_UP, 0.2, False),  # selects nothing
    ],
)
def test_which_recalls_are_hardly_better_than_at_random(caplog, recalls, phase, random, is_said):
    assert (messages(caplog, recalls, phase, random) != []) == is_said
