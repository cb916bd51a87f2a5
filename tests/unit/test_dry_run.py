"""Tests the report of a dry run."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from gsa_train.arguments import DEVICE
from gsa_train.checkpoint.files import MEGATRON_METADATA
from gsa_train.config import Config, ParallelConfig, PhaseConfig, load_config
from gsa_train.config.load import ConfigError
from gsa_train.model.flops import flops_per_token
from gsa_train.planning.dry_run import describe, rank_of

CONFIGS = Path(__file__).parents[2] / "configs"
GSA = CONFIGS / "gsa_1.7b.yaml"


def test_the_report_of_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may have the data
    report = describe(load_config(GSA, world_size=8, need_data=False), 8)
    for section in (
        "Layout",
        "Parameters",
        "Tokens",
        "Floating-point operations",
        "Time on",
        "Memory per rank",
        "Data",
    ):
        assert f"\n\n{section}" in report
    for fragment in (
        "gsa_1.7b on 8 ranks",
        "8 = tensor 1 x context 1 x pipeline 1 x data 8",
        "8 micro-batches of 4",
        "stage 0 (layers 0-23), data 7: rank 7",
        "1,743,291,392",
        "1,048,576 tokens per step",
        "104,857,600,000",
        "warm-up",
        "dense equivalent",
        "22.73; for the copies about 2.84 of each rank's host memory,",
        "on GPUs pinned from the first steps on",
        "data.train_dir",
    ):
        assert fragment in report
    assert f"data.train_dir = data/slimpajama/train: not in the current folder {tmp_path};" in report
    assert max(len(line.replace(str(tmp_path), "")) for line in report.splitlines()) < 110


def section(report: str, beginning: str) -> list[str]:
    (block,) = [each for each in report.split("\n\n") if each.startswith(beginning)]
    return block.splitlines()


def table_of(lines: list[str]) -> dict[str, list[float]]:
    return {words[0]: [float(word.replace(",", "")) for word in words[1:]] for words in map(str.split, lines)}


def test_the_time_follows_from_a_given_mfu():
    config = load_config(GSA, world_size=8, need_data=False)
    lines = section(
        describe(config, 8, "NVIDIA A100-SXM4-80GB", mfu=0.5), "Time on 8 x NVIDIA A100-SXM4-80GB"
    )
    assert lines[1] == "  MFU 50% of 312 TFLOP/s (bf16): as given"
    assert lines[2].split() == ["phase", "tokens/s", "hours", "GPU-days"]
    rows = table_of(lines[3:])
    assert list(rows) == ["warm-up", "sparse", "total"]
    seconds = 0.0
    for phase in config.phases:
        flops = flops_per_token(
            config.model, config.gsa, config.moe, phase, config.train.seq_len_tokens
        ).total
        tokens = phase.steps * config.train.global_batch_size * config.train.seq_len_tokens
        tokens_per_second = 8 * 0.5 * 312e12 / flops
        expected = [
            tokens_per_second,
            tokens / tokens_per_second / 3600,
            8 * tokens / tokens_per_second / 86400,
        ]
        assert rows[phase.name] == pytest.approx(expected, rel=0.01)
        seconds += tokens / tokens_per_second
    assert rows["total"][1:] == pytest.approx([seconds / 3600, 8 * seconds / 86400], rel=0.01)


def test_the_time_takes_the_mfu_that_was_measured_and_guesses_none():
    config = load_config(GSA, world_size=8, need_data=False)
    assert "measured for 1.7B parameters" in section(describe(config, 8), f"Time on 8 x {DEVICE}")[1]
    unknown = section(describe(config, 8, "NVIDIA B200"), "Time on 8 x NVIDIA B200")
    assert len(unknown) == 2
    assert "give --mfu" in unknown[1]
    small = section(describe(load_config(CONFIGS / "demo.yaml"), 1), f"Time on 1 x {DEVICE}")
    assert "give --mfu, such as --mfu 0.3: none has been measured for 1,970,080 parameters" in small[1]


def test_small_numbers_are_told_in_small_units():
    report = describe(load_config(CONFIGS / "demo.yaml"), 1, mfu=0.01)
    for beginning in ("Floating-point operations per token (training, in 1e6)", "Memory per rank (in MiB)"):
        totals = [line for line in section(report, beginning) if line.split()[0] in ("total", "sparse")]
        assert all(float(line.split()[-1]) > 1 for line in totals), totals
    assert float(section(report, "Checkpoint (in MiB)")[1].split(";")[0]) > 1
    assert "seconds  GPU-days" in report


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


def test_every_phase_and_stage_has_a_line():
    config = dataclasses.replace(
        load_config(GSA, ["parallel.pipeline=2"]), phases=[PhaseConfig(name="only", attention="dense")]
    )
    report = describe(config, 2)
    assert [line.split()[:2] for line in report.splitlines() if line.startswith("  only ")][-2:] == [
        ["only", "0"],
        ["only", "1"],
    ]


SHIPPED = sorted(path.name for path in CONFIGS.glob("*.yaml") if not path.name.startswith(("demo", "tiny")))
NOTE = (
    r"Peak memory by --dry-run is (\d+) GiB \(for 80 GB GPUs\), or (\d+) GiB with (\S+) \(for 141 GB GPUs\)\."
)


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
        gsa, standard = (
            load_config(CONFIGS / f"{kind}_1.7b_{length}.yaml", world_size=8, need_data=False)
            for kind in ("gsa", "standard")
        )
        assert gsa.train == standard.train
        assert gsa.model == standard.model
        assert gsa.parallel == standard.parallel
        assert gsa.parallel.context > 1


@pytest.mark.parametrize("override", ["gsa.attention_impl=reference", "gsa.indexer_heads=9"])
def test_attention_in_plain_torch_is_told(override: str) -> None:
    report = describe(load_config(GSA, [override], world_size=8, need_data=False), 8)
    assert f"attention in plain torch, with L x L tensors: {override.replace('=', ' = ')}" in report
    assert "give --mfu: attention runs in plain torch" in report
    assert "attention in plain torch" not in describe(load_config(GSA, world_size=8, need_data=False), 8)
