"""Defines the cross-entropy of each token over the vocabulary."""

import torch


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return -log softmax(logits)[target] in fp32 (fp64 if the logits are fp64).

    Args:
        logits: [N, V]
        targets: int64 [N], 0 <= target < V

    Returns:
        [N], fp32 (fp64)
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(wide, targets, reduction="none")
