"""Random weights of a Gated Sparse Attention layer, as the oracle takes them."""

import torch
from oracle import LayerOptions


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
