"""Tests what a new run takes from `checkpoint.initial_weights`, and which checkpoints the run refuses. If the
checkpoint is from bf16 training, the new run begins with the checkpoint's fp32 weights."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from gsa_data.tokenize import Tokenizer
from gsa_train import train
from gsa_train.arguments import Arguments
from gsa_train.checkpoint.load import StateError, load_checkpoint
from gsa_train.config import CheckpointConfig, Config, GSAConfig
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.interface import MAIN_WEIGHT
from gsa_train.optimizer.main_weights import MainWeights, carry_over, keep_main_weights
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.phases import PhaseRange, phase_ranges
from gsa_train.run import open as opening
from gsa_train.run.open import open_phase
from gsa_train.run.state import Run
from gsa_train.run_folder.initial_weights import (
    MEANING,
    WITHOUT_WEIGHTS,
    load_initial_optimizer,
)
from gsa_train.run_folder.lock import RunFolderError
from gsa_train.run_folder.resume import ResumeError, Start, choose_start
from gsa_train.train import train_phases
from helpers.checkpoints import write_checkpoint
from helpers.converted import model_with_weights_of
from helpers.runs import REPOSITORY
from helpers.single_rank import (
    DENSE,
    SPARSE,
    named_weights,
    random_batches,
    single_rank,
    take_step,
    tiny_config,
    tiny_model,
)
from helpers.tiny_run import tiny_run

TOKENIZER = cast(Tokenizer, SimpleNamespace(fingerprint="pieces"))
NO_TOKENIZER = cast(Tokenizer, SimpleNamespace(fingerprint=None))
DENSE_MODEL: dict[str, Any] = {"attention": "dense", "value_gate": False, "output_gate": False}

BF16 = {"precision": "bf16"}
BASE = dataclasses.replace(SPARSE, train="base")
KINDS: dict[str, dict[str, Any]] = {
    "distributed": {},
    "replicated": {"distributed_optimizer": False},
    "ZeRO-1": {"strategy": "deepspeed", "zero_stage": 1},
    "ZeRO-3": {"strategy": "deepspeed", "zero_stage": 3},
}

Trained = Callable[[Config], tuple[Path, Model]]


@pytest.fixture(autouse=True)
def no_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow garbage collection of a run's objects, because other tests share the process."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """Return the folder of a run that took one step, and its model."""

    def train_one(config: Config) -> tuple[Path, Model]:
        model = tiny_model(config)
        optimizer = build_optimizer(model, config.phases[0], config)
        take_step(model, optimizer, random_batches(config), config, lr=1e-2)
        data = {"tokenizer_fingerprint": "pieces"}
        write_checkpoint(tmp_path / "checkpoints", 1, model, optimizer, config, data=data)
        close_optimizer(model, optimizer)
        return tmp_path, model

    return train_one


def start(folder: Path, config: Config, tokenizer: Tokenizer = TOKENIZER) -> Model:
    return model_with_weights_of(folder, config, tokenizer)


def test_another_length_base_and_budget(trained: Trained) -> None:
    folder, model = trained(tiny_config([SPARSE]))
    longer = tiny_config(
        [DENSE, SPARSE],
        model={"rope_base": 5e5},
        gsa={"k_base": 8, "k_max": 16, "local_window": 2},
        train={"seq_len_tokens": 32},
    )
    loaded = start(folder, longer)
    for name, weight in named_weights(model).items():
        assert torch.equal(named_weights(loaded)[name], weight), name
    for mine, other in zip(model.attentions, loaded.attentions, strict=True):
        assert torch.equal(mine.variance.ema, other.variance.ema)


@pytest.mark.parametrize(("here", "warns"), [([2], True), ([3], False), ([], False)])
def test_steps_to_skip_that_were_the_earlier_run_s_are_named(
    trained: Trained, here: list[int], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = trained(tiny_config([SPARSE], train={"iterations_to_skip": [2]}))
    start(folder, tiny_config([SPARSE], train={"iterations_to_skip": here}))
    assert ("train.iterations_to_skip = [2] is as in the run of the checkpoint" in caplog.text) == warns


def main_weights(model: Model, optimizer: PhaseOptimizer) -> dict[str, torch.Tensor]:
    """Map parameters with a separate fp32 weight to this weight, flat."""
    names = {id(parameter): name for name, parameter in model.gpt.named_parameters()}
    return {
        names[id(part.parameter)]: part.tensors[MAIN_WEIGHT].clone()
        for part in optimizer.state_parts()
        if MAIN_WEIGHT in part.tensors
    }


def saved_in_bf16(
    folder: Path, config: Config, spoil: bool = False
) -> tuple[Path, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a checkpoint, its fp32 weights and the weights of its model.

    Args:
        spoil: whether one of the fp32 weights differs from the model's weight.
    """
    model = tiny_model(config)
    optimizer = build_optimizer(model, config.phases[0], config)
    for seed in range(3):
        take_step(model, optimizer, random_batches(config, seed), config, lr=1e-3)
    if spoil:
        next(optimizer.state_parts()).tensors[MAIN_WEIGHT][0] += 1
    checkpoint = write_checkpoint(folder, 3, model, optimizer, config)
    mains, weights = main_weights(model, optimizer), named_weights(model)
    close_optimizer(model, optimizer)
    rounded = sum(not torch.equal(main, main.bfloat16().float()) for main in mains.values())
    assert rounded > 10
    return checkpoint, mains, {name: weight.flatten().float() for name, weight in weights.items()}


def begun(checkpoint: Path, config: Config) -> dict[str, torch.Tensor]:
    """Return what the optimizer of the first phase begins with, and the model's other weights, flat."""
    model = start(checkpoint, config, NO_TOKENIZER)
    optimizer = build_optimizer(model, config.phases[0], config)
    load_initial_optimizer(config, checkpoint, model, optimizer, single_rank())
    found = main_weights(model, optimizer)
    assert all(not part.tensors["exp_avg"].any() for part in optimizer.state_parts())
    close_optimizer(model, optimizer)
    weights = {name: weight.flatten() for name, weight in named_weights(model).items()}
    for name, main in found.items():
        assert torch.equal(weights[name], main.to(weights[name].dtype)), name
    return weights | found


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_weights_of_a_run_in_bf16(kind: str, tmp_path: Path) -> None:
    checkpoint, mains, _ = saved_in_bf16(tmp_path, tiny_config([SPARSE], train=BF16))
    # In fp32 this includes weights that the first phase does not train.
    for phase, fields in ((SPARSE, BF16), (BASE, {})):
        found = begun(checkpoint, tiny_config([phase], train=fields, parallel=KINDS[kind]))
        for name, main in mains.items():
            assert torch.equal(found[name], main), name


def test_fp32_weights_beside_new_ones(tmp_path: Path) -> None:
    checkpoint, mains, _ = saved_in_bf16(tmp_path, tiny_config([DENSE], gsa=DENSE_MODEL, train=BF16))
    config = tiny_config([SPARSE], train=BF16)
    fresh, found = named_weights(tiny_model(config)), begun(checkpoint, config)
    assert found.keys() == fresh.keys()
    for name, weight in fresh.items():
        assert torch.equal(found[name], mains.get(name, weight.flatten().float())), name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["distributed", "ZeRO-3"])
def test_fp32_weights_that_are_not_the_model_s(kind, precision, tmp_path, caplog):
    checkpoint, _, weights = saved_in_bf16(tmp_path, tiny_config([SPARSE], train=BF16), spoil=True)
    config = tiny_config([SPARSE], train={"precision": precision}, parallel=KINDS[kind])
    found = begun(checkpoint, config)
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name
    assert "fp32 weights of 1 parameters (" in caplog.text


def test_only_the_first_phase_begins_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config([SPARSE, dataclasses.replace(SPARSE, name="second")], train=BF16)
    checkpoint, mains, _ = saved_in_bf16(tmp_path, config)
    model, seen = start(checkpoint, config, NO_TOKENIZER), []

    def one_weight_changes(run: Any, phase_range: Any, optimizer: PhaseOptimizer) -> None:
        seen.append(main_weights(run.model, optimizer))
        next(optimizer.state_parts()).tensors[MAIN_WEIGHT][0] += 1

    monkeypatch.setattr("gsa_train.train.run_phase", one_weight_changes)
    monkeypatch.setattr("gsa_train.train.save_the_end", lambda *_: None)
    ranges = phase_ranges(config.phases)
    optimizer = open_phase(config, model, Start(), ranges[0], single_rank(), RunClock(), checkpoint)
    run = tiny_run(config, model, phase_optimizer=optimizer)
    del optimizer
    assert train_phases(run, ranges) is None
    for name, main in mains.items():
        assert torch.equal(seen[0][name], main), name
    changed = [name for name, main in mains.items() if not torch.equal(seen[1][name], main)]
    assert len(changed) == 1


def test_a_refused_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some errors appear only during loading, for example if the checkpoint's fp32 and bf16 weights do not match. Such
    an error leaves no run folder. If no run folder can be created, the start fails before building a model."""
    config = tiny_config([SPARSE], train=BF16, run={"dir": str(tmp_path / "runs"), "name": "new"})
    checkpoint, _, _ = saved_in_bf16(tmp_path, config, spoil=True)
    monkeypatch.setattr(train, "init_parallel", lambda *_: single_rank())

    def choose(*given: Any, **options: Any) -> Start:
        assert (tmp_path / "runs" / "new" / "lock").exists(), (
            "the step to start from is chosen with the lock held"
        )
        return choose_start(*given, **options)

    monkeypatch.setattr(train, "choose_start", choose)
    monkeypatch.setattr(opening, "load_tokenizer", lambda _: NO_TOKENIZER)
    for name in ("HangWatchdog", "shared_validation_sets", "open_batches"):
        monkeypatch.setattr(opening, name, Mock())
    monkeypatch.setattr(opening, "build_model", Mock(side_effect=opening.build_model))
    arguments = Arguments("", (), str(checkpoint), False, False, False, False, 1)
    with pytest.raises(StateError, match=r"fp32 weights of embedding.* differ from the model's"):
        train.train(config, arguments, Mock())
    assert not (tmp_path / "runs").exists()

    (tmp_path / "runs").write_text("no folder")
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(initial_weights=str(checkpoint)))
    with pytest.raises(RunFolderError, match="cannot be written"):
        train.train(config, dataclasses.replace(arguments, resume_from=None), Mock())
    assert opening.build_model.call_count == 1


FOUR_EXPERTS = {"experts": 4, "expert_ffn_hidden_size": 16}


OTHER_HEADS = {"num_heads": 8, "head_dim": 2, "num_kv_heads": 4}
SILU = {"output_gate": False, "output_transform": "silu"}
UNFIT = [
    (
        tiny_config(model={"ffn_hidden_size": 32}),
        r"\n  model\.ffn_hidden_size = 32 here, 24 in the checkpoint\n",
    ),
    (tiny_config(model={"ffn_hidden_size": 32}), r"linear_fc1\.weight: \(64, 16\) here, \(48, 16\) in"),
    (tiny_config(gsa={"indexer_dim": 16}), r"\n  gsa\.indexer_dim = 16 here, 6 in the checkpoint\n"),
    (tiny_config(model={"num_layers": 3}), r"layers\.2\.\S+: not in the checkpoint"),
    (tiny_config(model={"num_layers": 1}), r"layers\.1\.\S+: only in the checkpoint"),
    (tiny_config(moe=FOUR_EXPERTS), r"moe\.experts = 4 here, 0 in .*\n(.*\n)*.*experts\.\S+: not in the"),
    (tiny_config([DENSE], gsa=DENSE_MODEL), r"linear_gate\.\S+: only in the checkpoint"),
    (tiny_config(model=OTHER_HEADS), r"model\.num_heads = 8 here, 4 in"),
    (tiny_config(gsa={"indexer_activation": "relu"}), "indexer_activation = relu here, sigmoid in"),
    (tiny_config(gsa={"gate_activation": "silu"}), "gate_activation = silu here, sigmoid in"),
    (tiny_config(gsa=SILU), "output_transform = silu here, none in"),
]


def test_what_does_not_fit(trained: Trained, tmp_path: Path) -> None:
    folder, _ = trained(tiny_config([SPARSE]))
    for config, message in UNFIT:
        with pytest.raises(ResumeError, match=message):
            start(folder, config)
    with pytest.raises(ResumeError, match=r"another tokenizer: data\.tokenizer = .*\.model is another file"):
        start(folder, tiny_config(), Tokenizer(str(REPOSITORY / "data/sample/tokenizer.model")))
    with pytest.raises(ResumeError, match="no complete checkpoint there"):
        start(tmp_path / "nowhere", tiny_config())
    damaged = next((folder / "checkpoints").glob("step_*/*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ResumeError, match="is damaged"):
        start(folder, tiny_config())


def test_every_field_of_the_attention_has_been_thought_of() -> None:
    """A new field that changes the meaning of weights must be added to MEANING, or here."""
    shapes = {"indexer_dim", "indexer_temperature"}  # in the weights' sizes, or in their names
    reads = {"adaptive_k", "k_base", "k_min", "k_max", "dense_below", "local_window"}  # how much is read
    trains = {"gate_bias_init", "indexer_loss_row_fraction", "variance_ema_decay"}
    runs = {"attention", "attention_impl", "attention_kernel", "dense_attention"}
    known = {*MEANING["gsa"], *WITHOUT_WEIGHTS} | shapes | reads | trains | runs
    assert {field.name for field in dataclasses.fields(GSAConfig)} == known


# --- from phase to phase ----------------------------------------------------------------------------------

FIRST = dataclasses.replace(SPARSE, name="first", steps=3, lr=1e-4, min_lr=1e-4)
"""Trains more than `BASE`."""
HOST_MEMORY = {"strategy": "deepspeed", "zero_stage": 2, "offload_optimizer": True}
PHASE_KINDS = {**KINDS, "in host memory": HOST_MEMORY}


@pytest.mark.parametrize("kind", PHASE_KINDS)
def test_fp32_weights_go_on_in_the_next_phase_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    config = tiny_config([FIRST, BASE], train=BF16, parallel=PHASE_KINDS[kind])
    model = tiny_model(config)
    first = build_optimizer(model, FIRST, config)
    for seed in range(3):
        take_step(model, first, random_batches(config, seed), config, lr=1e-4)
    folder = write_checkpoint(tmp_path, 3, model, first, config)
    before = main_weights(model, first)
    assert sum(not torch.equal(weight, weight.bfloat16().float()) for weight in before.values()) > 10
    kept = keep_main_weights(model, first)
    close_optimizer(model, first)
    second = build_optimizer(model, BASE, config)
    carry_over(kept, second)

    loaded = tiny_model(config)
    resumed = build_optimizer(loaded, BASE, config)
    load_checkpoint(folder, loaded, resumed, single_rank(), with_optimizer=False)
    for each, optimizer in ((model, second), (loaded, resumed)):
        after = main_weights(each, optimizer)
        assert after.keys() == {name for name in before if "indexer" not in name}
        for name, weight in after.items():
            assert torch.equal(weight, before[name]), name
        assert all(not part.tensors["exp_avg"].any() for part in optimizer.state_parts())
        assert optimizer.updates == 0
        close_optimizer(each, optimizer)


def test_fp32_weights_take_no_memory_once_the_next_phase_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[weakref.ref[MainWeights]] = []
    alive: list[list[bool]] = []

    def keep(model: Model, optimizer: PhaseOptimizer, whole_state: bool) -> MainWeights:
        weights = keep_main_weights(model, optimizer, whole_state)
        kept.append(weakref.ref(weights))
        return weights

    def run_phase(run: Run, phase_range: PhaseRange, optimizer: PhaseOptimizer) -> None:
        alive.append([each() is not None for each in kept])

    monkeypatch.setattr(train, "keep_main_weights", keep)
    monkeypatch.setattr(train, "run_phase", run_phase)
    monkeypatch.setattr(train, "save_the_end", lambda *_: None)
    phases = [dataclasses.replace(FIRST, name=name) for name in ("first", "second", "third")]
    config = tiny_config(phases, train=BF16)
    run, ranges = tiny_run(config, tiny_model(config)), phase_ranges(phases)
    run.phase_optimizer = open_phase(config, run.model, Start(), ranges[0], single_rank(), RunClock())
    train_phases(run, ranges)
    assert alive == [[], [False], [False, False]]
    assert len(kept) == 2
