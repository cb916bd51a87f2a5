"""Warn about slow steps on CPUs, text in which most queries attend densely, and an almost random indexer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from gsa_train.config import Config, PhaseConfig
from gsa_train.data.batches import MicroBatch
from gsa_train.distributed.parallel import Parallel
from gsa_train.metrics.progress import duration
from gsa_train.model.flops import flops_per_token
from gsa_train.run.state import Run
from gsa_train.services import Service, StepPlan

logger = logging.getLogger(__name__)

FLOPS_PER_CORE = 30e9
"""Assumed FLOP/s of fp32 matrix products on a core with AVX2. Other work is not counted."""
LONGEST_STEP_SECONDS = 60.0
"""Longer steps on CPUs cause a warning."""
LEAST_SPARSE_SHARE = 0.5
"""Smallest share of queries that can select. Below it, training mostly uses dense attention, and a warning says so."""
PATIENCE_STEPS = 100
"""Steps after the learning-rate warm-up before the check. In our studies every indexer that learned had reached
LEAST_FOUND_SHARE by then (docs/results)."""
LEAST_FOUND_SHARE = 0.05
"""Smallest share that the indexer must find of the attention that random keys miss."""
LOGGED_STEPS = 3
"""Consecutive logged steps below the share that cause the warning, because the recall of one step is noisy."""


def warn_of_cpus(config: Config, parallel: Parallel) -> None:
    """Warn before data and model are loaded, because the first step may take minutes."""
    if parallel.is_main and parallel.device.type == "cpu":
        said = cpu_warning(config, cores_of_the_job(parallel.world_size, torch.get_num_threads()))
        if said is not None:
            logger.warning(said)


def cpu_warning(config: Config, cores: int) -> str | None:
    """Returns a warning if a step on this number of CPU cores takes longer than LONGEST_STEP_SECONDS, else None."""
    tokens = config.train.global_batch_size * config.train.seq_len_tokens
    flops, name = max(
        (
            tokens
            * flops_per_token(config.model, config.gsa, config.moe, phase, config.train.seq_len_tokens).total,
            phase.name,
        )
        for phase in config.phases
    )
    seconds = flops / (FLOPS_PER_CORE * cores)
    if seconds <= LONGEST_STEP_SECONDS:
        return None
    return (
        f"no CUDA device: on CPUs a step of phase {name} takes about {duration(seconds)} ({flops:.2g} floating-point "
        f"operations, at an assumed {FLOPS_PER_CORE * cores / 1e9:,.0f} GFLOP/s of {cores} "
        f"{'core' if cores == 1 else 'cores'}). Start it on a machine with GPUs, whose torch finds them "
        "(torch.cuda.is_available()), or try --config demo, which is made for CPUs"
    )


def cores_of_the_job(world_size: int, threads_per_rank: int) -> int:
    """Returns the number of CPU cores that compute: the threads of all ranks, but at most the cores of all machines,
    which are assumed to be equal."""
    local = min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return world_size // local * min(local * threads_per_rank, len(os.sched_getaffinity(0)))


class DenseQueriesWarning(Service):
    """Warns at the first batch after each start if the budgets of most queries cover all their causal keys. For such
    queries, GSA equals dense attention."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_batch(self, plan: StepPlan, micro_batches: Sequence[MicroBatch], wait_seconds: float) -> None:
        if plan.step == self._run.start.step + 1:
            said = dense_queries_warning(self._run.config, micro_batches)
            if said is not None:
                logger.warning(said)


def dense_queries_warning(config: Config, micro_batches: Sequence[MicroBatch]) -> str | None:
    """Returns a warning if a phase is sparse and few queries of a step's micro-batches have more causal keys than they
    can select, else None. Synchronizes with the device."""
    if config.gsa.attention == "dense" or all(phase.attention == "dense" for phase in config.phases):
        return None
    visible = torch.cat([batch.causal_keys() for batch in micro_batches])
    counted = visible >= 2  # excludes padding
    limit = max(config.gsa.k_base, config.gsa.dense_below - 1)
    share = float((visible > limit).sum() / counted.sum().clamp(min=1))
    if share >= LEAST_SPARSE_SHARE:
        return None
    isolated = "" if config.data.attend_across_documents else " of its document"
    advice = "" if config.data.attend_across_documents else "set data.attend_across_documents=true, "
    field = f"gsa.k_base = {limit}" if limit == config.gsa.k_base else f"{limit} (gsa.dense_below)"
    return (
        f"only {share:.0%} of the queries see more than {field} keys{isolated} (of "
        f"{counted.sum().item():,} in the first text): for the others GSA is dense attention. If that is not what you "
        f"want, {advice}train on longer documents, or take a smaller gsa.k_base or a larger train.seq_len_tokens"
    )


class BlindIndexerWarning(Service):
    """Warns if, at LOGGED_STEPS logged steps in a row, a sparse phase's indexer hardly beats random selection."""

    def begin_phase(self, phase: PhaseConfig, start: int) -> None:
        self._from_step = start + phase.warmup_steps + PATIENCE_STEPS
        self._selects = phase.attention == "sparse"
        self._times = 0

    def on_record(self, record: dict[str, Any], numbers: Any) -> None:
        recall, random = record.get("recall"), record.get("random_recall")
        if not self._selects or record["step"] < self._from_step or recall is None or random is None:
            return
        self._times = self._times + 1 if recall - random < LEAST_FOUND_SHARE * (1 - random) else 0
        if self._times != LOGGED_STEPS:
            return
        saturated = record.get("indexer_saturated")
        flat = "" if saturated is None else f"; {saturated:.0%} of its activations have no slope"
        logger.warning(
            "step %d: the indexer selects hardly better than at random: recall %.3f, of random keys %.3f%s. Usual "
            "reasons: its rate is too high (phases.*.indexer_lr_mult), most of all for gsa.indexer_activation = relu, "
            "whose scores have no bounds; or it was warmed up on random weights, which have no attention to imitate",
            record["step"], recall, random, flat,
        )  # fmt: skip
