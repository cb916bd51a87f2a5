"""Lists the steps that `bench_step.py --lengths` measures: shapes, models, lengths, depths. Does not load torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gsa_train.config import Config, load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@dataclass(frozen=True)
class StepShape:
    """Holds a model's sizes, from a shipped config, and the number of layers to which it is cut."""

    layers: int
    """Layers of the whole model."""
    depths: tuple[int, ...]
    """Numbers of layers that are measured. The difference of two depths gives the time of a layer."""
    shallow: tuple[int, ...]
    """Depths from `SHALLOW_FROM` tokens on, where activations and logits fill the device."""
    overrides: tuple[str, ...] = ()


SHALLOW_FROM = 131072

SHAPES = {  # each name is the end of the names of two shipped configs
    "1.7b": StepShape(layers=24, depths=(2, 4), shallow=(1, 2)),
    "7b": StepShape(layers=32, depths=(1, 2), shallow=(1, 2), overrides=("parallel.tensor=1",)),
}

STANDARD, BASELINE = "standard", "baseline"
REUSE = 4
"""Number of layers that share a selection in `gsa_reuse`."""
MODELS: dict[str, tuple[str, ...]] = {
    STANDARD: ("gsa.dense_attention=cudnn",),
    "gsa": (),
    "gsa_k512": ("gsa.k_base=512", "gsa.k_min=128"),
    "gsa_full_loss": ("gsa.indexer_loss_row_fraction=1.0",),
    "gsa_reuse": (f"gsa.selection_reuse={REUSE}",),
}
"""Overrides that each model applies to its shape's config, which is standard or GSA."""

GRAPHS = ("train.cuda_graphs=true", "parallel.overlap_grad_reduce=false")
MODELS |= {f"{name}_graphs": (*MODELS[name], *GRAPHS) for name in (STANDARD, "gsa")}
MODELS[BASELINE] = MODELS[STANDARD]

BY_DEFAULT = (STANDARD, "gsa")

TOKENS = 32768
"""Tokens of a step, which has at least one sequence."""

LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True)
class StepCase:
    shape: str
    length: int
    layers: int
    model: str
    sequences: int
    """Sequences per step, in one micro-batch."""

    @property
    def has_indexer(self) -> bool:
        return self.model.startswith("gsa")

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """
        Raises:
            ConfigError: an override does not fit.
        """
        shape = SHAPES[self.shape]
        kind = "gsa" if self.has_indexer else STANDARD
        fixed = [
            f"train.global_batch_size={self.sequences}",
            f"train.micro_batch_size={self.sequences}",
            f"train.seq_len_tokens={self.length}",
            f"model.num_layers={self.layers}",
            "data.num_workers=0",
            "data.num_lanes=1",
            "data.attend_across_documents=true",  # each sequence is one document
            # The moving average of the variance keeps the value of the first step.
            "gsa.variance_ema_decay=0.9999",
        ]
        changes = [*fixed, *shape.overrides, *MODELS[self.model], *overrides]
        return load_config(CONFIGS / f"{kind}_{self.shape}.yaml", changes, world_size=1, need_data=False)


def plan(
    shapes: Sequence[str],
    lengths: Sequence[int],
    models: Sequence[str],
    layers: Sequence[int] = (),
) -> list[list[StepCase]]:
    """Return groups of cases that take turns with the group's standard model, which comes first if requested.

    If layers of some model share selections, all models have depths in whole groups of these layers.

    Args:
        layers: depths in place of the shape's own

    Raises:
        ValueError: a shape has fewer layers, or they do not form whole groups.
    """
    reuse = REUSE if any("_reuse" in model for model in models) else 1
    for name in shapes:
        for depth in layers:
            most = SHAPES[name].layers
            if not 1 <= depth <= most or depth % reuse:
                groups = f", in whole groups of {reuse}" if reuse > 1 else ""
                raise ValueError(f"--layers {depth}: the shape {name} has {most}; give 1 to {most}{groups}")
    order = sorted(dict.fromkeys(models), key=list(MODELS).index)
    cases = [
        StepCase(name, length, depth, model, sequences)
        for length, sequences in ((each, max(1, TOKENS // each)) for each in lengths)
        for name in shapes
        for depth in layers or _depths(SHAPES[name], length, reuse)
        for model in order
    ]
    return [list(group) for _, group in groupby(cases, lambda case: (case.length, case.shape, case.layers))]


def _depths(shape: StepShape, length: int, reuse: int) -> tuple[int, ...]:
    depths = shape.shallow if length >= SHALLOW_FROM else shape.depths
    if all(layers % reuse == 0 for layers in depths):
        return depths
    # From 128K on, two groups of layers do not fit: 8 layers of the 1.7B model ran out of the 140 GiB of an H200.
    return (reuse,) if length >= SHALLOW_FROM else (reuse, 2 * reuse)
