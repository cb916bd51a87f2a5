"""Which tokens a context-parallel rank holds; the training itself is in tests/distributed."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

from gsa_train.model.context_parallel import local_part, query_runs
from helpers.single_rank import single_rank


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_hold_every_token_once(size):
    length = 6 * size
    held = [
        position
        for rank in range(size)
        for run in query_runs(length // size, rank, size)
        for position in range(run.start, run.end)
    ]
    assert sorted(held) == list(range(length))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_runs_say_where_the_local_tokens_stand(size):
    length = 6 * size
    positions = torch.arange(length).expand(2, length)
    for rank in range(size):
        local = local_part(positions, rank, size)
        assert local.shape == (2, length // size)
        for run in query_runs(length // size, rank, size):
            assert torch.equal(local[:, run.local], positions[:, run.start : run.end])


def test_all_ranks_see_as_many_keys():
    seen = {sum(run.start + run.end for run in query_runs(12, rank, 4)) for rank in range(4)}
    assert len(seen) == 1


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_megatron_core_cuts_its_rotary_angles_in_the_same_way(rank):
    class Group:
        def size(self) -> int:
            return 3

        def rank(self) -> int:
            return rank

    positions = torch.arange(24.0).reshape(24, 1, 1, 1)
    single_rank()  # installs what megatron-core needs on CPUs
    theirs = get_pos_emb_on_this_cp_rank(positions, 0, Group())
    assert torch.equal(theirs.flatten(), local_part(positions.view(1, 24), rank, 3)[0])
