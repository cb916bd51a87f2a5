"""Defines what all kernels of one selection share: how to select rows, and where to write the result."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gsa_kernels.indexer.score_inputs import ScoreInputs
from gsa_kernels.types import BudgetRule


@dataclass(frozen=True)
class Criteria:
    """Holds the criteria by which a call selects every row. `select_keys` checks them."""

    inputs: ScoreInputs

    rule: BudgetRule
    """Its k_min and k_max are at most Lk, because no row has more keys, and larger limits would only take registers."""

    variance_ema: torch.Tensor
    """fp32, 0-d"""

    local_window: int


class LogSums(NamedTuple):
    """Requests log sum_{s in S_t} exp(beta I[t, s]) in addition to a selection."""

    inverse_temperature: torch.Tensor
    """beta > 0: fp32, one element."""
    out: torch.Tensor
    """The log-sums, fp32 [B, R]; -inf for rows without keys."""


@dataclass(frozen=True)
class Outputs:
    """Holds the tensors to which a selection is written."""

    packed_mask: torch.Tensor
    """int32 [B, rows, ceil(Lk / 32)], row r at [:, r - first_row]. A kernel expects zeros unless it says otherwise."""

    budget: torch.Tensor
    """int32 [B, R]"""

    variance: torch.Tensor
    """fp32 [B, R]"""

    first_row: int = 0
    """First row of the packed mask, which may cover only a chunk of rows."""

    log_sums: LogSums | None = None
    """The log-sums, if requested. Only rows that are selected in registers get one."""
