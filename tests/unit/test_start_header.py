"""Tests what a start prints about itself."""

from pathlib import Path

from gsa_train.cli import parse_arguments
from gsa_train.config import Config, DataConfig, PhaseConfig, RunConfig, TrainConfig, load_config
from gsa_train.model.flops import count_parameters
from gsa_train.run.start_header import first_line, start_header

CONFIG = Config(
    run=RunConfig(name="small", dir="/runs"),
    train=TrainConfig(seq_len_tokens=256, global_batch_size=8, objective="z_loss", optimizer="muon"),
    data=DataConfig(train_dir="text", validation_dir="", validation_sets={"web": "a", "books": "b"}),
    phases=[
        PhaseConfig(name="warm-up", steps=60, attention="dense", train="indexer"),
        PhaseConfig(name="sparse", steps=640, attention="sparse", train="all", decay="constant"),
    ],
)


def test_the_first_line() -> None:
    line = first_line(CONFIG, parse_arguments(["--config", "demo"]))
    assert line.startswith("small: training by demo on 1 rank, run folder /runs/small; loading torch")


def test_the_header() -> None:
    rows = start_header(CONFIG, "2 ranks on cpu", Path("/runs/small"), ["kept offline"]).splitlines()
    count = count_parameters(CONFIG.model, CONFIG.gsa, CONFIG.moe)
    assert count.gates > 0
    assert count.indexer > 0
    for row in (
        "small        2 ranks on cpu",
        f"model        {count.total:,} parameters, including gates {count.gates:,} and indexer {count.indexer:,}",
        "data         text; validation a, b",
        "tokens       2,048 a step (8 sequences of 256), 1,433,600 in all 700 steps",
        "training     objective = z_loss, optimizer = muon",
        "metrics      /runs/small/metrics.jsonl",
        "TensorBoard  tensorboard --logdir /runs/small",
        "W&B          kept offline",
    ):
        assert row in rows
    (phase,) = (row for row in rows if "sparse: steps" in row)
    assert phase.endswith("steps 61 to 700, sparse attention, trains all weights, constant learning rate")


def test_what_a_run_does_not_have_is_left_out_and_steps_before_a_resume_have_their_own_batches() -> None:
    config = load_config("standard_1.7b", ["logging.tensorboard=false"])
    header = start_header(config, "8 ranks on cuda", Path("runs/standard"), [])
    assert not any(word in header for word in ("TensorBoard", "W&B", "training  "))
    assert "gates 0 and indexer 0" in header
    header = start_header(CONFIG, "1 rank on cpu", Path("/runs/small"), [], done=(100, 51_200))
    assert "tokens       2,048 a step (8 sequences of 256), 1,280,000 in all 700 steps" in header.splitlines()
