"""Make small random models, and compute their tokens and log-probabilities by transformers and by vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

import gsa_hf

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "k_min": 8,
    "k_max": 32,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
OTHER_GATES = {"key_gate": True, "query_gate": True, "sandwich_norm": True, "qk_norm": True, "qkv_bias": True}
CONSTANT_GATES = {"gate_input": "input_independent", "gate_granularity": "headwise"}
SHARED_GATES = {"gate_sharing": "head_shared", "gate_form": "additive"}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "window_rotary": {"local_window": 24, "indexer_rope": True},
    "relu_norm_8_heads": {"indexer_activation": "relu", "indexer_norm": True, "index_n_heads": 8},
    "shared_layers": {"index_topk_freq": 2, "adaptive_k": "off", "dense_below": 40},
    "other_gates": {**OTHER_GATES, "projection_gate": True},
    "experts": {**EXPERTS, **CONSTANT_GATES, "router_bias": True, "scoring_func": "sigmoid"},
    "dense_layers": {
        **SHARED_GATES,
        "layer_types": ["full_attention", "indexed_attention"] * 2,
        "tie_word_embeddings": True,
    },
}
NEW_TOKENS = 24
REPETITION_PENALTY = 1e3
"""So high that no token occurs twice in a prompt and its continuation. Repeated tokens would have equal scores in the
first layer, and rounding would decide which of them is selected."""


def save_model(folder: Path, options: dict[str, Any]) -> str:
    """Save a random model. Biases and `variance_ema` get values other than 0, so that they influence the output."""
    torch.manual_seed(11)
    model = gsa_hf.GSAForCausalLM(gsa_hf.GSAConfig(**{**SIZES, **options}))
    for name, tensor in model.state_dict().items():
        if name.endswith("variance_ema"):
            tensor.fill_(0.03)
        elif name.endswith(("bias", "norm.weight", "layernorm.weight")):
            tensor += torch.randn_like(tensor) * 0.3
    model.save_pretrained(folder)
    return str(folder)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randperm(SIZES["vocab_size"], generator=generator)[:length].tolist() for length in lengths]


MIXED_LENGTHS = prompts(7, 33, 90, 150)


def by_transformers(folder: str, batch: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """Return the greedy tokens, and the log-probabilities of all prompt tokens except the first of each prompt."""
    model = gsa_hf.GSAForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, log_probs = [], []
    for prompt in batch:
        x = torch.tensor([prompt])
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"max_new_tokens": NEW_TOKENS, "repetition_penalty": REPETITION_PENALTY}
        made = model.generate(x, attention_mask=torch.ones_like(x), **options)
        tokens.append(made[0, len(prompt) :].tolist())
        with torch.no_grad():
            log_probs.append(model(x).logits[0, :-1].log_softmax(-1).gather(1, x[0, 1:, None])[:, 0])
    return tokens, torch.cat(log_probs)


@contextmanager
def engine(folder: str, **options: Any) -> Iterator[LLM]:
    """Start vLLM with pages of 32 tokens. A step has at most 48 tokens, so long prompts are divided into chunks."""
    defaults = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 48,
        "block_size": 32,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 16_000_000,
        "distributed_executor_backend": "uni",
    }
    llm = LLM(model=folder, **{**defaults, **options})
    yield llm
    llm.llm_engine.engine_core.shutdown()


def by_vllm(llm: LLM, batch: list[list[int]], **sampling: Any) -> list[Any]:
    options = {"temperature": 0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "detokenize": False}
    options |= {"repetition_penalty": REPETITION_PENALTY, **sampling}
    inputs = [{"prompt_token_ids": prompt} for prompt in batch]
    return llm.generate(inputs, SamplingParams(**options), use_tqdm=False)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def log_probs_of(outputs: list[Any]) -> torch.Tensor:
    """Return the log-probabilities of all prompt tokens except the first of each prompt."""
    found = []
    for output in outputs:
        pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        found += [of_token[token].logprob for of_token, token in pairs]
    return torch.tensor(found)
