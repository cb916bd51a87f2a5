"""Compute the rotary angles of this rank's positions."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection

from gsa_kernels.rotary import YarnScaling
from gsa_train.distributed.context_sharding import ContextSharding
from gsa_train.model.context_parallel import local_part
from gsa_train.model.mcore.config import GSATransformerConfig


class LocalRotaryEmbedding(RotaryEmbedding):
    """Extends megatron-core's rotary embedding to any context sharding and to YaRN.

    megatron-core's YarnRotaryEmbedding ignores `rotary_percent`, has no attention factor and does not run on CPUs.
    """

    def __init__(
        self, cut: ContextSharding, yarn: YarnScaling | None, rotary_base: float, **options: Any
    ) -> None:
        super().__init__(rotary_base=rotary_base, **options)
        if yarn is not None:
            self.inv_freq: torch.Tensor = yarn.scaled(self.inv_freq, rotary_base)
        self._cut = cut
        self._angles: dict[int, torch.Tensor] = {}
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, max_seq_len: int, *_: Any, **options: Any) -> torch.Tensor:
        """Return angles [L / size, 1, 1, channels] for sequences of `max_seq_len`. They are cached."""
        if max_seq_len not in self._angles:
            self._angles[max_seq_len] = local_part(self.get_emb(max_seq_len), self._cut, dim=0)
        return self._angles[max_seq_len]

    def tables(self, max_seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the angles: [L / size, channels / 2] each, fp32 because the frequencies are fp32. The
        tables have only the first half of the channels, because the second half has the same angles. The tables are
        cached."""
        if max_seq_len not in self._tables:
            angles = local_part(self.get_emb(max_seq_len), self._cut, dim=0)
            half = angles[:, 0, 0, : angles.shape[-1] // 2]
            self._tables[max_seq_len] = (half.cos().contiguous(), half.sin().contiguous())
        return self._tables[max_seq_len]


def rotary_embedding(
    config: GSATransformerConfig, channels: int, groups: ProcessGroupCollection, percent: float = 1.0
) -> LocalRotaryEmbedding:
    return LocalRotaryEmbedding(
        context_sharding(config, groups),
        config.yarn,
        config.rotary_base,
        kv_channels=channels,
        rotary_percent=percent,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=groups.cp,
    )


def context_sharding(config: GSATransformerConfig, groups: ProcessGroupCollection) -> ContextSharding:
    return ContextSharding(groups.cp.rank(), groups.cp.size(), config.context_chunks)
