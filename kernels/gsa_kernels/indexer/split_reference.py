"""Splits the indexer's joint projection into queries, key and head weights, and applies RMSNorm and RoPE."""

import torch

from gsa_kernels.checks import compute_dtype


def split_projection(
    together: torch.Tensor,
    heads: int,
    dim: int,
    *,
    has_weights: bool = True,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 1e-5,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Split [L, B, columns] into queries [B, L, heads, dim], keys [B, L, dim] and weight logits [B, L, heads].

    All results are contiguous. Norm and rotation are computed in fp32 (fp64) and rounded once.

    Args:
        together: columns of the queries, the key and the weights. Any further columns are not used
        has_weights: whether `together` has columns of the weights; without them None is returned in their place
        norms: weights [dim] of the RMSNorm of each head's query, and of the RMSNorm of the key; no norm if None
        eps: of both norms, added to the mean square
        tables: cos and sin [L, dim / 2] of the rotary embedding of queries and keys, which acts after the norms on the
            pairs (x[i], x[i + dim / 2]); no rotation if None
    """
    dtype = compute_dtype(together=together)
    sizes = [heads * dim, dim, heads * has_weights]
    queries, keys, weights, _ = together.split([*sizes, together.shape[2] - sum(sizes)], -1)

    def finish(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:  # [L, B, ..., dim]
        x = x.to(dtype)
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, (dim,), norm.to(dtype), eps)
        if tables is not None:
            cos, sin = (table.to(dtype).view(-1, *[1] * (x.ndim - 2), dim // 2) for table in tables)
            first, second = x.chunk(2, -1)
            x = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return x.to(together.dtype).transpose(0, 1).contiguous()

    query_norm, key_norm = norms or (None, None)
    return (
        finish(queries.unflatten(-1, (heads, dim)), query_norm),
        finish(keys, key_norm),
        weights.transpose(0, 1).contiguous() if has_weights else None,
    )
