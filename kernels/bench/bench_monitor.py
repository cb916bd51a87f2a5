"""What watching a run costs, on one CUDA device: the spike monitor in every step, the statistics of a logged one.

    python kernels/bench/bench_monitor.py [--config gsa_1.7b] [--micro-batch 8] [--rounds 24] [key=value ...]

Optimizer steps of a whole model take turns, in changing order: `unwatched`, without any verdict; `watched`, as training
takes them, the verdict sent to the host and read; `logged`, with the statistics of the attention layers and the
record's sums, as one step in `logging.every_steps` is. `verdict alone` is its kernels without a step around them,
launches included.
"""

import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in (".", "kernels", "data"))

import harness

from gsa_train.bench.step_bench import OurTrainee, random_batches, time_steps
from gsa_train.config import Config, load_config
from gsa_train.metrics.record import reduce_step
from gsa_train.monitor.monitor import READ_DELAY_STEPS, Monitor, MonitorState
from gsa_train.monitor.spikes import Verdict
from gsa_train.parallel import Parallel, init_parallel, shutdown_parallel
from gsa_train.phases import phase_spans

MOST = 0.005
"""Of a step's time, for all that watches it."""


class NoDetector:
    """Applies every update and looks at nothing."""

    def __init__(self, device: torch.device) -> None:
        applied = torch.ones((), dtype=torch.bool, device=device)
        self._verdict = Verdict(applied, torch.zeros(8, device=device))

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor, grad_clip: float) -> Verdict:
        return self._verdict


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--config", default="gsa_1.7b")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="per optimizer step")
    parser.add_argument("--rounds", type=int, default=24, help="a multiple of 6 has all orders alike")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_monitor", arguments)

    path = harness.ROOT / "configs" / f"{arguments.config}.yaml"
    sizes = [
        f"train.global_batch_size={arguments.sequences}",
        f"train.micro_batch_size={arguments.micro_batch}",
    ]
    overrides = [*sizes, "data.num_workers=0", *arguments.overrides]
    config = load_config(path, overrides, world_size=1, need_data=False)
    parallel = init_parallel(config.parallel, seed=1)
    seconds = time_watching(config, parallel, arguments.rounds)
    shutdown_parallel()

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, high = 1e3 * min(times), 1e3 * max(times)
        report.row(what=name, median_ms=1e3 * medians[name], low_ms=low, high_ms=high)
    step, every = medians["unwatched"], config.logging.every_steps
    of_monitor, monitor_error = difference(seconds["watched"], seconds["unwatched"], step)
    of_logging, logging_error = difference(seconds["logged"], seconds["watched"], step * every)
    report.row(
        share_of_a_step="",
        monitor=of_monitor,
        monitor_error=monitor_error,
        verdict_alone=medians["verdict alone"] / step,
        statistics=of_logging,
        statistics_error=logging_error,
    )
    report.bar("the monitor's share of a step", of_monitor, at_most=MOST)
    report.bar(f"monitor, and statistics of every {every}th step", of_monitor + of_logging, at_most=MOST)
    return report.finish()


def difference(more: list[float], less: list[float], of: float) -> tuple[float, float]:
    """Median of what the same rounds differ by, as a share of `of` seconds, and its standard error."""
    differences = [a - b for a, b in zip(more, less, strict=True)]
    middle = statistics.median(differences)
    # A normal value's standard deviation is 1.48 times its median deviation; its median is 1.25 times less sure than
    # its mean.
    spread = 1.48 * statistics.median(abs(each - middle) for each in differences)
    return middle / of, 1.25 * spread / len(differences) ** 0.5 / of


def time_watching(config: Config, parallel: Parallel, rounds: int) -> dict[str, list[float]]:
    """Seconds of the three kinds of steps in turn, and of the verdict."""
    trainee = OurTrainee(config, config.phases[-1], parallel)
    batches = random_batches(config, parallel)
    span = phase_spans(config.phases)[-1]
    monitor = Monitor(config.monitor, span, parallel.device, MonitorState(), lambda event: None, lambda: None)
    unwatched = NoDetector(parallel.device)
    step = span.start

    def plain() -> None:
        trainee.detector = unwatched  # type: ignore[assignment]
        trainee.step(batches)

    def watched() -> None:
        nonlocal step
        trainee.detector = monitor.detector
        trainee.step(batches)
        step += 1
        monitor.observe(step, trainee.result.verdict)
        monitor.read(step - READ_DELAY_STEPS)

    def logged() -> None:
        trainee.model.runtime.measuring = True
        watched()
        trainee.model.runtime.measuring = False
        result, stats = trainee.result, trainee.model.runtime.stats
        trainee.optimizer.update_norm(result.verdict.applied, parallel)
        tokens, visible = result.loss_tokens.item(), result.visible_keys
        reduce_step(stats, result.loss_sum, tokens, None, parallel, visible_keys=visible)

    def verdict() -> None:
        monitor.detector.judge(trainee.result.grad_norm, trainee.result.grad_norm, config.train.grad_clip)

    kinds: dict[str, Callable[[], None]] = {"unwatched": plain, "watched": watched, "logged": logged}
    for run in kinds.values():  # compiles
        run()
        run()
    gc.collect()
    gc.freeze()  # as training does
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    # In all orders alike: a step behind one that waited for the host finds a cooler device, 1% faster.
    for order in itertools.islice(itertools.cycle(itertools.permutations(kinds)), rounds):
        for name in order:
            seconds[name] += time_steps(kinds[name], 1, parallel.device)
    seconds["verdict alone"] = time_steps(verdict, 50, parallel.device)
    gc.unfreeze()
    trainee.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
