"""The report of a dry run."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from gsa_train.config import Config, ParallelConfig, PhaseConfig, load_config
from gsa_train.dry_run import describe, estimate_memory, rank_of
from gsa_train.model.flops import count_parameters

CONFIGS = Path(__file__).parents[2] / "configs"
GSA = CONFIGS / "gsa_1.7b.yaml"


def test_the_report_of_a_shipped_config():
    report = describe(load_config(GSA, world_size=8, need_data=False), 8)
    for section in ("Layout", "Parameters", "Tokens", "Floating-point operations", "Memory per rank", "Data"):
        assert f"\n\n{section}" in report
    for fragment in (
        "gsa_1.7b on 8 ranks",
        "8 = tensor 1 x context 1 x pipeline 1 x data 8",
        "8 micro-batches of 4",
        "stage 0 (layers 0-23), data 7: rank 7",
        "1,730,508,992",
        "1,048,576 tokens per step",
        "104,857,600,000",
        "warmup",
        "dense equivalent",
        "data.train_dir",
    ):
        assert fragment in report
    assert max(len(line) for line in report.splitlines()) < 120


def test_every_stage_and_rank_is_named():
    config = load_config(GSA, ["parallel.tensor=2", "parallel.pipeline=2"])
    report = describe(config, 8)
    for line in (
        "stage 0 (layers 0-11), data 0: ranks 0-1 (tensor 0-1)",
        "stage 0 (layers 0-11), data 1: ranks 2-3 (tensor 0-1)",
        "stage 1 (layers 12-23), data 0: ranks 4-5 (tensor 0-1)",
        "stage 1 (layers 12-23), data 1: ranks 6-7 (tensor 0-1)",
        "sequence parallel on",
    ):
        assert line in report


def test_chunks_of_a_stage_are_named():
    layout = [
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "parallel.pipeline_layers=[5,7,7,5]",
    ]
    report = describe(load_config(GSA, layout), 2)
    assert "12 layers per stage in 2 chunks (interleaved)" in report
    assert "stage 0 (layers 0-4, 12-18), data 0: rank 0" in report
    assert "stage 1 (layers 5-11, 19-23), data 0: rank 1" in report
    uneven = describe(load_config(GSA, ["parallel.pipeline=2", "parallel.pipeline_layers=[23,1]"]), 2)
    assert "[23, 1] layers on the stages" in uneven
    assert "stage 1 (layers 23), data 0: rank 1" in uneven


def test_context_parallel_ranks_are_named():
    config = load_config(GSA, ["parallel.context=2", "parallel.tensor=2"])
    report = describe(config, 8)
    assert "8 = tensor 2 x context 2 x pipeline 1 x data 2" in report
    assert "data 1: ranks 4-7 (tensor 0-1, context 0-1)" in report


def test_a_large_world_is_cut_short():
    report = describe(load_config(GSA, ["train.global_batch_size=1024"]), 1024)
    assert "... and 992 more in the same order" in report


@pytest.mark.parametrize(
    ("tensor", "context", "pipeline", "world_size"), [(2, 1, 2, 8), (1, 1, 4, 8), (2, 2, 3, 24), (1, 4, 1, 8)]
)
def test_ranks_are_laid_out_as_megatron_core_does(tensor, context, pipeline, world_size):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    data = world_size // tensor // context // pipeline
    generator = parallel_state.RankGenerator(
        tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp"
    )
    config = dataclasses.replace(
        Config(), parallel=ParallelConfig(tensor=tensor, context=context, pipeline=pipeline)
    )
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "data": data}

    def groups(axis: str) -> list[list[int]]:
        lines: dict[tuple[int, ...], list[int]] = {}
        for numbers in itertools.product(*map(range, sizes.values())):
            place = dict(zip(sizes, numbers, strict=True))
            others = tuple(place[name] for name in sizes if name != axis)
            lines.setdefault(others, []).append(rank_of(config, world_size, **place))
        return sorted(lines.values())

    for axis, token in (("tensor", "tp"), ("context", "cp"), ("pipeline", "pp"), ("data", "dp")):
        assert groups(axis) == sorted(generator.get_ranks(token))


# ---- memory


def estimate(overrides=(), world_size=8, stage=0, phase=-1):
    config = load_config(GSA, overrides, world_size=world_size, need_data=False)
    return estimate_memory(config, config.phases[phase], world_size, stage)


def test_parameters_and_their_state():
    config = load_config(GSA)
    count = count_parameters(config.model, config.gsa)
    sparse = estimate()
    assert sparse.weights == pytest.approx(2 * count.total)
    assert sparse.gradients == pytest.approx(4 * count.total)
    assert sparse.optimizer == pytest.approx(12 * count.total / 8)
    assert estimate(["parallel.distributed_optimizer=off"]).optimizer == pytest.approx(12 * count.total)
    assert estimate(["parallel.grad_reduce_dtype=bf16"]).gradients == pytest.approx(2 * count.total)
    warmup = estimate(phase=0)
    assert warmup.weights == sparse.weights
    assert warmup.gradients == pytest.approx(4 * count.indexer)
    assert warmup.activations == 0
    single = estimate(["train.precision=fp32"])
    assert single.weights == pytest.approx(4 * count.total)
    assert single.optimizer == pytest.approx(8 * count.total / 8)


@pytest.mark.parametrize("tied", ["on", "off"])
def test_the_ranks_together_hold_the_model(tied):
    overrides = ["parallel.tensor=2", "parallel.pipeline=2", f"model.tie_embeddings={tied}"]
    config = load_config(GSA, overrides)
    count = count_parameters(config.model, config.gsa)
    held = sum(2 * estimate(overrides, stage=stage).weights / 2 for stage in range(2))
    replicated = count.norms + count.indexer
    tied_copy = count.embedding if tied == "on" else 0
    assert held == pytest.approx(count.total + replicated + tied_copy)


def test_one_forward_one_backward_keeps_more_on_early_stages():
    stages = [estimate(["parallel.pipeline=4", "data.num_lanes=64"], stage=stage) for stage in range(4)]
    last = stages[-1].activations
    assert [stage.activations for stage in stages] == pytest.approx([4 * last, 3 * last, 2 * last, last])
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    few = ["parallel.pipeline=4", "train.global_batch_size=16"]  # 2 micro-batches
    assert estimate(few).activations == pytest.approx(2 * last)


def test_uneven_stages_hold_and_keep_what_their_layers_need():
    stages = [
        estimate(["parallel.pipeline=2", "parallel.pipeline_layers=[18,6]"], stage=stage) for stage in (0, 1)
    ]
    even = [estimate(["parallel.pipeline=2"], stage=stage) for stage in (0, 1)]
    assert stages[0].activations == pytest.approx(
        6 * stages[1].activations
    )  # 2 in flight of three times as many
    assert sum(s.weights for s in stages) == pytest.approx(sum(s.weights for s in even))
    assert stages[0].weights > stages[1].weights


def test_interleaving_keeps_more_in_flight():
    plain, interleaved = (
        [
            estimate(["parallel.pipeline=4", "data.num_lanes=64", f"parallel.virtual_pipeline={v}"], stage=s)
            for s in (0, 3)
        ]
        for v in (1, 2)
    )
    assert interleaved[0].weights == plain[0].weights
    one = plain[1].activations  # a micro-batch
    assert interleaved[0].activations == pytest.approx((2 * 3 + 4 + 1) / 2 * one)
    assert interleaved[1].activations == pytest.approx((4 + 1) / 2 * one)


REFERENCE = "gsa.attention_impl=reference"


def test_recomputation_saves_activations():
    modes = ("none", "selective", "full")
    kept = {mode: estimate([REFERENCE, f"train.recompute={mode}"]).activations for mode in modes}
    assert kept["none"] > 2 * kept["selective"] > 4 * kept["full"] > 0
    # Whole layers: four bf16 inputs of [4096, 2048] per recomputed unit.
    assert kept["full"] == 24 * 4 * 2 * 4096 * 2048
    units_of_four = estimate(["train.recompute=full", "train.recompute_num_layers=4"])
    assert units_of_four.activations == kept["full"] / 4
    assert units_of_four.working > estimate(["train.recompute=full"]).working


def test_squares_grow_with_the_square_of_the_length():
    short, long = (
        estimate([REFERENCE, "train.recompute=selective", f"train.seq_len_tokens={length}"])
        for length in (4096, 8192)
    )
    assert long.working == pytest.approx(4 * short.working)
    # Reference attention: two fp32 copies of [n_h, L, L], its gradients as many, and what the indexer keeps.
    assert short.working > 4 * 2 * 8 * 16 * 4096**2


def test_the_kernels_keep_a_selection_as_bits_and_nothing_else_square():
    short, long = (estimate([f"train.seq_len_tokens={length}"]) for length in (4096, 8192))
    assert long.working == short.working
    assert long.activations - 2 * short.activations == pytest.approx(24 * 4 * (8192**2 - 2 * 4096**2) / 8)


def test_lists_grow_with_the_length_and_not_with_its_square():
    for options in (["gsa.attention_kernel=gathered"], ["gsa.selection_block=32", "gsa.local_window=64"]):
        short, long = (estimate([f"train.seq_len_tokens={length}", *options]) for length in (32768, 65536))
        assert long.activations == pytest.approx(2 * short.activations)
        sums = 4 * 4 * 32768 * 2 * 4 * 128  # of dK and dV: 4 sequences, 4 heads of 128, in fp32
        assert long.working - short.working == pytest.approx(sums)


def test_beyond_the_longest_mask_selections_are_lists():
    masked, lists = (estimate([f"train.seq_len_tokens={length}"]) for length in (32768, 65536))
    assert lists.activations < 2 * masked.activations


def test_context_parallelism_divides_what_grows_with_the_length():
    one, two = estimate([REFERENCE]), estimate([REFERENCE, "parallel.context=2"])
    assert two.logits == one.logits / 2
    assert two.weights == one.weights
    assert two.optimizer == one.optimizer  # over as many ranks
    assert (
        one.activations / 4 < two.activations < one.activations / 2
    )  # each chunk sees the keys before its end
    one, two = (
        estimate([REFERENCE, "train.recompute=selective", f"parallel.context={size}"]) for size in (1, 2)
    )
    keys = 24 * 2 * 4 * 4096 * 64  # the indexer's, of 4 whole sequences in bf16; K and V are gathered again
    selections = 24 * 4 * 4096**2
    assert two.activations == pytest.approx((one.activations - selections) / 2 + keys + selections * 5 / 16)


def test_every_phase_and_stage_has_a_line():
    config = dataclasses.replace(
        load_config(GSA, ["parallel.pipeline=2"]), phases=[PhaseConfig(name="only", attention="dense")]
    )
    report = describe(config, 2)
    assert [line.split()[:2] for line in report.splitlines() if line.startswith("  only ")][-2:] == [
        ["only", "0"],
        ["only", "1"],
    ]
