"""megatron-core's GPTModel with the cross-entropy in two passes over the logits."""

from __future__ import annotations

import torch

from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy
from gsa_train.model.mcore.named_parts import NamedGPTModel


class FusedLossGPTModel(NamedGPTModel):
    """The same parameters under the same names; only the loss is calculated otherwise.

    megatron-core's holds a copy of the logits in fp32 and passes over it about ten times.
    """

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Labels [B, L] and this rank's logits [L, B, V / tp] -> losses [B, L], fp32.

        The backward pass writes the logits' gradient over them.
        """
        losses = vocab_parallel_cross_entropy(
            logits.flatten(0, 1),
            labels.t().reshape(-1),
            group=self.pg_collection.tp,
            overwrite_logits=True,
        )
        return losses.view(logits.shape[:2]).t().contiguous()
