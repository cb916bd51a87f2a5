"""Many layouts one after the other in one world of four ranks: `many_layouts.py FOLDER`.

Starting a rank takes longer than the steps of a tiny model, so the ranks stay and change their layout. What model,
context and pipeline sizes leave of the world is data parallel. Writes FOLDER/results.json.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gsa_train.batches import MicroBatch, to_micro_batch
from gsa_train.checkpoint.damage import tensor_files
from gsa_train.checkpoint.load import DamagedCheckpoint, load_checkpoint
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig, Config, PhaseConfig, RopeScalingConfig
from gsa_train.config.checks import check_config
from gsa_train.evaluation.requests import Request
from gsa_train.metrics.record import Measured, reduce_step
from gsa_train.model import query_sample
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.monitor.spikes import SpikeDetector
from gsa_train.next_tokens import next_tokens
from gsa_train.optimizer import mcore as optim
from gsa_train.optimizer.interface import MAIN_WEIGHT
from gsa_train.optimizer.main_weights import carry_over, keep_main_weights
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.parallel import Parallel, init_parallel, leave_layout, shutdown_parallel
from gsa_train.step import Training, evaluation_step, train_step
from gsa_train.tasks import log_likelihoods
from helpers.checkpoints import run_state
from helpers.single_rank import CONFIG, DENSE, EOS, SPARSE, WARM_UP, as_numbers

WORLD, LENGTH, SEQUENCES = 4, 32, 4
STEPS = (1, 2)
"""Of the warm-up and of the sparse phase. What differs in a step shows in its own numbers and in the next step's, also
of the next phase: of more steps they would only say that rounding does not grow."""
MORE_STEPS = (2, 2)
"""Of one layout of megatron-core's optimizer and one of DeepSpeed's, and of the text of `SELECTED`."""
ALL_KEYS = {"gsa": {"k_base": LENGTH, "k_min": LENGTH, "k_max": LENGTH}}
"""Every query selects all that it sees, so no rounding can change a selection."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"],
        "indexer_rope": True,
        "local_window": 4,
        "selection_block": 4,
        "selection_reuse": 2,
        "indexer_temperature": "learned",
    },
    "model": {
        "qk_norm": True,
        "tie_embeddings": True,
        "qkv_bias": True,
        "rotary_percent": 0.5,
        "rope_scaling": RopeScalingConfig("yarn", 4.0, 8),
    },
}
SELECTED: dict[str, dict[str, Any]] = {"model": {"vocab_size": 64, "init_std": 0.4}, "data": {"seed": 4}}
"""Every query selects some of the keys that it sees. The text of this seed has no near ties, which rounding, and so the
processor, would decide: no token comes twice in a sequence (`blocks`), and test_many_layouts measures the margins."""
GATES_OF_HEADS: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"],
        "key_gate": True,
        "query_gate": True,
        "gate_granularity": "headwise",
        "gate_form": "additive",
        "gate_activation": "silu",
        "selection_reuse": 2,
        "reuse_teacher": "group",
        "indexer_norm": True,
        "indexer_activation": "plain",
    },
    "model": {"sandwich_norm": True},
}
SHARED_GATES: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"],
        "key_gate": True,
        "query_gate": True,
        "gate_sharing": "head_shared",
        "indexer_activation": "qsa",
        "local_window": 4,
        "selection_block": 4,
        "selection_query": "previous_mean",
    },
}
FREE_GATES: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"],
        "output_gate": False,
        "output_transform": "rms_norm",
        "projection_gate": True,
        "key_gate": True,
        "gate_input": "input_independent",
        "indexer_pool": 2,
        "gate_activation": "ns_sigmoid",
    },
}
G5: dict[str, dict[str, Any]] = {"gsa": {**ALL_KEYS["gsa"], "projection_gate": True, "query_gate": True}}
"""With the three above: gates of which tensor-parallel ranks hold a part, or the same for other heads or tokens."""
TIED: dict[str, dict[str, Any]] = {**ALL_KEYS, "model": {"tie_embeddings": True}}
BASELINE = {"gsa": {"attention": "dense"}}
PAIRS = {"micro_batch_size": 2}
"""Half the passes through the layers, and what one rank trains one by one. `context` and pipelines have several."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
INSTANCES = {"optimizer_instances": 2}
REPLICATED = {"distributed_optimizer": False}
ZERO_1 = {"strategy": "deepspeed", "zero_stage": 1}
ZERO_2 = {"strategy": "deepspeed", "zero_stage": 2}
ZERO_3 = {"strategy": "deepspeed", "zero_stage": 3}


SAMPLE = {"STRETCH": 4, "STRETCHES": 4, "GROUP": 2}
"""Of gsa_train.model.query_sample: half of the 32 queries are measured, as of a long sequence. With four
context-parallel ranks every second chunk is a run."""


SAMPLED_POSITIONS = (13, 31)
"""After which a token is written: on several context- and sequence-parallel ranks."""


@dataclass(frozen=True)
class Case:
    parallel: dict[str, Any]
    sections: dict[str, dict[str, Any]] = field(default_factory=lambda: ALL_KEYS)
    train: dict[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = STEPS

    @property
    def layers(self) -> int:
        """Enough for the stages; where there are none, so few that two differ. The text of `SELECTED` is for four."""
        return 4 if "pipeline" in self.parallel or self.sections is SELECTED else 2

    def config(self, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
        """With `parallel`, for that layout instead of the case's."""
        dense = self.sections is BASELINE
        sections = {
            **self.sections,
            "model": {"num_layers": self.layers, "init_std": 0.1, **self.sections.get("model", {})},
            "train": {
                "seq_len_tokens": LENGTH,
                "micro_batch_size": 1,
                "global_batch_size": SEQUENCES,
                "grad_clip": 1.0,
                **train,
            },
            "parallel": self.parallel if parallel is None else parallel,
        }
        config = dataclasses.replace(CONFIG, phases=[DENSE] if dense else [WARM_UP, SPARSE])
        for name, fields in sections.items():
            section = dataclasses.replace(getattr(config, name), **fields)
            config = dataclasses.replace(config, **{name: section})
        return config


# Tensor, context, data and plain pipelines with selected keys: three_way_layouts.py, each pair of them together.
CASES = {
    "context": Case({"context": 2}),
    "context on all ranks": Case({"context": 4}, train=PAIRS, steps=MORE_STEPS),
    "context, indexer norm": Case({"context": 2}, GATES_OF_HEADS, PAIRS),
    "context, recomputed layers": Case({"context": 2}, train={"recompute": "full", **PAIRS}),
    "context, replicated optimizer": Case({"context": 2, "distributed_optimizer": False}, train=PAIRS),
    "context x pipeline, options": Case(
        {"context": 2, "pipeline": 2}, OPTIONS, {"recompute": "selective", **PAIRS}
    ),
    "context, dense baseline": Case({"context": 2}, BASELINE, PAIRS),
    "context in small chunks": Case({"context": 2, "context_chunks": 4}, OPTIONS, PAIRS),
    "context x interleaved": Case({"context": 2, **INTERLEAVED}, train=PAIRS),
    "data": Case({}),
    "tensor without sequence": Case({"tensor": 2, "sequence": False}, train=PAIRS),
    "tensor without sequence, overlapped": Case({"tensor": 2, "sequence": False, **OVERLAP}, train=PAIRS),
    "tensor, dense baseline": Case({"tensor": 2}, BASELINE, PAIRS),
    "tensor x pipeline, options": Case({"tensor": 2, "pipeline": 2}, OPTIONS, PAIRS),
    "tensor, gates of heads": Case({"tensor": 2}, GATES_OF_HEADS, PAIRS),
    "tensor, shared gates": Case({"tensor": 2}, SHARED_GATES, PAIRS),
    "tensor without sequence, shared gates": Case({"tensor": 2, "sequence": False}, SHARED_GATES, PAIRS),
    "tensor, free gates": Case({"tensor": 2}, FREE_GATES, PAIRS),
    "deepspeed 1 x tensor, G5": Case({"tensor": 2, **ZERO_1}, G5, PAIRS),
    "pipeline": Case({"pipeline": 2}),
    "pipeline, recomputed layers": Case({"pipeline": 2}, train={"recompute": "full"}),
    "tensor and sequence on all ranks": Case(
        {"tensor": 4}, {**ALL_KEYS, "model": {"num_kv_heads": 4}}, PAIRS
    ),
    "pipeline on all ranks": Case({"pipeline": 4}),
    "pipeline on all ranks, interleaved": Case(
        {"pipeline": 4, "virtual_pipeline": 2}, {**ALL_KEYS, "model": {"num_layers": 8}}
    ),
    "interleaved": Case(INTERLEAVED),
    "interleaved, selected keys": Case(INTERLEAVED, SELECTED, steps=MORE_STEPS),
    "interleaved x tensor, tied": Case({"tensor": 2, **INTERLEAVED}, TIED, PAIRS),
    "interleaved, overlapped": Case({**INTERLEAVED, **OVERLAP}),
    "uneven": Case({"pipeline": 2, "pipeline_layers": [1, 3]}),
    "two optimizer instances, overlapped": Case({**INSTANCES, **OVERLAP}),
    "deepspeed 1 x tensor, options": Case({"tensor": 2, "sequence": False, **ZERO_1}, OPTIONS),
    "deepspeed 2 in host memory, recomputed layers": Case(
        {"tensor": 2, **ZERO_2, "offload_optimizer": True}, train={"recompute": "full"}
    ),
    "deepspeed 3 x tensor, tied": Case({"tensor": 2, **ZERO_3}, TIED, steps=MORE_STEPS),
}

EQUAL = {
    "tensor without sequence, overlapped": "tensor without sequence",
    "interleaved, overlapped": "interleaved",
    "pipeline, recomputed layers": "pipeline",
}
"""To the last bit. Two replicas, as gloo sums the parts of a buffer of more ranks in another order."""

ONE_SMALL_INDEXER = {
    **ALL_KEYS,
    "gsa": {**ALL_KEYS["gsa"], "indexer_heads": 1, "indexer_dim": 2, "indexer_activation": "relu"},
    "model": {"num_layers": 1},
}


@dataclass(frozen=True)
class Reshard:
    """Who writes a checkpoint, and who goes on from it, the first of them after a damaged copy of it (of each kind of
    optimizer one does). In its own layout it goes on bit for bit."""

    writer: dict[str, Any]
    readers: list[dict[str, Any]]
    sections: dict[str, dict[str, Any]] = field(default_factory=lambda: ALL_KEYS)
    phase: PhaseConfig = SPARSE

    @property
    def layers(self) -> int:
        return 4 if any("pipeline" in layout for layout in (self.writer, *self.readers)) else 2


RESHARDED = {
    "interleaved": Reshard(
        INTERLEAVED,
        [{"pipeline": 2, "pipeline_layers": [3, 1], **REPLICATED}, {}, {"context": 2, "tensor": 2}],
    ),
    # Each copy of the embedding has a bucket of gradients to itself. More tensor- than data-parallel ranks read it.
    "pipeline, tied": Reshard(
        {"pipeline": 2, "pipeline_layers": [3, 1]},
        [{"tensor": 4, **ZERO_3}, {"tensor": 2, **INTERLEAVED}],
        {**TIED, "model": {**TIED["model"], "num_kv_heads": 4}},
    ),
    "context": Reshard({"context": 2}, [{"tensor": 2, **ZERO_2}, {"context": 4}, {"pipeline": 4}]),
    "two optimizer instances": Reshard({**INSTANCES, **OVERLAP}, [{**INSTANCES, **OVERLAP}]),
    "free gates": Reshard(
        {"tensor": 2, **REPLICATED},
        [{"tensor": 4, "sequence": False}, REPLICATED],
        {"gsa": FREE_GATES["gsa"], "model": {"num_kv_heads": 4}},
    ),
    "deepspeed": Reshard({"tensor": 2, **ZERO_3}, [ZERO_1, {"tensor": 2, **ZERO_3}]),
    # Three small matrices over four ranks, whose part in the buffer is 64 elements each.
    "a rank without a parameter": Reshard({}, [{}, ZERO_1], ONE_SMALL_INDEXER, WARM_UP),
}


def pairs(layout: dict[str, Any]) -> dict[str, int]:
    """PAIRS where model and context leave few replicas: each has a micro-batch, or two for a pipeline."""
    return PAIRS if {"context", "tensor"} & layout.keys() else {}


BOUNDARIES = {
    "sharded": {},
    "two optimizer instances": {**INSTANCES, **OVERLAP},
    "deepspeed 3 x tensor": {"tensor": 2, **ZERO_3},
}
"""In bf16, where one phase's optimizer cuts its fp32 weights otherwise than the next one's."""
BASE = dataclasses.replace(SPARSE, train="base")


def blocks(step: int, config: Config) -> torch.Tensor:
    """int32 [sequences, L + 1]: a global batch of documents of about 12 tokens (a third of a longer sequence), which
    cross the borders of chunks.

    Where the vocabulary is larger than a sequence no token comes twice in it: in the first layer equal tokens of a
    document have equal keys, and which of them is selected is then decided by the last bit, if at all.
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
    samples: bool = False,
    measures: bool = False,
) -> list[dict[str, Any]]:
    """Every step's numbers, with the statistics of each phase's last step, and those of a validation.

    Args:
        steps: of each phase; a single phase takes the last of them.
        prepare: changes the model before it trains.
        backwards: each step's micro-batches in the opposite order.
        samples: also the most probable next tokens, which in bf16 rounding may decide.
        measures: the statistics of each step.
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
            records.append(take_step(step, model, optimizer, config, parallel, measured, backwards, lr))
        close_optimizer(model, optimizer)
        del optimizer
        gc.collect()
    batches = share(1000, config, parallel)
    loss_sum, loss_tokens = evaluation_step(model, batches, config, parallel, measures=True)
    dist.all_reduce(loss_tokens, group=parallel.groups.dp)
    reduced = reduce_step(model.runtime.stats, loss_sum, loss_tokens.item(), None, parallel)
    validation = {"loss": reduced.loss, **as_numbers(reduced.layers)}
    if not samples:
        return [*records, validation]
    sampled = blocks(1000, config)[: len(SAMPLED_POSITIONS)].to(parallel.device).split(1)
    written = next_tokens(
        model,
        [to_micro_batch(part, EOS, False) for part in sampled],
        SAMPLED_POSITIONS[: len(sampled)],
        config.model.vocab_size - 1,
        config,
        parallel,
    )
    scored = log_likelihoods(model, requests_of(1000, config), EOS, config, parallel)
    return [*records, {**validation, "next_tokens": written, "task_nats": scored}]


def requests_of(step: int, config: Config) -> list[Request]:
    """The first and the last half of sequences, of which the last tokens are scored; two have room in a sequence.
    Without EOS tokens, two of which in a document would be a tie."""
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
) -> dict[str, Any]:
    """The numbers of one step, and if it `measures` those of every layer."""
    batches, detector = share(step, config, parallel), SpikeDetector(config.monitor, parallel.device)
    if backwards:
        batches.reverse()
    training = Training(model, optimizer, config, parallel, detector)
    result = train_step(training, batches, lr, step, measures=measures)
    measured = Measured(visible_keys=result.visible_keys) if measures else None
    stats, tokens = model.runtime.stats, result.loss_tokens.item()
    reduced = reduce_step(stats, result.loss_sum, tokens, measured, parallel)
    return {
        "loss": reduced.loss,
        **({"visible_keys": reduced.visible_keys} if measures else {}),
        "judged_loss": result.verdict.row[0].item(),
        "grad_norm": result.grad_norm.item(),
        "update_norm": optimizer.update_norm(result.verdict.applied, parallel).item(),
        **as_numbers(reduced.layers),
    }


def go_on(
    config: Config, phase: PhaseConfig, parallel: Parallel, folder: Path, number: int
) -> list[dict[str, Any]]:
    """A step, a checkpoint and two more, of which the checkpoint, written meanwhile, may show nothing; or these two
    from the checkpoint. The first loss then is that of the weights, the second shows the optimizer's state, and its
    statistics the moving averages.

    Args:
        number: 0 writes; 1 has read a damaged copy before.
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
    """Of a checkpoint, with a wrong bit: what that leaves behind, the good one is to replace."""
    damaged = good.parent / "damaged" / good.name
    if parallel.is_main:
        shutil.copytree(good, damaged)
        path = damaged / sorted(tensor_files(good))[-1]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()
    said = "nothing"
    try:
        load_checkpoint(damaged, model, optimizer, parallel, True, unchecked=tensor_files(damaged))
    except DamagedCheckpoint as damage:
        said = str(damage)
    assert f"{sorted(tensor_files(good))[-1]} has checksum" in said, said


def cross_boundary(
    config: Config, parallel: Parallel, folder: Path, resumes: bool
) -> tuple[list[dict[str, Any]], bool]:
    """A step of one phase and two of the next, with a checkpoint between them; or these two from there. Validations
    come before the checkpoint and the end of the phase, as in a run. With whether this rank went on from fp32 weights
    that bf16 does not hold."""
    model = build_model(config, parallel)
    kept = None
    if not resumes:
        first = build_optimizer(model, SPARSE, config)
        take_step(0, model, first, config, parallel, measures=False)
        evaluation_step(model, share(1000, config, parallel), config, parallel)
        saver = CheckpointSaver(folder, CheckpointConfig(async_save=False), parallel)
        (result,) = saver.begin(run_state(1, config, parallel.layout), model, first)
        saver.close()
        assert result.error is None, result.error
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


def main(folder: Path) -> None:
    from gsa_train.optimizer import zero  # here, where the ranks run: the tests read the tables above
    from helpers.zero_of_a_large_model import settings_of_a_large_model

    torch.set_num_threads(1)
    gc.freeze()  # each layout ends with a collection, which needs not search what was imported
    patch.object(zero, "_settings", settings_of_a_large_model).start()
    for name, value in SAMPLE.items():
        setattr(query_sample, name, value)
    # Overlapped reductions go in several buckets, as those of large models do.
    small_buckets = partial(optim.DistributedDataParallelConfig, bucket_size=500)
    patch.object(optim, "DistributedDataParallelConfig", small_buckets).start()
    trained, resumed, crossed = {}, {}, {}
    for name, case in CASES.items():
        config = case.config(**case.train)
        parallel = init_parallel(config.parallel, seed=1)
        trained[name] = train_case(config, parallel, case.steps, samples=True)
        print(f"rank {parallel.rank}: {name}", flush=True)  # how far it came, should it hang
        leave_layout()
    for name, case in RESHARDED.items():
        for number, layout in enumerate((case.writer, *case.readers)):
            sections = {
                **case.sections,
                "model": {"num_layers": case.layers, **case.sections.get("model", {})},
            }
            config = Case(layout, sections).config(**pairs(layout))
            parallel = init_parallel(config.parallel, seed=1)
            records = go_on(config, case.phase, parallel, folder / name, number)
            resumed.setdefault(name, []).append([str(layout), records])
            leave_layout()
    for name, layout in BOUNDARIES.items():
        config = Case(layout).config(precision="bf16", **pairs(layout))
        for resumes in (False, True):
            parallel = init_parallel(config.parallel, seed=1)
            found = cross_boundary(config, parallel, folder / f"boundary of {name}", resumes)
            crossed.setdefault(name, []).append(found)
            leave_layout()
    parallel = init_parallel(CASES["context"].config().parallel, seed=1)
    if parallel.is_main:
        results = {"trained": trained, "resumed": resumed, "crossed": crossed}
        (folder / "results.json").write_text(json.dumps(results))
    shutdown_parallel()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
