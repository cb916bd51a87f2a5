"""Traces the device memory of a training step without a device: `memory_trace.py CASES.json OUT.json` writes bytes.

The step runs on tensors without contents (FakeTensorMode), in a process group that sends nothing. Therefore a CPU can
trace a model of any size, and any rank of any layout. It can also trace one layer's key selection for some queries. The
traced code is the code that runs on a GPU, with two exceptions: fused kernels are not launched, and `_as_on_a_gpu`
replaces what differs between GPUs and CPUs. The reported bytes are the sum of all live storages, each rounded up to the
CUDA allocator's 512-byte blocks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

os.environ["TRITON_INTERPRET"] = "1"  # kernels then accept CPU tensors; read when they are imported

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from gsa_kernels.attention import triton_backward_keys, triton_gathered_backward
from gsa_kernels.fused.fp8.op import fused_magnitudes, fused_quantize
from gsa_kernels.key_lists import triton_build
from gsa_kernels.key_lists.format import HostCounts
from gsa_kernels.key_lists.triton_build import CountedKeys
from gsa_kernels.key_lists.triton_reduce_keys import split_tiles
from gsa_kernels.limits import MULTIPROCESSORS
from gsa_kernels.loss import triton_launch as loss_launch
from gsa_kernels.selection import lists_op
from gsa_kernels.types import BudgetRule, Geometry, Indexer
from gsa_train import step
from gsa_train.config import Config, load_config
from gsa_train.distributed import cpu_backend
from gsa_train.distributed.parallel import init_parallel, leave_layout
from gsa_train.model.mcore import build, fp8_linears, moe_layer
from gsa_train.model.mcore import config as mcore_config
from gsa_train.model.mcore import grad_accumulation_fusion as weight_gradients
from gsa_train.model.mcore.build import build_model
from gsa_train.model.mcore.norm import RMSNorm
from gsa_train.model.moe import token_exchange
from gsa_train.model.moe.token_exchange import Exchange
from gsa_train.optimizer import mcore as optim
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.reliability.monitor.spikes import SpikeDetector
from whole_steps.step_bench import random_batches

BLOCK_BYTES = 512
"""kMinBlockSize of CUDACachingAllocator."""
DEVICE_OF = torch.ops.prim.device.default


class LiveBytes(TorchDispatchMode):
    """Counts the live storages that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:  # half of all calls: it creates nothing and need not go through the mode below
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates and saves what torch's kernel on GPUs does; on CPUs it is a chain of operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _all_alike(results: list[Any], mine: Any, group: Any = None) -> None:
    results[:] = [mine] * len(results)


def _with_contents(on_the_host: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with tensor contents, because it computes on the host."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return on_the_host(*args, **kwargs)

    return call


class _OnTheHost(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unset_fake_temporarily():
            return super().__torch_function__(func, types, args, kwargs or {})


def _no_counts(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros for all counts that the host reads from the device."""
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).as_subclass(_OnTheHost)


def _longest_lists(most: int) -> Callable[..., CountedKeys]:
    """Return a replacement for `triton_build.count_keys`. For each query tile, the replacement returns the largest
    possible number of keys: the tile's number of causal keys, capped at `most`."""
    count_keys = triton_build.count_keys

    def count(words: torch.Tensor, rows: range, query_start: int = 0) -> CountedKeys:
        counted = count_keys(words, rows, query_start)
        with unset_fake_temporarily():
            ends = query_start + rows.start + 32 * torch.arange(1, counted.counts.shape[1] + 1)
            counts = ends.clamp(max=min(most, query_start + rows.stop)).int()
            counts = counts.expand(words.shape[0], -1)
            return replace(counted, host_counts=HostCounts(counts.clone().as_subclass(_OnTheHost)))

    return count


def _even_counts(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return equal numbers for the tokens per expert that the host reads."""
    with unset_fake_temporarily():
        return torch.full((count,), experts.numel() // count).as_subclass(_OnTheHost)


def _gathered_counts(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Let each rank gather its own counts from all ranks."""

    def gather(every: torch.Tensor, mine: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(mine, _OnTheHost):
            return every.copy_(mine.expand_as(every))
        return all_gather(every, mine, *args, **kwargs)

    return gather


def _planned(*args: Any) -> Exchange:
    """Plan the exchange of tokens by equal counts, but return counts without contents, as on the device."""
    exchange = token_exchange.plan_exchange(*args)
    of_counts = {
        name: torch.empty(value.shape, dtype=value.dtype)
        for name, value in vars(exchange).items()
        if isinstance(value, _OnTheHost)
    }
    return replace(exchange, **of_counts)


def _implementation(config: Config, device: torch.device) -> str:
    return "triton" if config.gsa.attention_impl == "auto" else config.gsa.attention_impl


def _product_of_tensor_cores(a: Any, b: Any, a_unit: Any, b_unit: Any, dtype: Any, fast: bool = False) -> Any:
    return a.new_empty(len(a), len(b), dtype=dtype)


@contextmanager
def _as_on_a_gpu(config: Config) -> Iterator[None]:
    most = 32 * (config.gsa.k_base + config.gsa.local_window)
    longest = _longest_lists(most)
    accumulate = weight_gradients.CublasAccumulation
    with ExitStack() as stack:
        for target, name, other in (
            (interpreter.InterpretedFunction, "run", lambda self, *args, **kwargs: None),
            (mcore_config, "uses_fused_ops", lambda config, device: config.train.fused_ops != "none"),
            (mcore_config, "unsupported_by_device", lambda train, device: []),
            (fp8_linears, "operations", lambda on_gpu: (fused_magnitudes, fused_quantize)),
            (fp8_linears, "product", _product_of_tensor_cores),
            (build, "attention_implementation", _implementation),
            (build, "initialize_weights", lambda chunk, config, parallel: None),
            # Everything is on the device, in its precision.
            (torch.nn.Module, "_apply", lambda self, fn, recurse=True: self),
            (RMSNorm, "forward", lambda self, x: _FusedRMSNorm.apply(x, self.weight)),
            (torch.nn.functional, "rms_norm", lambda x, size, weight, eps: _FusedRMSNorm.apply(x, weight)),
            # The operation is in place, as in cuBLAS.
            (accumulate, "wgrad_gemm_accum_fp32", staticmethod(lambda inputs, grad, main_grad: None)),
            (
                weight_gradients,
                "fp32_product",
                lambda a, b: a.new_empty(len(a), b.shape[1], dtype=torch.float32),
            ),
            (dist, "all_gather_object", _all_alike),
            (triton_gathered_backward, "split_tiles", _with_contents(split_tiles)),
            (triton_gathered_backward, "count_multiprocessors", lambda device: MULTIPROCESSORS),
            (triton_backward_keys, "count_multiprocessors", lambda device: MULTIPROCESSORS),
            (loss_launch, "count_multiprocessors", lambda device: MULTIPROCESSORS),
            (triton_build, "copy_to_host", _no_counts),
            (lists_op, "copy_to_host", _no_counts),  # failed rows
            (lists_op, "count_keys", longest),
            (triton_build, "count_keys", longest),
            (CudaRNGStatesTracker, "fork", lambda self, *args: nullcontext()),
            # Reductions are in place. Later work has more room and reads their results.
            (_ParamAndGradBucketGroup, "start_grad_sync", lambda *args, **kwargs: None),
            (optim, "megatron_finalize_model_grads", lambda *args, **kwargs: None),
            (optim.MegatronPhaseOptimizer, "reduce_grad_norm", lambda *args: (None, None)),
            (optim.MegatronPhaseOptimizer, "clipped_step", lambda *args: None),
            (step, "update_variance_emas", lambda *args: None),
            (step, "update_routers", lambda *args: None),
            (token_exchange, "expert_counts", _even_counts),
            (token_exchange, "_by_expert", lambda received, total: torch.empty(total, dtype=torch.int64)),
            (moe_layer, "plan_exchange", _planned),
            (dist, "all_gather_into_tensor", _gathered_counts(dist.all_gather_into_tensor)),
            (SpikeDetector, "judge", lambda *args: Mock(applied=torch.tensor(True))),
        ):
            stack.enter_context(patch.object(target, name, other))
        yield


def traced_steps(
    config: Config, rank: int, world_size: int, phase: int = -1, steps: int = 1
) -> dict[str, Any]:
    """Return bytes of parameters and their state, of the last step's peak, and of what remains after each step."""
    cpu_backend.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    new_group = dist.new_group

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    with (
        patch.object(dist, "new_group", fake_group),
        patch.object(torch.distributed, "new_group", fake_group),
    ):
        parallel = init_parallel(config.parallel, seed=1)
    live = LiveBytes()
    with _as_on_a_gpu(config), FakeTensorMode(allow_non_fake_inputs=True), live:
        model = build_model(config, parallel)
        optimizer = build_optimizer(model, config.phases[phase], config)
        static = live.now
        batches = random_batches(config, parallel)
        left = []
        for _ in range(steps):
            live.peak = live.now
            detector = SpikeDetector(config.monitor, parallel.device)
            step.train_step(step.Training(model, optimizer, config, parallel, detector), batches, 1e-3, 0)
            left.append(live.now)
        peak = live.peak
        close_optimizer(model, optimizer)
    leave_layout()
    dist.destroy_process_group()
    return {"static": static, "peak": peak, "left": left}


def traced_selection(config: Config, start: int, stop: int) -> dict[str, int]:
    """Return peak bytes of one layer's selection of the queries from start to stop, and bytes of its lists."""
    gsa, dtype = config.gsa, torch.bfloat16
    live, rows = LiveBytes(), stop - start
    with _as_on_a_gpu(config), FakeTensorMode(allow_non_fake_inputs=True), live:
        indexer = Indexer(
            torch.empty(1, rows, gsa.indexer_heads, gsa.indexer_dim, dtype=dtype),
            torch.empty(1, stop, gsa.indexer_dim, dtype=dtype),
            torch.empty(1, rows, gsa.indexer_heads, dtype=dtype),
        )
        variance_ema = torch.empty(())
        before = live.peak = live.now
        rule = BudgetRule(gsa.k_base, gsa.k_min, gsa.k_max, gsa.adaptive_k, gsa.dense_below)
        geometry = Geometry(None, start, local_window=gsa.local_window)
        lists = lists_op.select_key_lists(indexer, rule, variance_ema, geometry).key_lists
        assert lists is not None
        return {"peak": live.peak - before, "lists": lists.keys.nbytes + lists.words.nbytes}


def main() -> None:
    results = []
    gc.collect()
    gc.freeze()  # imported objects need not be searched at each collection
    for case in json.loads(Path(sys.argv[1]).read_text()):
        config = load_config(
            case["config"], case["overrides"], world_size=case["world_size"], need_data=False
        )
        if "queries" in case:
            results.append(traced_selection(config, *case["queries"]))
            continue
        phase, steps = case.get("phase", -1), case.get("steps", 1)
        results.append(traced_steps(config, case["rank"], case["world_size"], phase, steps))
        print(case, results[-1], file=sys.stderr, flush=True)
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
