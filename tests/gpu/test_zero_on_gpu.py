"""Tests DeepSpeed's ZeRO on CUDA devices, with its optimizer on the device or in host memory. Needs deepspeed."""

import gc
from pathlib import Path

import pytest
import torch

from gsa_train.config import load_config
from gsa_train.model.mcore.build import build_model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.reliability.monitor.spikes import SpikeDetector
from gsa_train.step import Training, train_step
from helpers.runs import REPOSITORY, SMALL, start
from helpers.single_rank import random_batches, single_rank
from helpers.tiers import needs_devices

pytest.importorskip("deepspeed")


MODEL = (
    *("model.num_layers=4", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=2"),
    *("model.head_dim=64", "model.ffn_hidden_size=1376", "model.vocab_size=8192"),
    *("train.seq_len_tokens=512", "train.micro_batch_size=1", "train.global_batch_size=4"),
    *("gsa.k_min=512", "gsa.k_base=512", "gsa.k_max=512"),
    *("parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"),
    "train.fused_ops=none",  # otherwise DeepSpeed's weight gradients are rounded to bf16, and megatron's are not
)
STRATEGIES = {
    "megatron": (),
    **{
        f"zero {stage}{', in host memory' if offload else ''}": (
            "parallel.strategy=deepspeed",
            f"parallel.zero_stage={stage}",
            f"parallel.offload_optimizer={str(offload).lower()}",
        )
        for stage in (1, 2, 3)
        for offload in (False, True)
    },
}


def train(overrides: tuple[str, ...]) -> tuple[list[tuple[float, float, float]], int, int]:
    """Return three things: the loss, gradient norm and update norm of each step; the bytes of device memory that the
    optimizer takes; and the number of trained parameters."""
    path = REPOSITORY / "configs" / "gsa_1.7b.yaml"
    config = load_config(path, [*MODEL, *overrides], world_size=1, need_data=False)
    parallel, phase = single_rank(), config.phases[-1]
    model = build_model(config, parallel)
    before = torch.cuda.memory_allocated()
    optimizer = build_optimizer(model, phase, config)
    taken = torch.cuda.memory_allocated() - before
    detector, records = SpikeDetector(config.monitor, parallel.device), []
    for step in range(4):
        training = Training(model, optimizer, config, parallel, detector)
        result = train_step(training, random_batches(config, step), 1e-3, step)
        changed = optimizer.update_norm(result.verdict.applied)
        loss = result.loss_sum / result.loss_tokens
        records.append((loss.item(), result.grad_norm.item(), changed.item()))
    count = sum(each.numel() for each in model.gpt.parameters() if each.requires_grad)
    close_optimizer(model, optimizer)
    del optimizer, model
    gc.collect()
    torch.cuda.empty_cache()
    return records, taken, count


def test_steps_match_megatron_and_host_memory_frees_the_device() -> None:
    expected, _, _ = train(STRATEGIES["megatron"])
    memory = {}
    for name, overrides in list(STRATEGIES.items())[1:]:
        found, memory[name], count = train(overrides)
        worst = max(
            abs(a - b) / abs(b)
            for record, other in zip(found, expected, strict=True)
            for a, b in zip(record, other, strict=True)
        )
        print(
            f"{name}: largest relative difference {worst:.1e}; {memory[name] / count:.1f} bytes per parameter"
        )
        assert worst <= 1e-3, name  # bf16
    for stage in (1, 2, 3):  # fp32 weights and two moments
        freed = memory[f"zero {stage}"] - memory[f"zero {stage}, in host memory"]
        assert freed >= 0.9 * 12 * count


LAYOUT = (*SMALL, "train.precision=fp32", "gsa.k_min=128", "gsa.k_base=128", "phases.0.steps=10")


@needs_devices(2)
def test_two_ranks_over_nccl_follow_one_and_resume(tmp_path: Path) -> None:
    one = start(tmp_path, *LAYOUT, name="one", real=True).wait()
    for stage, offload in ((1, False), (2, True), (3, False), (3, True)):
        layout = [f"parallel.zero_stage={stage}", f"parallel.offload_optimizer={str(offload).lower()}"]
        options = (*LAYOUT, "parallel.strategy=deepspeed", *layout)
        many = start(tmp_path, *options, name=f"zero{stage}{offload}", ranks=2, real=True).wait()
        for key in ("loss", "grad_norm", "indexer_kl"):
            pairs = zip(one.series(key), many.series(key), strict=True)
            worst = max(abs(a - b) / abs(a) for a, b in pairs)
            print(f"ZeRO-{stage}, offload {offload}, {key}: largest relative difference {worst:.2e}")
            assert worst <= 1e-5
        checkpoint = str(many.checkpoints / "step_00000005")
        again = start(
            tmp_path, *options, "--resume-from", checkpoint, name=f"again{stage}{offload}", ranks=2, real=True
        ).wait()
        for key in ("loss", "grad_norm", "update_norm"):
            assert again.series(key) == many.series(key)[5:]
