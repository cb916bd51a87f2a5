"""Defines what the bench of whole models measures for each model."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    step_ms: float = float("nan")
    """Median."""
    step_ms_low: float = float("nan")
    step_ms_high: float = float("nan")
    tokens_per_second_per_device: float = float("nan")
    mfu: float = float("nan")
    """Operations of the model's matrix products per second, divided by the device's peak. In sparse attention, each
    query counts as attending to k_base keys and the local window."""
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
