"""Tests how many launches a measuring forward pass adds, because the host must stay ahead of the device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gsa_train.model.attention_pass import AttentionPass
from gsa_train.model.probes.stats import LayerStats
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.phases import enter_phase
from helpers.single_rank import SPARSE, random_batches, read_stats, tiny_config, tiny_model, token_losses

LAYERS = (2, 4)
MOST_OF_A_LAYER = 160
MOST_OF_A_MICRO_BATCH = 90
"""Limit for the operations that all layers share."""
MOST_OF_READING = 225
"""Limit for reducing the statistics, whatever the number of layers is."""


class Operations(TorchDispatchMode):
    """Counts the operations that launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not func.is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


def operations(layers: int) -> tuple[int, int]:
    """Count the operations that measuring adds to a forward pass, and those that reduce its statistics."""
    config = tiny_config(model={"num_layers": layers}, train={"global_batch_size": 2})
    model = tiny_model(config, variance_ema=0.02)
    enter_phase(model, SPARSE)
    (batch,) = random_batches(config)
    numbers = []
    for measuring in (False, True):
        token_losses(model, batch, measuring=measuring)  # creates what is created once
        model.runtime.stats.reset()
        with Operations() as counted:
            token_losses(model, batch, measuring=measuring)
        numbers.append(counted.number)
    with Operations() as reading:
        assert len(read_stats(model)["recall"]) == layers
    return numbers[1] - numbers[0], reading.number


def test_a_measuring_forward_pass_launches_little() -> None:
    (few, reading_few), (many, reading_many) = (operations(layers) for layers in LAYERS)
    of_layer = (many - few) / (LAYERS[1] - LAYERS[0])
    shared = few - LAYERS[0] * of_layer
    assert 50 < of_layer <= MOST_OF_A_LAYER
    assert shared <= MOST_OF_A_MICRO_BATCH
    assert reading_few == reading_many <= MOST_OF_READING


def test_what_documents_decide_is_made_once_for_each_micro_batch() -> None:
    runtime, made = AttentionRuntime(LayerStats(1, torch.device("cpu"))), []

    def once(document_ids: torch.Tensor | None, key: str) -> int:
        return runtime.once(document_ids, key, lambda: (made.append(key), len(made))[1])

    first, second = torch.zeros(2, 8).int(), torch.zeros(2, 8).int()
    assert [once(first, "a"), once(first, "b"), once(first, "a")] == [1, 2, 1]
    assert once(first.detach(), "a") == 1, "as a recomputation hands it over"
    assert [once(second, "a"), once(second, "a"), once(None, "a"), once(None, "a")] == [3, 3, 4, 4]
    with runtime.during(AttentionPass()):
        assert once(first, "a") == 5
    assert once(first, "a") == 6, "nothing is kept between two passes"
