"""Turns the projections of a layer into attention inputs: split, RoPE on Q and K, gate G2 on V."""

import torch

from gsa_kernels.checks import compute_dtype
from gsa_kernels.fused.gates.reference import sigmoid_gate


def split_rotate_gate(
    qkv: torch.Tensor,
    gate_logits: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    kv_heads: int,
    value_gate: bool,
    output_gate: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return rotated Q and K, V * sigmoid(G2), and the logits of G1, batch first, computed in fp32 (fp64).

    G query heads share a key-value head. The rotation applies to the pairs (x[i], x[i + D / 2]).

    Args:
        qkv: [L, B, Hkv (G + 2) D]: per key-value head its G queries, the key, the value
        gate_logits: [L, B, Hkv rows]: per key-value head D rows of G2 if `value_gate`, then G D rows of G1 if
            `output_gate`; None without gates
        cos, sin: [L, D / 2], of the angles

    Returns:
        q [B, L, Hkv G, D], k and v [B, L, Hkv, D], G1's logits [B, L, Hkv, G, D] or None
    """
    dtype, size = compute_dtype(qkv=qkv), 2 * cos.shape[1]
    heads = qkv.unflatten(-1, (kv_heads, -1, size)).transpose(0, 1)  # [B, L, Hkv, G + 2, D]
    q, k, v = heads[..., :-2, :], heads[..., -2, :], heads[..., -1, :]
    gates = None
    if gate_logits is not None:
        rows = gate_logits.unflatten(-1, (kv_heads, -1, size)).transpose(0, 1)
        if value_gate:
            v = sigmoid_gate(v, rows[..., 0, :])
        if output_gate:
            gates = rows[..., 1:, :] if value_gate else rows
    cos, sin = (table.to(dtype)[None, :, None] for table in (cos, sin))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.to(dtype).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    return rotate(q.flatten(2, 3)), rotate(k), v, gates
