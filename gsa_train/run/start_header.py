"""Build the output at the start of training: a line before torch is imported, and a header after all logs are open."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gsa_train.arguments import Arguments
from gsa_train.config import Config, PhaseConfig
from gsa_train.config.batch_ramp import batch_in_words, tokens_before
from gsa_train.model.flops import count_parameters
from gsa_train.planning.choices import choices_of
from gsa_train.run_folder.paths import run_dir

LABEL_WIDTH = 12
TRAINED = {"all": "all weights", "base": "all but the indexer", "indexer": "the indexer alone"}


def first_line(config: Config, arguments: Arguments) -> str:
    """Returns the line that is printed before torch is imported, because the import takes seconds."""
    ranks = "1 rank" if arguments.world_size == 1 else f"{arguments.world_size} ranks"
    return (
        f"{config.run.name}: training by {arguments.config_path} on {ranks}, run folder {run_dir(config)}; "
        "loading torch and megatron-core ..."
    )


def start_header(
    config: Config,
    layout: str,
    folder: Path,
    wandb: Sequence[str],
    kernels: Sequence[str] = (),
    done: tuple[int, int] = (0, 0),
) -> str:
    """Returns the header: model, data, training settings that differ from the default, phases, and paths.

    Args:
        wandb: place of the W&B run; empty without W&B.
        kernels: place of the compiled kernels; empty if none are compiled.
        done: steps and tokens before this start. Tokens do not follow from steps if the batch size has changed.
    """
    model, train, data = config.model, config.train, config.data
    choices = choices_of(train)
    count = count_parameters(model, config.gsa, config.moe)
    per_step = train.global_batch_size * train.seq_len_tokens
    steps, (done_steps, done_tokens) = sum(phase.steps for phase in config.phases), done
    tokens = done_tokens + tokens_before(train, steps) - tokens_before(train, done_steps)
    active = f" ({count.active:,} active)" if count.idle else ""
    validated = ", ".join(data.validation_sets.values()) or data.validation_dir
    rows: dict[str, Sequence[str]] = {
        config.run.name: [layout],
        "model": [
            f"{count.total:,} parameters{active}, including gates {count.gates:,} and indexer {count.indexer:,}",
            f"{model.num_layers} layers of width {model.hidden_size}, vocabulary {model.vocab_size:,}",
        ],
        "data": [f"{data.train_dir}; validation {validated}"],
        "tokens": [
            f"{per_step:,} a step ({batch_in_words(train)} sequences of {train.seq_len_tokens:,}), "
            f"{tokens:,} in all {steps:,} steps"
        ],
        "training": [", ".join(choices)] if choices else [],
        "phases": _phases(config.phases),
        "config": [f"{folder / 'config.yaml'} (every field)"],
        "metrics": [f"{folder / 'metrics.jsonl'}"],
        "TensorBoard": [f"tensorboard --logdir {folder}"] if config.logging.tensorboard else [],
        "W&B": wandb,
        "kernels": kernels,
    }
    return "\n".join(
        f"{'' if index else label:<{LABEL_WIDTH}} {line}".rstrip()
        for label, lines in rows.items()
        for index, line in enumerate(lines)
    )


def _phases(phases: Sequence[PhaseConfig]) -> list[str]:
    lines, done = [], 0
    for phase in phases:
        lines.append(
            f"{phase.name}: steps {done + 1:,} to {done + phase.steps:,}, {phase.attention} attention, "
            f"trains {TRAINED[phase.train]}"
            + (f", {phase.decay} learning rate" if phase.decay != PhaseConfig().decay else "")
        )
        done += phase.steps
    return lines
