"""Defines what several benches run: the shapes of the reference models, random inputs, and torch's dense attention."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gsa_kernels.packed_mask import pack_mask
from gsa_kernels.types import Indexer

DEVICE, DTYPE = "cuda", torch.bfloat16
INDEXER_HEADS, INDEXER_SIZE = 4, 64
K_BASE, K_MIN, K_MAX = 2048, 256, 4096
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""Backends of decoding. MATH is left out, because it copies the cache several times."""


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    head_size: int = 128


USUAL = ("1.7B", "7B")
"""Names in SHAPES of the reference models, which a bench runs by default."""

SHAPES = {shape.name: shape for shape in (Shape("1.7B", 16, 4), Shape("7B", 32, 8))}


@dataclass(frozen=True)
class AttentionInputs:
    """Holds tensors [B, L, heads, D], which require gradients except `grad`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    output_gate: torch.Tensor
    """Logits of G1, with the shape of q."""
    value_gate: torch.Tensor
    """Logits of G2, with the shape of v."""
    grad: torch.Tensor
    """Gradient of the output, with the shape of q."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.q, self.k, self.v, self.output_gate, self.value_gate]


def attention_inputs(shape: Shape, length: int) -> AttentionInputs:
    q, gate, grad = (normal(1, length, shape.heads, shape.head_size) for _ in range(3))
    k, v, value_gate = (normal(1, length, shape.kv_heads, shape.head_size) for _ in range(3))
    inputs = AttentionInputs(q, k, v, gate, value_gate, grad)
    for leaf in inputs.leaves:
        leaf.requires_grad_()
    return inputs


def leaves_of(indexer: Indexer) -> list[torch.Tensor]:
    tensors = indexer.queries, indexer.keys, indexer.head_weight_logits
    return [*tensors, *(x for x in (indexer.score_bias, indexer.head_weight_bias) if x is not None)]


def random_indexer(length: int, likeness: float = 0.0, heads: int = INDEXER_HEADS) -> Indexer:
    """Draw tensors that require gradients.

    Args:
        likeness: similarity of the 32 queries of a tile, 0 (independent) to 1 (equal). Similar queries select more keys
            in common.
    """

    def alike(*inner: int) -> torch.Tensor:
        own = normal(1, length, *inner)
        shared = normal(1, -(-length // 32), *inner).repeat_interleave(32, 1)[:, :length]
        return likeness**0.5 * shared + (1 - likeness) ** 0.5 * own

    indexer = Indexer(
        alike(heads, INDEXER_SIZE),
        # The keys' scale of 1.5 gives logits a standard deviation of 1.5, with which sigmoids do not saturate.
        1.5 * normal(1, length, INDEXER_SIZE),
        alike(heads),
        normal(heads),
        normal(heads),
    )
    for leaf in leaves_of(indexer):
        leaf.requires_grad_()
    return indexer


def without_biases(indexer: Indexer, activation: Literal["sigmoid", "relu"]) -> Indexer:
    return replace(indexer, score_bias=None, head_weight_bias=None, activation=activation)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def random_packed_mask(length: int, selected: int) -> torch.Tensor:
    """Draw a packed mask, int32 [1, L, ceil(L / 32)]. Each causal key of query t is selected with probability `selected
    / (t + 1)`. Key 0 is always selected."""
    keys = torch.arange(length, device=DEVICE)
    parts = []
    for rows in keys.split(1024):  # the mask of all rows would be large
        chance = (selected / (rows[:, None] + 1)).clamp(max=1)
        chosen = torch.rand(1, len(rows), length, device=DEVICE) < chance
        parts.append(pack_mask((chosen | (keys == 0)) & (keys <= rows[:, None])))
    return torch.cat(parts, 1)


def dense_attention(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Run dense causal attention with one torch backend, for q [B, H, L, D] and k and v [B, Hkv, L, D]. On an H200 at
    32K tokens, cuDNN is fastest if these tensors are contiguous, and flash attention if they are transposed views of
    [B, L, H, D]."""
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def gated_dense(inputs: AttentionInputs) -> tuple[torch.Tensor, ...]:
    """Compute what GSA with all keys must give: output and gradients of `inputs.leaves`, in fp32."""
    x = inputs
    v = x.v.float() * x.value_gate.float().sigmoid()
    heads_first = (t.float().transpose(1, 2) for t in (x.q, x.k, v))
    out = dense_attention(SDPBackend.MATH, *heads_first).transpose(1, 2) * x.output_gate.float().sigmoid()
    return out, *torch.autograd.grad(out, x.leaves, x.grad.float())


@dataclass(frozen=True)
class Dense:
    """Runs dense attention of one backend, for inputs in its fastest layout."""

    backend: SDPBackend
    leaves: list[torch.Tensor]
    grad: torch.Tensor

    def forward(self) -> torch.Tensor:
        return dense_attention(self.backend, *self.leaves)

    def both(self) -> tuple[torch.Tensor, ...]:
        """Return output and gradients of q, k and v."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.leaves, self.grad)


def cudnn(inputs: AttentionInputs) -> Dense:
    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.detach().transpose(1, 2).contiguous()

    leaves = [copied(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return Dense(SDPBackend.CUDNN_ATTENTION, leaves, copied(inputs.grad))


def flash(inputs: AttentionInputs) -> Dense:
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    return Dense(SDPBackend.FLASH_ATTENTION, leaves, inputs.grad.transpose(1, 2))
