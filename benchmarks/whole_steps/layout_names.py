"""Parses short names of layouts for the benches: `tp=2,sp,opt=off` stands for overrides of a config.

    tp pp vpp cp     parallel.tensor, .pipeline, .virtual_pipeline, .context; default 1
    sp               sequence parallelism; default off
    opt              parallel.distributed_optimizer, on or off
    recompute, mbs   train.recompute, train.micro_batch_size

The remaining ranks are data parallel. Any other `field=value` is passed on unchanged.
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
    """Convert `tp=2,sp` to [`parallel.tensor=2`, ...].

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
    """Split `tp=1;tp=2,sp` into [`tp=1`, `tp=2,sp`]."""
    return [name.strip() for name in names.split(";") if name.strip()]
