"""QK-clip (Kimi K2, arXiv 2507.20534): after an update, scale down the projections of heads with large logits.

    m = the head's largest log-sum-exp of attention logits, over all queries of the step
    factor = min(1, train.qk_clip / m)

Attention computes the log-sum-exp anyway. It is an upper bound of a query's largest logit, by at most ln(keys). As in
Kimi K2, query and key weights of a head are multiplied by sqrt(factor). In grouped-query attention several heads share
a key, as they share the rotary key in Kimi K2. Then the query weights get the whole factor, and no other head changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gsa_train.model.gsa_attention import GSASelfAttention

MainWeight = Callable[[torch.nn.Parameter], tuple[torch.Tensor | None, int]]
"""Return this rank's fp32 shard of a parameter, or None, and its offset in the flat parameter."""


@dataclass
class QKClip:
    attentions: list[GSASelfAttention]
    threshold: float
    group: dist.ProcessGroup
    """Data- and context-parallel ranks, over which the queries of a step are sharded."""
    row_factors: list[torch.Tensor] = field(default_factory=list)
    """For each layer, the factor of each row of `linear_qkv`."""

    def begin_step(self) -> None:
        """Forget the log-sum-exps of the last step, or of the first time that this step was computed."""
        for attention in self.attentions:
            largest = attention.over_chunks.largest_log_sums
            if largest is None:
                heads = attention.local_kv_heads * attention.heads_per_group
                largest = attention.linear_qkv.weight.new_empty(heads, dtype=torch.float32)
                attention.over_chunks.largest_log_sums = largest
            largest.fill_(-torch.inf)

    @torch.no_grad()
    def measure(self, applied: torch.Tensor) -> None:
        """Set the factors; 1 if the update is not `applied`. Collective."""
        largest = torch.stack([attention.over_chunks.largest_log_sums for attention in self.attentions])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        factors = torch.where(applied & (largest > self.threshold), self.threshold / largest, 1)
        self.row_factors = [
            row_factors(of_heads.view(attention.local_kv_heads, -1), attention.config.kv_channels)
            for attention, of_heads in zip(self.attentions, factors, strict=True)
        ]

    @torch.no_grad()
    def scale(self, main_weight: MainWeight) -> None:
        """Scale the fp32 shards of one optimizer. The optimizer then copies them to the model's weights."""
        for attention, rows in zip(self.attentions, self.row_factors, strict=True):
            for parameter in attention.linear_qkv.parameters():  # weight and bias
                main, start = main_weight(parameter)
                if main is not None:
                    factors = rows.repeat_interleave(parameter.numel() // len(rows))
                    main.view(-1).mul_(factors[start : start + main.numel()])

    def close(self) -> None:
        for attention in self.attentions:
            attention.over_chunks.largest_log_sums = None


def row_factors(factors: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the factor of each row of `linear_qkv`, flat, from the heads' factors [n_kv, n_h / n_kv]."""
    shared = factors.shape[1] > 1
    query, ones = (factors if shared else factors.sqrt()), torch.ones_like(factors[:, :1])
    key = ones if shared else query
    return torch.cat([query, key, ones], dim=1).flatten().repeat_interleave(head_dim)
