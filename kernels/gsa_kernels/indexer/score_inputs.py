"""Checks the inputs of the score kernels and makes them contiguous."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from gsa_kernels.checks import check_indexer_sizes, check_kernel_dtype, check_shape
from gsa_kernels.limits import INDEXER_HEADS
from gsa_kernels.types import Geometry, Indexer


@dataclass(frozen=True)
class ScoreInputs:
    """Holds the checked and contiguous inputs of one indexer, which `score_inputs` creates.

    There are R = Lk - query_start rows. Row r is the query at position query_start + r.
    """

    indexer: Indexer
    """With queries [B, R, HI, DI]."""
    document_starts: torch.Tensor | None
    """int32 [B, R]"""
    query_start: int = 0

    @property
    def batch(self) -> int:
        return self.indexer.queries.shape[0]

    @property
    def num_rows(self) -> int:
        """Return R."""
        return self.indexer.queries.shape[1]

    @property
    def num_keys(self) -> int:
        """Return Lk."""
        return self.indexer.keys.shape[1]

    @property
    def device(self) -> torch.device:
        return self.indexer.queries.device

    def position(self, row: int) -> int:
        return self.query_start + row

    def rows_below(self, position: int) -> int:
        """Count the rows before a position, which is at or after `query_start`."""
        return position - self.query_start


def score_inputs(indexer: Indexer, geometry: Geometry) -> ScoreInputs:
    """Check dtypes, devices and limits, and make the kernels' inputs contiguous."""
    queries, keys = indexer.queries, indexer.keys
    batch, length, heads, dim = queries.shape
    check_shape("indexer.keys", keys, "[B, query_start + L, DI]", (batch, geometry.query_start + length, dim))
    if batch < 1 or length < 1:
        raise ValueError(
            f"indexer.queries has shape {tuple(queries.shape)}; pass at least one sequence and one token"
        )
    check_indexer_sizes(heads, dim, INDEXER_HEADS)
    check_indexer_dtypes(indexer)
    starts = geometry.document_starts
    if starts is not None:
        check_shape("document_starts", starts, "[B, L]", (batch, length))
        if starts.device != queries.device:
            raise ValueError(
                f"document_starts is on {starts.device} and the indexer on {queries.device}; pass one device"
            )
    strided: dict[str, Any] = {
        name: x.contiguous() for name, x in _tensors(indexer).items() if not x.is_contiguous()
    }
    return ScoreInputs(
        replace(indexer, **strided) if strided else indexer,  # `replace` repeats all checks of the indexer
        None if starts is None else starts.contiguous(),
        geometry.query_start,
    )


def check_indexer_dtypes(indexer: Indexer) -> None:
    """Check dtypes for the kernels that compute scores, and check that all tensors are on one device."""
    queries = indexer.queries
    for name, tensor in _tensors(indexer).items():
        # Without this check fp64 weights or biases would be rounded to fp32 without a message.
        check_kernel_dtype(f"indexer.{name}", tensor)
        if tensor.device != queries.device:
            raise ValueError(
                f"indexer.{name} is on {tensor.device} and its queries on {queries.device}; pass one device"
            )
    if indexer.keys.dtype != queries.dtype:
        raise ValueError(
            f"indexer.keys has dtype {indexer.keys.dtype} and its queries {queries.dtype}; pass one dtype for both"
        )


def _tensors(indexer: Indexer) -> dict[str, torch.Tensor]:
    """Return the tensors that determine the scores, without biases that are None."""
    names = ("queries", "keys", "head_weight_logits", "score_bias", "head_weight_bias")
    return {name: x for name in names if (x := getattr(indexer, name)) is not None}
