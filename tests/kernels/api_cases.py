"""Lists calls of the API, one for each kind of selection, and their inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

import gsa_kernels
from gsa_kernels import BudgetRule, Geometry, Indexer, Selection, limits
from gsa_kernels.packed_mask import unpack_mask
from gsa_kernels.types import Implementation, RowSample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 40, 4, 1, 32
WIDE = (24, 2, 256)  # as in Qwen3.5
RULE = BudgetRule(k_base=6, k_min=2, k_max=12)
EMA = 0.01


@dataclass(frozen=True)
class Case:
    kernel: limits.Kernel = "auto"
    query_start: int = 0
    documents: bool = False
    local_window: int = 0
    activation: str = "sigmoid"
    dense: bool = False
    rows: RowSample = dataclasses.field(default_factory=RowSample)
    heads: tuple[int, int, int] = (HEADS, KV_HEADS, SIZE)


HALF, SHARE = RowSample(0.5, draw=1), RowSample(0.5, draw=3, share=(0, 2))
CASES = {
    "packed mask, a share of the rows": Case(rows=SHARE, query_start=32),
    "packed mask, documents, relu": Case("masked", 16, documents=True, local_window=3, activation="relu"),
    "key lists, documents, relu": Case("gathered", 16, documents=True, activation="relu"),
    "key lists, half of the rows": Case("gathered", rows=HALF),
    "dense": Case(dense=True, documents=True),
    "dense, later queries, relu": Case(dense=True, query_start=16, activation="relu"),
    "heads of 256, packed mask": Case("masked", 16, documents=True, local_window=3, heads=WIDE),
    "heads of 256, key lists": Case("gathered", documents=True, local_window=3, heads=(8, 1, 256)),
    "heads of 256, dense": Case(dense=True, heads=(12, 1, 256)),
}


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate_logits: torch.Tensor
    indexer: Indexer
    geometry: Geometry

    def leaves(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(self, name) for name in ("q", "k", "v", "gate_logits")}
        names = ("queries", "keys", "head_weight_logits", "score_bias", "head_weight_bias")
        found |= {name: getattr(self.indexer, name) for name in (*names, "inverse_temperature")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def problem(case: Case, dtype: torch.dtype = torch.float32) -> Problem:
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(DEVICE, dtype).requires_grad_()

    keys = case.query_start + LENGTH
    heads, kv_heads, size = case.heads
    gated = case.activation == "sigmoid"
    indexer = Indexer(
        leaf(BATCH, LENGTH, 2, 16),
        leaf(BATCH, keys, 16),
        leaf(BATCH, LENGTH, 2),
        leaf(2) if gated else None,
        leaf(2) if gated else None,
        case.activation,  # type: ignore[arg-type]
        torch.tensor(1.3, device=DEVICE, requires_grad=True),
    )
    starts = None
    if case.documents:
        positions = case.query_start + torch.arange(LENGTH)
        starts = torch.stack([torch.where(positions < 27, 0, 27), torch.where(positions < 19, 11, 19)])
        starts = torch.minimum(starts, positions).to(DEVICE, torch.int32)
    return Problem(
        leaf(BATCH, LENGTH, heads, size),
        leaf(BATCH, keys, kv_heads, size),
        leaf(BATCH, keys, kv_heads, size),
        leaf(BATCH, LENGTH, heads, size),
        indexer,
        Geometry(starts, case.query_start, case.local_window),
    )


def select(case: Case, given: Problem, implementation: Implementation) -> Selection:
    ema = torch.tensor(EMA, device=DEVICE)
    kernel, log_sum = case.kernel, case.kernel != "gathered"
    return gsa_kernels.select(
        given.indexer,
        RULE,
        ema,
        given.geometry,
        implementation=implementation,
        kernel=kernel,
        with_log_sum=log_sum,
    )


def mask_of(selection: Selection, num_keys: int) -> torch.Tensor:
    return unpack_mask(selection.packed_rows(torch.arange(LENGTH, device=DEVICE)), num_keys)
