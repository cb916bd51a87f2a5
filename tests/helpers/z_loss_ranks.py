"""Compares the z-loss of a vocabulary that two ranks share with plain torch in fp64: `z_loss_ranks.py` on two ranks."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

import torch

from gsa_train.config import ParallelConfig, TrainConfig
from gsa_train.distributed.parallel import init_parallel, shutdown_parallel
from gsa_train.losses import cross_entropy, training_losses
from helpers.interpreter import mend_interpreter

TOKENS, BATCH, VOCABULARY, COEFF = 6, 2, 40, 0.3


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [L, B, V], labels [B, L] and the gradients of both losses [2, B, L]."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(TOKENS, BATCH, VOCABULARY, generator=generator)
    labels = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    return logits, labels, torch.rand(2, BATCH, TOKENS, generator=generator)


def exact(coeff: float = COEFF) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both losses and the gradient of the logits, in fp64."""
    logits, labels, grads = problem()
    leaf = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(leaf.flatten(0, 1), labels.t().flatten(), reduction="none")
    both = torch.stack([losses.view(TOKENS, BATCH).t(), coeff * leaf.logsumexp(-1).square().t()])
    both.backward(grads.double())
    assert leaf.grad is not None
    return both.detach(), leaf.grad


def check_losses(group: torch.distributed.ProcessGroup) -> None:
    expected, gradient = exact()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for fused, objective in ((False, cross_entropy), (True, cross_entropy), (True, other_objective)):
            logits, labels, grads = problem()
            mine = logits.chunk(group.size(), -1)[group.rank()]
            leaf = mine.to(dtype).requires_grad_()
            train = TrainConfig(z_loss_coeff=COEFF)
            losses = training_losses(objective, leaf * 1, labels, group, fused, train)
            losses.backward(grads)
            assert losses.dtype == torch.float32
            torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
            own = gradient.chunk(group.size(), -1)[group.rank()]
            torch.testing.assert_close(leaf.grad.double(), own, rtol=tolerance, atol=tolerance)


def other_objective(*given):
    return cross_entropy(*given)


def main() -> None:
    mend_interpreter()
    parallel = init_parallel(ParallelConfig(tensor=2), seed=1)
    check_losses(parallel.groups.tp)
    shutdown_parallel()


if __name__ == "__main__":
    main()
