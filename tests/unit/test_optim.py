"""Tests a phase's optimizer: learning rates and decay by parameter, teardown, and fixes of megatron-core's Adam."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch

from gsa_train.config import PhaseConfig
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import PhaseOptimizer, build_optimizer, close_optimizer, lr_multipliers
from helpers.single_rank import (
    DENSE,
    SPARSE,
    WARM_UP,
    LeavesOut,
    named_weights,
    random_batches,
    single_rank,
    step_gradients,
    take_step,
    tiny_config,
    tiny_model,
)

LR, DECAY = 1e-2, 0.3
SHARDED = pytest.mark.parametrize("sharded", [True, False], ids=["distributed", "plain"])


def kind_of(name: str) -> str:
    return "indexer" if ".indexer." in name else "gates" if ".linear_gate." in name else "base"


# --- parameter groups -------------------------------------------------------------------------------------

PHASES = {
    "all": SPARSE,
    "all, gates slower": dataclasses.replace(SPARSE, gate_lr_mult=0.25, indexer_lr_mult=3.0),
    "all at one rate": dataclasses.replace(SPARSE, indexer_lr_mult=1.0),
    "base": dataclasses.replace(DENSE, gate_lr_mult=2.0),
    "warm-up": WARM_UP,
}


@SHARDED
@pytest.mark.parametrize("name", PHASES)
def test_each_parameter_steps_at_its_own_rate_and_only_matrices_decay(name: str, sharded: bool) -> None:
    """Adam's first step has a closed form: lr * g / (|g| + eps)."""
    phase, eps = PHASES[name], 1e-3
    train, parallel = {"weight_decay": DECAY, "adam_epsilon": eps}, {"distributed_optimizer": sharded}
    config = tiny_config([phase], gsa={"indexer_temperature": "learned"}, train=train, parallel=parallel)
    batches = random_batches(config)
    _, gradients = step_gradients(tiny_model(config), phase, batches, config)
    model = tiny_model(config)
    before = named_weights(model)
    take_step(model, build_optimizer(model, phase, config), batches, config, LR)

    multipliers = {"base": 1.0, "gates": phase.gate_lr_mult, "indexer": phase.indexer_lr_mult}
    if name == "warm-up":
        multipliers = {"indexer": 1.0}
    reported = {kind: multipliers[kind] for kind in {kind_of(parameter) for parameter in gradients}}
    assert lr_multipliers(phase) == reported
    for parameter, after in named_weights(model).items():
        old = before[parameter]
        if parameter not in gradients:
            assert torch.equal(after, old), parameter
            continue
        lr, gradient = LR * multipliers[kind_of(parameter)], gradients[parameter]
        kept = old * (1 - lr * DECAY) if old.dim() > 1 else old
        expected = kept - lr * gradient / (gradient.abs() + eps)
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6, msg=parameter)
        assert (after != old).any(), parameter


@SHARDED
def test_gradients_are_clipped_to_the_norm_over_all_parameters(sharded: bool) -> None:
    clip = 0.01
    train = {"weight_decay": 0.0, "adam_epsilon": 1.0, "grad_clip": clip}
    config = tiny_config(train=train, parallel={"distributed_optimizer": sharded})
    batches = random_batches(config)
    unclipped, gradients = step_gradients(tiny_model(config), SPARSE, batches, tiny_config())
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item()
    model = tiny_model(config)
    before = named_weights(model)
    result = take_step(model, build_optimizer(model, SPARSE, config), batches, config, LR)
    # This also holds without clipping. Otherwise a run would miss a NaN.
    assert result.grad_norm == unclipped.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 100 * clip
    for name, after in named_weights(model).items():
        clipped = gradients[name] * clip / norm
        lr = LR * (10.0 if kind_of(name) == "indexer" else 1.0)
        moved = -lr * clipped / (clipped.abs() + 1.0)
        torch.testing.assert_close(after - before[name], moved, rtol=0.02, atol=2e-7, msg=name)


def state_tensors(model: Model, optimizer: PhaseOptimizer) -> dict[str, torch.Tensor]:
    tensors = {name: held for name, held in model.gpt.state_dict().items() if isinstance(held, torch.Tensor)}
    for inner in optimizer.optimizer.chained_optimizers:
        for index, (parameter, state) in enumerate(inner.optimizer.state.items()):
            tensors |= {f"{id(inner)} {index} {name}": value for name, value in state.items()}
            tensors[f"{id(inner)} {index} weight"] = parameter
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@SHARDED
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("phase", [SPARSE, WARM_UP], ids=["sparse", "warm-up"])
@pytest.mark.parametrize(("why", "name"), [("spike", "adamw"), ("nan", "adamw"), ("nan", "muon")])
def test_an_update_left_out_leaves_no_trace(
    phase: PhaseConfig, precision: str, sharded: bool, why: str, name: str
) -> None:
    """Weights, moments, step counts and variance averages keep their bits, so the next step is as without the batch."""
    train = {"precision": precision, "optimizer": name}
    config = tiny_config([phase], train=train, parallel={"distributed_optimizer": sharded})
    model, never = tiny_model(config), tiny_model(config)
    optimizer, its_own = build_optimizer(model, phase, config), build_optimizer(never, phase, config)
    for each, its in ((model, optimizer), (never, its_own)):
        take_step(each, its, random_batches(config), config, LR)
    before = state_tensors(model, optimizer)
    if why == "spike":
        detector = LeavesOut(config.monitor, single_rank().device)
        take_step(model, optimizer, random_batches(config, seed=1), config, LR, detector=detector)
    else:
        indexer = model.attentions[0].indexer
        hook = next(indexer.parameters()).register_hook(lambda gradient: gradient * float("nan"))
        result = take_step(model, optimizer, random_batches(config, seed=1), config, LR)
        hook.remove()
        assert not result.grad_norm.isfinite()
    after = state_tensors(model, optimizer)
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name
    for each, its in ((model, optimizer), (never, its_own)):
        take_step(each, its, random_batches(config, seed=2), config, LR)
    for name, value in model.gpt.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, never.gpt.state_dict()[name]), name


@SHARDED
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_update_norm_matches_the_change_in_the_weights(name: str, precision: str, sharded: bool) -> None:
    train = {"precision": precision, "weight_decay": DECAY, "optimizer": name}
    config = tiny_config(train=train, parallel={"distributed_optimizer": sharded})
    model = tiny_model(config)
    optimizer = build_optimizer(model, SPARSE, config)

    def weights() -> list[torch.Tensor]:
        groups = [g for inner in optimizer.optimizer.chained_optimizers for g in inner.optimizer.param_groups]
        return [parameter.detach().double().clone() for group in groups for parameter in group["params"]]

    assert optimizer.update_norm(torch.tensor(False)) == 0  # if the first step after a start is not applied
    for seed in range(3):
        before = weights()
        result = take_step(model, optimizer, random_batches(config, seed), config, LR)
        changes = [(new - old).square().sum() for new, old in zip(weights(), before, strict=True)]
        norm = optimizer.update_norm(result.verdict.applied)
        assert norm.item() == pytest.approx(torch.stack(changes).sum().sqrt().item(), rel=1e-4)
        assert optimizer.update_norm(torch.tensor(False)) == 0


# --- from phase to phase ----------------------------------------------------------------------------------


@SHARDED
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_closed_optimizer_is_freed(overlap: bool, precision: str, sharded: bool) -> None:
    """The optimizer's DDP wrapper is part of a reference cycle through autograd, which Python's garbage collector
    cannot see. `close_optimizer` breaks the cycle, so the wrapper is freed even if a module keeps an activation. A kept
    activation or closed optimizer must not change the gradient norms of later phases."""
    parallel = {"distributed_optimizer": sharded, "overlap_grad_reduce": overlap}
    parallel["overlap_param_gather"] = overlap and sharded
    config = tiny_config([WARM_UP, DENSE, SPARSE], train={"precision": precision}, parallel=parallel)
    found = []
    for keeps_activation, keeps_optimizer in ((False, False), (True, False), (True, True)):
        model, norms, closed = tiny_model(config), [], []
        if keeps_activation:
            model.gpt.decoder.register_forward_hook(lambda module, _, output: setattr(module, "kept", output))
        for phase in config.phases:
            optimizer = build_optimizer(model, phase, config)
            norms.append(take_step(model, optimizer, random_batches(config), config, LR).grad_norm.item())
            ddp = optimizer.ddps[0]
            old = [weakref.ref(each) for each in (ddp, optimizer.optimizer, ddp.buffers[0].grad_data)]
            close_optimizer(model, optimizer)
            if keeps_optimizer:
                closed.append(optimizer)
            else:
                del optimizer, ddp
                gc.collect()
                assert [reference() for reference in old] == [None, None, None], phase.name
        found.append(norms)
    assert found[1:] == found[:1] * 2


# --- gradients in bf16 ------------------------------------------------------------------------------------


@SHARDED
def test_gradients_in_bf16_are_those_in_fp32_rounded(sharded: bool) -> None:
    def step(dtype: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        parallel = {"distributed_optimizer": sharded, "grad_reduce_dtype": dtype}
        config = tiny_config(parallel=parallel, train={"precision": "bf16"})
        model = tiny_model(config, variance_ema=0.02)
        optimizer = build_optimizer(model, SPARSE, config)
        result = take_step(model, optimizer, random_batches(config), config, lr=1e-3)
        gradients = {name: p.main_grad.clone() for name, p in model.gpt.named_parameters()}
        close_optimizer(model, optimizer)
        return result.grad_norm, gradients, named_weights(model)

    norm, gradients, weights = step("bf16")
    expected_norm, expected_gradients, expected_weights = step("fp32")
    assert norm == pytest.approx(expected_norm.item(), rel=1e-2)
    for name, expected in expected_gradients.items():
        assert expected.dtype == torch.float32
        assert gradients[name].dtype == torch.bfloat16
        error = (gradients[name].float() - expected).norm()
        assert error <= 2**-7 * expected.norm(), name  # two micro-batches: two roundings to 8 bits
        torch.testing.assert_close(weights[name], expected_weights[name], rtol=1e-2, atol=2e-3)


def test_gradients_in_bf16_need_weights_in_bf16() -> None:
    with pytest.raises(ValueError, match="grad_reduce_dtype = bf16: gradients have the weights' precision"):
        tiny_model(tiny_config(parallel={"grad_reduce_dtype": "bf16"}))  # on CPUs auto is fp32
