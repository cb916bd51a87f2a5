"""Tests that a training step on a CUDA device never waits, is repeatable, and is equal with every kernel."""

from collections.abc import Callable, Iterator

import pytest
import torch
import triton

from gsa_train.config import Config, load_config
from gsa_train.data.batches import MicroBatch, share_blocks, to_micro_batch
from gsa_train.distributed.parallel import Parallel
from gsa_train.metrics.record import Measured, send_step
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import StepResult, Training, train_step
from helpers.runs import REPOSITORY
from helpers.single_rank import single_rank

SMALL = (
    *("model.num_layers=2", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=2"),
    *("model.head_dim=64", "model.ffn_hidden_size=1376", "model.vocab_size=4096", "model.init_std=0.05"),
    *("train.seq_len_tokens=1024", "train.micro_batch_size=2", "train.global_batch_size=4"),
    "data.num_workers=0",
)
ALL_KEYS = ("gsa.k_min=1024", "gsa.k_base=1024", "gsa.k_max=1024")
"""All keys are selected, so rounding cannot change a selection."""
NO_DOCUMENTS = "data.attend_across_documents=true"


def config_of(name: str, *overrides: str) -> Config:
    gsa = (
        [] if name.startswith(("standard", "gated")) else ["gsa.k_min=64", "gsa.k_base=256", "gsa.k_max=512"]
    )
    path = REPOSITORY / "configs" / f"{name}.yaml"
    return load_config(path, [*SMALL, *gsa, *overrides], world_size=1, need_data=False)


def batches_of(config: Config, parallel: Parallel, seed: int) -> list[MicroBatch]:
    train, generator = config.train, torch.Generator().manual_seed(seed)
    shape = (train.global_batch_size, train.seq_len_tokens + 1)
    blocks = torch.randint(1, config.model.vocab_size, shape, generator=generator, dtype=torch.int32)
    blocks[torch.rand(shape, generator=generator) < 0.005] = 0
    shared = share_blocks(blocks.numpy(), shape, parallel)
    across = config.data.attend_across_documents
    return [to_micro_batch(part, 0, across) for part in shared.split(train.micro_batch_size)]


class Trainer:
    def __init__(self, config: Config, phase: int = -1) -> None:
        self.config, self.parallel = config, single_rank()
        self.model: Model = build_model(config, self.parallel)
        self.optimizer: PhaseOptimizer = build_optimizer(self.model, config.phases[phase], config)
        self.detector = SpikeDetector(config.monitor, self.parallel.device)
        # The history is as after the first steps of a phase, which are not judged.
        full = {"steps": 128, "history": [[8.0, 9.0] * 64, [5.0, 6.0] * 64], "streak": [0.0, 0.0]}
        self.detector.load({"detector": "robust", **full})

    def step(self, step: int, measures: bool = False) -> StepResult:
        batches = batches_of(self.config, self.parallel, step)
        training = Training(self.model, self.optimizer, self.config, self.parallel, self.detector)
        return train_step(training, batches, 1e-3, step, measures=measures)

    def gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.gpt.named_parameters()
        return {name: p.main_grad.clone() for name, p in named if p.requires_grad}


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(config: Config, phase: int = -1) -> Trainer:
        made.append(Trainer(config, phase))
        return made[-1]

    yield make
    for one in made:
        close_optimizer(one.model, one.optimizer)


def worst_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - g).norm() / g.norm().clamp(min=1e-12)) for n, g in other.items())


@pytest.mark.parametrize(
    ("name", "phase", "overrides"),
    [
        ("gsa_1.7b", -1, ()),
        ("gsa_1.7b", 0, ()),
        ("gsa_1.7b", -1, ("gsa.indexer_loss_row_fraction=0.5", "train.recompute=full")),
        ("standard_1.7b", -1, ("train.linear_layers=fp8",)),
        ("gsa_1.7b", -1, ("train.optimizer=muon",)),
        ("gated_only_1.7b", -1, ("train.fused_ops=none",)),
    ],
)
def test_the_host_waits_for_nothing(trainer, name, phase, overrides):
    one = trainer(config_of(name, *overrides), phase)
    one.step(0)  # compiles, and creates handles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = [one.step(step).grad_norm for step in (1, 2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(norms).isfinite().all()


def test_the_host_waits_for_nothing_in_a_logged_step(trainer: Callable[..., Trainer]) -> None:
    """A step's numbers are read after the next step's launch, and equal what a waiting host reads."""
    one, other = (trainer(config_of("gsa_1.7b")) for _ in range(2))
    found = []
    for each, waits in ((one, False), (other, True)):
        each.step(0, measures=True)  # compiles, and finds the queries to measure
        each.model.runtime.stats.reset()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            result = each.step(1, measures=True)
            worked = each.model.work_time.read_and_reset()
            measured = Measured(causal_keys=result.causal_keys, update_norm=result.update_norm)
            read = send_step(
                each.model.runtime.stats, result.loss_sum, result.loss_tokens, measured, each.parallel
            )
            if waits:
                torch.cuda.synchronize()
            else:
                each.step(2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(read())
        torch.cuda.synchronize()
        later = each.model.work_time.read_and_reset()  # of work that had not ended
        assert worked.parts["optimizer"] + later.parts["optimizer"] > 0
    unwaited, waited = found
    assert unwaited.loss == waited.loss
    assert unwaited.update_norm == waited.update_norm
    assert unwaited.update_norm > 0
    assert repr(unwaited.layers) == repr(waited.layers)  # NaN is NaN


@pytest.mark.parametrize("kernel", ["masked", "gathered"])
def test_only_the_first_step_compiles(trainer, kernel, monkeypatch):
    """Key lists have a different length in each step."""
    one = trainer(config_of("gsa_1.7b", f"gsa.attention_kernel={kernel}"))
    one.step(0)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["fn"].name)
    )
    for step in range(1, 7):
        one.step(step)
    assert compiled == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("phase", "overrides"),
    [
        (-1, ()),
        (0, ()),
        (-1, ("gsa.attention_kernel=gathered",)),
        (-1, ("gsa.indexer_activation=sigmoid", "train.fused_ops=none")),
        (-1, ("gsa.attention_kernel=gathered", "train.seq_len_tokens=20000")),
    ],
)
def test_a_norm_that_is_not_finite_changes_no_weight(trainer, phase, overrides, bad):
    """No kernel or statistic fails on such numbers, and the next step is clean."""
    one = trainer(config_of("gsa_1.7b", *overrides), phase)
    one.step(0)
    weights = {name: p.detach().clone() for name, p in one.model.gpt.named_parameters()}
    hook = one.model.gpt.decoder.layers[0].mlp.linear_fc2.register_forward_hook(
        lambda module, inputs, output: (output[0] * bad, output[1])
    )
    assert not one.step(1, measures=True).grad_norm.isfinite()
    for name, parameter in one.model.gpt.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    hook.remove()
    assert one.step(1, measures=True).grad_norm.isfinite()


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_an_update_left_out_leaves_no_trace(trainer: Callable[..., Trainer], sharded: str) -> None:
    """Weights, averages, and AdamW's moments and step counts keep their bits."""
    one = trainer(config_of("gsa_1.7b", "monitor.action=skip", f"parallel.distributed_optimizer={sharded}"))
    one.step(0)

    def tensors() -> list[torch.Tensor]:
        kept = [value for value in one.model.gpt.state_dict().values() if isinstance(value, torch.Tensor)]
        for inner in one.optimizer.optimizer.chained_optimizers:
            for parameter, state in inner.optimizer.state.items():
                kept += [parameter, *state.values()]
        return [tensor.detach().clone() for tensor in kept]

    before = tensors()
    low = {"steps": 128, "history": [[-90.0, -91.0] * 64, [5.0, 6.0] * 64], "streak": [0.0, 0.0]}
    one.detector.load({"detector": "robust", **low})
    assert not one.step(1).verdict.applied
    assert all(torch.equal(after, tensor) for after, tensor in zip(tensors(), before, strict=True))


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_one_kernel_clips_and_updates(trainer: Callable[..., Trainer], sharded: str) -> None:
    """The expected value is Adam's first step in closed form, for gradients clipped to a hundredth."""
    fields = (
        "train.grad_clip=0.01", "train.adam_epsilon=1e-5", "train.weight_decay=0", "train.precision=fp32",
    )  # fmt: skip
    one = trainer(config_of("standard_1.7b", *fields, f"parallel.distributed_optimizer={sharded}"))
    before = {name: p.detach().clone() for name, p in one.model.gpt.named_parameters()}
    norm = one.step(0).grad_norm.item()
    clipped = one.gradients()  # the kernel writes them back
    total = torch.stack([gradient.norm() for gradient in clipped.values()]).norm().item()
    assert norm > 0.1
    assert total == pytest.approx(0.01, rel=1e-4)
    for name, parameter in one.model.gpt.named_parameters():
        expected = -1e-3 * clipped[name] / (clipped[name].abs() + 1e-5)
        torch.testing.assert_close(
            parameter - before[name], expected, rtol=0.02, atol=1.2e-7, msg=name
        )  # The tolerance is an ulp of a norm's weight.


@pytest.mark.parametrize(
    "overrides", [(), ("gsa.indexer_loss_row_fraction=0.5",), ("train.optimizer=muon", "train.qk_clip=12")]
)
def test_steps_repeat_bit_for_bit(trainer: Callable[..., Trainer], overrides: tuple[str, ...]) -> None:
    runs = [trainer(config_of("gsa_1.7b", *overrides)) for _ in range(2)]
    for step in range(3):
        results = [one.step(step) for one in runs]
        assert torch.equal(results[0].loss_sum, results[1].loss_sum)
        assert torch.equal(results[0].grad_norm, results[1].grad_norm)
    first, second = (one.gradients() for one in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gsa_1.7b", ()),
        ("gsa_1.7b", ("gsa.indexer_rope=false", "gsa.indexer_activation=plain")),
        ("gsa_1.7b", ("gsa.indexer_norm=false", "gsa.indexer_activation=qsa")),
        ("standard_1.7b", ()),
    ],
)
def test_fused_operations_change_nothing_but_rounding(trainer, name, overrides):
    """In bf16, gradients of fused operations are at most 1.5 times as far from fp32 as in plain torch."""
    losses, gradients = {}, {}
    all_keys = ALL_KEYS if name.startswith("gsa") else ()
    for precision, fused in (("fp32", "none"), ("fp32", "triton"), ("bf16", "none"), ("bf16", "triton")):
        fields = (f"train.fused_ops={fused}", f"train.precision={precision}", *all_keys, *overrides)
        one = trainer(config_of(name, *fields))
        losses[precision, fused] = one.step(0).loss_sum
        gradients[precision, fused] = one.gradients()
    exact = losses["fp32", "none"]
    torch.testing.assert_close(losses["fp32", "triton"], exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["bf16", "triton"], losses["bf16", "none"], rtol=1e-3, atol=0)
    error = {key: worst_difference(each, gradients["fp32", "none"]) for key, each in gradients.items()}
    assert error["fp32", "triton"] < 1e-4
    assert error["bf16", "triton"] < 1.5 * error["bf16", "none"]


@pytest.mark.parametrize("name", ["cudnn", "flash_sdpa"])
@pytest.mark.parametrize("config_name", ["standard_1.7b", "gated_only_1.7b"])
def test_dense_attention_by_other_kernels(trainer, name, config_name):
    found = []
    for chosen in ("triton", name):
        one = trainer(config_of(config_name, f"gsa.dense_attention={chosen}", NO_DOCUMENTS))
        found.append((one.step(0, measures=True), one.gradients()))
    torch.testing.assert_close(found[0][0].loss_sum, found[1][0].loss_sum, rtol=1e-3, atol=0)
    assert worst_difference(found[1][1], found[0][1]) < 0.06


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("gsa.indexer_activation=plain", "gsa.indexer_norm=true"),
        ("gsa.indexer_activation=qsa", "gsa.indexer_norm=true", "gsa.indexer_rope=true"),
        (
            "gsa.indexer_activation=sigmoid",
            "gsa.indexer_norm=false",
            "gsa.indexer_rope=false",
            "gsa.local_window=0",
        ),
        ("gsa.key_gate=true", "gsa.query_gate=true", "gsa.projection_gate=true", "model.sandwich_norm=true"),
        ("gsa.gate_granularity=headwise", "gsa.gate_form=additive", "gsa.gate_activation=silu"),
        ("gsa.output_gate=false", "gsa.output_transform=rms_norm", "gsa.gate_input=input_independent"),
    ],
)
def test_kernels_train_what_plain_torch_trains(trainer, overrides):
    """In fp32 kernels and plain torch differ only by the order of sums."""
    found = []
    for name in ("reference", "triton"):
        fields = (f"gsa.attention_impl={name}", "train.precision=fp32", *ALL_KEYS, *overrides)
        one = trainer(config_of("gsa_1.7b", *fields))
        found.append((one.step(0, measures=True), one.gradients()))
    (plain, expected), (result, gradients) = found
    torch.testing.assert_close(result.loss_sum, plain.loss_sum, rtol=1e-5, atol=0)
    assert worst_difference(gradients, expected) < 1e-3
