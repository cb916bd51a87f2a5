"""Lists the models and layouts of the bench of whole models. Does not load torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gsa_train.config import Config, ConfigError, GSAConfig, PhaseConfig, load_config
from gsa_train.config.checks import check_packages
from whole_steps.layout_names import layout_overrides


@dataclass(frozen=True)
class Variant:
    name: str
    """The config's name, or `megatron`."""
    layout: str
    config: Config
    is_megatrons: bool = False
    """The model is megatron-core's own (megatron_peer.py)."""

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
        if problems := check_packages(config):
            raise ConfigError(path, problems)
        return config


def variants(
    configs: Sequence[Path], megatron: Path | None, layouts: Sequence[str], sizes: Sizes, world_size: int
) -> list[Variant]:
    """List variants layout by layout, so that each world is set up once.

    Raises:
        ConfigError: a layout does not fit.
    """
    made = []
    for layout in layouts:
        made += [Variant(path.stem, layout, sizes.apply(path, layout, world_size)) for path in configs]
        if megatron is not None:
            made.append(Variant("megatron", layout, plain(sizes.apply(megatron, layout, world_size)), True))
    return made


def plain(config: Config) -> Config:
    """Return the config without gates and indexer, densely trained: the model and operation count of megatron-core."""
    gsa = GSAConfig(attention="dense", value_gate=False, output_gate=False)
    phase = replace(config.phases[-1], attention="dense", train="all")
    return replace(config, gsa=gsa, phases=[phase])
