"""Compares the cross-entropy by Triton with its reference, also for a vocabulary that ranks share."""

import pytest
import torch

pytest.importorskip("triton")

from layer_kernels import (
    DTYPES,
    assert_as_good,
    poisoned_memory,  # noqa: F401 - pytest finds it here
    run,
)

from gsa_kernels.fused.cross_entropy import op as cross_entropy_op
from gsa_kernels.fused.cross_entropy.op import cross_entropy_and_log_sums, vocab_parallel_cross_entropy
from gsa_kernels.fused.cross_entropy.reference import cross_entropy
from gsa_kernels.fused.cross_entropy.triton_rows import row_statistics, write_gradient


@pytest.mark.parametrize(("rows", "vocabulary"), [(5, 37), (2, 9000), (1, 1)])
def test_cross_entropy(device, rows, vocabulary):
    for dtype in DTYPES:
        logits = (torch.randn(rows, vocabulary, device=device) * 4).to(dtype)
        logits[0, 0] = 60.0
        targets = torch.randint(vocabulary, (rows,), device=device)
        targets[-1] = vocabulary - 1
        grad = torch.randn(rows, device=device)
        results = []
        for overwrite in (False, True, False):
            leaf = logits.clone().requires_grad_()
            held = leaf * 1  # the gradient may overwrite it
            loss = vocab_parallel_cross_entropy(held, targets, overwrite_logits=overwrite)
            results.append([loss.detach(), torch.autograd.grad(loss, leaf, grad)[0]])
        plain = run(lambda x, t=targets: cross_entropy(x, t), [logits], [grad])
        exact = run(lambda x, t=targets: cross_entropy(x, t), [logits.double()], [grad])
        assert_as_good(results[0], plain, exact, dtype)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        grads = [grad, torch.randn(rows, device=device)]
        both = run(lambda x, t=targets: cross_entropy_and_log_sums(x, t), [logits], grads)
        plain, exact = (
            run(lambda x, t=targets: (cross_entropy(x, t), (x * 1.0).logsumexp(-1)), [given], grads)
            for given in (logits.float(), logits.double())
        )
        plain[2] = plain[2].to(dtype)
        assert_as_good(both, plain, exact, dtype)
        assert torch.equal(both[0], results[0][0])


def test_a_second_backward_pass_after_the_logits_are_gone_is_an_error(device):
    """The first pass has overwritten the logits with the gradient, which a second pass would read as logits."""
    targets = torch.zeros(2, dtype=torch.int64, device=device)
    leaf = torch.randn(2, 5, device=device, requires_grad=True)
    for overwrite in (False, True):
        loss = vocab_parallel_cross_entropy(leaf * 1, targets, overwrite_logits=overwrite).sum()
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        if overwrite:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            assert torch.equal(torch.autograd.grad(loss, leaf)[0], first)


def test_cross_entropy_of_a_split_vocabulary(device, monkeypatch):
    """The test runs two ranks in turn, and does their collectives by hand."""
    logits = torch.randn(6, 40, device=device) * 3
    targets = torch.randint(40, (6,), device=device)
    parts = logits.chunk(2, 1)
    statistics = [row_statistics(part.contiguous(), targets, 20 * rank) for rank, part in enumerate(parts)]
    highest = torch.maximum(statistics[0][0], statistics[1][0])

    def all_reduce(tensor, op=None, group=None):
        if tensor.dim() == 1:
            tensor.copy_(highest)
        else:
            tensor.copy_(sum(torch.stack([t * (m - highest).exp(), x]) for m, t, x in statistics))

    monkeypatch.setattr(cross_entropy_op.dist, "all_reduce", all_reduce)
    maximum, total, target_logit = cross_entropy_op._over_ranks(*statistics[1], group=None)
    torch.testing.assert_close(total.log() + maximum - target_logit, cross_entropy(logits, targets))
    grad, of_log_sums = torch.rand(2, 6, device=device)
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        [cross_entropy(leaf, targets), leaf.logsumexp(-1)], leaf, [grad, of_log_sums]
    )
    for rank, part in enumerate(parts):
        out = torch.empty_like(part.contiguous())
        write_gradient(part.contiguous(), targets, maximum, total, grad, 20 * rank, out, of_log_sums)
        torch.testing.assert_close(out, expected.chunk(2, 1)[rank], atol=1e-6, rtol=1e-5)


def test_cross_entropy_names_what_is_wrong(device):
    logits, targets = torch.randn(4, 6, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    for arguments, message in [
        ((logits[0], targets), "logits has shape"),
        ((logits, targets[:2]), "targets has shape"),
        ((logits.double(), targets), "logits has dtype"),
        ((logits.T.contiguous().T, targets), "rows of logits have stride"),
        ((logits, targets.int()), "targets is torch.int32"),
    ]:
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(*arguments)
