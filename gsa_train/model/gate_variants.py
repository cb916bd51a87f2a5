"""Implement the gate variants of the gated-attention study (arXiv 2505.06708) in plain torch.

The GSA paper's two gates, a sigmoid per head and channel, are in gates.py and have fused kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from gsa_train.config import GSAConfig
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.norm import RMSNorm


def opening(logits: torch.Tensor, gsa: GSAConfig) -> torch.Tensor:
    if gsa.gate_activation == "sigmoid":
        return logits.sigmoid()
    if gsa.gate_activation == "ns_sigmoid":
        return 0.5 + 0.5 * logits.sigmoid()
    if gsa.gate_activation == "silu":
        return torch.nn.functional.silu(logits)
    return logits


def apply_gate(x: torch.Tensor, logits: torch.Tensor, gsa: GSAConfig) -> torch.Tensor:
    """Compute x * gate or x + gate in fp32 (fp64 if an input is fp64), and return it in the shape and dtype of x.

    Args:
        logits: broadcastable to x; a dimension of 1 means one gate for all channels of a head, or for all heads.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, logits.dtype), torch.float32)
    gate = opening(logits.to(dtype), gsa)
    gated = x.to(dtype) * gate if gsa.gate_form == "multiplicative" else x.to(dtype) + gate
    return gated.to(x.dtype)


class HeadGate(MegatronModule):
    """Gates this rank's heads independently of the input: the logits are parameters."""

    def __init__(self, config: GSATransformerConfig, groups: ProcessGroupCollection, rows: int) -> None:
        """
        Args:
            rows: a layer's gates over all ranks
        """
        super().__init__(config)
        self.tp_group = groups.tp
        self.bias = _parameter(config, rows // groups.tp.size())
        set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [L, B, local rows] for `hidden` [L, B, d] ([L / tp, B, d] under sequence parallelism)."""
        shards = self.tp_group.size() if self.config.sequence_parallel else 1
        return self.bias.expand(shards * hidden.shape[0], hidden.shape[1], -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class ReplicatedGate(MegatronModule):
    """Computes gates whose weights are replicated over tensor-parallel ranks: gates that all heads share, and G5 after
    W_O."""

    def __init__(
        self, config: GSATransformerConfig, groups: ProcessGroupCollection, rows: int, for_heads: bool
    ) -> None:
        """
        Args:
            for_heads: True: gates on this rank's heads, for all tokens. False: gates on W_O's output, for this rank's
                tokens.
        """
        super().__init__(config)
        self.tp_group, self.for_heads = groups.tp, for_heads
        depends = config.gsa.gate_input == "query_dependent"
        self.weight = _parameter(config, rows, config.hidden_size) if depends else None
        self.bias = _parameter(config, rows)
        for parameter in self.parameters():
            # Each rank has different tokens, so megatron-core sums the gradients over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [L, B, rows] for heads, else logits of the given tokens.

        Args:
            hidden: [L, B, d] ([L / tp, B, d] under sequence parallelism).
        """
        if self.weight is None:
            logits = self.bias.expand(*hidden.shape[:2], -1)
        else:  # F.linear is avoided: DeepSpeed's replacement rounds before adding the bias.
            logits = torch.addmm(self.bias, hidden.flatten(0, 1), self.weight.t())
            logits = logits.unflatten(0, hidden.shape[:2])
        if not self.for_heads:
            return logits
        # Each rank's heads contribute a part of the gradient.
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(logits, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(logits, group=self.tp_group)


class HeadNorm(RMSNorm):
    """Applies RMSNorm to each head's attention output, with one weight for all heads: `gsa.output_transform:
    rms_norm`."""

    def __init__(self, config: GSATransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config, config.kv_channels, config.layernorm_epsilon)
        self.tp_group = groups.tp
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]  # summed here, over the heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., d_k] of this rank's heads."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, self.eps)


def _parameter(config: GSATransformerConfig, *shape: int) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    parameter = torch.nn.Parameter(torch.zeros(*shape, dtype=config.params_dtype, device=device))
    parameter.gsa_gate = True  # type: ignore[attr-defined]  # its own learning rate (optimizer/mcore.py)
    return parameter
