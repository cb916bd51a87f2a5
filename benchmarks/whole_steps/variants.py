"""Lists the models and layouts of the bench of whole models, without torch: `cuda_connections` comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gsa_train.checkpoint.files import MEGATRON_METADATA
from gsa_train.config import Config, ConfigError, GSAConfig, PhaseConfig, load_config
from gsa_train.config.checks import check_packages
from gsa_train.config.file_checks import check_data
from whole_steps.layout_names import layout_overrides

ATTENTIONS = ("local", "sdpa")
"""Kinds of attention in megatron-core's model, see megatron_peer.py."""


@dataclass(frozen=True)
class Variant:
    name: str
    """The config's name, or megatron's with its attention."""
    layout: str
    config: Config
    attention: str = ""
    """Attention of megatron-core's model; empty: the model is ours."""
    text: bool = False
    """Train on the first batch of the config's text instead of random tokens."""
    checkpoint: Path | None = None
    """Run of this model whose weights to start from, instead of new ones."""

    @property
    def phase(self) -> PhaseConfig:
        return self.config.phases[-1]


@dataclass(frozen=True)
class Sizes:
    """Holds what the bench changes in every config."""

    sequences_per_device: int
    seq_len_tokens: int | None
    num_layers: int | None
    overrides: Sequence[str] = ()
    text: bool = False
    """Whether the config's training text is available."""

    def apply(self, path: Path, layout: str, world_size: int) -> Config:
        """
        Raises:
            ConfigError: the layout does not fit the config or the world.
        """
        fixed = [
            f"train.global_batch_size={self.sequences_per_device * world_size}",
            "data.num_workers=0",
            f"data.num_lanes={world_size}",
            "train.micro_batch_size=1",
            "logging.wandb=disabled",  # nothing is logged, so its package need not be installed
        ]
        if self.seq_len_tokens is not None:
            fixed.append(f"train.seq_len_tokens={self.seq_len_tokens}")
        if self.num_layers is not None:
            fixed.append(f"model.num_layers={self.num_layers}")
        overrides = [*fixed, *layout_overrides(layout), *self.overrides]
        config = load_config(path, overrides, world_size=world_size, need_data=False)
        problems = check_packages(config)
        if self.text:  # the text is only for training, without validation
            problems += check_data(replace(config.data, validation_dir="", validation_sets={}))
        if problems:
            raise ConfigError(path, problems)
        return config


def variants(
    configs: Sequence[Path],
    megatron: Path | None,
    layouts: Sequence[str],
    sizes: Sizes,
    world_size: int,
    checkpoints: Mapping[str, Path] | None = None,
) -> list[Variant]:
    """List variants layout by layout, so that each world is set up once.

    Args:
        checkpoints: checkpoints of models by the names of their configs.

    Raises:
        ConfigError: a layout does not fit.
        ValueError: a checkpoint belongs to no config here, or does not exist.
    """
    made, checkpoints = [], checkpoints or {}
    if unknown := checkpoints.keys() - {path.stem for path in configs}:
        raise ValueError(f"--checkpoint {sorted(unknown)[0]}=...: no such --config")
    for model, folder in checkpoints.items():
        if not (folder / MEGATRON_METADATA).exists():
            raise ValueError(f"--checkpoint {model}={folder}: no checkpoint; name a step_* folder of a run")
    for layout in layouts:
        for path in configs:
            config, checkpoint = sizes.apply(path, layout, world_size), checkpoints.get(path.stem)
            made.append(Variant(path.stem, layout, config, text=sizes.text, checkpoint=checkpoint))
        if megatron is not None:
            config = plain(sizes.apply(megatron, layout, world_size))
            made += [
                Variant(f"megatron ({each})", layout, config, each, text=sizes.text) for each in ATTENTIONS
            ]
    return made


def plain(config: Config) -> Config:
    """Return the config without gates and indexer, densely trained: the model and operation count of megatron-core."""
    gsa = GSAConfig(attention="dense", value_gate=False, output_gate=False)
    phase = replace(config.phases[-1], attention="dense", train="all")
    return replace(config, gsa=gsa, phases=[phase])
