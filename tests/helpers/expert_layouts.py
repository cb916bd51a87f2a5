"""`expert_layouts.py FOLDER` trains mixtures of experts in many layouts, one after another, on the same four ranks.
FOLDER/wanted.json names the layouts, in the same form as for many_layouts.py. The results go to FOLDER/results.json."""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import exchange_utils

from gsa_train.config import Config
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.model.mcore.moe_layer import MixtureOfExperts
from gsa_train.model.moe import router
from helpers.layout_cases import ALL_KEYS, INSTANCES, INTERLEAVED, MORE_STEPS, OVERLAP, PAIRS, Case, Reshard
from helpers.many_layouts import cross_all, finish, prepare_rank, resume_all, train_all, train_case

WORLD = 4
CLEAR: dict[str, dict[str, Any]] = {**ALL_KEYS, "model": {"init_std": 0.3}, "data": {"seed": 6}}
"""Weights and text for which the scores of two experts are never so close that rounding decides."""
SIZES = {"experts": 8, "expert_ffn_hidden_size": 16, "shared_expert_ffn_hidden_size": 8}
BALANCED: dict[str, dict[str, Any]] = {
    **CLEAR,
    "moe": {**SIZES, "top_k": 2, "balance_coeff": 0.1, "z_loss_coeff": 0.1},
}  # fmt: skip
"""Coefficients so large that a wrong loss changes the gradient norm."""
BIASED: dict[str, dict[str, Any]] = {
    **CLEAR,
    "moe": {
        **SIZES, "top_k": 3, "router_score": "sigmoid", "balancing": "aux_free", "bias_update_rate": 0.05,
        "routed_scale": 2.0, "z_loss_coeff": 0.1, "first_dense_layers": 1,
    },
}  # fmt: skip
DROPPING = {**BALANCED, "moe": {**BALANCED["moe"], "capacity_factor": 1.0}}
"""A capacity that drops about a third of the choices."""
ONE_BY_ONE = {**BALANCED, "moe": {**BALANCED["moe"], "experts_impl": "sequential"}}
MUON = {**BALANCED, "train": {"optimizer": "muon"}}
MUON_ONE_BY_ONE = {**ONE_BY_ONE, "train": {"optimizer": "muon"}}
TENSOR_2_EXPERT_2 = {"tensor": 2, "expert": 2}

CASES = {
    "data x expert": Case({"expert": 2}, BALANCED),
    "expert on all ranks": Case({"expert": 4}, BIASED),
    "expert, overlapped": Case({"expert": 2, **OVERLAP}, BALANCED, steps=MORE_STEPS, nightly=True),
    "expert, two optimizer instances, overlapped": Case(
        {"expert": 2, **INSTANCES, **OVERLAP}, BALANCED, nightly=True
    ),
    "expert, recomputed layers": Case({"expert": 2}, BIASED, {"recompute": "full"}, nightly=True),
    "tensor x expert": Case(TENSOR_2_EXPERT_2, BALANCED, PAIRS, nightly=True),
    "tensor x expert on all ranks": Case({"tensor": 2, "expert": 4}, BIASED, PAIRS, nightly=True),
    "tensor, split experts": Case({"tensor": 2, "expert_tensor": 2}, BALANCED, PAIRS, nightly=True),
    "tensor, split experts one by one": Case({"tensor": 2, "expert_tensor": 2}, ONE_BY_ONE, PAIRS),
    "tensor x expert, split experts": Case({**TENSOR_2_EXPERT_2, "expert_tensor": 2}, DROPPING, PAIRS),
    "muon, tensor x expert, split experts": Case({**TENSOR_2_EXPERT_2, "expert_tensor": 2}, MUON, PAIRS),
    "muon, tensor x expert": Case({"tensor": 2, "expert": 2}, MUON, PAIRS, nightly=True),
    "muon, data x expert": Case({"expert": 2}, MUON, nightly=True),
    "muon, one by one": Case({"expert": 2}, MUON_ONE_BY_ONE, nightly=True),
    "tensor, whole experts, replicated optimizer": Case(
        {"tensor": 2, "distributed_optimizer": False}, BALANCED, PAIRS, nightly=True
    ),
    "pipeline x expert": Case({"pipeline": 2, "expert": 2}, BIASED),
    "interleaved x expert": Case({**INTERLEAVED, "expert": 2}, BALANCED, nightly=True),
    "context x expert": Case({"context": 2, "expert": 2}, DROPPING, PAIRS),
    "context x tensor x expert": Case(
        {"context": 2, "tensor": 2, "expert": 4}, DROPPING, PAIRS, nightly=True
    ),
}

RESHARDED = {
    "expert": Reshard({"expert": 2}, [{"expert": 2}, {}, {"tensor": 2}, {"expert": 4}], BALANCED),
    "split experts": Reshard(
        {"tensor": 2, "expert_tensor": 2},
        [
            {"tensor": 2, "expert_tensor": 2},
            {**TENSOR_2_EXPERT_2, "expert_tensor": 2},
            {"pipeline": 2, "expert": 2},
        ],
        BIASED,
        nightly=True,
    ),
    "one by one": Reshard(
        {"tensor": 2}, [{"expert": 2, "distributed_optimizer": False}], ONE_BY_ONE, nightly=True
    ),
    "muon": Reshard(
        {"expert": 2},
        [{"expert": 2}, {**TENSOR_2_EXPERT_2, "expert_tensor": 2}, {"tensor": 2}],
        MUON,
        nightly=True,
    ),
}
BOUNDARIES = {"expert": {"expert": 2}, "tensor x expert": {**TENSOR_2_EXPERT_2, **INSTANCES, **OVERLAP}}
NIGHTLY_BOUNDARIES = {"expert"}


def gather_balances(model: Model) -> dict[str, list[list[float]]]:
    mine = {
        str(layer.layer_number): [held.tolist() for held in layer.mlp.router.balance()]
        for chunk in model.chunks
        for layer in chunk.decoder.layers
        if isinstance(layer.mlp, MixtureOfExperts)
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[str, list[list[float]]] = {}
    for each in every:
        for layer, held in each.items():
            assert found.setdefault(layer, held) == held, "the same on all ranks that have the layer"
    return found


def train(config: Config, parallel: Parallel, steps: Sequence[int]) -> list[dict[str, Any]]:
    models: list[Model] = []
    records = train_case(config, parallel, steps, prepare=models.append, tasks=True)
    return [*records, gather_balances(*models)]


@contextmanager
def measured_margin() -> Iterator[list[float]]:
    """Collect the smallest distance between the last chosen score and the next one, for each choice of experts."""
    found: list[float] = []
    choose = router.choose_experts

    def choose_and_measure(
        scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ranked = (scores if bias is None else scores + bias).detach().topk(top_k + 1).values
        found.append((ranked[:, top_k - 1] - ranked[:, top_k]).min().item())
        return choose(scores, bias, top_k, scale)

    with patch.object(router, "choose_experts", choose_and_measure):
        yield found


@contextmanager
def measured_loads() -> Iterator[dict[str, int]]:
    """Count the elements that ranks broadcast when they load checkpoints (`sent`). Also count the elements that ranks
    receive although they do not need them (`unwanted`)."""
    found = {"sent": 0, "unwanted": 0}
    exchange = exchange_utils.exchange_loaded_tensors_broadcast

    def exchange_and_count(loaded: Any, unloaded: Any, distribution: Any, group: Any) -> Any:
        for shard, ranks in distribution.all_ranks_for_shard.items():
            if len(ranks) > 1:
                elements = math.prod(distribution.shard_to_metadata[shard].local_shape)
                found["sent"] += elements
                found["unwanted"] += elements * (group.size() - len(ranks))
        return exchange(loaded, unloaded, distribution, group)

    with patch.object(exchange_utils, "exchange_loaded_tensors_broadcast", exchange_and_count):
        yield found


def main(folder: Path) -> None:
    prepare_rank()
    wanted = json.loads((folder / "wanted.json").read_text())
    results: dict[str, Any] = {}
    with measured_margin() as margins, measured_loads() as loads:
        results["trained"] = train_all(CASES, wanted["trained"], train)
        results["resumed"] = resume_all(RESHARDED, wanted["resumed"], folder)
        results["loads"] = loads
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, min(margins, default=math.inf))
    crossed = cross_all(BOUNDARIES, wanted["crossed"], folder, BALANCED)
    finish(folder, {**results, "margin": min(every), "crossed": crossed})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
