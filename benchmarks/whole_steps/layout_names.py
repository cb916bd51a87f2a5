"""Layouts in short, as the benches take them: `tp=2,sp,opt=off` for overrides of a config.

    tp pp vpp cp     parallel.tensor, .pipeline, .virtual_pipeline, .context; 1 where they are not named
    sp               sequence parallelism; off where it is not named
    opt              parallel.distributed_optimizer, on or off
    recompute, mbs   train.recompute, train.micro_batch_size

What they leave of the world is data parallel. Any other `field=value` is taken as it is.
"""

from __future__ import annotations

_FIELDS = {
    "tp": "parallel.tensor",
    "pp": "parallel.pipeline",
    "vpp": "parallel.virtual_pipeline",
    "cp": "parallel.context",
    "sp": "parallel.sequence",
    "opt": "parallel.distributed_optimizer",
    "recompute": "train.recompute",
    "mbs": "train.micro_batch_size",
}
_DEFAULTS = {"tp": "1", "pp": "1", "vpp": "1", "cp": "1", "sp": "off"}


def layout_overrides(name: str) -> list[str]:
    """`tp=2,sp` -> [`parallel.tensor=2`, ...].

    Raises:
        ValueError: a part is neither a short name nor `section.field=value`.
    """
    given = dict(_DEFAULTS)
    others = []
    for part in filter(None, (part.strip() for part in name.split(","))):
        key, separator, value = part.partition("=")
        if key in _FIELDS:
            given[key] = value if separator else "on"
        elif separator and "." in key:
            others.append(part)
        else:
            raise ValueError(
                f"{part}: not part of a layout; name {', '.join(_FIELDS)} or section.field=value"
            )
    return [f"{_FIELDS[key]}={value}" for key, value in given.items()] + others


def layout_list(names: str) -> list[str]:
    """`tp=1;tp=2,sp` -> [`tp=1`, `tp=2,sp`]"""
    return [name.strip() for name in names.split(";") if name.strip()]
