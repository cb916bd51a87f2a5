"""Start a new run from the weights of another run (`checkpoint.initial_weights`).

By default, the new run starts at step 0 with fresh optimizer state and schedules, as with Megatron-LM's `--finetune`,
and reads its text from the beginning. With `checkpoint.initial_text=continue`, the run continues at the checkpoint's
position in the text. With `checkpoint.initial_state=continue`, the run continues at this position and keeps the
optimizer state.

The new run may change sequence length, rotary base, YaRN or key budget. It may also add gates and an indexer to a dense
model.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from gsa_data.tokenize import Tokenizer
from gsa_train.checkpoint.damage import find_damage
from gsa_train.checkpoint.load import (
    RunState,
    load_checkpoint,
    load_main_weights,
    load_weights,
    read_run_state,
    saved_weights,
    weights_to_load,
)
from gsa_train.config import Config, TrainConfig, saved_sections
from gsa_train.config.gates import FORM, POSITIONS
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import PhaseOptimizer
from gsa_train.run_folder.resume import ResumeError, named_checkpoint, other_fields

logger = logging.getLogger(__name__)

FIELD = "checkpoint.initial_weights"

NEW = tuple(
    f".self_attention.{part}."
    for part in ("indexer", "variance", "linear_gate", "head_gate", "projection_gate")
)
"""Parts of names of weights that a dense checkpoint lacks, and that a sparse model may initialize itself."""

MEANING = {
    "model": (
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rotary_percent",
        "qkv_bias",
        "qk_norm",
        "sandwich_norm",
        "tie_embeddings",
    ),
    "moe": ("experts", "top_k", "router_score", "routed_scale"),
    "gsa": (
        *(f"{position}_gate" for position in POSITIONS),
        *FORM,
        "indexer_heads",
        "indexer_activation",
        "indexer_rope",
        "indexer_norm",
        "selection_reuse",
    ),
}
"""Fields that must equal the checkpoint's, because they change how weights are used, often not the shapes. Fields of
`gsa` count only if the checkpoint has weights of gates or indexer."""

SIZES = {
    "model": ("hidden_size", "ffn_hidden_size", "vocab_size"),
    "moe": ("expert_ffn_hidden_size", "shared_expert_ffn_hidden_size"),
    "gsa": ("indexer_dim",),
}
"""Further fields that change the sizes of weights."""

WITHOUT_WEIGHTS = ("output_transform",)
"""Fields of `gsa` that count for every checkpoint."""


def find_initial_weights(config: Config) -> Path:
    """Returns the checkpoint of `checkpoint.initial_weights`. Call it only once, because the folder may later have a
    newer checkpoint. Collective.

    Raises:
        ResumeError: the folder has no complete checkpoint.
    """
    folder = Path(config.checkpoint.initial_weights)
    return named_checkpoint(f"{FIELD} = {folder}", folder)


def initial_data_state(config: Config, checkpoint: Path | None) -> dict[str, Any] | None:
    """Returns the position in the text at which a run starts, or None for the beginning.

    Args:
        checkpoint: result of `find_initial_weights`; None without `checkpoint.initial_weights`.

    Raises:
        ResumeError: the config asks to continue at the checkpoint's position, and the checkpoint has none.
    """
    fields = ("initial_text", "initial_state")
    asked = [field for field in fields if getattr(config.checkpoint, field) == "continue"]
    if checkpoint is None or not asked:
        return None
    try:
        data = read_run_state(checkpoint).data
    except ValueError as error:
        raise ResumeError(f"{FIELD} = {config.checkpoint.initial_weights}: {error}") from error
    if "cursors" not in data:
        raise ResumeError(
            f"checkpoint.{asked[-1]} = continue: {checkpoint} has weights alone, and no position in a text; set "
            f"checkpoint.{asked[-1]}=fresh"
        )
    return data


def load_initial_weights(
    config: Config, checkpoint: Path, model: Model, tokenizer: Tokenizer, parallel: Parallel
) -> None:
    """Load the checkpoint's weights into a new model. Collective.

    Raises:
        ResumeError: the checkpoint is damaged, has another tokenizer, or does not fit the model: unexpected weights,
            missing weights (other than NEW), other sizes or other fields of MEANING.
    """
    folder = config.checkpoint.initial_weights
    fault = find_damage(checkpoint, parallel, checksums=config.checkpoint.verify == "full")
    if fault is not None:
        raise ResumeError(f"{FIELD} = {folder}: {checkpoint} is damaged: {fault}. Give another checkpoint.")
    try:
        state = read_run_state(checkpoint)
    except ValueError as error:
        raise ResumeError(f"{FIELD} = {folder}: {error}") from error
    if state.data["tokenizer_fingerprint"] != tokenizer.fingerprint:
        raise ResumeError(
            f"{FIELD} = {folder}: {checkpoint} was trained with another tokenizer: "
            f"{tokenizer.differs_from(state.data['tokenizer_fingerprint'])}"
        )
    continues = config.checkpoint.initial_state == "continue"
    if continues and (reasons := _other_state(config, state)):
        shown = "".join(f"\n  {line}" for line in reasons)
        raise ResumeError(
            f"checkpoint.initial_state = continue: {checkpoint} holds another optimizer state:{shown}"
        )
    saved, wanted = saved_weights(checkpoint), weights_to_load(checkpoint, model, parallel)
    others = [name for name in sorted(wanted) if name in saved and saved[name] != wanted[name]]
    fresh = sorted(set(wanted) - set(saved))
    meaning = {"model": MEANING["model"], "moe": MEANING["moe"], "gsa": WITHOUT_WEIGHTS}
    if any(part in name for name in saved for part in NEW):
        meaning["gsa"] += MEANING["gsa"]
    problems = [
        *other_fields(config, state, meaning),  # first, as these often cause the other problems
        *(other_fields(config, state, SIZES) if others else ()),
        *(
            f"{name}: not in the checkpoint"
            for name in fresh
            if continues or not any(part in name for part in NEW)
        ),
        *(f"{name}: only in the checkpoint" for name in sorted(set(saved) - set(wanted))),
        *(f"{name}: {wanted[name]} here, {saved[name]} in the checkpoint" for name in others),
    ]
    if problems:
        shown = "".join(f"\n  {line}" for line in problems[:8])
        more = f"\n  and {len(problems) - 8} more" if problems[8:] else ""
        raise ResumeError(
            f"{FIELD} = {folder}: {checkpoint} holds another model:{shown}{more}\nSet model, moe and gsa as they were "
            "(gates and indexer may be new)."
        )
    load_weights(checkpoint, model, parallel, names=saved.keys())
    if parallel.is_main:
        logger.info("weights of %s, step %d; the run begins at step 0", checkpoint, state.step)
        skipped = config.train.iterations_to_skip
        if skipped and skipped == saved_sections(state.config_yaml).get("train", {}).get(
            "iterations_to_skip"
        ):
            logger.warning(
                "train.iterations_to_skip = %s is as in the run of the checkpoint, but counts this run's steps from 1; "
                "remove it if it means steps of the earlier run",
                skipped,
            )
        if fresh:
            logger.warning("%d weights are new, for that checkpoint has none: %s, ...", len(fresh), fresh[0])


def load_initial_optimizer(
    config: Config, checkpoint: Path, model: Model, phase_optimizer: PhaseOptimizer, parallel: Parallel
) -> None:
    """Load the checkpoint's optimizer state and fp32 weights. With `checkpoint.initial_state=fresh`, load only the fp32
    weights. Collective.

    The bf16 weights would not be enough, because they lack updates that are smaller than their precision.
    """
    if config.checkpoint.initial_state == "continue":
        load_checkpoint(checkpoint, model, phase_optimizer, parallel, with_optimizer=True)
        return
    others = load_main_weights(checkpoint, model, phase_optimizer, parallel)
    if others and parallel.is_main:
        logger.warning(
            "%s: the optimizer's fp32 weights of %d parameters (%s, ...) differ from the model's weights; "
            "the run starts from the model's weights",
            checkpoint,
            len(others),
            others[0],
        )


def _other_state(config: Config, state: RunState) -> list[str]:
    """Return a line for each reason why the checkpoint's optimizer state does not fit the first phase."""
    saved, phase = saved_sections(state.config_yaml), config.phases[0]
    trained = saved["phases"][state.phase_index]["train"]
    optimizer = saved.get("train", {}).get("optimizer", TrainConfig.optimizer)
    remedy = "set it so, or checkpoint.initial_state=fresh"
    lines = []
    if trained not in ("all", phase.train):
        lines.append(f"phases.0.train = {phase.train} here, {trained} in the checkpoint; {remedy}")
    if optimizer != config.train.optimizer:
        lines.append(
            f"train.optimizer = {config.train.optimizer} here, {optimizer} in the checkpoint; {remedy}"
        )
    return lines
