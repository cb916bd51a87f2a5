"""Defines what the bench of whole models measures for each model, and how two reports compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LARGEST_DIFFERENCE_OF_KEYS = 0.01
"""Largest relative difference between two reports whose speeds are compared. It may change an efficiency by the same
amount, while efficiencies differ by some percent."""


@dataclass
class Result:
    """Holds the result of one variant over all ranks."""

    model: str
    layout: str
    world_size: int
    data_parallel: int = 0
    sequences: int = 0
    """Per optimizer step, over all ranks."""
    seq_len_tokens: int = 0
    num_layers: int = 0
    causal_keys: float = float("nan")
    """Mean number of causal keys per query: less than half of a sequence if it has several documents."""
    attended_keys: float = float("nan")
    """The keys that `mfu` counts: all causal keys, or with sparse attention a budget of k_base and the local window."""
    step_ms: float = float("nan")
    """Median."""
    step_ms_low: float = float("nan")
    step_ms_high: float = float("nan")
    tokens_per_second_per_device: float = float("nan")
    mfu: float = float("nan")
    """The model's matrix products over the device's peak; attention counts `attended_keys`."""
    peak_gib: list[float] = field(default_factory=list)
    """Allocated, by rank."""
    peak_reserved_gib: list[float] = field(default_factory=list)
    predicted_gib: list[float] = field(default_factory=list)
    """Estimate of a dry run, by rank; empty for megatron-core's model."""
    loss: float = float("nan")
    """Loss of the last step, on the same random tokens."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Milliseconds of a traced step on rank 0's device, see `step_trace.in_columns`; empty without a trace."""
    exposed_communication_ms: list[float] = field(default_factory=list)
    """Measured in a traced step, by rank."""
    failed: str = ""
    """Why there are no figures."""

    @property
    def prediction_error(self) -> float:
        """Return the largest |predicted - peak| / peak over the ranks; NaN without a prediction."""
        pairs = [(p, m) for p, m in zip(self.predicted_gib, self.peak_gib, strict=False) if m > 0]
        return max((abs(p - m) / m for p, m in pairs), default=float("nan"))


class VariantFailed(RuntimeError):
    """Says that the process must end without waiting for other ranks."""

    def __init__(self, result: Result, speaks: bool) -> None:
        super().__init__(f"{result.model}, {result.layout}: {result.failed}")
        self.result = result
        self.speaks = speaks
        """Whether this rank reports for all failed ranks."""


def as_row(result: Result) -> dict[str, Any]:
    """Convert to plain values for the report, with lists by rank."""
    return {**asdict(result), "prediction_error": result.prediction_error}


def scaling(few: Sequence[dict[str, Any]], many: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compute weak scaling: tokens per second and device of the same model and layout in the rows of two reports.

    Raises:
        ValueError: they have no model and layout in common, different work per device, or different documents.
    """
    rows = []
    for row in many:
        for other in few:
            if (row["model"], row["layout"]) != (other["model"], other["layout"]):
                continue
            work = [each["sequences"] * each["seq_len_tokens"] / each["world_size"] for each in (row, other)]
            if work[0] != work[1]:
                raise ValueError(
                    f"{row['model']}, {row['layout']}: {work[0]} and {work[1]} tokens per device and step; "
                    "measure both with the same --sequences-per-device and --seq-len"
                )
            speeds = row["tokens_per_second_per_device"], other["tokens_per_second_per_device"]
            if None in speeds:
                continue
            _refuse_other_documents(row, other)
            rows.append(
                {
                    "model": row["model"],
                    "layout": row["layout"],
                    "devices": f"{other['world_size']} -> {row['world_size']}",
                    "causal_keys": row["causal_keys"],
                    "tokens_per_second_per_device": speeds[0],
                    "efficiency": speeds[0] / speeds[1],
                }
            )
    if not rows:
        raise ValueError("the two reports have no model and layout in common")
    return rows


def _refuse_other_documents(row: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise if queries have different numbers of causal keys, because the times cannot be compared."""
    before, now = other.get("causal_keys"), row.get("causal_keys")
    if before is None or now is None:
        raise ValueError(
            f"{row['model']}, {row['layout']}: a report does not say how many keys a query sees (causal_keys): "
            "it was written by an earlier version, measure it again"
        )
    if abs(before - now) > LARGEST_DIFFERENCE_OF_KEYS * min(before, now):
        raise ValueError(
            f"{row['model']}, {row['layout']}: a query sees {before:.1f} keys on {other['world_size']} devices and "
            f"{now:.1f} on {row['world_size']}, as their texts have other documents; measure both without --text, "
            "or with data.attend_across_documents=true"
        )
