"""Replaces the CUDA graph of a micro-batch on CPUs: a replay calls the captured pass again."""

from collections.abc import Callable

import torch

from gsa_train.optimizer.micro_batch_graph import MicroBatchGraph, PassInputs


class CalledAgain(MicroBatchGraph):
    """Replays with only the data that existed when the pass was captured."""

    captures = 0

    def _capture(self, run_pass: Callable[[PassInputs], torch.Tensor], inputs: PassInputs) -> None:
        self.captures += 1
        self._inputs = PassInputs._make(None if each is None else torch.zeros_like(each) for each in inputs)
        self._loss_sum = torch.zeros(())
        self._pass = run_pass

    def _replay(self) -> None:
        self._loss_sum.copy_(self._pass(self._inputs))


class CalledAtOnce(CalledAgain):
    """Replays from the first step on."""

    def is_due(self) -> bool:
        return True
