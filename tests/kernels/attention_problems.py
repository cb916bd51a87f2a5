"""Computes attention in torch, and the tolerance for the kernels."""

import torch

from gsa_kernels.attention.reference import sparse_attention

NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v", "grad_gate")
GPUS = ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 99))
"""Dtypes, and the KiB of shared memory of a GPU with smaller tiles. None: of the GPU at hand."""


def causal(batch, length, starts=None):
    """Return bool [B, L, L], with `starts` int32 [B, L] only within the document."""
    position = torch.arange(length, device="cpu" if starts is None else starts.device)
    mask = (position[None, :] <= position[:, None]).expand(batch, length, length)
    return mask if starts is None else mask & (position >= starts[..., None])


def document_starts(batch, length, device):
    """Return the starts of packed documents, int32 [B, L], which begin at different positions in each sequence."""
    starts = torch.zeros(batch, length, dtype=torch.int32)
    for b in range(batch):
        for cut in (length // 3 + b, length // 2 + 2 * b):
            starts[b, min(cut, length) :] = min(cut, length)
    return starts.to(device)


def random_mask(batch, length, chance, device):
    """Let every query select itself and each earlier key with the given chance."""
    mask = (torch.rand(batch, length, length, device=device) < chance).tril()
    return mask | torch.eye(length, dtype=torch.bool, device=device)


def make_inputs(batch, length, heads, kv_heads, dim, dtype, device):
    return [
        torch.randn(batch, length, n, dim, dtype=dtype).to(device) for n in (heads, kv_heads, kv_heads, heads)
    ]


def from_query(inputs, first):
    """Return the inputs with only the queries from `first` on; the gate may be None."""
    q, k, v, gate = inputs
    return [q[:, first:], k, v, None if gate is None else gate[:, first:]]


def differentiated(attend, inputs, grad):
    """Return output, lse and the gradients of inputs that are not None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, [x for x in leaves if x is not None], grad)]


def reference(inputs, mask, grad):
    """Attend in fp64."""

    def attend(q, k, v, gate):
        found = sparse_attention(q, k, v, mask, return_lse=True)
        return (found.out if gate is None else found.out * torch.sigmoid(gate)), found.lse

    return differentiated(attend, [None if x is None else x.double() for x in inputs], grad.double())


def plain(inputs, mask, grad):
    """Attend in the dtype of the inputs, with plain torch operations."""

    def attend(q, k, v, gate):
        ratio = q.shape[2] // k.shape[2]
        keys, values = k.repeat_interleave(ratio, 2), v.repeat_interleave(ratio, 2)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), values)
        return (out if gate is None else out * torch.sigmoid(gate)), logits.float().logsumexp(-1)

    return differentiated(attend, inputs, grad)


def check(inputs, mask, *attends):
    """Check that the error of each result is at most twice the error of plain torch in the same dtype. Both errors are
    differences from fp64 results. All functions in `attends` get the same output gradient. Return their results."""
    grad = torch.randn_like(inputs[0])
    wanted, other = reference(inputs, mask, grad), plain(inputs, mask, grad)
    # Where torch's error vanishes (a single key has probability exactly 1), the rounding of sums over the head remains.
    floor = (
        max(4.0, inputs[0].shape[-1] ** 0.5)
        * torch.finfo(inputs[0].dtype).eps
        * max(1.0, *(value.abs().max().item() for value in wanted))
    )
    results = [differentiated(attend, inputs, grad) for attend in attends]
    for number, got in enumerate(results):
        assert len(got) == len(wanted)
        for name, want, torch_value, value in zip(NAMES, wanted, other, got, strict=False):
            error = (value.double() - want).abs().max()
            allowed = 2 * (torch_value.double() - want).abs().max() + floor
            assert error <= allowed, f"{number} {name}: error {error:.2e}, allowed {allowed:.2e}"
    return results
