"""Tests which tokens a context-parallel rank holds; tests/distributed trains with it."""

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

from gsa_kernels.rotary import YarnScaling
from gsa_train.distributed.context_sharding import ContextSharding, query_chunks
from gsa_train.model.context_parallel import local_part
from gsa_train.model.rotary import LocalRotaryEmbedding
from helpers.single_rank import single_rank

SIZES = [(1, 2), (2, 2), (3, 2), (2, 4), (3, 6), (4, 8)]


@pytest.mark.parametrize(("size", "chunks"), SIZES)
def test_the_ranks_hold_every_token_once_and_runs_say_where(size: int, chunks: int) -> None:
    length, held = 3 * chunks * size, []
    positions = torch.arange(length).expand(2, length)
    for rank in range(size):
        cut = ContextSharding(rank, size, chunks)
        local = local_part(positions, cut)
        assert local.shape == (2, length // size)
        assert torch.equal(local_part(positions.T, cut, dim=0), local.T)
        for run in query_chunks(length // size, cut):
            assert torch.equal(local[:, run.local], positions[:, run.start : run.end])
            held += range(run.start, run.end)
    assert sorted(held) == list(range(length))


def cost(cut: ContextSharding, length: int, of_query: list[float]) -> float:
    runs = query_chunks(length // cut.size, cut)
    return sum(sum(of_query[run.start : run.end]) for run in runs)


@pytest.mark.parametrize(("size", "chunks"), SIZES)
def test_all_ranks_see_equally_many_keys(size: int, chunks: int) -> None:
    length = 3 * chunks * size
    keys = [float(position + 1) for position in range(length)]
    assert len({cost(ContextSharding(rank, size, chunks), length, keys) for rank in range(size)}) == 1


@pytest.mark.parametrize("size", [2, 8])
def test_more_chunks_even_out_what_does_not_grow_with_the_position(size: int) -> None:
    """An example is the number of keys that 32 neighbouring queries select together."""
    length = 1024
    keys = [1 - math.exp(-position / 200) for position in range(length)]

    def spread(chunks: int) -> float:
        costs = [cost(ContextSharding(rank, size, chunks), length, keys) for rank in range(size)]
        return (max(costs) - min(costs)) / max(costs)

    assert spread(2) > 0.15
    assert spread(4) < 0.4 * spread(2)
    assert spread(8) < 0.25 * spread(4)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_has_the_angles_of_its_positions_as_in_megatron_core(rank: int) -> None:
    parallel = single_rank()  # installs what megatron-core needs on CPUs
    options: dict[str, Any] = {"kv_channels": 8, "rotary_percent": 1.0, "cp_group": parallel.groups.cp}
    options |= {"yarn": YarnScaling(4.0, 16, 3.0, 0.2), "rotary_base": 100.0}
    angles = LocalRotaryEmbedding(ContextSharding(), **options)(24)
    assert not torch.equal(LocalRotaryEmbedding(ContextSharding(), **{**options, "yarn": None})(24), angles)
    ours = LocalRotaryEmbedding(ContextSharding(rank, 3), **options)
    group = Mock(size=lambda: 3, rank=lambda: rank)
    assert torch.equal(ours(24), get_pos_emb_on_this_cp_rank(angles, 0, group))
    assert ours(24) is ours(24)  # tables of angles are made once
    finer = ContextSharding(rank, 3, 4)
    assert torch.equal(LocalRotaryEmbedding(finer, **options)(24), local_part(angles, finer, dim=0))
