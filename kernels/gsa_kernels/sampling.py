"""Chooses which rows of the indexer loss are computed: all rows, a sample for an estimate, or one rank's share."""

from dataclasses import dataclass, field

import torch

from gsa_kernels.limits import STRETCH_ROWS


@dataclass(frozen=True)
class SampledRows:
    """Describes a sample of a sequence: every `every`-th stretch of `stretch` neighbouring rows."""

    start: int
    """First row."""
    count: int
    """Total number of rows. Only the last stretch of the sequence may be short."""
    every: int = 1
    stretch: int = field(default_factory=lambda: STRETCH_ROWS)
    """Rows of a stretch."""

    @property
    def spacing(self) -> int:
        """Rows from the start of one stretch to the start of the next."""
        return self.every * self.stretch

    def row(self, number: int) -> int:
        """Return the row with number `number` in the sample."""
        return self.start + number // self.stretch * self.spacing + number % self.stretch

    def chunk(self, number: int, count: int) -> "SampledRows":
        """Return `count` sampled rows from number `number` on, which is the first of a stretch."""
        return SampledRows(self.row(number), min(count, self.count - number), self.every, self.stretch)

    def rows(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return all rows, int64 [count], computed on the device because a copy would make the host wait."""
        number = torch.arange(self.count, device=device)
        return self.start + number // self.stretch * self.spacing + number % self.stretch


def sample_rows(
    num_rows: int,
    fraction: float,
    draw: int | None,
    share: tuple[int, int] = (0, 1),
    stretch: int | None = None,
) -> tuple[SampledRows, int]:
    """Choose a systematic sample: evenly spaced stretches of `stretch` rows, by default STRETCH_ROWS.

    Each sample contains rows from all parts of the sequence. A stretch consists of whole tiles of the kernels.

    Args:
        fraction: 1 / n for a whole n; at least one stretch is taken; 1 takes all rows
        draw: chooses the first stretch, number `draw` modulo n
        share: (rank, size): this rank takes every size-th of the chosen stretches, from number `rank` on

    Returns:
        The rows, possibly none, and the factor for the sum over all shares of the sample.
    """
    stretch = stretch or STRETCH_ROWS
    first, factor = systematic(-(-num_rows // stretch), fraction, draw)
    rank, size = share
    every = factor * size
    start = (first + rank * factor) * stretch
    whole, rest = divmod(max(num_rows - start, 0), every * stretch)
    return SampledRows(start, whole * stretch + min(rest, stretch), every, stretch), factor


def sampled_one_of(num_rows: int, fraction: float) -> int:
    """Return n if `sample_rows` takes one of n stretches; 1 if it takes all rows."""
    return min(stretches_per_sampled(fraction), -(-num_rows // STRETCH_ROWS))


def systematic(num_units: int, fraction: float, draw: int | None) -> tuple[int, int]:
    """Return the first sampled unit and the distance to the next sampled unit. All units have the same probability."""
    factor = min(stretches_per_sampled(fraction), num_units)
    return (draw or 0) % factor, factor


def stretches_per_sampled(fraction: float) -> int:
    """Return n of a fraction 1 / n.

    Raises:
        ValueError: the fraction is more than one percent off 1 / n.
    """
    whole = round(1 / fraction) if 0 < fraction <= 1 else 0
    if whole == 0 or abs(whole * fraction - 1) > 0.01:
        raise ValueError(f"row_fraction is {fraction}; pass 1 / n for a whole n: 1, 0.5, 0.3333, 0.25, ...")
    return whole
