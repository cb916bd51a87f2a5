"""Forward and backward pass of a micro-batch as one CUDA graph (`train.cuda_graphs`).

A small model's step has a thousand launches and more, each of which costs the host 50 us and more in Python; the device
is done with most of them sooner. A graph holds all launches of a micro-batch, and the host starts it by one call. It is
captured once and replayed for every micro-batch of a step: the same kernels in the same order on the same addresses, so
that every bit is what it was.

What is behind those addresses must stay: weights, gradient buffers and moving averages are changed in place, and the
micro-batch is copied in before each replay. What Python does in a pass happens once, while it is captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from gsa_train.config import Config
from gsa_train.optimizer.interface import PhaseOptimizer

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
"""That run without the graph, before it is captured: kernels are compiled and libraries make their handles."""


class CaptureError(RuntimeError):
    """A pass cannot be captured; says the remedy."""


class PassInputs(NamedTuple):
    """What differs between the micro-batches of a phase."""

    tokens: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor | None
    loss_mask: torch.Tensor
    """Of a `MicroBatch`."""
    loss_scale: torch.Tensor
    """0-d: factor of the summed loss."""
    kl_grad_scale: torch.Tensor | None
    """0-d, of the `AttentionPass`; None in phases without an indexer loss."""


def new_graph(optimizer: PhaseOptimizer, config: Config) -> MicroBatchGraph | None:
    """For the steps of a phase; None where they run without one."""
    return MicroBatchGraph() if config.train.cuda_graphs and not optimizer.local_backward else None


class MicroBatchGraph:
    """Of one phase: its gradient buffers, and so the addresses in the graph, end with it."""

    def __init__(self) -> None:
        self.replays = 0
        """Micro-batches that went through a graph."""
        self.memory_bytes = 0
        """Of the device, for what lies between the operations of a pass; held as long as the graph."""
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured: Hashable = None
        self._inputs: PassInputs | None = None
        self._loss_sum: torch.Tensor | None = None

    def is_due(self) -> bool:
        """Whether the step that begins replays the graph. Ask once for each step that could."""
        self._steps += 1
        return self._steps > WARM_UP_STEPS

    def run(
        self, run_pass: Callable[[PassInputs], torch.Tensor], inputs: PassInputs, fixed: Hashable
    ) -> torch.Tensor:
        """The pass over one micro-batch: its summed loss, 0-d, in memory of its own.

        Args:
            run_pass: forward and backward pass; returns the summed loss. Not called where a graph of it is there.
            fixed: all else that decides what it does; another value makes another graph.

        Raises:
            CaptureError: an operation of the pass is not allowed in a graph, such as waiting for the device.
            torch.OutOfMemoryError: there is no room for it.
        """
        captured = (fixed, *(None if each is None else (each.shape, each.dtype) for each in inputs))
        if captured != self._captured:
            self._release()
            self._capture(run_pass, inputs)
            self._captured = captured
        assert self._inputs is not None
        assert self._loss_sum is not None
        for static, given in zip(self._inputs, inputs, strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        self._replay()
        self.replays += 1
        return self._loss_sum.clone()

    def _capture(self, run_pass: Callable[[PassInputs], torch.Tensor], inputs: PassInputs) -> None:
        """Record the pass. It does not run."""
        began = time.perf_counter()
        self._inputs = PassInputs._make(None if each is None else each.clone() for each in inputs)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, may talk to the device meanwhile.
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._loss_sum = run_pass(self._inputs)
        except RuntimeError as error:
            # Of an error inside, the end of the capture makes one of its own.
            for cause in (error, error.__context__):
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
            raise CaptureError(
                "train.cuda_graphs = true: a pass over a micro-batch cannot be captured (the error above says where); "
                "set it to false"
            ) from error
        self._graph = graph
        self.memory_bytes = torch.cuda.memory_reserved() - before
        logger.info(
            "a micro-batch's forward and backward pass is a CUDA graph: captured in %.1f s, %.2f GiB of its own "
            "(train.cuda_graphs = true)",
            time.perf_counter() - began,
            self.memory_bytes / 2**30,
        )

    def _replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()

    def _release(self) -> None:
        """The memory of one graph is not held beside the next one's."""
        self._graph = self._captured = self._inputs = self._loss_sum = None


def leave_default_stream(device: torch.device) -> None:
    """From now on the work of this thread goes to a stream of its own, if it is on a GPU: the default stream cannot be
    captured.

    autograd adds up a parameter's gradients on the stream on which its node was made, so call this before the
    data-parallel wrapper makes them. Calling it again changes nothing.
    """
    if device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.default_stream())
    torch.cuda.set_stream(stream)
    torch.cuda.empty_cache()  # what is free belongs to the default stream, and stays free
