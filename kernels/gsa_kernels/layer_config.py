"""Defines the configuration of `GatedSparseAttention`. Fields have the same names as in training configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from gsa_kernels import limits
from gsa_kernels.checks import check_at_least
from gsa_kernels.rotary import YarnScaling
from gsa_kernels.types import BudgetRule, Geometry, Implementation

RENAMED = {
    "d_model": "hidden_size",
    "n_heads": "num_heads",
    "n_kv_heads": "num_kv_heads",
    "d_head": "head_dim",
    "use_value_gate": "value_gate",
    "use_output_gate": "output_gate",
    "n_indexer_heads": "indexer_heads",
    "d_indexer": "indexer_dim",
}
"""Maps names from earlier versions and the authors' code to today's names."""


@dataclass(frozen=True)
class GSAConfig:
    """Configures one layer. The defaults are the paper's values for its 7B class (table 1)."""

    hidden_size: int = 4096
    """d, the hidden size."""
    num_heads: int = 32
    """H, query heads."""
    num_kv_heads: int = 8
    """Hkv, key-value heads; H is a multiple of it."""
    head_dim: int | None = None
    """D, even; Triton supports limits.HEAD_SIZES. Default: hidden_size / num_heads."""
    value_gate: bool = True
    """G2: multiply the values by sigmoid(h W + b) before attention (eq. 9)."""
    output_gate: bool = True
    """G1: multiply the output of attention by sigmoid(h W + b) (eq. 10)."""
    gate_bias_init: float = 0.0
    """Initial b of both gates. The paper has 0, the authors' code 0.5."""
    indexer_heads: int = 4
    indexer_dim: int = 64
    """Size of an indexer head."""
    indexer_activation: Literal["sigmoid", "relu"] = "sigmoid"
    """Activation of the scores. `sigmoid`: GSA (eq. 7). `relu`, with unbounded head weights and no biases: DSA."""
    k_base: int = 2048
    """Keys per query before adaptation."""
    k_min: int = 256
    k_max: int = 4096
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    """How a query's budget follows from k_base (eq. 8). `BudgetRule` has the formulas."""
    dense_below: int = 0
    """Queries with fewer causal keys attend to all of them, whatever their budget; 0: none."""
    variance_ema_decay: float = 0.99
    """Decay per optimizer step of the moving average of the score variance."""
    local_window: int = 0
    """Number of latest keys that are always selected. The paper has 0."""
    rope_base: float = 10000.0
    rope_scaling: YarnScaling | None = None
    """YaRN, for sequences longer than in training."""
    implementation: Literal["auto", "triton", "reference"] = "auto"
    """`triton`: the fused kernels, on CUDA tensors. `reference`: plain torch on any device, with tensors of [L, Lk].
    `auto`: `triton` if the input is a CUDA tensor, else `reference`. `auto` also raises an error if the kernels do not
    support the config."""

    def __new__(cls, *_args: Any, **fields: Any) -> GSAConfig:
        if renamed := [f"{old} is now {new}" for old, new in RENAMED.items() if old in fields]:
            raise ValueError(f"{'; '.join(renamed)}: rename it in the call")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "indexer_heads", "indexer_dim"):
            check_at_least(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}; pass num_heads in a multiple "
                "of num_kv_heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_heads {self.num_heads}; pass a multiple of num_heads, or "
                "head_dim"
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ValueError(f"head_dim is {self.head_size}; pass an even number, whose halves RoPE turns")
        if self.indexer_activation not in ("sigmoid", "relu"):
            raise ValueError(f"indexer_activation is {self.indexer_activation!r}; pass 'sigmoid' or 'relu'")
        if not self.k_min <= self.k_base <= self.k_max:
            raise ValueError(
                f"k_base is {self.k_base} with k_min {self.k_min} and k_max {self.k_max}; pass k_min <= k_base <= k_max"
            )
        _ = self.rule, self.geometry(None)  # their own checks
        if not 0 <= self.variance_ema_decay < 1:
            raise ValueError(f"variance_ema_decay is {self.variance_ema_decay}; pass 0 <= decay < 1")
        if not self.rope_base > 0:
            raise ValueError(f"rope_base is {self.rope_base}; pass a positive number")
        if self.rope_scaling is not None and not self.rope_base > 1:
            raise ValueError(f"rope_base is {self.rope_base} with rope_scaling; pass more than 1")
        if self.implementation not in ("auto", "triton", "reference"):
            raise ValueError(
                f"implementation is {self.implementation!r}; pass 'auto', 'triton' or 'reference'"
            )
        if self.implementation == "triton":
            self._check_kernels()

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def rule(self) -> BudgetRule:
        return BudgetRule(self.k_base, self.k_min, self.k_max, self.adaptive_k, self.dense_below)

    def geometry(self, document_starts: torch.Tensor | None, query_start: int = 0) -> Geometry:
        return Geometry(document_starts, query_start, self.local_window)

    def implementation_on(self, device: torch.device) -> Implementation:
        """Return the implementation that runs on a device.

        Raises:
            ValueError: the kernels would run there, but do not support a field.
        """
        if self.implementation != "auto":
            return self.implementation
        if device.type != "cuda":
            return "reference"
        self._check_kernels()
        return "triton"

    def _check_kernels(self) -> None:
        heads, sizes = limits.INDEXER_HEADS, limits.INDEXER_HEAD_SIZES
        fields = {  # supported values and their descriptions
            "head_dim": (self.head_size, limits.HEAD_SIZES, f"one of {limits.HEAD_SIZES}"),
            "indexer_heads": (self.indexer_heads, heads, f"{heads[0]} to {heads[-1]}"),
            "indexer_dim": (self.indexer_dim, sizes, f"{sizes[0]} to {sizes[-1]}"),
        }
        for name, (value, taken, words) in fields.items():
            if value not in taken:
                raise ValueError(
                    f"{name} is {value}, which the kernels do not take; pass {words}, or implementation='reference'"
                )
