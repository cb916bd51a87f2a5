"""Capture the forward and backward pass of a micro-batch as one CUDA graph (`train.cuda_graphs`).

In a small model, most kernels take less time than their launches from Python, so the launches limit the speed of a
step. A graph contains all launches of a micro-batch and starts with one call. The graph is captured once and replayed
for every micro-batch. A replay runs the same kernels in the same order on the same addresses as the pass without a
graph. Its results are therefore equal bit for bit.

If only a share 1 / n of the queries enters the indexer loss (`gsa.indexer_loss_row_fraction`), there are n possible
choices of queries (draws). Each draw has its own graph. The graphs share their memory, because they run one after the
other.

A graph reads and writes fixed addresses, so these addresses must stay valid. Weights, gradient buffers and moving
averages are therefore updated in place, and each micro-batch is copied into fixed inputs before its replay. Python code
in a pass runs only while the graph is captured, not in a replay.

Logged steps run without a graph, and so does the last micro-batch of a step with `parallel.overlap_grad_reduce`. These
passes allocate their tensors in the memory of the graphs (`run_plain`), so they need no memory of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gsa_train.config import Config
from gsa_train.optimizer.interface import PhaseOptimizer

logger = logging.getLogger(__name__)

Results = dict[str, torch.Tensor]  # of a micro-batch, 0-d, by name

WARM_UP_STEPS = 2
"""Steps without a graph before the capture, to compile kernels and create the libraries' handles. The capture also
waits for a logged step, so that tensors which this step keeps for later steps are not in the memory of the graphs."""


class CaptureError(RuntimeError):
    """A pass cannot be captured. The message names the remedy."""


class PassInputs(NamedTuple):
    """Holds inputs that differ between the micro-batches of a phase."""

    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None
    loss_mask: torch.Tensor
    """Loss mask of the `MicroBatch`, whose other tensors are the fields above."""
    loss_scale: torch.Tensor
    """0-d: factor of the summed loss."""
    kl_grad_scale: torch.Tensor | None
    """0-d, see `AttentionPass`; None in phases without an indexer loss."""


def new_graph(optimizer: PhaseOptimizer, config: Config) -> MicroBatchGraph | None:
    """Create the graph for the steps of a phase, or return None if they run without one."""
    return MicroBatchGraph() if config.train.cuda_graphs and not optimizer.local_backward else None


@dataclass(frozen=True)
class Captured:
    replay: Callable[[], object]
    """Runs the pass again, with the present contents of the inputs."""
    loss_sum: torch.Tensor
    """0-d: the result of the last replay."""


class MicroBatchGraph:
    """Holds the graphs of one phase. Their addresses include the phase's gradient buffers."""

    def __init__(self) -> None:
        self.replays = 0
        """Number of micro-batches run by a graph."""
        self.memory_bytes = 0
        """Device memory for the intermediate tensors of a pass, held for the lifetime of the graphs."""
        self.has_measured = False
        """Whether a step with measurements has run."""
        self._steps = 0
        self._inputs: PassInputs | None = None
        self._fixed: Hashable = None
        self._captured: dict[int, Captured] = {}
        self._pool: torch.cuda.MemPool | None = None

    def is_due(self) -> bool:
        """Whether the next step uses graphs. Call it exactly once for each step without measurements."""
        self._steps += 1
        return self._steps > WARM_UP_STEPS and self.has_measured

    def run_plain(self, run_passes: Callable[[], list[Results]], measures: bool) -> list[Results]:
        """Run passes without a graph, in the memory of the graphs if they exist.

        The next replay overwrites this memory. Results are therefore copied out, and the passes must leave no tensor
        there.

        Args:
            run_passes: runs forward and backward and returns named results of each micro-batch.

        Raises:
            RuntimeError: a pass left a tensor in the memory of the graphs.
        """
        self.has_measured |= measures
        if self._pool is None:
            return run_passes()
        held = _allocated_bytes(self._pool)
        # Only the thread that enters a pool allocates in it, so the backward pass must run in this thread.
        with torch.cuda.use_mem_pool(self._pool), torch.autograd.set_multithreading_enabled(False):
            results = run_passes()
        copies = [{name: result.clone() for name, result in each.items()} for each in results]
        del results
        left = _allocated_bytes(self._pool) - held
        if left > 0:
            raise RuntimeError(
                f"train.cuda_graphs = true: a pass without the graph left {left} bytes in the memory of the graph, "
                "which the next step would overwrite; set it to false, and please report this"
            )
        return copies

    def run(
        self,
        run_pass: Callable[[PassInputs], torch.Tensor],
        inputs: PassInputs,
        fixed: Hashable,
        draw: int = 0,
    ) -> torch.Tensor:
        """Run one micro-batch and return a copy of its summed loss, 0-d.

        Args:
            run_pass: runs forward and backward and returns the summed loss; called only to capture a graph.
            fixed: everything else that determines the pass, except the draw. A new value replaces all graphs.
            draw: choice of the queries in the indexer loss. Each draw has its own graph.

        Raises:
            CaptureError: the pass has an operation that a graph does not allow, such as waiting for the device.
            torch.OutOfMemoryError: there is not enough memory for the graph.
        """
        fixed = (fixed, *(None if each is None else (each.shape, each.dtype) for each in inputs))
        if fixed != self._fixed:
            self._captured.clear()
            self._pool, self.memory_bytes = None, 0
            zeros = (None if each is None else torch.zeros_like(each) for each in inputs)
            self._inputs = PassInputs._make(zeros)
            self._fixed = fixed
        assert self._inputs is not None
        if draw not in self._captured:
            self._captured[draw] = self._capture(run_pass, self._inputs)
        for static, given in zip(self._inputs, inputs, strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        captured = self._captured[draw]
        captured.replay()
        self.replays += 1
        return captured.loss_sum.clone()

    def _capture(self, run_pass: Callable[[PassInputs], torch.Tensor], inputs: PassInputs) -> Captured:
        """Capture the pass without running it."""
        began = time.perf_counter()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.MemPool()
        try:
            # During capture other threads, such as NCCL's, may call the device.
            stream = torch.cuda.current_stream()
            handle: Any = pool.id  # the type that torch expects has no public name
            with torch.cuda.graph(graph, pool=handle, stream=stream, capture_error_mode="thread_local"):
                loss_sum = run_pass(inputs)
        except RuntimeError as error:
            # The end of the capture replaces an inner error by its own error.
            for cause in (error, error.__context__):
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            raise CaptureError(
                "train.cuda_graphs = true: a pass over a micro-batch cannot be captured (the error above says where); "
                "set it to false"
            ) from error
        self._pool = pool
        self.memory_bytes += torch.cuda.memory_reserved() - before
        logger.info(
            "captured a micro-batch's forward and backward pass as a CUDA graph in %.1f s; graphs hold %.2f GiB "
            "(train.cuda_graphs = true)",
            time.perf_counter() - began,
            self.memory_bytes / 2**30,
        )
        return Captured(graph.replay, loss_sum)


def _allocated_bytes(pool: torch.cuda.MemPool) -> int:
    """Return the bytes of the tensors that exist in a pool."""
    return sum(segment["allocated_size"] for segment in torch.cuda.memory_snapshot(pool.id))


def leave_default_stream(device: torch.device) -> None:
    """Move this thread's work to a new CUDA stream, because the default stream cannot be captured.

    autograd accumulates a parameter's gradient on the stream on which the parameter's autograd node was created. The
    data-parallel wrapper creates these nodes, so call this function before the wrapper is built. Further calls have no
    effect.
    """
    if device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    torch.cuda.set_stream(stream)
    torch.cuda.empty_cache()  # cached blocks belong to the default stream
