"""QK-clip (Kimi K2, arXiv 2507.20534): after an update, scale down the projections of heads with large logits.

    m = the head's largest log-sum-exp of attention logits, over all queries of the step
    factor = min(1, train.qk_clip / m)

The log-sum-exp replaces Kimi's largest logit, because attention computes log-sum-exps anyway. Over n keys, a
log-sum-exp exceeds the largest logit by at most ln(n).

If each head has its own keys, the query weights and the key weights of the head are both multiplied by sqrt(factor), as
in Kimi K2. In grouped-query attention, several heads share a key. In that case, only the query weights of the head are
multiplied, by the whole factor, so that no other head changes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from gsa_train.model.gsa_attention import GSASelfAttention

MainWeight = Callable[[torch.nn.Parameter], tuple[torch.Tensor | None, int]]
"""Return this rank's fp32 shard of a parameter, or None, and its offset in the flat parameter."""


class QKClip:
    def __init__(self, layers: list[GSASelfAttention], threshold: float, group: dist.ProcessGroup) -> None:
        """
        Args:
            group: data- and context-parallel ranks, over which the queries of a step are sharded.
        """
        self.layers, self.threshold, self.group = layers, threshold, group
        first = layers[0]
        self.head_dim: int = first.config.kv_channels
        shape = len(layers), first.local_kv_heads, first.heads_per_group
        self.largest = torch.zeros(shape, device=first.linear_qkv.weight.device)
        """Largest log-sum-exp of each head on this rank, or after `measure` on all ranks."""
        self.row_factors = torch.empty(0)
        """Factor of each row of `linear_qkv`, [layers, rows]; set by `measure`."""
        for attention, of_layer in zip(layers, self.largest, strict=True):
            attention.over_chunks.largest_log_sums = of_layer.view(-1)

    def begin_step(self) -> None:
        """Forget the log-sum-exps of the last step or, if this step is computed again, of its first computation."""
        self.largest.fill_(-torch.inf)

    @torch.no_grad()
    def measure(self, applied: torch.Tensor) -> None:
        """Set the factors; 1 if the update is not `applied`. Collective."""
        dist.all_reduce(self.largest, op=dist.ReduceOp.MAX, group=self.group)
        clips = applied & (self.largest > self.threshold)
        query = torch.where(clips, self.threshold / self.largest, 1)  # [layers, n_kv, n_h / n_kv]
        key = value = torch.ones_like(query[..., :1])
        if query.shape[-1] == 1:
            query = key = query.sqrt()
        of_heads = torch.cat([query, key, value], dim=-1).flatten(1)
        self.row_factors = of_heads.repeat_interleave(self.head_dim, dim=1)

    @torch.no_grad()
    def scale(self, main_weight: MainWeight) -> None:
        """Scale the fp32 shards of one optimizer. The optimizer then copies them to the model's weights."""
        for attention, rows in zip(self.layers, self.row_factors, strict=True):
            for parameter in attention.linear_qkv.parameters():  # weight and bias
                main, start = main_weight(parameter)
                if main is not None:
                    factors = rows.repeat_interleave(parameter.numel() // len(rows))
                    main.view(-1).mul_(factors[start : start + main.numel()])

    def close(self) -> None:
        for attention in self.layers:
            attention.over_chunks.largest_log_sums = None
