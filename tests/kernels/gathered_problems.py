"""Creates masks for the tests of attention over key lists."""

import torch


def random_mask(batch, length, chance, device):
    """Let every query select itself and each earlier key with the given chance."""
    mask = (torch.rand(batch, length, length, device=device) < chance).tril()
    return mask | torch.eye(length, dtype=torch.bool, device=device)


def document_mask(batch, length, device):
    """Select the causal keys of packed documents, which begin at different positions in each sequence."""
    position = torch.arange(length, device=device)
    cuts = torch.tensor([[length // 3 + b, length // 2 + 2 * b] for b in range(batch)], device=device)
    document = (position[None, :, None] >= cuts[:, None, :]).sum(-1)
    return (document[:, :, None] == document[:, None, :]).tril()
