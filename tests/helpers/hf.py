"""Creates tiny models of gsa_hf."""

from __future__ import annotations

from typing import Any

import torch

from gsa_hf import DENSE_LAYER, INDEXED_LAYER, GSAConfig, GSAForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "index_n_heads": 2,
    "index_head_dim": 8, "index_topk": 8, "k_min": 3, "k_max": 16, "initializer_range": 0.2,
    "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
PAPER: dict[str, dict[str, Any]] = {
    "standard": {"layer_types": [DENSE_LAYER] * 2, "value_gate": False, "output_gate": False},
    "gated-only": {"layer_types": [DENSE_LAYER] * 2},
    "sparse-only": {
        "value_gate": False, "output_gate": False, "indexer_activation": "relu", "adaptive_k": "off",
    },
    "gsa": {},
}  # fmt: skip
"""The paper's four models."""
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 3.0, "beta_slow": 0.2,
}  # fmt: skip
BEYOND: dict[str, dict[str, Any]] = {
    "reuse": {"index_topk_freq": 2, "indexer_rope": True, "rope_parameters": YARN},
    "gates": {
        "key_gate": True, "query_gate": True, "projection_gate": True, "gate_activation": "silu",
        "sandwich_norm": True,
    },
    "headwise": {
        "gate_granularity": "headwise", "gate_form": "additive", "gate_input": "input_independent",
        "output_gate": False, "output_transform": "rms_norm",
    },
    "mixed": {"layer_types": [DENSE_LAYER, INDEXED_LAYER], "adaptive_k": "direct"},
    "window-rope-reuse": {
        "local_window": 4, "indexer_rope": True, "index_topk_freq": 2, "qkv_bias": True,
        "qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
"""Models beyond the paper."""
MODELS = PAPER | BEYOND


def tiny_model(name: str = "gsa", seed: int = 0, attention: str = "eager", **changes: Any) -> GSAForCausalLM:
    """Create a model in evaluation mode with random parameters, and variance averages that give a range of budgets."""
    torch.manual_seed(seed)
    config = GSAConfig(**{**SIZES, **MODELS[name], **changes})
    config._attn_implementation = attention
    model = GSAForCausalLM(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.variance_ema.fill_(0.01)
    return model


def distinct_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Draw tokens, int64 [rows, length], so that no row contains a token twice. In the first layer, a repeated token's
    keys would have equal scores, and rounding would decide which key is selected."""
    generator = torch.Generator().manual_seed(seed)
    draws = [1 + torch.randperm(SIZES["vocab_size"] - 1, generator=generator)[:length] for _ in range(rows)]
    return torch.stack(draws)


def padded(length: int, pads: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and their attention mask [rows, length]. The second row begins with padding."""
    tokens = distinct_tokens(rows, length)
    mask = torch.ones_like(tokens)
    mask[1, :pads] = 0
    return tokens, mask


def losses_and_gradients(
    model: GSAForCausalLM, tokens: torch.Tensor, mask: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """Return two dicts, one from eager attention and one from the kernels. Each dict has the indexer loss, the loss and
    all parameters' gradients. The first token after left padding is not a label, because its prediction comes from a
    padding position, whose output is arbitrary."""
    labels = tokens.masked_fill((mask == 0) | (mask.roll(1, dims=1) == 0), -100)
    found = []
    for attention in ("eager", "gsa"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        outputs = model(tokens, attention_mask=mask, labels=labels, use_cache=False)
        outputs.loss.backward()
        gradients: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"kl": outputs.indexer_loss.detach(), "loss": outputs.loss.detach(), **gradients})
    return found
