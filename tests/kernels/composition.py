"""A Gated Sparse Attention layer composed of `gsa_kernels` operations, on the weights the oracle takes."""

import torch
from oracle import LayerOptions

from gsa_kernels import reference as ops


def gsa_layer(
    h: torch.Tensor,
    weights: dict[str, torch.Tensor],
    o: LayerOptions,
    document_ids: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """h [B, L, d], document_ids int [B, L] -> what the oracle returns, with a batch dimension."""
    length = h.shape[1]
    positions = torch.arange(length)
    leaders = torch.arange(0, length, o.selection_block)

    q = rotate((h @ weights["w_q"].T).unflatten(-1, (o.num_heads, o.head_dim)), positions, o.rope_base)
    k = rotate((h @ weights["w_k"].T).unflatten(-1, (o.num_kv_heads, o.head_dim)), positions, o.rope_base)
    v = h @ weights["w_v"].T
    if o.value_gate:
        v = ops.sigmoid_gate(v, h @ weights["w_vg"].T + weights["b_vg"])
    v = v.unflatten(-1, (o.num_kv_heads, o.head_dim))

    hidden = h.detach()
    q_idx = (hidden[:, leaders] @ weights["w_iq"].T).unflatten(-1, (o.indexer_heads, o.indexer_dim))
    k_idx = hidden @ weights["w_ik"].T
    if o.indexer_rope:
        q_idx = rotate(q_idx, leaders, o.rope_base)
        k_idx = rotate(k_idx[:, :, None], positions, o.rope_base)[:, :, 0]
    sigmoid = o.indexer_activation == "sigmoid"
    scores = ops.indexer_scores(
        q_idx,
        k_idx,
        hidden[:, leaders] @ weights["w_iw"].T,
        score_bias=weights["b_j"] if sigmoid else None,
        weight_bias=weights["c_j"] if sigmoid else None,
        activation=o.indexer_activation,
    )

    visible = ops.causal_mask(length, document_ids=document_ids)
    visible_to_leader = ops.causal_mask(length, query_positions=leaders, document_ids=document_ids)
    _, variance = ops.score_moments(scores, visible_to_leader)
    budget = ops.adaptive_budget(
        variance,
        torch.tensor(o.variance_ema, dtype=torch.float64),
        visible_to_leader.sum(-1),
        k_base=o.k_base,
        k_min=o.k_min,
        k_max=o.k_max,
        adaptive_k=o.adaptive_k,
        dense_below=o.dense_below,
    )
    top_k = ops.select_top_k(scores, visible_to_leader, budget)
    window = ops.local_window_mask(length, o.local_window)
    selected = (ops.expand_block_selection(top_k, o.selection_block, length) | window) & visible

    dense = o.attention == "dense"
    attended = ops.sparse_attention(q, k, v, visible if dense else selected, return_probs=True)
    assert attended.head_sum_probs is not None
    out = attended.out.flatten(2)
    if o.output_gate:
        out = ops.sigmoid_gate(out, h @ weights["w_og"].T + weights["b_og"])

    support = visible_to_leader if dense else (top_k | window[leaders]) & visible_to_leader
    target = ops.renormalise_target(ops.sum_over_blocks(attended.head_sum_probs, o.selection_block), support)
    return {
        "out": out @ weights["w_o"].T,
        "kl": ops.indexer_kl(scores, target, support, o.inverse_temperature),
        "selected": selected,
        "budget": budget,
        "variance": variance,
    }


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding of x [B, L, H, D] at `positions` [L], rotate-half layout."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = (positions.to(x.dtype)[:, None] * frequencies)[None, :, None]
    first, second = x.split(half, dim=-1)
    return torch.cat(
        (
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ),
        dim=-1,
    )


def random_weights(o: LayerOptions, hidden_size: int, seed: int) -> dict[str, torch.Tensor]:
    """fp64 leaves with gradient, for the parts that `o` switches on."""
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
