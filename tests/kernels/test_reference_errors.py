"""Tests that errors for wrong arguments name the argument, its value and the remedy."""

from collections.abc import Callable

import pytest
import torch

from gsa_kernels import reference as ops

BOOL = torch.ones(1, 4, 4, dtype=torch.bool)
ROWS = torch.rand(1, 4, 4)
Q, KV = torch.rand(1, 4, 4, 2), torch.rand(1, 4, 2, 2)
INDEXER = (torch.rand(1, 4, 2, 3), torch.rand(1, 4, 3), torch.rand(1, 4, 2))
LIMITS = {"k_base": 4, "k_min": 2, "k_max": 8}


def budget(**changes: object) -> torch.Tensor:
    arguments = {"num_causal": torch.ones(1, 4, dtype=torch.int64), **LIMITS, "adaptive_k": "off", **changes}
    return ops.adaptive_budget(torch.rand(1, 4), torch.tensor(0.1), **arguments)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "positions": (
        lambda: ops.causal_mask(4, query_positions=torch.zeros(1, 3)),
        r"query_positions has shape \(1, 3\)",
    ),
    "indexer key per head": (
        lambda: ops.indexer_scores(torch.rand(1, 4, 2, 3), torch.rand(1, 4, 2, 3), torch.rand(1, 4, 2)),
        "k_idx has shape",
    ),
    "relu biases": (
        lambda: ops.indexer_scores(*INDEXER, score_bias=torch.zeros(2), activation="relu"),
        "score_bias is given with activation 'relu'",
    ),
    "activation": (lambda: ops.indexer_scores(*INDEXER, activation="gelu"), "activation is 'gelu'"),
    "integer scores": (lambda: ops.score_moments(ROWS.long(), BOOL), "scores has dtype torch.int64"),
    "float mask": (lambda: ops.score_moments(ROWS, ROWS), "causal has dtype torch.float32"),
    "mask shape": (lambda: ops.score_moments(ROWS, BOOL[0]), r"causal has shape \(4, 4\)"),
    "limits": (lambda: budget(k_min=9), "k_max is 8, below k_min 9"),
    "k_min": (lambda: budget(k_min=0), "k_min is 0"),
    "adaptive_k": (lambda: budget(adaptive_k="adaptive"), "adaptive_k is 'adaptive'"),
    "float counts": (lambda: budget(num_causal=torch.ones(1, 4)), "num_causal has dtype"),
    "float budget": (lambda: ops.select_top_k(ROWS, BOOL, torch.ones(1, 4)), "budget has dtype"),
    "window": (lambda: ops.local_window_mask(4, -1, query_positions=torch.arange(4)), "window is -1"),
    "heads": (lambda: ops.sparse_attention(Q[:, :, :3], KV, KV, BOOL), "q has 3 heads and k has 2"),
    "head size": (lambda: ops.sparse_attention(Q, KV[..., :1], KV, BOOL), "k has shape"),
    "values": (lambda: ops.sparse_attention(Q, KV, KV[:, :3], BOOL), "v has shape"),
    "recall": (
        lambda: ops.sparse_attention(Q, KV, KV, BOOL, recall_among=BOOL[:, :3]),
        "recall_among has shape",
    ),
    "gate": (lambda: ops.sigmoid_gate(Q, Q[0]), "gate_logits has shape"),
    "target": (lambda: ops.indexer_kl(ROWS, ROWS[:, :3], BOOL), "target has shape"),
    "beta": (lambda: ops.indexer_kl(ROWS, ROWS, BOOL, torch.ones(2)), "inverse_temperature has shape"),
    "attended set": (lambda: ops.renormalise_target(ROWS, BOOL[:, :3]), "attended has shape"),
    "statistics": (lambda: ops.adjacent_overlap(ROWS), "selected has dtype"),
    "group": (lambda: ops.union_ratio(BOOL, group=0), "group is 0"),
    "short group": (lambda: ops.union_ratio(BOOL, group=32), "group is 32; pass a divisor"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "pass" in str(error.value)
