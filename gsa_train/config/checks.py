"""Check what must hold between the fields of a config. Each check returns lines `field = value: wrong; remedy`.

This is plain Python, because it runs before torch.distributed starts, and on machines without accelerators.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections import Counter
from typing import Any

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
from gsa_train.config.load import problem_line
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
from gsa_train.config.train import check_graphs, check_muon, check_qk_clip

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
LARGEST_SOURCE_WEIGHT = 100.0  # as in gsa_data, whose import would load torch
LARGEST_FP32 = 3.4e38
LONGEST_TIMEOUT_MINUTES = 1e9  # datetime holds a little more
NOT_EMPTY = ("run.dir", "data.train_dir", "data.tokenizer", "data.text_field", "logging.wandb_project")


def check_config(config: Config, world_size: int) -> list[str]:
    """Return all mistakes in the values of a config on `world_size` ranks. `file_checks.check_data` checks the
    files."""
    return [
        *_check_ranges(config),
        *_check_run_name(config),
        *_check_written_folders(config),
        *_check_validation_sets(config.data),
        *_check_format(config.data),
        *_check_order(config.data),
        *_check_reading(config),
        *_check_model(config),
        *check_selection(config),
        *check_gates(config.gsa),
        *check_kernels(config),
        *check_graphs(config, data_parallel_size(config, world_size)),
        *check_muon(config),
        *check_qk_clip(config),
        *check_layout(config, world_size),
        *check_moe(config, world_size),
        *check_batch_ramp(config.train),
        *_check_multiple(config, "checkpoint.keep_every_steps", "checkpoint.every_steps"),
        *_check_initial(config),
        *_check_recompute(config),
        *_check_phases(config),
        *check_monitor(config, data_parallel_size(config, world_size)),
        *check_tasks(config),
        *_check_profile(config, world_size),
    ]


def check_packages(config: Config) -> list[str]:
    """Returns an error line for each optional package that this run needs and that is missing."""
    lines = []
    if config.parallel.strategy == "deepspeed" and not is_installed("deepspeed"):
        remedy = "run pip install '.[deepspeed]' in the checkout, or set parallel.strategy to megatron"
        wrong = "the package deepspeed is not installed"
        lines.append(problem_line("parallel.strategy", "deepspeed", wrong, remedy))
    mode: str = config.logging.wandb
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or mode
    if mode != "disabled" and not is_installed("wandb"):
        remedy = "run pip install wandb, or set logging.wandb=disabled"
        wrong = "the package wandb is not installed"
        lines.append(problem_line("logging.wandb", config.logging.wandb, wrong, remedy))
    return lines


def is_installed(package: str) -> bool:
    """Whether a package is installed. A folder of that name without code, such as W&B's own `wandb/`, does not
    count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _check_initial(config: Config) -> list[str]:
    if config.checkpoint.initial_weights:
        return []
    remedy = "name it in checkpoint.initial_weights"
    return [
        problem_line(
            f"checkpoint.initial_{part}", "continue", f"there is no checkpoint whose {part} goes on", remedy
        )
        for part in ("text", "state")
        if _get(config, f"checkpoint.initial_{part}") == "continue"
    ]


def _check_validation_sets(data: DataConfig) -> list[str]:
    empty = [field for field, folder in validation_fields(data).items() if not folder.strip()]
    return [problem_line(field, "", "empty", "give a folder") for field in empty]


def _check_format(data: DataConfig) -> list[str]:
    if data.format == "text":
        wrong, remedy = "data.format = text reads none", "set data.format=chat, or leave it out"
        return [problem_line("data.chat_template", data.chat_template, wrong, remedy)] * bool(
            data.chat_template
        )
    lines = []
    if data.attend_across_documents:
        wrong = "with data.format = chat, an answer would see other conversations"
        lines.append(problem_line("data.attend_across_documents", True, wrong, "set it to false"))
    if data.text_field != DataConfig.text_field:
        wrong = "data.format = chat reads the field messages"
        lines.append(problem_line("data.text_field", data.text_field, wrong, "leave it out"))
    if not is_installed("transformers"):
        wrong = "the package transformers, which writes conversations, is not installed"
        remedy = "run in the checkout: pip install '.[hf]'"
        lines.append(problem_line("data.format", data.format, wrong, remedy))
    return lines


def _check_order(data: DataConfig) -> list[str]:
    lines = []
    for name, weight in data.source_weights.items():
        if not 0 <= weight <= LARGEST_SOURCE_WEIGHT:  # written so that NaN fails
            wrong = f"outside [0, {LARGEST_SOURCE_WEIGHT:g}]"
            remedy = "give how often a document comes in an epoch; 0 leaves the source out"
            lines.append(problem_line(f"data.source_weights.{name}", weight, wrong, remedy))
    if data.packing == "best_fit" and data.attend_across_documents:
        wrong = "needs data.attend_across_documents = false: what fills a sequence up would see the documents before it"
        remedy = "set it to false, or data.packing to concatenate"
        lines.append(problem_line("data.packing", data.packing, wrong, remedy))
    return lines


def _check_reading(config: Config) -> list[str]:
    """Check that reading gives up before the watchdog ends the rank that reads. data.on_bad_shard then decides."""
    data, limit_minutes = config.data, config.parallel.timeout_minutes
    longest_seconds = longest_read_seconds(data)
    if data.read_timeout_seconds <= 0 or not 0 < limit_minutes * 60 < longest_seconds < math.inf:
        return []
    wrong = (
        f"with data.read_retries = {data.read_retries} a read fails after {longest_seconds:g} s, when "
        f"parallel.timeout_minutes = {limit_minutes:g} has ended the run"
    )
    remedy = "lower one of the first two, or raise the third"
    return [problem_line("data.read_timeout_seconds", data.read_timeout_seconds, wrong, remedy)]


def _check_ranges(config: Config) -> list[str]:
    lines = []
    for field, value in _numbers(config):
        rule = re.sub(r"\.\d+\.", ".", field)  # `phases.lr` has the rule for phases.0.lr
        if not math.isfinite(value):
            lines.append(problem_line(field, value, "not a finite number", "give a finite number"))
        elif abs(value) > LARGEST_FP32:
            lines.append(problem_line(field, value, "more than fp32 holds", "give a smaller number"))
        elif rule in AT_LEAST_ZERO:
            if value < 0:
                lines.append(problem_line(field, value, "negative", "give 0 or more"))
        elif rule in FROM_ZERO_BELOW_ONE:
            if not 0 <= value < 1:
                lines.append(problem_line(field, value, "outside [0, 1)", "give a number from 0 to below 1"))
        elif rule in ABOVE_ZERO:
            if value <= 0:
                lines.append(problem_line(field, value, "not positive", "give a number above 0"))
        elif isinstance(value, int) and value < 1:
            lines.append(problem_line(field, value, "below 1", "give 1 or more"))
        if value > AT_MOST.get(rule, LARGEST_FP32) and value <= LARGEST_FP32:
            lines.append(
                problem_line(field, value, "more than any model has", f"give at most {AT_MOST[rule]}")
            )
    for field in NOT_EMPTY:
        if not _get(config, field).strip():
            lines.append(problem_line(field, _get(config, field), "empty", "give a value"))
    minutes = config.parallel.timeout_minutes
    if LONGEST_TIMEOUT_MINUTES < minutes <= LARGEST_FP32:
        remedy = f"give {LONGEST_TIMEOUT_MINUTES:.0e} or less"
        lines.append(problem_line("parallel.timeout_minutes", minutes, "longer than any run", remedy))
    fraction = config.data.max_bad_line_fraction
    if not 0 <= fraction <= 1:
        lines.append(
            problem_line(
                "data.max_bad_line_fraction", fraction, "outside [0, 1]", "give a number from 0 to 1"
            )
        )
    return lines


def _numbers(section: Any, prefix: str = "") -> list[tuple[str, float]]:
    """Return every number of the config with its dotted name. Phases are `phases.0.lr`, ..."""
    numbers: list[tuple[str, float]] = []
    for field in dataclasses.fields(section):
        name, value = prefix + field.name, getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            numbers += _numbers(value, f"{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if dataclasses.is_dataclass(item):  # the reader of a list checks its numbers
                    numbers += _numbers(item, f"{name}.{index}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.append((name, value))
    return numbers


def _get(config: Config, field: str) -> Any:
    section, name = field.split(".")
    return getattr(getattr(config, section), name)


def _check_multiple(config: Config, field: str, of: str) -> list[str]:
    """Check that `field` is a multiple of the field `of`. Sizes that are not positive are reported elsewhere."""
    value, unit = _get(config, field), _get(config, of)
    if value < 1 or unit < 1 or value % unit == 0:
        return []
    return [
        problem_line(
            field,
            value,
            f"not a multiple of {of} = {unit}",
            f"set {field} to {nearest(value, unit)}, or change {of}",
        )
    ]


def _check_run_name(config: Config) -> list[str]:
    name = config.run.name
    is_plain = name.isprintable() and name == name.strip() and name not in ("", ".", "..")
    if is_plain and not any(separator in name for separator in "/\\"):
        return []
    return [
        problem_line(
            "run.name",
            name,
            "not a plain folder name",
            "give a name without slashes; the folder goes to run.dir",
        )
    ]


def _check_written_folders(config: Config) -> list[str]:
    folders = {"run.dir": config.run.dir, "run.kernel_cache_dir": config.run.kernel_cache_dir}
    return [
        problem_line(
            field, folder, LEFT_TO_A_SHELL, f"write {os.path.expanduser(os.path.expandvars(folder))}"
        )
        for field, folder in folders.items()
        if left_to_a_shell(folder)
    ]


def _check_model(config: Config) -> list[str]:
    lines = [
        *_check_multiple(config, "model.num_heads", "model.num_kv_heads"),
        *_check_multiple(config, "model.num_heads", "parallel.tensor"),
        *_check_multiple(config, "model.num_kv_heads", "parallel.tensor"),
        *_check_multiple(config, "model.ffn_hidden_size", "parallel.tensor"),
        *_check_multiple(config, "model.vocab_size", "parallel.tensor"),
    ]
    turned = {"gsa.indexer_dim": config.gsa.indexer_dim}
    if config.model.rotary_percent == 1:  # otherwise the rotated channels are checked
        turned["model.head_dim"] = config.model.head_dim
    lines += [
        problem_line(field, size, "odd", "give an even size: RoPE turns pairs")
        for field, size in turned.items()
        if size % 2 != 0
    ]
    if config.parallel.sequence:
        lines += _check_multiple(config, "train.seq_len_tokens", "parallel.tensor")
    return lines + check_rotary(config.model)


def _check_recompute(config: Config) -> list[str]:
    train, lines = config.train, []
    if train.recompute != "full" or train.recompute_num_layers < 1:
        return []
    if undivided := undivided_chunk(config, train.recompute_num_layers):
        lines.append(
            problem_line(
                "train.recompute_num_layers",
                train.recompute_num_layers,
                f"does not divide the {undivided} layers of {chunk_in_words(config)}",
                f"choose a divisor of {undivided}",
            )
        )
    reuse = config.gsa.selection_reuse
    if reuse > 1 and train.recompute_num_layers % reuse != 0:
        lines.append(
            problem_line(
                "train.recompute_num_layers",
                train.recompute_num_layers,
                f"not a multiple of gsa.selection_reuse = {reuse}, so a unit would lack its selection",
                f"set it to {nearest(train.recompute_num_layers, reuse)}",
            )
        )
    return lines


def _check_profile(config: Config, world_size: int) -> list[str]:
    profile, lines = config.profile, []
    last = sum(phase.steps for phase in config.phases)
    for index, rank in enumerate(profile.ranks):
        if not 0 <= rank < max(world_size, 1):  # a wrong world size is reported elsewhere
            wrong = f"no rank of this run, which has {world_size}"
            remedy = f"give ranks from 0 to {world_size - 1}, or none for all"
            lines.append(problem_line(f"profile.ranks.{index}", rank, wrong, remedy))
        elif rank in profile.ranks[:index]:
            lines.append(problem_line(f"profile.ranks.{index}", rank, "named twice", "remove one of them"))
    if profile.start_step > last:
        wrong = f"after the last step of the run, {last} (phases.*.steps)"
        lines.append(problem_line("profile.start_step", profile.start_step, wrong, "give an earlier step"))
    elif profile.start_step > 0 and profile.start_step + profile.steps - 1 > last:
        wrong = (
            f"from profile.start_step = {profile.start_step} on go beyond the last step of the run, {last}"
        )
        remedy = f"set it to {last - profile.start_step + 1} or less"
        lines.append(problem_line("profile.steps", profile.steps, wrong, remedy))
    if profile.memory_snapshot and profile.start_step == 0:
        wrong = "needs the steps to look at, and profile.start_step = 0"
        remedy = "set profile.start_step, or this to false"
        lines.append(problem_line("profile.memory_snapshot", True, wrong, remedy))
    return lines


def _check_phases(config: Config) -> list[str]:
    if not config.phases:
        return [problem_line("phases", [], "no phase", "list at least one, with name and steps")]
    lines = []
    for name, count in Counter(phase.name for phase in config.phases).items():
        if count > 1:
            lines.append(problem_line("phases", name, f"{count} phases have this name", "give each its own"))
    for index, phase in enumerate(config.phases):
        lines += _check_phase(phase, f"phases.{index}", config.gsa.attention == "sparse")
        lines += check_decay(phase, f"phases.{index}")
    return lines + check_kept_optimizer(config.phases)


def _check_phase(phase: PhaseConfig, name: str, has_indexer: bool) -> list[str]:
    lines = []
    if not phase.name.strip():
        lines.append(problem_line(f"{name}.name", phase.name, "empty", "give a name"))
    if not phase.name.isprintable():
        wrong = "has characters that are not visible, and stands in every line of the log"
        lines.append(problem_line(f"{name}.name", phase.name, wrong, "leave them out"))
    if phase.min_lr > phase.lr:
        wrong = f"above {name}.lr = {phase.lr}"
        lines.append(problem_line(f"{name}.min_lr", phase.min_lr, wrong, "give lr or less"))
    if phase.warmup_steps >= phase.steps > 0:
        wrong = f"not below {name}.steps = {phase.steps}"
        remedy = "shorten the learning-rate warm-up or lengthen the phase"
        lines.append(problem_line(f"{name}.warmup_steps", phase.warmup_steps, wrong, remedy))
    if phase.train == "indexer" and phase.attention != "dense":
        wrong = f"learns from all causal keys (eq. 14), but {name}.attention = {phase.attention}"
        lines.append(problem_line(f"{name}.train", phase.train, wrong, f"set {name}.attention to dense"))
    if not has_indexer:
        wrong = "needs an indexer, and gsa.attention = dense builds none"
        remedy = "set gsa.attention to sparse, or the phase to attention: dense and train: all"
        if phase.attention == "sparse":
            lines.append(problem_line(f"{name}.attention", phase.attention, wrong, remedy))
        if phase.train == "indexer":
            lines.append(problem_line(f"{name}.train", phase.train, wrong, remedy))
    return lines
