"""Compares a sequence in one call with chunks of queries: inputs and tolerances."""

import torch
from kernel_devices import CUDA

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.attention.op import masked_attention

LENGTH = 70
CHUNKS = ((0, 41), (41, LENGTH))
"""Not at borders of tiles of queries or keys, which have 16 to 128."""
BLOCK_CHUNKS = ((0, 16), (16, LENGTH))
"""For blocks of 16."""


def draw(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def document_starts(device: str) -> torch.Tensor:
    """Return int32 [2, L]; documents begin inside chunks, at their first query, and just after it."""
    starts = torch.zeros(2, LENGTH, dtype=torch.int32)
    for row, cuts in enumerate(((20, 41, 60), (36, 42))):
        for cut in cuts:
            starts[row, cut:] = cut
    return starts.to(device)


def visible(starts: torch.Tensor | None, device: str) -> torch.Tensor:
    position = torch.arange(LENGTH, device=device)
    mask = (position[None, :] <= position[:, None]).expand(2, LENGTH, LENGTH)
    return mask if starts is None else mask & (position >= starts[..., None])


def random_mask(starts: torch.Tensor | None, device: str) -> torch.Tensor:
    """Select a random part of each query's causal keys, and the query itself."""
    mask = visible(starts, device) & (torch.rand(2, LENGTH, LENGTH) < 0.5).to(device)
    return mask | torch.eye(LENGTH, dtype=torch.bool, device=device)


def rows_of(tensor: torch.Tensor | None, first: int, last: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:, first:last]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check equal bits where sums run in the same order; compiled code may fuse products with sums differently."""
    assert got.dtype == want.dtype
    if CUDA and got.is_floating_point():
        eps = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=8 * eps, atol=8 * eps)
    else:
        assert torch.equal(got, want)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 6 * 2**-7}[want.dtype]
    torch.testing.assert_close(got.to(want.dtype), want, rtol=tolerance, atol=tolerance)


def attend(q, k, v, gate, grad, **options):  # type: ignore[no-untyped-def]
    """Return output, lse and gradients of q, gate, k and v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, gate)]
    attention = gathered_attention if "lists" in options else masked_attention
    out, lse = attention(*leaves[:3], gate_logits=leaves[3], **options)
    grad_q, grad_k, grad_v, grad_gate = torch.autograd.grad(out, leaves, grad)
    return (out.detach(), lse.transpose(1, 2), grad_q, grad_gate), (grad_k, grad_v)


def indexer(device: str, block: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries (of the blocks' first tokens), keys and weight logits."""
    rows = -(-LENGTH // block)
    return draw(device, 2, rows, 2, 16), draw(device, 2, LENGTH, 16), draw(device, 2, rows, 2)


def of_chunk(
    inputs: tuple[torch.Tensor, ...], first: int, last: int, block: int = 1
) -> tuple[torch.Tensor, ...]:
    q_idx, k_idx, weights = inputs
    rows = slice(first // block, -(-last // block))
    return q_idx[:, rows], k_idx[:, :last], weights[:, rows]
