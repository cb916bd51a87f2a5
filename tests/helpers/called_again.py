"""Replaces the CUDA graphs of micro-batches on CPUs: a replay calls the captured pass again."""

from collections.abc import Callable

import torch

from gsa_train.optimizer.micro_batch_graph import Captured, MicroBatchGraph, PassInputs


class CalledAgain(MicroBatchGraph):
    """Replays with only the data that existed when the pass was captured."""

    captures = 0

    def _capture(self, run_pass: Callable[[PassInputs], torch.Tensor], inputs: PassInputs) -> Captured:
        self.captures += 1
        loss_sum = torch.zeros(())
        return Captured(lambda: loss_sum.copy_(run_pass(inputs)), loss_sum)


class CalledAtOnce(CalledAgain):
    """Replays from the first step on."""

    def is_due(self) -> bool:
        return True
