"""Tasks of a model whose indexer scores groups of keys: they begin at the first token of a group."""

from __future__ import annotations

import numpy as np
import pytest

from gsa_train.model.cores.triton import TritonCore
from gsa_train.phases import enter_phase
from gsa_train.validation.requests import Request
from gsa_train.validation.tasks import NOBODY, log_likelihoods, pack_requests
from helpers.single_rank import EOS, SPARSE, single_rank, tiny_config, tiny_model

GROUPS = tiny_config(
    [SPARSE],
    model={"num_layers": 1, "head_dim": 32, "init_std": 0.2},
    gsa={"indexer_pool": 4, "indexer_dim": 16, "indexer_heads": 2, "k_base": 4, "k_min": 4, "k_max": 8},
    data={"attend_across_documents": True},
    train={"seq_len_tokens": 32, "micro_batch_size": 1, "global_batch_size": 1},
)


def group_requests() -> list[Request]:
    """Requests of 2 tokens up to a sequence and its last label; one has an EOS in the middle."""
    random = np.random.default_rng(4)
    lengths = [(33, 6), (17, 9), (18, 3), (2, 1), (25, 4)]
    requests = [Request(random.integers(1, 32, length).astype(np.int32), n) for length, n in lengths]
    requests[4].tokens[3] = EOS
    return requests


@pytest.mark.slow
def test_groups_of_keys_are_scored_on_the_kernels_as_alone_on_the_reference_core() -> None:
    model = tiny_model(GROUPS, variance_ema=0.02)
    enter_phase(model, SPARSE)
    requests = group_requests()
    alone = [log_likelihoods(model, [each], EOS, GROUPS, single_rank())[0] for each in requests]
    assert log_likelihoods(model, requests, EOS, GROUPS, single_rank()) == pytest.approx(alone, rel=1e-5)
    for attention in model.attentions:
        attention.over_chunks.core = TritonCore(attention.over_chunks.core.settings)
    on_kernels = log_likelihoods(model, requests, EOS, GROUPS, single_rank())
    assert on_kernels == pytest.approx(alone, rel=1e-4)
    owners = pack_requests(requests, EOS, 32, 4).owners
    assert len(owners) < len(requests)
    counts = np.bincount(owners[owners != NOBODY], minlength=len(requests))
    assert counts.tolist() == [each.scored for each in requests]
