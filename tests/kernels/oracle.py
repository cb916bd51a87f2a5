"""Computes a Gated Sparse Attention layer in explicit loops in fp64, without code from `gsa_kernels`.

The code follows the definition: it computes one query t, one head and one key at a time. S_t is the set of the k_t
keys that query t selects. G1 and G2 are gates. Autograd computes the gradients. The order of the steps is:

    h -> Q, K, V -> G2 on V -> RoPE on Q, K -> indexer scores -> k_t, S_t -> softmax over S_t -> G1 -> W_O
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Yarn:
    """Describes the extension of the rotary embedding (arXiv 2309.00071, section 3.4)."""

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class LayerOptions:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    indexer_heads: int
    indexer_dim: int
    k_base: int
    k_min: int
    k_max: int
    attention: Literal["dense", "sparse"] = "sparse"
    """dense is phase 1: the KL covers all causal keys. sparse is phase 2: the KL covers S_t."""
    value_gate: bool = True
    output_gate: bool = True
    indexer_activation: Literal["sigmoid", "relu", "plain", "qsa"] = "sigmoid"
    """plain and qsa are sigmoid and relu without head weights."""
    indexer_norm: bool = False
    norm_epsilon: float = 1e-5
    adaptive_k: Literal["inverse", "direct", "off"] = "inverse"
    dense_below: int = 0
    variance_ema: float = 0.0
    rope_base: float = 10_000.0
    yarn: "Yarn | None" = None
    indexer_rope: bool = False
    local_window: int = 0
    inverse_temperature: float = 1.0


def gsa_layer(
    h: torch.Tensor,
    weights: dict[str, torch.Tensor],
    options: LayerOptions,
    document_ids: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Run one sequence through one layer.

    Args:
        h: [L, d], fp64
        weights: matrices are [out, in], as in `torch.nn.Linear`, and a head's outputs are contiguous. Required are w_q,
            w_k, w_v, w_o, w_iq [HI * DI, d], w_ik [DI, d] and w_iw [HI, d]; with gates also w_vg, b_vg, w_og and b_og;
            with a sigmoid indexer also b_j [HI] and c_j [HI]; with a plain indexer also b_j; with norms also n_iq and
            n_ik [DI].
        document_ids: [L]; None: one document

    Returns:
        out [L, d]; kl [L] and, as numbers without gradient, budget [L] and variance [L]; selected bool [L, L], S_t of
        every query.
    """
    length = h.shape[0]
    o = options
    documents = [0] * length if document_ids is None else list(document_ids)
    group = o.num_heads // o.num_kv_heads

    # Projections, the value gate, and rotation give vectors indexed [position][head].
    q, k, v = [], [], []
    for t in range(length):
        value = weights["w_v"] @ h[t]
        if o.value_gate:
            value = value * _sigmoid(weights["w_vg"] @ h[t] + weights["b_vg"])
        v.append(_heads(value, o.num_kv_heads))
        size = 1.0 if o.yarn is None else o.yarn.attention_factor
        q.append([size * _rotate(x, t, o) for x in _heads(weights["w_q"] @ h[t], o.num_heads)])
        k.append([size * _rotate(x, t, o) for x in _heads(weights["w_k"] @ h[t], o.num_kv_heads)])

    def sees(t: int, s: int) -> bool:
        return s <= t and documents[s] == documents[t]

    scores: dict[int, dict[int, torch.Tensor]] = {}
    top_k: dict[int, set[int]] = {}
    budgets, variances = [], []
    for t in range(length):
        visible = [s for s in range(length) if sees(t, s)]
        scores[t] = _indexer_row(h.detach(), weights, o, t, visible)
        values = {s: score.item() for s, score in scores[t].items()}
        number = len(visible)
        mean = math.fsum(values.values()) / number
        variance = math.fsum((x - mean) ** 2 for x in values.values()) / number
        budget = len(visible) if len(visible) < o.dense_below else min(_budget(o, variance), len(visible))
        ranking = sorted(visible, key=lambda s: (-values[s], s))
        top_k[t] = set(ranking[:budget])
        budgets.append(budget)
        variances.append(variance)

    selected = []
    for t in range(length):
        window = {s for s in range(length) if sees(t, s) and t - s < o.local_window}
        selected.append(top_k[t] | window)

    # This part computes attention, the output gate and W_O.
    out_rows, probs = [], []
    for t in range(length):
        attended = (
            sorted(selected[t]) if o.attention == "sparse" else [s for s in range(length) if sees(t, s)]
        )
        head_outputs, head_probs = [], []
        for head in range(o.num_heads):
            kv = head // group
            logits = [_dot(q[t][head], k[s][kv]) / math.sqrt(o.head_dim) for s in attended]
            p = _softmax(logits)
            head_probs.append({s: x.item() for s, x in zip(attended, p, strict=True)})
            output = torch.zeros_like(v[0][0])
            for s, x in zip(attended, p, strict=True):
                output = output + x * v[s][kv]
            head_outputs.append(output)
        concatenated = torch.cat(head_outputs)
        if o.output_gate:
            concatenated = concatenated * _sigmoid(weights["w_og"] @ h[t] + weights["b_og"])
        out_rows.append(weights["w_o"] @ concatenated)
        probs.append(head_probs)

    # This part computes the indexer loss.
    kl_rows = []
    for t in range(length):
        support = sorted(selected[t]) if o.attention == "sparse" else sorted(scores[t])
        target = [
            sum(probs[t][head].get(s, 0.0) for head in range(o.num_heads)) / o.num_heads for s in support
        ]
        total = sum(target)
        model = _softmax([o.inverse_temperature * scores[t][s] for s in support])
        kl = h.new_zeros(())
        for p, model_p in zip(target, model, strict=True):
            if p > 0:
                kl = kl + p / total * (math.log(p / total) - model_p.log())
        kl_rows.append(kl)

    return {
        "out": torch.stack(out_rows),
        "kl": torch.stack(kl_rows),
        "budget": torch.tensor(budgets),
        "variance": torch.tensor(variances, dtype=torch.float64),
        "selected": torch.tensor([[s in selected[t] for s in range(length)] for t in range(length)]),
    }


def _indexer_row(
    h: torch.Tensor, weights: dict[str, torch.Tensor], o: LayerOptions, t: int, keys: list[int]
) -> dict[int, torch.Tensor]:
    """Return I[t, s] for every s in `keys`."""
    queries = _heads(weights["w_iq"] @ h[t], o.indexer_heads)
    if o.indexer_norm:
        queries = [_norm(x, weights["n_iq"], o) for x in queries]
    if o.indexer_rope:
        queries = [_rotate(x, t, o) for x in queries]
    weighted = o.indexer_activation in ("sigmoid", "relu")
    head_weights = weights["w_iw"] @ h[t] if weighted else h.new_ones(o.indexer_heads)
    row = {}
    for s in keys:
        key = weights["w_ik"] @ h[s]
        if o.indexer_norm:
            key = _norm(key, weights["n_ik"], o)
        if o.indexer_rope:
            key = _rotate(key, s, o)
        score = h.new_zeros(())
        for j in range(o.indexer_heads):
            product = _dot(queries[j], key) / math.sqrt(o.indexer_dim)
            if o.indexer_activation == "sigmoid":
                weight = _sigmoid(head_weights[j] + weights["c_j"][j])
                score = score + weight * _sigmoid(product + weights["b_j"][j])
            elif o.indexer_activation == "plain":
                score = score + _sigmoid(product + weights["b_j"][j])
            elif product.item() > 0:
                score = score + head_weights[j] * product
        row[s] = score
    return row


def _budget(o: LayerOptions, variance: float) -> int:
    """Compute k_t before the number of causal keys limits it."""
    if o.adaptive_k == "off" or o.variance_ema == 0:
        wanted = float(o.k_base)
    elif o.adaptive_k == "inverse":
        wanted = o.k_base * o.variance_ema / variance if variance > 0 else math.inf
    else:
        wanted = o.k_base * variance / o.variance_ema
    if wanted >= o.k_max:
        return o.k_max
    return max(math.floor(wanted), o.k_min)


def _rotate(x: torch.Tensor, position: int, o: LayerOptions) -> torch.Tensor:
    """Apply the rotary embedding in the rotate-half layout: element i is paired with element i + D / 2."""
    half = len(x) // 2
    first, second = [], []
    for i in range(half):
        angle = position * _rate(i, len(x), o)
        cos, sin = math.cos(angle), math.sin(angle)
        first.append(x[i] * cos - x[i + half] * sin)
        second.append(x[i + half] * cos + x[i] * sin)
    return torch.stack(first + second)


def _rate(i: int, channels: int, o: LayerOptions) -> float:
    """Return the rotation rate (angle per position) of the i-th channel pair.

    YaRN computes the index of the pair that rotates `beta_fast` times over the original length, and rounds the index
    down. The index for `beta_slow` is rounded up. Between these two pairs, the ratio of the returned rate to the
    original rate falls linearly from 1 to 1 / `factor`.
    """
    rate: float = o.rope_base ** (-2 * i / channels)
    if o.yarn is None:
        return rate
    turns = {}
    for beta in (o.yarn.beta_fast, o.yarn.beta_slow):
        # This solves rate * original length = 2 pi beta for i.
        turns[beta] = channels / 2 * math.log(o.yarn.original_length / (2 * math.pi * beta), o.rope_base)
    first = max(0, math.floor(turns[o.yarn.beta_fast]))
    last = min(channels - 1, math.ceil(turns[o.yarn.beta_slow]))
    slowed = min(1.0, max(0.0, (i - first) / (last - first)))
    return slowed * rate / o.yarn.factor + (1 - slowed) * rate


def _norm(x: torch.Tensor, weight: torch.Tensor, o: LayerOptions) -> torch.Tensor:
    return weight * x / torch.sqrt(_dot(x, x) / len(x) + o.norm_epsilon)


def _heads(x: torch.Tensor, heads: int) -> list[torch.Tensor]:
    size = len(x) // heads
    return [x[i * size : (i + 1) * size] for i in range(heads)]


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum()


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _softmax(logits: list[torch.Tensor]) -> list[torch.Tensor]:
    largest = max(x.item() for x in logits)
    exponentials = [torch.exp(x - largest) for x in logits]
    total = torch.stack(exponentials).sum()
    return [x / total for x in exponentials]


def random_weights(o: LayerOptions, hidden_size: int, seed: int) -> dict[str, torch.Tensor]:
    """Draw fp64 leaves with gradient for the parts that `o` switches on."""
    generator = torch.Generator().manual_seed(seed)
    query_size, kv_size = o.num_heads * o.head_dim, o.num_kv_heads * o.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "w_q": (query_size, hidden_size),
        "w_k": (kv_size, hidden_size),
        "w_v": (kv_size, hidden_size),
        "w_o": (hidden_size, query_size),
        "w_iq": (o.indexer_heads * o.indexer_dim, hidden_size),
        "w_ik": (o.indexer_dim, hidden_size),
    }
    if o.indexer_activation in ("sigmoid", "relu"):
        sizes["w_iw"] = (o.indexer_heads, hidden_size)
    if o.value_gate:
        sizes |= {"w_vg": (kv_size, hidden_size), "b_vg": (kv_size,)}
    if o.output_gate:
        sizes |= {"w_og": (query_size, hidden_size), "b_og": (query_size,)}
    if o.indexer_activation == "sigmoid":
        sizes |= {"b_j": (o.indexer_heads,), "c_j": (o.indexer_heads,)}
    if o.indexer_activation == "plain":
        sizes["b_j"] = (o.indexer_heads,)
    if o.indexer_norm:
        sizes |= {"n_iq": (o.indexer_dim,), "n_ik": (o.indexer_dim,)}
    weights = {}
    for name, size in sizes.items():
        scale = 1.0 if name.startswith("b_") or name == "c_j" else hidden_size**-0.5
        weights[name] = scale * torch.randn(size, generator=generator, dtype=torch.float64)
    return {name: weight.requires_grad_() for name, weight in weights.items()}
