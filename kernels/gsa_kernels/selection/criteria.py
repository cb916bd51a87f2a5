"""What all kernels of one selection share: by what rows are selected, and where the result goes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gsa_kernels.indexer.triton_scores import ScoreInputs
from gsa_kernels.types import BudgetRule


@dataclass(frozen=True)
class Criteria:
    """By what every row of one call is selected. Checked by `select_keys`."""

    inputs: ScoreInputs

    rule: BudgetRule
    """With limits of at most Lk: no row has more keys, and limits above that would only cost registers."""

    variance_ema: torch.Tensor
    """fp32, 0-d"""

    local_window: int


class LogSums(NamedTuple):
    """log sum_{s in S_t} exp(beta I[t, s]), to be written beside a selection."""

    inverse_temperature: torch.Tensor
    """beta > 0: fp32, one element."""
    out: torch.Tensor
    """fp32 [B, R]; -inf for rows without a key."""


@dataclass(frozen=True)
class Outputs:
    """Where a selection is written."""

    packed_mask: torch.Tensor
    """int32 [B, rows, ceil(Lk / 32)], row r at [:, r - first_row]: zeros, unless a kernel says otherwise."""

    budget: torch.Tensor
    """int32 [B, R]"""

    variance: torch.Tensor
    """fp32 [B, R]"""

    first_row: int = 0
    """First row of the packed mask, which may cover a chunk of rows."""

    log_sums: LogSums | None = None
    """On request, and only for rows that are selected in registers."""
