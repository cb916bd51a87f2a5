"""Run one optimizer step, or one validation pass, through megatron-core's pipeline schedule."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import forward_step

from gsa_kernels.sampling import sampled_one_of
from gsa_train.config import Config
from gsa_train.config.batch_ramp import batch_size
from gsa_train.data.batches import MicroBatch, counted_rows, mean_causal_keys
from gsa_train.distributed.context_sharding import ContextSharding
from gsa_train.distributed.megatron_versions import backward_step
from gsa_train.distributed.parallel import Parallel
from gsa_train.losses import indexer_kl_grad_scale, loss_scale, masked_loss
from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.budget import update_variance_emas
from gsa_train.model.context_parallel import local_part
from gsa_train.model.mcore.build import Model
from gsa_train.model.moe.router import update_routers
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.optimizer.micro_batch_graph import MicroBatchGraph, PassInputs
from gsa_train.reliability.monitor.corruption import Computed, CorruptionCheck
from gsa_train.reliability.monitor.spikes import SpikeDetector, Verdict


@dataclass(frozen=True)
class Training:
    model: Model
    optimizer: PhaseOptimizer
    config: Config
    parallel: Parallel
    detector: SpikeDetector
    """Judges each step before its update."""
    check: CorruptionCheck | None = None
    """Repeats a step or compares the replicas' weights when due; raises CorruptionFound on a mismatch."""
    graph: MicroBatchGraph | None = None
    """Runs steps without measurements as CUDA graphs (`train.cuda_graphs`)."""
    hold_update: Callable[[], None] = lambda: None
    """Called before each update, which then waits until a save in progress has copied weights and optimizer state."""


@dataclass(frozen=True)
class StepResult:
    """Tensors that stay on the device until the step is logged or the monitor reads them."""

    loss_sum: torch.Tensor
    """0-d: summed loss of this rank's scored tokens. The sum over the ranks is the global batch's loss."""
    loss_tokens: torch.Tensor
    """0-d: scored tokens of the whole global batch."""
    grad_norm: torch.Tensor
    """0-d: global gradient norm before clipping."""
    verdict: Verdict
    """Whether the update was applied, and why not."""
    causal_keys: torch.Tensor | None
    """0-d: causal keys per query, mean over this replica; None in steps without measurements."""
    update_norm: torch.Tensor | None
    """0-d fp32: norm of the change in the weights; None in steps without measurements."""
    z_loss_sum: torch.Tensor | None = None
    """0-d: summed z-loss, as `loss_sum`; None without a z-loss or measurements."""


def train_step(
    training: Training,
    micro_batches: Sequence[MicroBatch],
    lr: float,
    step: int,
    saves: bool = False,
    measures: bool = False,
) -> StepResult:
    """Run one optimizer step: forward and backward over all micro-batches, gradient reduction and clipping, and
    updates.

    The step updates weights, moving averages of the indexer's score variance, and router loads. If the spike detector
    rejects the step, or if the loss or gradient is not finite, model and optimizer stay unchanged.

    With megatron-core's optimizer and without corruption checks, the host waits for a GPU only in these cases:
    - in the first step that measures attention;
    - in the step that captures a CUDA graph;
    - in every step, if experts are sharded or have a capacity, because the host then needs their token counts.

    Args:
        step: number of earlier steps of the run, which seeds the choice of queries for the indexer loss.
        saves: the weights after this step will be saved.
        measures: record attention statistics, because this step is logged.
    """
    model, optimizer, config = training.model, training.optimizer, training.config
    detector, check, groups = training.detector, training.check, training.parallel.groups
    loss_tokens = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).sum()
    uses_indexer = model.runtime.attention_pass.uses_indexer
    rows = counted_rows(micro_batches) if uses_indexer else loss_tokens.new_zeros(())
    counts = torch.stack([loss_tokens, rows])
    model.work_time.end()  # waits for other ranks are not this rank's work
    dist.all_reduce(counts, group=groups.dp)
    loss_tokens, rows = counts.unbind()
    loss_tokens = loss_tokens.clamp(min=1)  # without scored tokens the loss is 0, not 0 / 0
    model.work_time.begin()
    optimizer.set_learning_rate(lr, config.train.weight_decay)

    attention_pass = _training_pass(training, step, measures, rows)
    compute = partial(_compute, training, micro_batches, loss_tokens, attention_pass)
    computed = compute() if check is None else check.compute(step + 1, compute)
    verdict = detector.judge(computed.loss, computed.grad_norm, config.train.grad_clip)
    if check is not None:  # finds corruption before the update
        if check.suspects(verdict):
            computed = check.compute_again(step + 1, computed, compute)
            detector.take_back()
            verdict = detector.judge(computed.loss, computed.grad_norm, config.train.grad_clip)
        check.compare_replicas(step + 1, saves)
    training.hold_update()
    with model.work_time.part("optimizer"):
        optimizer.clipped_step(computed.grad_norm, config.train.grad_clip, verdict.applied)
        if config.train.weight_average_decay > 0:
            optimizer.average_weights(config.train.weight_average_decay, verdict.applied)
        if uses_indexer:
            update_variance_emas(
                model.variance_trackers, config.gsa.variance_ema_decay, groups.dp_cp, verdict.applied, rows
            )
        if optimizer.phase.train != "indexer":
            update_routers(model.routers, groups.tp_dp_cp, verdict.applied)
    causal_keys = update_norm = None
    if measures:
        causal_keys = mean_causal_keys(micro_batches)
        update_norm = optimizer.update_norm(verdict.applied)
    return StepResult(
        computed.loss_sum,
        loss_tokens,
        computed.grad_norm,
        verdict,
        causal_keys,
        update_norm,
        computed.z_loss_sum,
    )


def _training_pass(training: Training, step: int, measures: bool, rows: torch.Tensor) -> AttentionPass:
    """Return the settings of the attention layers for this step.

    Args:
        rows: 0-d, `counted_rows` of the global batch.
    """
    model, config, parallel = training.model, training.config, training.parallel
    of_phase = model.runtime.attention_pass
    kl_grad_scale: float | torch.Tensor = 0.0
    if of_phase.trains_indexer:
        kl_grad_scale = indexer_kl_grad_scale(
            training.optimizer.phase.kl_coeff,
            model.num_indexers,
            rows.clamp(min=1),
            parallel.data_size * parallel.context_size,
        )
    rank = parallel.data_rank * parallel.context_size + parallel.context_rank
    return replace(
        of_phase,
        base_has_graph=not training.optimizer.local_backward,
        batch_share=batch_size(config.train, step) / config.train.global_batch_size,
        measuring=measures,
        kl_grad_scale=kl_grad_scale,
        row_fraction=config.gsa.indexer_loss_row_fraction,
        row_draw=zlib.crc32(f"{config.run.seed} {step} {rank}".encode()),
    )


def _compute(
    training: Training,
    micro_batches: Sequence[MicroBatch],
    loss_tokens: torch.Tensor,
    attention_pass: AttentionPass,
) -> Computed:
    """Run forward and backward over all micro-batches and reduce the gradients. The gradients stay in their buffers."""
    model, optimizer = training.model, training.optimizer
    config, parallel = training.config, training.parallel
    local = optimizer.local_backward

    def run() -> list[dict[str, torch.Tensor]]:
        with model.runtime.during(attention_pass):
            losses = _run_schedule(optimizer.modules, micro_batches, loss_tokens, config, parallel, local)
        model.runtime.stats.sum_up()  # meanwhile the device runs the backward pass
        return losses

    optimizer.begin_step()
    # In the indexer warm-up, only the indexer trains, so the rest of the model needs no autograd graph. Each layer runs
    # the indexer's backward pass itself, and the schedule runs forward only.
    with model.work_time.part("forward_backward"):
        with torch.no_grad() if local else nullcontext():
            graph, measures = training.graph, attention_pass.measuring
            if graph is not None and not measures and graph.is_due():
                losses = _run_graph(training, graph, micro_batches, loss_tokens, attention_pass)
            elif graph is not None:
                losses = graph.run_plain(run, measures)
            else:
                losses = run()
        if local:
            optimizer.reduce_gradients()
    with model.work_time.part("optimizer"):
        loss_sum = _sum_of(losses, parallel)
        loss_share = loss_sum.double() / loss_tokens
        grad_norm, loss = optimizer.reduce_grad_norm(loss_share)
    z_loss_sum = None
    if config.train.z_loss_coeff > 0 and attention_pass.measuring:
        z_loss_sum = _sum_of(losses, parallel, "z_loss_sum")
    return Computed(loss_sum, grad_norm, loss, z_loss_sum)


@torch.no_grad()
def evaluation_step(
    model: Model,
    micro_batches: Sequence[MicroBatch],
    config: Config,
    parallel: Parallel,
    measures: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of this rank's scored tokens, and the number of scored tokens in this data-parallel
    replica. The loss is 0 except on the first tensor-parallel rank of the last pipeline stage."""
    loss_tokens = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).sum()
    with evaluating(model, measures):
        losses = _run_schedule(
            model.modules, micro_batches, loss_tokens.clamp(min=1), config, parallel, forward_only=True
        )
    return _sum_of(losses, parallel), loss_tokens


@torch.no_grad()
def owners_losses(
    model: Model,
    batches: Sequence[tuple[MicroBatch, torch.Tensor]],
    count: int,
    config: Config,
    parallel: Parallel,
) -> torch.Tensor:
    """Return this rank's sum of losses per owner: fp64 [count]. Each label belongs to at most one owner, such as an
    evaluation request. An all-reduce of the result gives the sums over all ranks.

    Args:
        batches: micro-batches of one shape, each with the owners of its labels: int64 [B, L], from 0 to
            count - 1; a negative number is no owner.
    """
    micro_batch_size, seq_len_tokens = batches[0][0].tokens.shape
    cut = ContextSharding(parallel.context_rank, parallel.context_size, config.parallel.context_chunks)
    iterators = [iter(batches) for _ in model.modules]
    with evaluating(model, measures=False):
        found = get_forward_backward_func()(
            forward_step_func=partial(_forward_to_losses, cut=cut),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(model.modules) if len(iterators) > 1 else model.modules[0],
            num_microbatches=len(batches),
            seq_length=seq_len_tokens,
            micro_batch_size=micro_batch_size,
            forward_only=True,
        )
    sums: np.ndarray = np.zeros(count)
    if parallel.is_last_stage and parallel.tensor_rank == 0:  # tensor-parallel ranks hold equal losses
        losses = torch.cat([each["losses"].flatten() for each in found]).double().cpu().numpy()
        owners = torch.cat([local_part(each, cut).flatten() for _, each in batches]).cpu().numpy()
        # summed on the host, in a fixed order
        sums = np.bincount(owners[owners >= 0], losses[owners >= 0], count)
    return torch.from_numpy(sums).to(parallel.device)


def _forward_to_losses(
    batches: Iterator[tuple[MicroBatch, torch.Tensor]], module: torch.nn.Module, cut: ContextSharding
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch, _ = next(batches)
    one = torch.ones((), device=batch.tokens.device)
    output, _ = _forward_step(iter([batch]), module, one, cut)
    return output, lambda losses: (losses.sum(), {"losses": losses.detach().float()})


@contextmanager
def evaluating(model: Model, measures: bool) -> Iterator[None]:
    attention_pass = replace(model.runtime.attention_pass, evaluating=True, measuring=measures)
    for module in model.modules:
        module.eval()
    with model.runtime.during(attention_pass):
        yield
    for module in model.modules:
        module.train()


def _run_schedule(
    modules: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss_tokens: torch.Tensor,
    config: Config,
    parallel: Parallel,
    forward_only: bool,
) -> list[dict[str, torch.Tensor]]:
    scale = loss_scale(len(micro_batches), loss_tokens, parallel.data_size)
    cut = ContextSharding(parallel.context_rank, parallel.context_size, config.parallel.context_chunks)
    iterators = [iter(micro_batches) for _ in modules]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, scale=scale, cut=cut),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(modules) if len(modules) > 1 else modules[0],
        num_microbatches=len(micro_batches),
        seq_length=config.train.seq_len_tokens,
        micro_batch_size=config.train.micro_batch_size,
        forward_only=forward_only,
    )


def _run_graph(
    training: Training,
    graph: MicroBatchGraph,
    micro_batches: Sequence[MicroBatch],
    loss_tokens: torch.Tensor,
    attention_pass: AttentionPass,
) -> list[dict[str, torch.Tensor]]:
    """Replay the CUDA graph for each micro-batch, then reduce the gradients, as in megatron-core's schedule without
    pipelining. With `parallel.overlap_grad_reduce`, the last micro-batch runs without the graph: its backward pass must
    start the reductions, and the graph contains none."""
    count, kl_grad_scale = len(micro_batches), attention_pass.kl_grad_scale
    scale = loss_scale(count, loss_tokens, training.parallel.data_size)
    scales = (scale, kl_grad_scale if isinstance(kl_grad_scale, torch.Tensor) else None)
    inputs = [
        PassInputs(batch.tokens, batch.labels, batch.document_ids, batch.loss_mask, *scales)
        for batch in micro_batches
    ]
    no_sync = training.model.mcore_config.no_sync_func  # None without `parallel.overlap_grad_reduce`
    replayed = count if no_sync is None else count - 1
    draws = sampled_one_of(training.config.train.seq_len_tokens, attention_pass.row_fraction)
    of_all = replace(attention_pass, kl_grad_scale=0.0, row_draw=0)
    drawn = [(attention_pass.row_draw + number) % draws for number in range(count)]
    runs = [partial(_pass_over_one, training, count, replace(of_all, row_draw=draw)) for draw in drawn]
    losses = []
    with nullcontext() if no_sync is None else no_sync():
        for run, given, draw in zip(runs[:replayed], inputs, drawn, strict=False):
            losses.append({"loss_sum": graph.run(run, given, (count, of_all), draw)})
    if replayed < count:
        losses += graph.run_plain(lambda: [{"loss_sum": runs[-1](inputs[-1])}], measures=False)
    training.optimizer.reduce_gradients()
    return losses


def _pass_over_one(
    training: Training, count: int, attention_pass: AttentionPass, inputs: PassInputs
) -> torch.Tensor:
    """Run forward and backward over one of `count` micro-batches and return its summed loss, for the log."""
    model, (module,) = training.model, training.optimizer.modules
    tokens, labels, document_ids, loss_mask, scale, kl_grad_scale = inputs
    if kl_grad_scale is not None:
        attention_pass = replace(attention_pass, kl_grad_scale=kl_grad_scale)
    run = partial(_forward_step, scale=scale, cut=ContextSharding(0, 1, 2))
    batches = iter([MicroBatch(tokens, labels, document_ids, loss_mask)])
    logged: list[dict[str, torch.Tensor]] = []
    with model.runtime.during(attention_pass):
        loss, _ = forward_step(run, batches, module, count, None, logged, model.mcore_config, 1)
        backward_step(loss, module, model.mcore_config)
    return logged[0]["loss_sum"]


def _forward_step(
    micro_batches: Iterator[MicroBatch],
    module: torch.nn.Module,
    scale: torch.Tensor,
    cut: ContextSharding,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch = next(micro_batches)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    tokens, positions, labels, loss_mask = (
        local_part(each, cut) for each in (batch.tokens, positions, batch.labels, batch.loss_mask)
    )
    # The attention mask argument carries the document ids of the whole sequence; our attention builds masks from them.
    output = module(tokens, positions, batch.document_ids, labels=labels)
    return output, partial(masked_loss, loss_mask, scale)


def _sum_of(
    losses: list[dict[str, torch.Tensor]], parallel: Parallel, name: str = "loss_sum"
) -> torch.Tensor:
    """Return the summed losses on the first tensor-parallel rank of the last pipeline stage, and 0 elsewhere, so that
    each token counts once."""
    if losses and parallel.is_last_stage and parallel.tensor_rank == 0:
        return torch.stack([entry[name] for entry in losses]).sum()
    return torch.zeros((), device=parallel.device)
