"""Tests that `train.cuda_graphs` on a CUDA device changes no bits, adds no waits, keeps memory constant and resumes."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import test_step_on_gpu
import torch

from gsa_train.config import load_config
from gsa_train.model.mcore.build import build_model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.optimizer.micro_batch_graph import WARM_UP_STEPS, leave_default_stream, new_graph
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import Training, evaluation_step, train_step
from helpers.runs import REPOSITORY, SMALL, kill, start
from helpers.single_rank import single_rank

MODEL = (*test_step_on_gpu.SMALL, "parallel.overlap_grad_reduce=false")
BUDGETS = ("gsa.k_min=64", "gsa.k_base=256", "gsa.k_max=512")
ACROSS = "data.attend_across_documents=true"
GRAPHS, OVERLAP = "train.cuda_graphs=true", "parallel.overlap_grad_reduce=true"
EXPERTS = (
    *(*BUDGETS, "parallel.expert=1", "data.num_lanes=1", "moe.experts=16", "moe.top_k=4"),
    *("moe.expert_ffn_hidden_size=128", "moe.shared_expert_ffn_hidden_size=256"),
)
BIASES = ("moe.router_score=sigmoid", "moe.balancing=aux_free", "moe.bias_update_rate=0.01")

STEPS = 10
MEASURED = 1, 6
"""Logged steps, each with a validation after it."""


@dataclass
class Trained:
    numbers: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    tensors: dict[str, torch.Tensor]
    """Weights, moving averages, gradients, and the optimizer's state."""
    replays: int
    milliseconds: float
    """Time of the last step."""


def train(name: str, *overrides: str) -> Trained:
    path = REPOSITORY / "configs" / f"{name}.yaml"
    config = load_config(path, [*MODEL, *overrides], world_size=1, need_data=False)
    parallel = single_rank()
    model = build_model(config, parallel)
    optimizer = build_optimizer(model, config.phases[-1], config)
    detector = SpikeDetector(config.monitor, parallel.device)
    training = Training(model, optimizer, config, parallel, detector, graph=new_graph(optimizer, config))
    numbers, places, in_use, reserved = [], set(), set(), 0
    for step in range(STEPS):
        batches = test_step_on_gpu.batches_of(config, parallel, step)
        torch.cuda.synchronize()
        # The capture itself waits, and so does a step with measurements.
        waits = step <= WARM_UP_STEPS + 1 or step in MEASURED
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        began = time.perf_counter()
        try:
            result = train_step(training, batches, 1e-3, step, measures=step in MEASURED)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        milliseconds = 1e3 * (time.perf_counter() - began)
        numbers.append((result.loss_sum.item(), result.grad_norm.item()))
        trained = [p for p in model.gpt.parameters() if p.requires_grad]
        places.add(tuple(address for p in trained for address in (p.data_ptr(), p.main_grad.data_ptr())))
        if training.graph is not None and step == max(MEASURED):  # it has used the memory of the graph
            grown, held = torch.cuda.memory_reserved() - reserved, training.graph.memory_bytes
            print(f"a logged step reserves {grown} bytes, the graphs {held}")
            assert held > 0
            assert grown <= held // 2
        reserved = torch.cuda.memory_reserved()
        if step in MEASURED:
            evaluation_step(model, batches, config, parallel)
        if step > max(MEASURED):
            in_use.add(torch.cuda.memory_allocated())
    assert len(places) == 1  # the memory that a graph reads and writes
    print(f"{name} {overrides}: last step {milliseconds:.2f} ms, in use {sorted(in_use)}")
    assert max(in_use) - min(in_use) <= 2**20  # results of steps
    tensors = {n: p.detach().clone() for n, p in model.gpt.named_parameters()}
    tensors |= {f"gradient of {n}": p.main_grad.clone() for n, p in model.gpt.named_parameters()}
    tensors |= {n: b.clone() for n, b in model.gpt.named_buffers()}
    for number, part in enumerate(optimizer.state_parts()):
        tensors |= {f"{kept} {number}": tensor.clone() for kept, tensor in part.tensors.items()}
    replays = 0 if training.graph is None else training.graph.replays
    close_optimizer(model, optimizer)
    return Trained(numbers, tensors, replays, milliseconds)


CASES = {
    "one document": ("gsa_1.7b", (*BUDGETS, ACROSS)),
    "documents": ("gsa_1.7b", BUDGETS),
    "a share of the rows of the loss": ("gsa_1.7b", (*BUDGETS, ACROSS, "gsa.indexer_loss_row_fraction=0.5")),
    "overlapped reduction": ("gsa_1.7b", (*BUDGETS, ACROSS, OVERLAP)),
    "as in the paper": ("paper_gsa_1.7b", BUDGETS),
    "standard": ("standard_1.7b", ("gsa.dense_attention=triton",)),
    "FP8": ("standard_1.7b", ("gsa.dense_attention=triton", "train.linear_layers=fp8")),
    "experts, balanced by loads": ("gsa_moe_15b_a2b", EXPERTS),
    "experts, balanced by biases": ("gsa_moe_15b_a2b", (*EXPERTS, *BIASES)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_as_without_graphs(case: str) -> None:
    name, overrides = CASES[case]
    leave_default_stream(single_rank().device)
    without = train(name, *overrides)
    with_graphs = train(name, *overrides, GRAPHS)
    assert without.replays == 0
    replayed = 1 if OVERLAP in overrides else 2  # of a step's two micro-batches
    assert with_graphs.replays == replayed * (STEPS - WARM_UP_STEPS - len(MEASURED))
    assert with_graphs.numbers == without.numbers
    assert len({loss for loss, _ in without.numbers}) == STEPS
    assert with_graphs.tensors.keys() == without.tensors.keys()
    different = [n for n, t in without.tensors.items() if not torch.equal(with_graphs.tensors[n], t)]
    assert different == []
    balances = [t for n, t in without.tensors.items() if n.endswith((".loads", ".expert_bias"))]
    assert all(len(each.unique()) > 1 for each in balances)  # they have changed


RUN = (*SMALL, "logging.every_steps=3", "evaluate.every_steps=5", "checkpoint.every_steps=5")


def test_a_killed_run_with_graphs_ends_as_one_without(tmp_path: Path) -> None:
    without = start(tmp_path, *RUN, name="without", real=True).wait()
    first = start(tmp_path, *RUN, GRAPHS, name="graphs", real=True)
    first.wait_until(lambda: len(first.steps()) >= 5)
    kill(first)
    resumed = start(tmp_path, *RUN, GRAPHS, name="graphs", real=True).wait()
    assert "pass as a CUDA graph" in resumed.output
    for key in ("loss", "indexer_kl", "grad_norm"):
        assert resumed.series(key) == without.series(key)
