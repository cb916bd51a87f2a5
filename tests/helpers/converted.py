"""Converts small models to transformers and back in one process."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import gsa_hf  # noqa: F401 - registers the architecture
from gsa_data.tokenize import Tokenizer
from gsa_train.config import Config, PhaseConfig, RopeScalingConfig
from gsa_train.model.mcore.build import Model
from gsa_train.phases import enter_phase
from gsa_train.run_folder.initial_weights import find_initial_weights, load_initial_weights
from helpers.checkpoints import write_checkpoint
from helpers.runs import REPOSITORY
from helpers.single_rank import DENSE, SPARSE, single_rank, tiny_config, tiny_model

TOKENIZER = str(REPOSITORY / "data" / "sample" / "tokenizer.model")
VOCABULARY = 4096
LENGTH = 24

NO_GATES: dict[str, Any] = {"value_gate": False, "output_gate": False}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "standard": {"gsa": {"attention": "dense", **NO_GATES}},
    "sparse-only": {"gsa": {"indexer_activation": "relu", "adaptive_k": "off", **NO_GATES}},
    "gated-only": {"gsa": {"attention": "dense"}},
    "GSA": {},
    "YaRN": {
        "model": {"rope_base": 100.0, "rope_scaling": RopeScalingConfig("yarn", 4.0, 16, 3.0, 0.2, 1.3)},
        "gsa": {"indexer_rope": True, "dense_below": 12},
    },
    "plain, norms": {"gsa": {"indexer_activation": "plain", "indexer_norm": True, "indexer_rope": True}},
    "qsa, window": {"gsa": {"indexer_activation": "qsa", "local_window": 4}},
    "norms, shared selections": {"gsa": {"indexer_norm": True, "selection_reuse": 2}},
    "all gates, of SiLU": {
        "model": {"sandwich_norm": True, "qk_norm": True},
        "gsa": {"key_gate": True, "query_gate": True, "projection_gate": True, "gate_activation": "silu"},
    },
    "headwise, added": {
        "gsa": {
            "key_gate": True, "gate_granularity": "headwise", "gate_form": "additive",
            "gate_activation": "identity",
        },
    },
    "shared": {"gsa": {"query_gate": True, "gate_sharing": "head_shared", "gate_activation": "ns_sigmoid"}},
    "shared, of no input": {
        "gsa": {
            "gate_sharing": "head_shared", "gate_input": "input_independent", "gate_granularity": "headwise",
        },
    },
    "of no input": {"gsa": {"projection_gate": True, "gate_input": "input_independent"}},
    "norm of the output": {"gsa": {"output_gate": False, "output_transform": "rms_norm"}},
    "SiLU of the output": {"gsa": {"value_gate": False, "output_gate": False, "output_transform": "silu"}},
    "experts": {
        "moe": {
            "experts": 8, "top_k": 3, "expert_ffn_hidden_size": 16, "shared_expert_ffn_hidden_size": 24,
            "routed_scale": 1.5,
        },
    },
    "experts with biases in every other layer": {
        "model": {"num_layers": 4},
        "moe": {
            "experts": 4, "expert_ffn_hidden_size": 8, "router_score": "sigmoid", "balancing": "aux_free",
            "first_dense_layers": 1, "layer_interval": 2,
        },
        "gsa": {"attention": "dense"},
    },
    "options": {
        "model": {"qkv_bias": True, "qk_norm": True, "rotary_percent": 0.5, "tie_embeddings": True},
        "gsa": {
            "value_gate": False, "indexer_rope": True, "local_window": 4, "selection_reuse": 2,
            "indexer_temperature": "learned",
        },
    },
}  # fmt: skip
"""The four models of the paper, and cases beyond them."""


def config_of(name: str, **train: Any) -> Config:
    sections = MODELS[name]
    dense = sections.get("gsa", {}).get("attention") == "dense"
    return tiny_config(
        [DENSE if dense else SPARSE],
        model={"vocab_size": VOCABULARY, "head_dim": 8, **sections.get("model", {})},
        gsa=sections.get("gsa", {}),
        moe=sections.get("moe", {}),
        train={"seq_len_tokens": LENGTH, **train},
        data={"tokenizer": TOKENIZER},
    )


def save(model: Model, config: Config, folder: Path) -> Path:
    """Write a checkpoint with a copy of the tokenizer, as in a run."""
    tokenizer = Tokenizer(TOKENIZER)
    data = {"tokenizer_fingerprint": tokenizer.fingerprint}
    return write_checkpoint(folder, 1, model, None, config, tokenizer, data=data)


def some_tokens(rows: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)


@torch.no_grad()
def training_logits(model: Model, phase: PhaseConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Compute logits, fp32 [B, L, V], of sequences that are one document each."""
    enter_phase(model, phase)
    attention_pass = dataclasses.replace(model.runtime.attention_pass, evaluating=True)
    with model.runtime.during(attention_pass):
        logits: torch.Tensor = model.module(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    return logits.float()


@torch.no_grad()
def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Compute logits, fp32 [B, L, V], from an exported folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    logits: torch.Tensor = model(tokens).logits
    return logits.float()


def model_with_weights_of(folder: Path, config: Config, tokenizer: Tokenizer | None = None) -> Model:
    """Load weights as a run with `checkpoint.initial_weights` does."""
    checkpoint = dataclasses.replace(config.checkpoint, initial_weights=str(folder))
    config = dataclasses.replace(config, checkpoint=checkpoint)
    model = tiny_model(config)
    tokenizer = tokenizer or Tokenizer(config.data.tokenizer, config.data.eos_token or None)
    load_initial_weights(config, find_initial_weights(config), model, tokenizer, single_rank())
    return model
