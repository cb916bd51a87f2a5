"""Defines the baseline of whole steps: the dense model in plain torch.

The model uses torch.compile for each layer, cuDNN's attention, bf16 weights with fp32 master weights, and fused AdamW.
Optionally, torchao computes its matrix products in float8, with one scale per matrix. The weights have the same layout
as in our model.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gsa_train.config import Config, ModelConfig
from gsa_train.data.batches import MicroBatch
from gsa_train.distributed.parallel import Parallel


def has_float8() -> bool:
    return importlib.util.find_spec("torchao") is not None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x [B, H, L, D], whose halves form the pairs."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.kv_heads, self.head_dim, self.group = m.num_kv_heads, m.head_dim, m.num_heads // m.num_kv_heads
        self.attention_norm = nn.RMSNorm(m.hidden_size, m.norm_epsilon)
        self.qkv = nn.Linear(m.hidden_size, (m.num_heads + 2 * m.num_kv_heads) * m.head_dim, bias=False)
        self.out = nn.Linear(m.num_heads * m.head_dim, m.hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(m.hidden_size, m.norm_epsilon)
        self.up = nn.Linear(m.hidden_size, 2 * m.ffn_hidden_size, bias=False)
        self.down = nn.Linear(m.ffn_hidden_size, m.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (self.kv_heads, self.group + 2, self.head_dim))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in heads.split([self.group, 1, 1], 3))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Head(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(m.hidden_size, m.norm_epsilon)
        self.output = nn.Linear(m.hidden_size, m.vocab_size, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the cross-entropies."""
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class PlainModel(nn.Module):
    def __init__(self, m: ModelConfig) -> None:
        super().__init__()
        if m.qkv_bias or m.qk_norm or m.sandwich_norm or m.tie_embeddings or m.rotary_percent != 1:
            raise ValueError(
                "the baseline has no biases, no norms of heads or results, and no tied embedding"
            )
        self.m = m
        self.embedding = nn.Embedding(m.vocab_size, m.hidden_size)
        self.layers = nn.ModuleList(Layer(m) for _ in range(m.num_layers))
        self.head = Head(m)
        for part in (*self.layers, self.head):
            part.compile(dynamic=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        channels = torch.arange(0, self.m.head_dim, 2, device=tokens.device) / self.m.head_dim
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / self.m.rope_base**channels
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(x, labels)


class Baseline:
    """Implements the members of `step_bench.OurTrainee` that benches use."""

    graph_bytes, warm_up_steps = 0, 0

    def __init__(self, config: Config, parallel: Parallel, float8: bool, lr: float) -> None:
        self.config, self.parallel, self.phase = config, parallel, config.phases[-1]
        train, device = config.train, parallel.device
        self.model = PlainModel(config.model)
        for parameter in self.model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.model.init_std)
        self.model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        if float8:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            recipe = Float8LinearConfig.from_recipe_name("tensorwise")
            convert_to_float8_training(self.model.layers, config=recipe)
        self.weights: list[torch.Tensor] = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=lr,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            weight_decay=train.weight_decay,
            fused=True,
        )

    def step(self, batches: list[MicroBatch], measures: bool = False) -> None:
        tokens = sum(batch.labels.numel() for batch in batches)
        on_gpu = self.parallel.device.type == "cuda"
        total = torch.zeros((), device=self.parallel.device)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else nullcontext():
            for batch in batches:
                loss = self.model(batch.tokens, batch.labels) / tokens
                loss.backward()
                total += loss.detach()
        self.last_loss = total
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, self.config.train.grad_clip or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)

    def close(self) -> None:
        del self.model, self.optimizer, self.masters, self.weights
