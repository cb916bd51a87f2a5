"""`moe.*`: feed-forward layers that are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MoEConfig:
    experts: int = 0
    """Routed experts of a layer, each a SwiGLU; 0: all feed-forward layers are dense, of `model.ffn_hidden_size`."""
    top_k: int = 2
    """Experts that a token is sent to."""
    expert_ffn_hidden_size: int = 256
    """Inner width of a routed expert."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner width of an expert that every token is sent to, beside its `top_k`; 0: none."""
    first_dense_layers: int = 0
    """Layers at the start of the model that stay dense."""
    layer_interval: int = 1
    """Of the layers behind those every so many-th has experts, the first among them; the others are dense."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a token's score of each expert out of the router's logits, in fp32. The scores of the chosen experts,
    divided by their sum, are the weights of their outputs."""
    routed_scale: float = 1.0
    """Factor of the routed experts' weighted sum; DeepSeek-V3 has 2.5."""
    balancing: Literal["none", "global_batch", "aux_free"] = "global_batch"
    """What keeps the experts' loads alike. `global_batch`: a loss (arXiv 2501.11873), with the loads of the whole
    global batch of the step before, so that neither layout nor micro-batches change it. `aux_free`: with
    router_score=sigmoid, a bias of each expert that only the choice sees, and that moves against its load after each
    step (arXiv 2408.15664)."""
    balance_coeff: float = 1e-3
    """Coefficient of the loss of `global_batch`, experts x the sum of share of the choices x mean score, which is 1
    where even and is added for each layer, as megatron-core's `moe_aux_loss_coeff`. The 1e-3 of Qwen3's config.json
    (`router_aux_loss_coef`) is for transformers' formula: `top_k` where even, and once for the means over all layers.
    Here that is 1e-3 x `top_k` / layers: 1.7e-4 with its top 8 and 48 layers."""
    bias_update_rate: float = 1e-3
    """By how much an update moves each bias of `aux_free`; DeepSeek-V3's."""
    z_loss_coeff: float = 1e-3
    """Coefficient of the mean squared log-sum-exp of the router's logits, added for each layer; 1e-3 is ST-MoE's. 0:
    none."""
    capacity_factor: float = 0.0
    """An expert takes this times its even share, tokens x top_k / experts, of each sequence: its first ones; what comes
    later is dropped. 0: every token reaches all its experts."""
    experts_impl: Literal["grouped", "sequential"] = "grouped"
    """`grouped`: the experts of a rank as one grouped matrix product. `sequential`: megatron-core's SequentialMLP, one
    expert after the other."""


def layers_with_experts(moe: MoEConfig, num_layers: int) -> range:
    """The layers (from 0) that are mixtures of experts."""
    if moe.experts < 1 or moe.layer_interval < 1:
        return range(0)
    return range(moe.first_dense_layers, num_layers, moe.layer_interval)
