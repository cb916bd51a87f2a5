"""Tests tasks of a model whose indexer scores groups of keys: its kernels support one document per sequence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gsa_train.phases import enter_phase
from gsa_train.step import owners_losses
from gsa_train.validation import tasks
from gsa_train.validation.requests import Request
from gsa_train.validation.tasks import (
    NOBODY,
    _deal,
    log_likelihoods,
    pack_requests,
    place_requests,
    row_tokens,
)
from helpers.single_rank import EOS, SPARSE, single_rank, tiny_config, tiny_model

GROUPS = tiny_config(
    [SPARSE],
    model={"num_layers": 1, "head_dim": 32, "init_std": 0.2},
    gsa={"indexer_pool": 4, "indexer_dim": 16, "indexer_heads": 2, "k_base": 4, "k_min": 4, "k_max": 8},
    data={"attend_across_documents": True},
    train={"seq_len_tokens": 32, "micro_batch_size": 1, "global_batch_size": 1},
)


def group_requests() -> list[Request]:
    """Return requests of 2 tokens up to a sequence and its last label; one has an EOS in the middle."""
    random = np.random.default_rng(4)
    lengths = [(33, 6), (17, 9), (18, 3), (2, 1), (25, 4)]
    requests = [Request(random.integers(1, 32, length).astype(np.int32), n) for length, n in lengths]
    requests[4].tokens[3] = EOS
    return requests


@pytest.mark.slow
def test_groups_of_keys_are_scored_on_the_kernels_as_on_the_reference_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "LEAST_ROW_TOKENS", 8)
    model = tiny_model(GROUPS, variance_ema=0.02)
    enter_phase(model, SPARSE)
    requests = group_requests()
    packed = _deal(pack_requests(requests, EOS, 32), EOS, GROUPS, single_rank())
    expected = (-owners_losses(model, packed, len(requests), GROUPS, single_rank())).tolist()
    on_reference = log_likelihoods(model, requests, EOS, GROUPS, single_rank())
    for attention in model.attentions:
        attention.over_chunks.implementation = "triton"
    on_kernels = log_likelihoods(model, requests, EOS, GROUPS, single_rank())
    assert on_reference == pytest.approx(expected, rel=1e-5)
    assert on_kernels == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="document_starts is given with indexer_pool 4"):
        owners_losses(model, packed, len(requests), GROUPS, single_rank())


def test_requests_alone_have_sequences_as_short_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LEAST_ROW_TOKENS", 8)
    requests = group_requests()
    assert [row_tokens(each, GROUPS) for each in requests] == [32, 16, 32, 8, 32]
    rows = place_requests(requests, EOS, GROUPS)
    assert [each.owners.shape for each in rows] == [(1, 8), (1, 16), (3, 32)]
    owners = np.concatenate([each.owners.flatten() for each in rows])
    counts = np.bincount(owners[owners != NOBODY], minlength=len(requests))
    assert counts.tolist() == [each.scored for each in requests]
    for each in rows:  # micro-batches have the size of training's
        for batch, _ in _deal(each, EOS, GROUPS, single_rank()):
            assert batch.tokens.numel() == 32
            assert batch.document_ids is None
    split = dataclasses.replace(GROUPS, parallel=dataclasses.replace(GROUPS.parallel, tensor=4))
    assert row_tokens(requests[3], split) == 16, "a group for each of the ranks that share the tokens"
    monkeypatch.undo()
    assert row_tokens(requests[3], GROUPS) == 32
    train = dataclasses.replace(GROUPS.train, seq_len_tokens=4096)
    assert row_tokens(requests[3], dataclasses.replace(GROUPS, train=train)) == 64
    documents = dataclasses.replace(GROUPS, gsa=dataclasses.replace(GROUPS.gsa, indexer_pool=1))
    assert [each.one_document for each in place_requests(requests, EOS, documents)] == [False]
