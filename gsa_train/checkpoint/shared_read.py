"""Share the reading of a checkpoint: each replica reads a part, and broadcasts it to the ranks that need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.process_groups_config import ProcessGroupCollection

EXPERTS = ".mlp.experts."
"""Marks routed experts, and their optimizer state, in the names of tensors on disk."""


class WithExperts(FullyParallelLoadStrategyWrapper):
    """Loads experts over a separate group.

    megatron-core broadcasts each tensor to the whole group that loads it, even to ranks that do not need it. The copies
    of an MoE expert are on different ranks than the copies of other tensors. With one group for all tensors, each rank
    would therefore receive all experts.
    """

    def __init__(self, strategy: Any, groups: ProcessGroupCollection) -> None:
        super().__init__(strategy, groups.dp_cp)
        self.of_experts = FullyParallelLoadStrategyWrapper(strategy, groups.expt_dp)

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *strategy: str
    ) -> dict[str, Any]:
        """Collective, also on ranks that need no expert. megatron-core 0.19 passes the name of a strategy."""
        experts, others = extract_matching_values(sharded_state_dict, lambda each: EXPERTS in each.key)
        loaded = super().load(others, checkpoint_dir, *strategy)
        merge(loaded, self.of_experts.load(experts, checkpoint_dir, *strategy))
        return loaded
