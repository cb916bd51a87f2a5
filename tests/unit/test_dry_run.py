"""Tests the report of a dry run, and the costs of mixtures of experts in it."""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gsa_train.arguments import DEVICE
from gsa_train.checkpoint.files import MEGATRON_METADATA
from gsa_train.config import Config, ParallelConfig, load_config
from gsa_train.config.load import ConfigError
from gsa_train.model.flops import count_parameters, flops_per_token
from gsa_train.planning.dry_run import describe, rank_of
from gsa_train.planning.memory.estimate import estimate_memory, worst_expert_load
from gsa_train.planning.memory.experts import most_rows, routed_rows
from gsa_train.planning.memory.sizes import sizes_of

CONFIGS = Path(__file__).parents[2] / "configs"
GSA = CONFIGS / "gsa_1.7b.yaml"


def load(overrides: Sequence[str] = (), world_size: int = 8) -> Config:
    return load_config(GSA, overrides, world_size=world_size, need_data=False)


def test_the_report_of_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may have the data
    report = describe(load(), 8)
    names = ("Layout", "Parameters", "Tokens", "Floating-point operations", "Time on", "Memory per rank")
    for name in names:
        assert f"\n\n{name}" in report
    for fragment in (
        "gsa_1.7b on 8 ranks",
        "8 = tensor 1 x context 1 x pipeline 1 x data 8",
        "8 micro-batches of 4",
        "1,743,291,392",
        "1,048,576 tokens per step",
        "sparse attention: masked",
        "104,857,600,000",
        "warm-up",
        "dense equivalent",
        "22.73; for the copies about 2.84 of each rank's host memory,",
        f"data.train_dir = data/slimpajama/train: not in the current folder {tmp_path};",
    ):
        assert fragment in report


def section(report: str, beginning: str) -> list[str]:
    (block,) = [each for each in report.split("\n\n") if each.startswith(beginning)]
    return block.splitlines()


def table_of(lines: list[str]) -> dict[str, list[float]]:
    return {words[0]: [float(word.replace(",", "")) for word in words[1:]] for words in map(str.split, lines)}


def test_the_time_follows_from_a_given_mfu():
    config = load()
    device = "NVIDIA A100-SXM4-80GB"
    lines = section(describe(config, 8, device, mfu=0.5), f"Time on 8 x {device}")
    in_fp8 = describe(load(["train.linear_layers=fp8"]), 8, device, mfu=0.5)
    assert section(in_fp8, f"Time on 8 x {device}") == lines  # MFU is relative to bf16's peak
    assert lines[1] == "  MFU 50% of 312 TFLOP/s (bf16): as given"
    assert lines[2].split() == ["phase", "tokens/s", "hours", "GPU-days"]
    rows = table_of(lines[3:])
    assert list(rows) == ["warm-up", "sparse", "total"]
    seconds = 0.0
    for phase in config.phases:
        sections = (config.model, config.gsa, config.moe, phase)
        flops = flops_per_token(*sections, config.train.seq_len_tokens).total
        tokens = phase.steps * config.train.global_batch_size * config.train.seq_len_tokens
        tokens_per_second = 8 * 0.5 * 312e12 / flops
        hours = tokens / tokens_per_second / 3600
        assert rows[phase.name] == pytest.approx([tokens_per_second, hours, 8 * hours / 24], rel=0.01)
        seconds += tokens / tokens_per_second
    assert rows["total"][1:] == pytest.approx([seconds / 3600, 8 * seconds / 86400], rel=0.01)


def test_the_time_takes_the_mfu_that_was_measured_and_guesses_none():
    config = load()
    assert "measured for 1.7B parameters" in section(describe(config, 8), f"Time on 8 x {DEVICE}")[1]
    unknown = section(describe(config, 8, "NVIDIA B200"), "Time on 8 x NVIDIA B200")
    assert len(unknown) == 2
    assert "give --mfu" in unknown[1]
    report = describe(load_config(CONFIGS / "demo.yaml"), 1)
    small = section(report, f"Time on 1 x {DEVICE}")
    assert "give --mfu, such as --mfu 0.3: none has been measured for 1,970,080 parameters" in small[1]
    assert "\n\nMemory per rank (in MiB)" in report, "not 0.0 GiB"


PIPELINE = ["parallel.tensor=2", "parallel.pipeline=2"]
INTERLEAVED = [*PIPELINE[1:], "parallel.virtual_pipeline=2", "parallel.pipeline_layers=[5,7,7,5]"]
LAYOUTS = [
    (PIPELINE, 8, ["stage 0 (layers 0-11), data 1: ranks 2-3 (tensor 0-1)", "sequence parallel on"]),
    (PIPELINE, 8, ["stage 1 (layers 12-23), data 0: ranks 4-5 (tensor 0-1)"]),
    (
        INTERLEAVED,
        2,
        ["12 layers per stage in 2 chunks (interleaved)", "stage 0 (layers 0-4, 12-18), data 0: rank 0"],
    ),
    ([*PIPELINE[1:], "parallel.pipeline_layers=[23,1]"], 2, ["stage 1 (layers 23), data 0: rank 1"]),
    ([*PIPELINE[:1], "parallel.context=2"], 8, ["data 1: ranks 4-7 (tensor 0-1, context 0-1)"]),
    (["train.global_batch_size=1024"], 1024, ["... and 992 more in the same order"]),
]


@pytest.mark.parametrize(("overrides", "world_size", "lines"), LAYOUTS)
def test_stages_and_ranks_are_named(overrides: list[str], world_size: int, lines: list[str]) -> None:
    report = describe(load_config(GSA, overrides), world_size)
    assert [line for line in lines if line not in report] == []


def test_initial_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    path, missing = Path("configs/demo.yaml"), f"checkpoint.initial_weights={tmp_path / 'gone'}"
    # The config's folder may contain a demo, which would resume from its own checkpoint.
    options = [missing, f"run.dir={tmp_path}"]
    report = describe(load_config(path, options, world_size=1, need_data=False), 1)
    assert f"checkpoint.initial_weights = {tmp_path / 'gone'}: no such folder" in report
    with pytest.raises(ConfigError, match="no such folder"):
        load_config(path, options, world_size=1)


def test_a_restart_needs_no_initial_weights(tmp_path: Path) -> None:
    """The run that wrote them may have deleted them; this run resumes from its own checkpoint."""
    path = Path("configs/demo.yaml")
    own = [f"checkpoint.initial_weights={tmp_path / 'gone'}", f"run.dir={tmp_path}", "run.name=new"]
    checkpoint = tmp_path / "new" / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match="no such folder"):  # the folder of an incomplete save
        load_config(path, own, world_size=1)
    (checkpoint / MEGATRON_METADATA).touch()
    load_config(path, own, world_size=1)


@pytest.mark.parametrize(
    ("tensor", "context", "pipeline", "world_size"), [(2, 1, 2, 8), (1, 1, 4, 8), (2, 2, 3, 24), (1, 4, 1, 8)]
)
def test_ranks_are_laid_out_as_megatron_core_does(tensor, context, pipeline, world_size):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    data = world_size // tensor // context // pipeline
    sizes = {"tp": tensor, "ep": 1, "dp": data, "pp": pipeline, "cp": context}
    generator = parallel_state.RankGenerator(**sizes, order="tp-cp-ep-dp-pp")
    layout = ParallelConfig(tensor=tensor, context=context, pipeline=pipeline)
    config = dataclasses.replace(Config(), parallel=layout)
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


SHIPPED = sorted(
    path.name for path in CONFIGS.glob("*.yaml") if not path.name.startswith(("demo", "tiny", "convert"))
)
NOTE = r"Peak memory by --dry-run is (\d+) GiB \(for 80 GB GPUs\), or (\d+) GiB with (\S+) \(for 141 GB GPUs"


def peak_gib(name: str, overrides: list[str]) -> float:
    config = load_config(CONFIGS / name, overrides, world_size=8, need_data=False)
    report = describe(config, 8)
    rows = report[report.index("Memory per rank") :].split("\n\n")[0].splitlines()[3:]
    assert len(rows) == len(config.phases) * config.parallel.pipeline
    return max(float(row.split()[-1]) for row in rows)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_config_fits_the_gpus_that_its_head_names(name: str) -> None:
    """A tenth is left for the CUDA context, NCCL, and the allocator's gaps."""
    head = (CONFIGS / name).read_text().split("run:")[0]
    found = re.search(NOTE, head)
    assert found is not None, head
    said, said_with, override = found.groups()
    peak, peak_with = peak_gib(name, []), peak_gib(name, [override])
    assert (peak, peak_with) == pytest.approx((int(said), int(said_with)), abs=0.51)  # rounded to integers
    assert peak * 2**30 < 0.9 * 80e9
    assert peak < peak_with < 0.9 * 141e9 / 2**30


def test_long_contexts_come_with_their_baseline() -> None:
    for length in ("32k", "128k"):
        paths = (CONFIGS / f"{kind}_1.7b_{length}.yaml" for kind in ("gsa", "standard"))
        gsa, standard = (load_config(path, world_size=8, need_data=False) for path in paths)
        assert gsa.train == standard.train
        assert gsa.model == standard.model
        assert gsa.parallel == standard.parallel
        assert gsa.parallel.context > 1


@pytest.mark.parametrize("override", ["gsa.attention_impl=reference", "gsa.indexer_heads=9"])
def test_attention_in_plain_torch_is_told(override: str) -> None:
    report = describe(load([override]), 8)
    assert f"attention in plain torch, with L x L tensors: {override.replace('=', ' = ')}" in report
    assert "give --mfu: attention runs in plain torch" in report
    assert "attention in plain torch" not in describe(load(), 8)


# ---- mixtures of experts

EXPERTS = ["moe.experts=64", "moe.top_k=4", "moe.expert_ffn_hidden_size=512"]
EXPERTS += ["moe.shared_expert_ffn_hidden_size=1024", "moe.first_dense_layers=1"]
EXPERT_8 = [*EXPERTS, "parallel.expert=8"]


def test_experts_are_spread_over_their_own_ranks() -> None:
    config = load(EXPERT_8)
    count, phase = count_parameters(config.model, config.gsa, config.moe), config.phases[-1]
    of_all = count.total - count.experts
    estimate = estimate_memory(config, phase, 8, 0)
    assert estimate.weights == pytest.approx(2 * (of_all + count.experts / 8))
    assert estimate.gradients == pytest.approx(4 * (of_all + count.experts / 8))
    # Each expert and its state are on one of eight ranks. All else has eight replicas, and an eighth of the state each.
    assert estimate.optimizer == pytest.approx(12 * (of_all / 8 + count.experts / 8))
    split = [*EXPERTS, "parallel.tensor=4", "parallel.expert_tensor=4", "parallel.expert=2"]
    config = load(split)
    replicated = count.norms + count.indexer + count.router
    estimate = estimate_memory(config, phase, 8, 0)
    of_rank = (of_all - replicated) / 4 + replicated + count.experts / 8
    assert estimate.weights == pytest.approx(2 * of_rank)


def test_rows_of_a_rank() -> None:
    """Each of eight ranks has four sequences of 4096 tokens, with four choices each."""
    even = 4 * 4096 * 4
    config = load(EXPERT_8)
    sizes = sizes_of(config)
    assert (routed_rows(config, sizes), most_rows(config, sizes)) == (even, 8 * even)
    limited = load([*EXPERT_8, "moe.capacity_factor=1.5"])
    assert most_rows(limited, sizes) == 1.5 * even
    few = load([*EXPERT_8, "moe.experts=16"])  # two experts on a rank are two choices of a token
    assert most_rows(few, sizes) == 8 * even / 2
    alone = load(EXPERTS)
    assert most_rows(alone, sizes) == routed_rows(alone, sizes) == even
    assert worst_expert_load(alone, 8, 0) == 0
    # 23 layers keep rows, SwiGLU's input halves and output in bf16, and an fp32 weight. The last layer has two outputs.
    more = 7 * even
    kept = 23 * more * (2 * (2048 + 3 * 512) + 4)
    assert worst_expert_load(config, 8, 0) == pytest.approx(kept + 2 * 2 * more * 2048)
    recomputed = load([*EXPERT_8, "train.recompute=full"])
    assert worst_expert_load(recomputed, 8, 0) == pytest.approx(kept / 23 + 2 * 2 * more * 2048)


def test_a_dry_run_tells_of_experts() -> None:
    config = load(EXPERT_8, 16)
    report, count = describe(config, 16), count_parameters(config.model, config.gsa, config.moe)
    for line in (
        "23 layers with 64 experts, top 4: 8 on a rank, in 2 replicas",
        f"active in a token  {count.active:,}",
        "more where one rank's get all tokens of all its layers",
    ):
        assert line in report
    assert "expert" not in describe(load(), 8).replace("--mfu", "")
