"""`many_layouts.py FOLDER` trains many layouts, one after the other, on the same four ranks.

FOLDER/wanted.json names the layouts. Starting a rank takes longer than the steps of a tiny model, so the same ranks
train one layout after another. If a layout needs fewer than four ranks, the remaining ranks are data parallel. The
results go to FOLDER/results.json.
"""

import gc
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gsa_kernels import sampling
from gsa_train.checkpoint.damage import tensor_files
from gsa_train.checkpoint.load import DamagedCheckpoint, load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config, PhaseConfig
from gsa_train.config.checks import check_config
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.distributed.parallel import Parallel, init_parallel, leave_layout, shutdown_parallel
from gsa_train.metrics.record import Measured, send_step
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.model.probes import query_sample
from gsa_train.optimizer import mcore as optim
from gsa_train.optimizer.interface import MAIN_WEIGHT
from gsa_train.optimizer.main_weights import carry_over, keep_main_weights
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.optimizer.micro_batch_graph import MicroBatchGraph
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import Training, evaluation_step, train_step
from gsa_train.validation.requests import Request
from gsa_train.validation.tasks import log_likelihoods
from helpers.called_again import CalledAtOnce
from helpers.checkpoints import run_state, write_checkpoint
from helpers.damage import flip
from helpers.layout_cases import (
    ALL_KEYS,
    BASE,
    BOUNDARIES,
    CASES,
    LENGTH,
    RESHARDED,
    SAMPLE,
    STEPS,
    Case,
    Reshard,
    pairs,
)
from helpers.single_rank import EOS, SPARSE, as_numbers


def blocks(step: int, config: Config) -> torch.Tensor:
    """Draw int32 [sequences, L + 1]: a global batch of documents of about max(12, L / 3) tokens.

    Documents cross the borders of context-parallel chunks. If the vocabulary is larger than a sequence, no token except
    the EOS repeats in a sequence. In the first layer, a repeated token's keys would be equal, and rounding would decide
    which key is selected.
    """
    generator = torch.Generator().manual_seed(10_000 * config.data.seed + step)
    length, vocabulary = config.train.seq_len_tokens, config.model.vocab_size
    shape = (config.train.global_batch_size, length + 1)
    if vocabulary > length + 1:
        order = torch.rand((shape[0], vocabulary - 1), generator=generator).argsort(-1)
        tokens = order[:, : length + 1].int() + 1
    else:
        tokens = torch.randint(1, vocabulary, shape, generator=generator, dtype=torch.int32)
    return tokens.masked_fill(torch.rand(shape, generator=generator) < 1 / max(12, length // 3), EOS)


def share(step: int, config: Config, parallel: Parallel) -> list[MicroBatch]:
    mine = blocks(step, config)[parallel.data_rank :: parallel.data_size].to(parallel.device)
    return [to_micro_batch(part, EOS, False) for part in mine.split(config.train.micro_batch_size)]


def train_case(
    config: Config,
    parallel: Parallel,
    steps: Sequence[int] = STEPS,
    prepare: Callable[[Model], None] | None = None,
    backwards: bool = False,
    lr: float = 1e-3,
    tasks: bool = False,
    measures: bool = False,
    graph: MicroBatchGraph | None = None,
) -> list[dict[str, Any]]:
    """Return every step's numbers, with the statistics of each phase's last step, and a validation's numbers.

    Args:
        steps: number of steps of each phase. A case with one phase uses the last number.
        prepare: function that changes the model before it trains.
        backwards: whether to run each step's micro-batches in opposite order.
        tasks: whether to score tasks, too.
        measures: whether to return the statistics of each step.
        graph: takes the place of a CUDA graph: it runs the micro-batches of the last phase in steps without statistics.
    """
    assert check_config(config, parallel.world_size) == []
    model = build_model(config, parallel)
    if prepare is not None:
        prepare(model)
    records: list[dict[str, Any]] = []
    for phase, count in zip(config.phases, steps[-len(config.phases) :], strict=True):
        optimizer = build_optimizer(model, phase, config)
        end = len(records) + count
        for step in range(len(records), end):
            measured = measures or step == end - 1
            replayed = None if optimizer.local_backward else graph
            records.append(
                take_step(step, model, optimizer, config, parallel, measured, backwards, lr, replayed)
            )
        close_optimizer(model, optimizer)
        del optimizer
        gc.collect()
    batches = share(1000, config, parallel)
    loss_sum, loss_tokens = evaluation_step(model, batches, config, parallel, measures=True)
    dist.all_reduce(loss_tokens, group=parallel.groups.dp)
    reduced = send_step(model.runtime.stats, loss_sum, loss_tokens.item(), None, parallel)()
    validation = {"loss": reduced.loss, **as_numbers(reduced.layers)}
    if not tasks:
        return [*records, validation]
    scored = log_likelihoods(model, requests_of(1000, config), EOS, config, parallel)
    return [*records, {**validation, "task_nats": scored}]


def requests_of(step: int, config: Config) -> list[Request]:
    """Return each half of a sequence as a request whose last tokens are scored. EOS tokens are removed, because the
    keys of two EOS in one request would have equal scores."""
    rows = blocks(step, config).numpy()
    parts = [row[place : place + LENGTH // 2] for row in rows for place in (0, LENGTH // 2 + 1)]
    return [Request(part[part != EOS], 3 + number) for number, part in enumerate(parts)]


def take_step(
    step: int,
    model: Model,
    optimizer: PhaseOptimizer,
    config: Config,
    parallel: Parallel,
    measures: bool = True,
    backwards: bool = False,
    lr: float = 1e-3,
    graph: MicroBatchGraph | None = None,
) -> dict[str, Any]:
    """Return the numbers of one step, and of every layer if it `measures`."""
    batches, detector = share(step, config, parallel), SpikeDetector(config.monitor, parallel.device)
    if backwards:
        batches.reverse()
    training = Training(model, optimizer, config, parallel, detector, graph=graph)
    result = train_step(training, batches, lr, step, measures=measures)
    measured = Measured(causal_keys=result.causal_keys, z_loss_sum=result.z_loss_sum) if measures else None
    stats, tokens = model.runtime.stats, result.loss_tokens.item()
    reduced = send_step(stats, result.loss_sum, tokens, measured, parallel)()
    return {
        "loss": reduced.loss,
        **({"causal_keys": reduced.causal_keys} if measures else {}),
        **({"z_loss": reduced.z_loss} if reduced.z_loss is not None else {}),
        "judged_loss": result.verdict.row[0].item(),
        "grad_norm": result.grad_norm.item(),
        "update_norm": optimizer.update_norm(result.verdict.applied).item(),
        **as_numbers(reduced.layers),
    }


def go_on(
    config: Config, phase: PhaseConfig, parallel: Parallel, folder: Path, number: int
) -> list[dict[str, Any]]:
    """Take a step, write a checkpoint and take two more steps, or take these two from the checkpoint.

    The checkpoint is written in the background during the next two steps, but it must not contain the changes of these
    steps. After a load, the loss of the first step tests the weights. The loss of the second step tests the optimizer's
    state, and the statistics test the moving averages.

    Args:
        number: 0 writes the checkpoint; 1 reads a damaged copy before the good one.
    """
    saves = number == 0
    model = build_model(config, parallel)
    optimizer = build_optimizer(model, phase, config)
    saver = CheckpointSaver(folder, CheckpointConfig(), parallel)
    if saves:
        take_step(0, model, optimizer, config, parallel, measures=False)
        assert saver.begin(run_state(1, config, parallel.layout), model, optimizer) == []
    else:
        good = folder / "step_00000001"
        if number == 1:
            read_damaged_copy(good, model, optimizer, parallel)
        load_checkpoint(good, model, optimizer, parallel, True, unchecked=tensor_files(good))
    records = [take_step(step, model, optimizer, config, parallel, measures=step == 2) for step in (1, 2)]
    assert [result.error for result in saver.ended(now=3, wait=True)] == [None] * saves
    saver.close()
    close_optimizer(model, optimizer)
    return records


def read_damaged_copy(good: Path, model: Model, optimizer: PhaseOptimizer, parallel: Parallel) -> None:
    """Load a checkpoint with a wrong bit; the good one must then replace everything that this load changed."""
    damaged, last = good.parent / "damaged" / good.name, max(tensor_files(good))
    if parallel.is_main:
        shutil.copytree(good, damaged)
        flip(0.5)(damaged / last)
    dist.barrier()
    said = "nothing"
    try:
        load_checkpoint(damaged, model, optimizer, parallel, True, unchecked=tensor_files(damaged))
    except DamagedCheckpoint as damage:
        said = str(damage)
    assert f"{last} has checksum" in said, said


def cross_boundary(
    config: Config, parallel: Parallel, folder: Path, resumes: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Take a step, write a checkpoint, and take two steps of the next phase. If `resumes`, load this checkpoint instead
    of taking the first step and writing.

    Without `resumes`, one validation runs before the checkpoint is written, and one before the next phase begins. Also
    return whether this rank began the next phase with fp32 weights that bf16 cannot represent.
    """
    model = build_model(config, parallel)
    kept = None
    if not resumes:
        first = build_optimizer(model, SPARSE, config)
        take_step(0, model, first, config, parallel, measures=False)
        evaluation_step(model, share(1000, config, parallel), config, parallel)
        write_checkpoint(folder, 1, model, first, config, parallel=parallel)
        evaluation_step(model, share(1000, config, parallel), config, parallel)
        kept = keep_main_weights(model, first)
        close_optimizer(model, first)
        del first
        gc.collect()
    second = build_optimizer(model, BASE, config)
    if kept is None:
        saved = folder / "step_00000001"
        load_checkpoint(saved, model, second, parallel, False, unchecked=tensor_files(saved))
    else:
        carry_over(kept, second)
    weights = [part.tensors[MAIN_WEIGHT] for part in second.state_parts()]
    finer = any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    records = [take_step(step, model, second, config, parallel, measures=step == 2) for step in (1, 2)]
    close_optimizer(model, second)
    return records, finer


@contextmanager
def layout_of(config: Config) -> Iterator[Parallel]:
    yield init_parallel(config.parallel, seed=1)
    leave_layout()


def train_all(cases: Mapping[str, Case], names: Iterable[str], train: Callable[..., Any]) -> dict[str, Any]:
    trained = {}
    for name in names:
        case = cases[name]
        config = case.config(**case.train)
        with layout_of(config) as parallel:
            graphs = {"graph": CalledAtOnce()} if case.replays else {}
            trained[name] = train(config, parallel, case.steps, **graphs)
            assert [graph.replays for graph in graphs.values()] == [1] * case.replays
            print(f"rank {parallel.rank}: {name}", flush=True)  # shows the progress if it hangs
    return trained


def resume_all(cases: Mapping[str, Reshard], names: Iterable[str], folder: Path) -> dict[str, list[Any]]:
    """Return layout and numbers of each writer of a checkpoint and of its readers."""
    resumed: dict[str, list[Any]] = {name: [] for name in names}
    for name, found in resumed.items():
        case = cases[name]
        sections = {**case.sections, "model": {"num_layers": case.layers, **case.sections.get("model", {})}}
        for number, layout in enumerate((case.writer, *case.readers)):
            config = Case(layout, sections).config(**pairs(layout))
            with layout_of(config) as parallel:
                found.append((str(layout), go_on(config, case.phase, parallel, folder / name, number)))
    return resumed


def cross_all(
    layouts: Mapping[str, dict[str, Any]], names: Iterable[str], folder: Path, sections: dict[str, Any]
) -> dict[str, list[Any]]:
    """Return the numbers of an uninterrupted and of a resumed phase boundary in bf16."""
    crossed: dict[str, list[Any]] = {name: [] for name in names}
    for name, found in crossed.items():
        config = Case(layouts[name], sections).config(precision="bf16", **pairs(layouts[name]))
        for resumes in (False, True):
            with layout_of(config) as parallel:
                found.append(cross_boundary(config, parallel, folder / f"boundary of {name}", resumes))
    return crossed


def prepare_rank() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # each layout ends with a collection, which need not search imported objects
    for name, value in SAMPLE.items():
        setattr(query_sample, name, value)
    # Overlapped reductions go in several buckets, as in large models.
    small_buckets = partial(optim.DistributedDataParallelConfig, bucket_size=500)
    patch.object(optim, "DistributedDataParallelConfig", small_buckets).start()


def finish(folder: Path, results: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    shutdown_parallel()


def main(folder: Path) -> None:
    from gsa_train.optimizer import zero  # imported here, where the ranks run
    from helpers.zero_of_a_large_model import leave_out_what_nobody_reads, settings_of_a_large_model

    prepare_rank()
    patch.object(zero, "_settings", settings_of_a_large_model).start()
    leave_out_what_nobody_reads(setattr)
    sampling.STRETCH_ROWS = 4  # each tensor-parallel rank has rows of the indexer loss
    wanted = json.loads((folder / "wanted.json").read_text())
    results = {
        "trained": train_all(CASES, wanted["trained"], partial(train_case, tasks=True)),
        "resumed": resume_all(RESHARDED, wanted["resumed"], folder),
        "crossed": cross_all(BOUNDARIES, wanted["crossed"], folder, ALL_KEYS),
    }
    finish(folder, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
