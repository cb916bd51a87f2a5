"""`monitor.*`: spikes and wrong bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MonitorConfig:
    action: Literal["log", "skip", "lower_lr", "rewind", "stop"] = "log"
    """What a spike does. `log`: it is recorded; a loss or gradient that is not finite stops the run. The others leave
    out the update of each spiking step and then: `skip`, nothing else; `lower_lr`, a lower learning rate for a while;
    `rewind`, back to an earlier checkpoint, on without the batches around the spike; `stop`, end with exit code 13."""
    detector: Literal["robust", "sigma"] = "robust"
    """`robust`: loss and log of the gradient norm against running medians, also a smaller rise that lasts or is one of
    both. `sigma`: OLMo-core's rule, mean + sigmas * standard deviation."""
    window_steps: int = 128
    """Steps of history that a step is judged by."""
    min_history_steps: int = 64
    """Steps of a phase before the first one is judged."""
    sigmas: float = 6.0
    """Rise of a single step that makes it a spike, in standard deviations of the noise."""
    lasting_sigmas: float = 3.0
    """Rise that makes a spike when it lasts `lasting_steps`; its least rises are half of those of a single step."""
    lasting_steps: int = 8
    """Steps in a row above `lasting_sigmas`, the last of which is a spike. Batches of the same lanes are alike for some
    steps, and text alone kept them above for 6."""
    loss_min_rise_nats: float = 0.2
    """A loss that rises by less is no spike, however quiet it was."""
    grad_norm_min_ratio: float = 4.0
    """A gradient norm that rises by a smaller factor is no spike. AdamW's second moment with beta 2 = 0.95 remembers 20
    steps, which a norm 20^0.5 = 4.5 times as large outweighs; rare documents alone make factors of 3. Where
    `train.grad_clip` leaves less of it, a norm alone is a spike from this factor's square on, or when it lasts."""
    patience_steps: int = 3
    """lower_lr, rewind and stop act after this many spiking steps in a row, whose updates are left out."""
    max_skips_in_a_row: int = 50
    """skip and lower_lr stop the run when they have left out this many updates in a row."""
    lower_lr_factor: float = 0.5
    """Factor on all learning rates after a spike, with lower_lr."""
    lower_lr_steps: int = 200
    """Steps for which it holds; another spike starts them anew."""
    rewind_min_steps: int = 100
    """The checkpoint gone back to is at least this much older than the spike's first step."""
    rewind_skip_before_steps: int = 100
    """Batches left out before the spike's first step, as far as they come after that checkpoint."""
    rewind_skip_after_steps: int = 100
    """Batches left out behind the last spiking step seen."""
    max_rewinds: int = 3
    """The spike after that many rewinds stops the run."""
    recheck_every_steps: int = 0
    """Steps between those computed twice, forward and backward: loss and each rank's gradients must be equal to the
    last bit. 0: none."""
    recheck_spikes: bool = False
    """Compute each spiking step twice before anything is done about it; the host waits for the device at every step."""
    compare_replicas_every_steps: int = 0
    """Steps between comparisons of the data-parallel replicas' weights, bit by bit; also before each save. 0: none."""
    on_corruption: Literal["stop", "log"] = "stop"
    """When bits differ: end the run with exit code 14, to go on from the last checkpoint, or only record it (event
    `corruption`); of a step computed twice the second numbers then count."""

    @property
    def reach_steps(self) -> int | None:
        """With `rewind`, so much older than the newest checkpoint is one that a spike may go back to: a save may come
        within its first steps. Else None."""
        if self.action != "rewind":
            return None
        return self.rewind_min_steps + self.lasting_steps + self.patience_steps
