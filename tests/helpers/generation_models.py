"""Creates small models of all kinds with prompts, and what transformers generates from them."""

from typing import Any

import torch

from gsa_hf import DENSE_LAYER, INDEXED_LAYER, GSAConfig, GSAForCausalLM, generation

PROMPTS = [[place * factor % 61 for place in range(count)] for count, factor in ((30, 7), (15, 11), (21, 23))]
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "initializer_range": 0.3, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 6, "k_min": 2,
    "k_max": 9,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "sparse": {"dense_below": 20},
    "dense": {"layer_types": [DENSE_LAYER] * 2, "value_gate": False, "output_gate": False},
    "groups of layers": {"num_hidden_layers": 3, "index_topk_freq": 2, "local_window": 3},
    "norms, no head weights": {"indexer_norm": True, "indexer_activation": "plain", "indexer_rope": True},
    "norms, group of layers": {
        "indexer_rope": True, "indexer_norm": True, "local_window": 3, "index_topk_freq": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "mixed": {
        "layer_types": [DENSE_LAYER, INDEXED_LAYER], "qk_norm": True, "qkv_bias": True, "indexer_rope": True,
        "indexer_activation": "relu", "adaptive_k": "direct",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip


def make_model(name: str, **changes: Any) -> GSAForCausalLM:
    torch.manual_seed(0)
    model = GSAForCausalLM(GSAConfig(**(TINY | MODELS[name] | changes))).eval()
    for parameter_name, each in model.named_parameters():
        if each.ndim == 1 and ("norm" not in parameter_name or "indexer" in parameter_name):
            torch.nn.init.normal_(each, std=0.5)  # biases and norms of indexers
    for buffer_name, each in model.named_buffers():
        if buffer_name.endswith("variance_ema"):
            each.fill_(0.02)
    return model


def by_transformers(model: GSAForCausalLM, count: int, **options: Any) -> list[list[int]]:
    tokens, mask = generation.pad_left(PROMPTS, model.device)
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **options)
    return found[:, tokens.shape[1] :].tolist()
