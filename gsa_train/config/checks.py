"""Check that the fields of a config fit together. Each check returns lines `field = value: wrong; remedy`.

This is plain Python, because it runs before torch.distributed starts, and on machines without accelerators.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections import Counter
from collections.abc import Iterator

from gsa_train.config.batch_ramp import check_batch_ramp
from gsa_train.config.data import DataConfig
from gsa_train.config.evaluate import check_tasks
from gsa_train.config.file_checks import (
    LEFT_TO_A_SHELL,
    left_to_a_shell,
    longest_read_seconds,
    validation_fields,
)
from gsa_train.config.gates import check_gates
from gsa_train.config.gsa import check_selection
from gsa_train.config.kernel_checks import check_kernels
from gsa_train.config.load import flat_fields, problem_line
from gsa_train.config.model import check_rotary
from gsa_train.config.moe import check_moe
from gsa_train.config.monitor import check_monitor
from gsa_train.config.parallel import (
    check_layout,
    chunk_in_words,
    data_parallel_size,
    nearest,
    undivided_chunk,
)
from gsa_train.config.phases import PhaseConfig, check_decay, check_kept_optimizer
from gsa_train.config.sections import Config
from gsa_train.config.train import check_fp8, check_graphs, check_muon, check_qk_clip

# Ranges of single fields. An integer is at least 1 unless it is listed under AT_LEAST_ZERO.
AT_LEAST_ZERO = frozenset(
    """
    run.seed run.time_limit_minutes run.slurm_margin_minutes profile.start_step
    data.seed data.num_workers model.rope_scaling.original_max_position_embeddings model.rope_scaling.attention_factor
    evaluate.every_steps gsa.local_window gsa.dense_below train.weight_decay train.grad_clip train.z_loss_coeff
    train.qk_clip evaluate.tasks_every_steps evaluate.tasks_max_questions
    data.read_retries checkpoint.save_retries checkpoint.keep_every_steps parallel.hang_limit_seconds
    monitor.recheck_every_steps monitor.compare_replicas_every_steps monitor.loss_min_rise_nats
    phases.warmup_steps phases.decay_steps phases.min_lr phases.kl_coeff
    moe.experts moe.shared_expert_ffn_hidden_size moe.first_dense_layers moe.balance_coeff moe.bias_update_rate
    moe.z_loss_coeff moe.capacity_factor
    """.split()  # noqa: SIM905 - a list literal would be a page long
)
ABOVE_ZERO = frozenset(
    """
    model.rope_scaling.factor model.rope_scaling.beta_fast model.rope_scaling.beta_slow
    model.rope_base model.rotary_percent model.norm_epsilon model.init_std train.adam_epsilon train.muon_update_rms
    parallel.timeout_minutes logging.straggler_ratio data.read_timeout_seconds
    monitor.sigmas monitor.lasting_sigmas phases.lr phases.indexer_lr_mult phases.gate_lr_mult
    moe.routed_scale
    """.split()  # noqa: SIM905
)
FROM_ZERO_BELOW_ONE = frozenset(
    {
        "gsa.variance_ema_decay",
        "train.adam_beta1",
        "train.adam_beta2",
        "train.muon_momentum",
        "train.weight_average_decay",
    }
)
AT_MOST = {"model.num_layers": 10_000, "moe.experts": 65_536}
"""Limits of counts, because checks before a run loop over each layer and expert."""
LARGEST_SOURCE_WEIGHT = 100.0  # as in gsa_data, whose import would load numpy
LARGEST_FP32 = 3.4e38
LONGEST_TIMEOUT_MINUTES = 1e9  # datetime holds a little more
NOT_EMPTY = ("run.dir", "data.train_dir", "data.tokenizer", "data.text_field", "logging.wandb_project")


def check_config(config: Config, world_size: int) -> list[str]:
    """Return all mistakes in the values of a config on `world_size` ranks. `check_files` checks the files."""
    replicas = data_parallel_size(config, world_size)
    return [
        *_check_ranges(config),
        *_check_run_name(config),
        *_check_written_folders(config),
        *_check_format(config),
        *_check_order(config),
        *_check_reading(config),
        *_check_model(config),
        *check_selection(config),
        *check_gates(config),
        *check_kernels(config),
        *check_graphs(config, replicas),
        *check_muon(config),
        *check_qk_clip(config),
        *check_fp8(config),
        *check_layout(config, world_size),
        *check_moe(config, world_size),
        *check_batch_ramp(config),
        *_check_multiple(config, "checkpoint.keep_every_steps", "checkpoint.every_steps"),
        *_check_initial(config),
        *_check_recompute(config),
        *_check_phases(config),
        *check_monitor(config, replicas),
        *check_tasks(config),
        *_check_profile(config, world_size),
    ]


def check_packages(config: Config) -> list[str]:
    """Returns an error line for each optional package that this run needs and that is missing."""
    lines = []
    if config.parallel.strategy == "deepspeed" and not is_installed("deepspeed"):
        remedy = "run pip install '.[deepspeed]' in the checkout, or set parallel.strategy to megatron"
        lines.append(config.problem("parallel.strategy", "the package deepspeed is not installed", remedy))
    mode: str = config.logging.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or mode
    if mode != "disabled" and not is_installed("wandb"):
        remedy = "run pip install wandb, or set logging.wandb=disabled"
        lines.append(config.problem("logging.wandb", "the package wandb is not installed", remedy))
    return lines


def is_installed(package: str) -> bool:
    """Whether a package is installed. A folder of that name without code, such as W&B's own `wandb/`, does not
    count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _check_initial(config: Config) -> Iterator[str]:
    for part in ("text", "state"):
        field = f"checkpoint.initial_{part}"
        if not config.checkpoint.initial_weights and config.value_of(field) == "continue":
            wrong = f"there is no checkpoint whose {part} goes on"
            yield config.problem(field, wrong, "name it in checkpoint.initial_weights")


def _check_format(config: Config) -> Iterator[str]:
    data = config.data
    if data.format == "text":
        if data.chat_template:
            wrong = "data.format = text reads none"
            yield config.problem("data.chat_template", wrong, "set data.format=chat, or leave it out")
        return
    if data.attend_across_documents:
        wrong = "with data.format = chat, an answer would see other conversations"
        yield config.problem("data.attend_across_documents", wrong, "set it to false")
    if data.text_field != DataConfig.text_field:
        yield config.problem("data.text_field", "data.format = chat reads the field messages", "leave it out")
    if not is_installed("transformers"):
        wrong = "the package transformers, which writes conversations, is not installed"
        yield config.problem("data.format", wrong, "run in the checkout: pip install '.[hf]'")


def _check_order(config: Config) -> Iterator[str]:
    for name, weight in config.data.source_weights.items():
        if not 0 <= weight <= LARGEST_SOURCE_WEIGHT:  # written so that NaN fails
            wrong = f"outside [0, {LARGEST_SOURCE_WEIGHT:g}]"
            remedy = "give how often a document comes in an epoch; 0 leaves the source out"
            yield problem_line(f"data.source_weights.{name}", weight, wrong, remedy)
    if config.data.packing == "best_fit" and config.data.attend_across_documents:
        wrong = "needs data.attend_across_documents = false: what fills a sequence up would see the documents before it"
        yield config.problem("data.packing", wrong, "set it to false, or data.packing to concatenate")


def _check_reading(config: Config) -> Iterator[str]:
    """Check that a failing read gives up before the watchdog ends the rank, so that data.on_bad_shard can decide."""
    data, limit_minutes = config.data, config.parallel.timeout_minutes
    longest_seconds = longest_read_seconds(data)
    if data.read_timeout_seconds > 0 and 0 < limit_minutes * 60 < longest_seconds < math.inf:
        wrong = (
            f"with data.read_retries = {data.read_retries} a read fails after {longest_seconds:g} s, when "
            f"parallel.timeout_minutes = {limit_minutes:g} has ended the run"
        )
        remedy = "lower one of the first two, or raise the third"
        yield config.problem("data.read_timeout_seconds", wrong, remedy)


def _check_ranges(config: Config) -> Iterator[str]:
    for field, value in flat_fields(dataclasses.asdict(config)):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or field.startswith("data.source_weights."):  # `_check_order` checks the weights
            continue
        rule = re.sub(r"\.\d+\.", ".", field)  # `phases.lr` has the rule for phases.0.lr
        if not math.isfinite(value):
            yield config.problem(field, "not a finite number", "give a finite number")
        elif abs(value) > LARGEST_FP32:
            yield config.problem(field, "more than fp32 holds", "give a smaller number")
        elif rule in AT_LEAST_ZERO:
            if value < 0:
                yield config.problem(field, "negative", "give 0 or more")
        elif rule in FROM_ZERO_BELOW_ONE:
            if not 0 <= value < 1:
                yield config.problem(field, "outside [0, 1)", "give a number from 0 to below 1")
        elif rule in ABOVE_ZERO:
            if value <= 0:
                yield config.problem(field, "not positive", "give a number above 0")
        elif isinstance(value, int) and value < 1:
            yield config.problem(field, "below 1", "give 1 or more")
        if AT_MOST.get(rule, LARGEST_FP32) < value <= LARGEST_FP32:
            yield config.problem(field, "more than any model has", f"give at most {AT_MOST[rule]}")
    texts = {field: config.value_of(field) for field in NOT_EMPTY} | validation_fields(config.data)
    for field, text in texts.items():
        if not text.strip():
            yield problem_line(field, text, "empty", "give a value")
    if LONGEST_TIMEOUT_MINUTES < config.parallel.timeout_minutes <= LARGEST_FP32:
        remedy = f"give {LONGEST_TIMEOUT_MINUTES:.0e} or less"
        yield config.problem("parallel.timeout_minutes", "longer than any run", remedy)
    if not 0 <= config.data.max_bad_line_fraction <= 1:
        yield config.problem("data.max_bad_line_fraction", "outside [0, 1]", "give a number from 0 to 1")


def _check_multiple(config: Config, field: str, of: str) -> Iterator[str]:
    """Check that `field` is a multiple of the field `of`. Sizes that are not positive are reported elsewhere."""
    value, unit = config.value_of(field), config.value_of(of)
    if value > 0 and unit > 0 and value % unit != 0:
        remedy = f"set {field} to {nearest(value, unit)}, or change {of}"
        yield config.problem(field, f"not a multiple of {of} = {unit}", remedy)


def _check_run_name(config: Config) -> Iterator[str]:
    name = config.run.name
    is_plain = name.isprintable() and name == name.strip() and name not in ("", ".", "..")
    if not is_plain or any(separator in name for separator in "/\\"):
        remedy = "give a name without slashes; the folder goes to run.dir"
        yield config.problem("run.name", "not a plain folder name", remedy)


def _check_written_folders(config: Config) -> Iterator[str]:
    for field in ("run.dir", "run.kernel_cache_dir"):
        if left_to_a_shell(folder := config.value_of(field)):
            remedy = f"write {os.path.expanduser(os.path.expandvars(folder))}"
            yield config.problem(field, LEFT_TO_A_SHELL, remedy)


def _check_model(config: Config) -> Iterator[str]:
    yield from _check_multiple(config, "model.num_heads", "model.num_kv_heads")
    for size in ("num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"):
        yield from _check_multiple(config, f"model.{size}", "parallel.tensor")
    turned = ["gsa.indexer_dim"]
    if config.model.rotary_percent == 1:  # otherwise the rotated channels are checked
        turned.append("model.head_dim")
    for field in turned:
        if config.value_of(field) % 2 != 0:
            yield config.problem(field, "odd", "give an even size: RoPE turns pairs")
    if config.parallel.sequence:
        yield from _check_multiple(config, "train.seq_len_tokens", "parallel.tensor")
    yield from check_rotary(config)


def _check_recompute(config: Config) -> Iterator[str]:
    field, reuse = "train.recompute_num_layers", config.gsa.selection_reuse
    unit = config.value_of(field)
    if config.train.recompute != "full" or unit < 1:
        return
    if undivided := undivided_chunk(config, unit):
        wrong = f"does not divide the {undivided} layers of {chunk_in_words(config)}"
        yield config.problem(field, wrong, f"choose a divisor of {undivided}")
    if reuse > 1 and unit % reuse != 0:
        wrong = f"not a multiple of gsa.selection_reuse = {reuse}, so a unit would lack its selection"
        yield config.problem(field, wrong, f"set it to {nearest(unit, reuse)}")


def _check_profile(config: Config, world_size: int) -> Iterator[str]:
    profile = config.profile
    last = sum(phase.steps for phase in config.phases)
    for index, rank in enumerate(profile.ranks):
        if not 0 <= rank < max(world_size, 1):  # a wrong world size is reported elsewhere
            wrong = f"no rank of this run, which has {world_size}"
            remedy = f"give ranks from 0 to {world_size - 1}, or none for all"
            yield config.problem(f"profile.ranks.{index}", wrong, remedy)
        elif rank in profile.ranks[:index]:
            yield config.problem(f"profile.ranks.{index}", "named twice", "remove one of them")
    if profile.start_step > last:
        wrong = f"after the last step of the run, {last} (phases.*.steps)"
        yield config.problem("profile.start_step", wrong, "give an earlier step")
    elif profile.start_step > 0 and profile.start_step + profile.steps - 1 > last:
        wrong = (
            f"from profile.start_step = {profile.start_step} on go beyond the last step of the run, {last}"
        )
        yield config.problem("profile.steps", wrong, f"set it to {last - profile.start_step + 1} or less")
    if profile.memory_snapshot and profile.start_step == 0:
        wrong = "needs the steps to look at, and profile.start_step = 0"
        yield config.problem("profile.memory_snapshot", wrong, "set profile.start_step, or this to false")


def _check_phases(config: Config) -> Iterator[str]:
    if not config.phases:
        yield config.problem("phases", "no phase", "list at least one, with name and steps")
    for name, count in Counter(phase.name for phase in config.phases).items():
        if count > 1:
            yield problem_line("phases", name, f"{count} phases have this name", "give each its own")
    for index, phase in enumerate(config.phases):
        yield from _check_phase(config, phase, f"phases.{index}")
        yield from check_decay(config, f"phases.{index}")
    yield from check_kept_optimizer(config)


def _check_phase(config: Config, phase: PhaseConfig, name: str) -> Iterator[str]:
    if not phase.name.strip():
        yield config.problem(f"{name}.name", "empty", "give a name")
    if not phase.name.isprintable():
        wrong = "has characters that are not visible, and stands in every line of the log"
        yield config.problem(f"{name}.name", wrong, "leave them out")
    if phase.min_lr > phase.lr:
        yield config.problem(f"{name}.min_lr", f"above {name}.lr = {phase.lr}", "give lr or less")
    if phase.warmup_steps >= phase.steps > 0:
        remedy = "shorten the learning-rate warm-up or lengthen the phase"
        yield config.problem(f"{name}.warmup_steps", f"not below {name}.steps = {phase.steps}", remedy)
    if phase.train == "indexer" and phase.attention != "dense":
        wrong = f"learns from all causal keys (eq. 14), but {name}.attention = {phase.attention}"
        yield config.problem(f"{name}.train", wrong, f"set {name}.attention to dense")
    if config.gsa.attention == "dense":
        wrong = "needs an indexer, and gsa.attention = dense builds none"
        remedy = "set gsa.attention to sparse, or the phase to attention: dense and train: all"
        if phase.attention == "sparse":
            yield config.problem(f"{name}.attention", wrong, remedy)
        if phase.train == "indexer":
            yield config.problem(f"{name}.train", wrong, remedy)
