"""Compares the memory that a dry run estimates with the traced memory of a step.

Most layer sizes, vocabularies and lengths come from the shipped configs, because a small model divides its memory
differently between weights and activations. With few layers, memory outside the layers is a large share.
"""

import json
from typing import Any

import pytest
import torch

from gsa_kernels import limits
from gsa_train.config import load_config
from gsa_train.distributed.context_sharding import QueryChunk
from gsa_train.model.flops import count_parameters
from gsa_train.planning.memory import selection as memory_selection
from gsa_train.planning.memory.estimate import WORKSPACE_BYTES, estimate_memory
from gsa_train.planning.memory.selection import listing_bytes
from gsa_train.planning.memory.sizes import sizes_of
from helpers.runs import REPOSITORY, run_script
from helpers.tiers import chosen, with_nightly

GSA, STANDARD = "configs/gsa_1.7b.yaml", "configs/standard_1.7b.yaml"
GSA_128K = "configs/gsa_1.7b_128k.yaml"
WARM_UP, SPARSE = 0, -1

LONG = ["train.seq_len_tokens=65536", "train.micro_batch_size=1", "train.global_batch_size=2"]

PP_2, PP_4, TP_4 = "parallel.pipeline=2", "parallel.pipeline=4", "parallel.tensor=4"
TWO_MICRO_BATCHES = ["train.micro_batch_size=1", "train.global_batch_size=2"]
CONTEXT_4 = [*TWO_MICRO_BATCHES, "parallel.context=4"]
SHORT = ["train.micro_batch_size=2"]
"""Four micro-batches: the most in flight on the first of 4 pipeline stages, or on the last stage of two chunks."""
EIGHT = "train.global_batch_size=16"
ONE_MICRO_BATCH = "train.global_batch_size=4"
"""One micro-batch. Cases with two test the second one with what the first one left in memory."""

EXPERT_2, FEW_WORDS = "parallel.expert=2", ["model.vocab_size=8192"]
EXPERTS = ["moe.experts=128", "moe.top_k=8"]
EXPERTS += ["moe.expert_ffn_hidden_size=384", "moe.shared_expert_ffn_hidden_size=384"]

TABLE = """
one rank | GSA 0/1 SPARSE |
one rank, warm-up | GSA 0/1 WARM_UP |
one short sequence, parts of the gradients of K and V | GSA 0/1 SPARSE |
    train.seq_len_tokens=2048 train.micro_batch_size=1 train.global_batch_size=1 gsa.indexer_loss_row_fraction=0.25
    model.ffn_hidden_size=512 model.vocab_size=512
recompute full | GSA 0/1 SPARSE | ONE_MICRO_BATCH train.recompute=full
recompute selective | GSA 0/1 SPARSE | ONE_MICRO_BATCH train.recompute=selective
loss of all queries | GSA 0/1 SPARSE | ONE_MICRO_BATCH gsa.indexer_loss_row_fraction=1.0
data 2, distributed optimizer | GSA 0/2 SPARSE | train.global_batch_size=16
tensor 2 with sequence parallelism | GSA 0/2 SPARSE | ONE_MICRO_BATCH parallel.tensor=2
context 2 | GSA 0/2 SPARSE | ONE_MICRO_BATCH parallel.context=2
first stage of 2 | GSA 0/2 SPARSE | parallel.pipeline=2
last stage of 2 | GSA 1/2 SPARSE | parallel.pipeline=2
inner stage of 4, standard | STANDARD 1/4 SPARSE | PP_4 model.num_layers=4 SHORT
first stage of 2, warm-up | GSA 0/2 WARM_UP | PP_2
first stage of 2, tensor 2, over lists | GSA 0/4 SPARSE | PP_2 parallel.tensor=2 gsa.attention_kernel=gathered SHORT
interleaved, inner stage, recomputed | GSA 2/4 SPARSE |
    PP_4 parallel.virtual_pipeline=2 model.num_layers=8 train.recompute=full SHORT EIGHT
norms of Q and K, average | GSA 0/2 SPARSE | model.qk_norm=on PP_2 train.weight_average_decay=0.9
standard | STANDARD 0/1 SPARSE | ONE_MICRO_BATCH
standard, FP8 | STANDARD 0/1 SPARSE | ONE_MICRO_BATCH train.linear_layers=fp8
FP8, recompute full | STANDARD 0/1 SPARSE | train.linear_layers=fp8 FEW_WORDS train.recompute=full
FP8, small vocabulary | STANDARD 0/1 SPARSE | train.linear_layers=fp8 FEW_WORDS
FP8, small vocabulary, tensor 4 | STANDARD 0/4 SPARSE | train.linear_layers=fp8 FEW_WORDS TP_4
FP8 | GSA 0/1 SPARSE | ONE_MICRO_BATCH train.linear_layers=fp8
FP8, tensor 4 with sequence parallelism | GSA 0/4 SPARSE | ONE_MICRO_BATCH TP_4 train.linear_layers=fp8
FP8, standard, tensor 4 with sequence parallelism | STANDARD 0/4 SPARSE | ONE_MICRO_BATCH TP_4 train.linear_layers=fp8
operations one by one | GSA 0/1 SPARSE | ONE_MICRO_BATCH train.fused_ops=none
operations one by one, z-loss | STANDARD 0/1 SPARSE | ONE_MICRO_BATCH train.fused_ops=none train.z_loss_coeff=1e-4
experts | GSA 0/1 SPARSE | EXPERTS
experts, first stage of 2, expert 2, warm-up | GSA 0/4 WARM_UP | EXPERTS FEW_WORDS PP_2 EXPERT_2
experts split over 2, first stage of 2, recomputed | GSA 0/8 SPARSE |
    EXPERTS PP_2 EXPERT_2 parallel.tensor=2 parallel.expert_tensor=2 train.recompute=full
experts in every other layer, first stage of 2 | STANDARD 0/4 SPARSE |
    EXPERTS FEW_WORDS PP_2 EXPERT_2 moe.layer_interval=2 model.num_layers=4 TWO_MICRO_BATCHES
128K tokens, context 4, tensor 4, warm-up | GSA_128K 4/16 WARM_UP | CONTEXT_4 TP_4
128K tokens, context 4, tensor 4, recompute selective | GSA_128K 4/16 SPARSE |
    CONTEXT_4 TP_4 train.global_batch_size=1 train.recompute=selective
128K tokens, context 2, tensor 2, first stage of 2, warm-up | GSA_128K 2/8 WARM_UP |
    TWO_MICRO_BATCHES parallel.context=2 parallel.tensor=2 PP_2 model.num_layers=4
64K tokens, first stage of 2 | GSA 0/2 SPARSE | LONG parallel.pipeline=2
8K tokens, short lists from packed masks | GSA 0/1 SPARSE |
    train.seq_len_tokens=8192 train.micro_batch_size=1 train.global_batch_size=2 gsa.k_base=128 gsa.k_min=64
32K tokens, lists from candidates | GSA 0/1 SPARSE |
    train.seq_len_tokens=32768 train.micro_batch_size=1 train.global_batch_size=1
"""
"""Cases to trace. Columns: name; config, rank/ranks and phase; overrides, or names of lists of overrides. By default a
model has two layers, and a step has two micro-batches."""
Traced = tuple[str, list[str], int, int, int]


def cases_of(table: str) -> dict[str, Traced]:
    cases: dict[str, Traced] = {}
    for row in table.strip().replace("\n    ", " ").splitlines():
        name, subject, words = (part.strip() for part in row.split("|"))
        config, place, phase = subject.split()
        rank, ranks = place.split("/")
        cases[name] = (globals()[config], overrides_in(words), int(rank), int(ranks), globals()[phase])
    return cases


def overrides_in(words: str) -> list[str]:
    found = [globals().get(word, word) for word in words.split()]
    return [each for part in found for each in ([part] if isinstance(part, str) else part)]


CASES = cases_of(TABLE)

NIGHTLY = CASES.keys() - {"one rank", "recompute full", "first stage of 2", "last stage of 2"}


# Queries of one layer's selection, and overrides: the whole sequence and runs of it, smaller budgets, and budgets so
# large that all scores are kept.
SELECTIONS: dict[str, tuple[int, int, list[str]]] = {
    "whole": (0, 131072, []),
    "last": (122880, 131072, []),
    "first": (0, 32768, []),
    "small budgets": (98304, 131072, ["gsa.k_max=1024", "gsa.k_base=512"]),
    "all of few keys": (98304, 131072, ["gsa.dense_below=6000"]),
}

# Cases of one rank, whose second step must leave the same memory as the first.
TWO_STEPS: dict[str, list[str]] = {
    "two steps, recompute full": ["train.recompute=full"],
    "two steps over lists, recompute selective": [
        "gsa.attention_kernel=gathered",
        "train.recompute=selective",
    ],
}


@pytest.fixture(scope="module")
def traced(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, int]]:
    """Trace in a separate process, where kernels are imported for CPU tensors."""
    wanted = chosen(request, test_the_dry_run_says_what_the_step_takes.__name__)
    steps = {name: case for name, case in CASES.items() if name in wanted}
    selections = chosen(request, test_the_dry_run_says_what_a_selection_takes.__name__)
    two_steps = chosen(request, test_a_step_leaves_no_more_than_the_one_before.__name__)
    folder = tmp_path_factory.mktemp("memory")
    file, out = folder / "cases.json", folder / "bytes.json"
    names = ("config", "overrides", "rank", "world_size", "phase")
    cases = [dict(zip(names, (case[0], [*FEW, *case[1]], *case[2:]), strict=True)) for case in steps.values()]
    for start, stop, overrides in map(SELECTIONS.__getitem__, selections):
        case = {"config": GSA_128K, "overrides": overrides, "world_size": 8, "queries": (start, stop)}
        cases.append(case)
    for overrides in map(TWO_STEPS.__getitem__, two_steps):
        case = {"config": GSA, "overrides": [*FEW, *overrides], "rank": 0, "world_size": 1, "steps": 2}
        cases.append(case)
    file.write_text(json.dumps(cases))
    command = ["tests/helpers/memory_trace.py", str(file), str(out)]
    on_cpus = {"CUDA_VISIBLE_DEVICES": ""}
    run_script(command, folder / "log", ranks=1, launcher="python", environment=on_cpus)
    return dict(zip([*steps, *selections, *two_steps], json.loads(out.read_text()), strict=True))


FEW = ["model.num_layers=2", "train.global_batch_size=8"]
"""Layers and sequences; each micro-batch has four sequences."""


@pytest.mark.parametrize("name", with_nightly(CASES, NIGHTLY))
def test_the_dry_run_says_what_the_step_takes(name: str, traced: dict[str, Any]) -> None:
    """The dry run estimates the memory of a step, without weights, gradients and optimizer state. This estimate must be
    at most 3% below and at most 9% above the traced memory. A trace does not include cuBLAS's workspaces, so they are
    subtracted from the estimate. The sum of weights, gradients and optimizer state must be within 0.5% of the trace."""
    config_path, overrides, rank, world_size, phase = CASES[name]
    config = load_config(REPOSITORY / config_path, [*FEW, *overrides], world_size=world_size, need_data=False)
    stage = rank * config.parallel.pipeline // world_size
    estimate = estimate_memory(config, config.phases[phase], world_size, stage)
    static = estimate.weights + estimate.gradients + estimate.optimizer
    assert static == pytest.approx(traced[name]["static"], rel=0.005)
    added = traced[name]["peak"] - traced[name]["static"]
    assert 0.97 <= (estimate.total - static - WORKSPACE_BYTES) / added <= 1.09


@pytest.mark.parametrize("name", with_nightly(SELECTIONS, SELECTIONS.keys() - {"whole"}))
def test_the_dry_run_says_what_a_selection_takes(name: str, traced: dict[str, Any]) -> None:
    start, stop, overrides = SELECTIONS[name]
    config = load_config(REPOSITORY / GSA_128K, overrides, world_size=8, need_data=False)
    lists = traced[name]["lists"]
    queries = QueryChunk(slice(0, stop - start), start, stop)
    said = lists + listing_bytes(config, sizes_of(config), queries, lists)
    assert 0.97 <= said / traced[name]["peak"] <= 1.09


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWO_STEPS)
def test_a_step_leaves_no_more_than_the_one_before(name: str, traced: dict[str, Any]) -> None:
    first, second = traced[name]["left"]
    assert second == first > traced[name]["static"], (
        "tables of the first step are left, which the second takes"
    )


# --- where no step is traced -------------------------------------------------------------------------------


def estimate(overrides=(), world_size=8, stage=0, phase=-1):
    config = load_config(REPOSITORY / GSA, overrides, world_size=world_size, need_data=False)
    return estimate_memory(config, config.phases[phase], world_size, stage)


def test_parameters_and_their_state():
    config = load_config(REPOSITORY / GSA)
    count = count_parameters(config.model, config.gsa, config.moe)
    sparse = estimate()
    assert sparse.weights == pytest.approx(2 * count.total)
    assert sparse.gradients == pytest.approx(4 * count.total)
    assert sparse.optimizer == pytest.approx(12 * count.total / 8)
    assert estimate(["parallel.distributed_optimizer=off"]).optimizer == pytest.approx(12 * count.total)
    assert estimate(["parallel.grad_reduce_dtype=bf16"]).gradients == pytest.approx(2 * count.total)
    assert estimate(["parallel.optimizer_instances=2"]).optimizer == pytest.approx(12 * count.total / 4)
    deepspeed = ["parallel.strategy=deepspeed"]
    deepspeed += ["parallel.overlap_grad_reduce=off", "parallel.overlap_param_gather=off"]
    zero = estimate([*deepspeed, "parallel.zero_stage=3"])
    assert zero.weights == pytest.approx(2 * count.total / 8)
    assert zero.gradients == pytest.approx(4 * count.total / 8)
    assert zero.optimizer == sparse.optimizer
    assert estimate(deepspeed, phase=0).activations > 0
    assert estimate([*deepspeed, "parallel.offload_optimizer=on"]).optimizer == 0
    warmup = estimate(phase=0)
    assert warmup.weights == sparse.weights
    assert warmup.gradients == pytest.approx(4 * count.indexer)
    assert warmup.activations == 0
    single = estimate(["train.precision=fp32"])
    assert single.weights == pytest.approx(4 * count.total)
    assert single.optimizer == pytest.approx(8 * count.total / 8)


def test_no_launch_in_segments_takes_more_than_is_counted():
    """The bound follows from the number of programs, and one program of a tile's gradient of q."""
    pytest.importorskip("triton")
    from gsa_kernels.attention.triton_gathered_backward import backward_tiles, count_segments
    from gsa_kernels.attention.triton_gathered_forward import heads_per_program

    for keys in (8192, 20000, 131072, 2**20):
        most = max(
            programs * count_segments(programs, limits.MULTIPROCESSORS, keys)
            for programs in range(1, limits.MULTIPROCESSORS)
        )
        assert most * limits.SEGMENT_GRADIENT_BYTES <= limits.segments_bytes(keys, limits.MULTIPROCESSORS)
    for size in limits.HEAD_SIZES:
        for dtype in (torch.bfloat16, torch.float32):
            rows = limits.TILE_QUERIES * heads_per_program(64, backward_tiles(size, dtype).queries)
            assert 4 * rows * size <= limits.SEGMENT_GRADIENT_BYTES
    assert limits.segments_bytes(8191, limits.MULTIPROCESSORS) == 0


def test_segments_are_counted_beyond_the_gradients_of_k_and_v(monkeypatch):
    """If several Triton programs share a key list, each stores a partial gradient of q. The backward pass frees the
    partial gradients before it allocates the gradients of k and v. Partial gradients need extra memory only if they
    are larger than the gradients of k and v, here 512 bytes per token (one bf16 head of size 128)."""
    lengths, counted = (4096, 32768, 131072), {}
    for segments in (limits.segments_bytes, lambda *_: 0):
        monkeypatch.setattr(limits, "segments_bytes", segments)
        for length in lengths:
            options = ["gsa.attention_kernel=gathered", "train.micro_batch_size=1", "parallel.tensor=4"]
            options.append(f"train.seq_len_tokens={length}")
            config = load_config(REPOSITORY / GSA, options, world_size=8, need_data=False)
            taken = memory_selection.attending_bytes(config, config.phases[-1], sizes_of(config))
            counted.setdefault(length, []).append(taken)
    more = [counted[length][0] - counted[length][1] for length in lengths]
    assert more == [0, 4 * 132 * 64 * 1024 - 32768 * 512, 0]


def test_validation_cannot_use_the_memory_of_a_cuda_graph():
    graphs = ["train.cuda_graphs=on", "parallel.overlap_grad_reduce=off"]
    without, with_graph = estimate(), estimate(graphs)
    assert without.graph == 0
    assert with_graph.graph == max(with_graph.working, with_graph.logits)
    assert with_graph.total == pytest.approx(without.total + with_graph.graph)
    assert estimate(graphs, phase=0).graph == 0  # only the indexer trains
