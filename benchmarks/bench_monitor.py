"""What watching a run costs, on one CUDA device: the spike monitor in every step, the record of a logged one.

    python benchmarks/bench_monitor.py [--config gsa_1.7b] [--micro-batch 8] [--rounds 30] [key=value ...]

Pairs of optimizer steps of a whole model take turns, in changing order: `unwatched`, without any verdict; `watched`, as
training takes them, the verdict sent to the host and read; `logged`, the first one with all that training does for a
record, as one step in `logging.every_steps` is: the statistics of the attention layers, the update's norm, sums, the
record in metrics.jsonl, TensorBoard and W&B (offline). The second step of a pair is there for what a record holds up:
it is made while the device is busy with that one. `verdict alone` is its kernels without a step around them,
launches included.
"""

import gc
import itertools
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import harness
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gsa_train.config import Config, load_config
from gsa_train.distributed.parallel import Parallel, init_parallel, shutdown_parallel
from gsa_train.metrics.goodput.goodput_log import GoodputLog
from gsa_train.metrics.goodput.run_clock import RunClock
from gsa_train.metrics.record import (
    IntervalClock,
    LoggedStep,
    Measured,
    data_totals,
    send_step,
    step_record,
)
from gsa_train.metrics.sinks import open_sinks
from gsa_train.metrics.wandb_sink import open_wandb
from gsa_train.phases import phase_ranges
from gsa_train.reliability.monitor.monitor import READ_DELAY_STEPS, Monitor, MonitorState
from gsa_train.reliability.monitor.spikes import Verdict
from gsa_train.run.run_log import RunLog
from whole_steps.step_bench import OurTrainee, random_batches, time_steps

MOST_PERCENT = 0.5
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
    parser.add_argument("--rounds", type=int, default=30, help="a multiple of 6 has all orders alike")
    parser.add_argument("--top", type=int, default=0, help="print this many kernels that a record adds")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_monitor", arguments)

    path = harness.ROOT / "configs" / f"{arguments.config}.yaml"
    sizes = [
        f"train.global_batch_size={arguments.sequences}",
        f"train.micro_batch_size={arguments.micro_batch}",
    ]
    overrides = [*sizes, "data.num_workers=0", "logging.wandb=offline", *arguments.overrides]
    config = load_config(path, overrides, world_size=1, need_data=False)
    parallel = init_parallel(config.parallel, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        seconds = time_watching(config, parallel, arguments.rounds, Path(folder), arguments.top)
    shutdown_parallel()

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, high = 1e3 * min(times), 1e3 * max(times)
        report.row(what=name, median_ms=1e3 * medians[name], low_ms=low, high_ms=high)
    step, every = medians["unwatched"], config.logging.every_steps
    of_monitor, monitor_error = difference(seconds["watched"], seconds["unwatched"], step)
    of_record, record_error = difference(seconds["logged"], seconds["watched"], step * every / 2)
    report.row(
        percent_of_a_step="",
        monitor=of_monitor,
        monitor_error=monitor_error,
        verdict_alone=100 * medians["verdict alone"] / step,
        record=of_record,
        record_error=record_error,
    )
    report.bar("percent of a step for the monitor", of_monitor, at_most=MOST_PERCENT)
    both = f"percent for the monitor and the record of every {every}th step"
    report.bar(both, of_monitor + of_record, at_most=MOST_PERCENT)
    return report.finish()


def difference(more: list[float], less: list[float], of: float) -> tuple[float, float]:
    """Median of what the same rounds differ by, as percent of `of` seconds, and its standard error."""
    middle, error = harness.median_and_error([a - b for a, b in zip(more, less, strict=True)])
    return 100 * middle / of, 100 * error / of


Pair = tuple[Callable[[], None], Callable[[], None]]
"""Two steps, one behind the other."""


def show_difference(more: Pair, less: Pair, top: int) -> None:
    """Prints where the device is longer in one pair than in the other: the `top` kernels, and idle."""
    found, other = (device_ms(pair) for pair in (more, less))
    extra = Counter({name: found[name] - other[name] for name in found.keys() | other.keys()})
    print(f"ms of the device in a logged pair beyond those in a watched one: {sum(extra.values()):.2f}")
    for name, ms in extra.most_common(top):
        print(f"{ms:8.3f}  {name[:110]}")


def device_ms(pair: Pair) -> Counter[str]:
    """By kernel, and `idle` between the first and the last one."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for step in pair:
            step()
        torch.cuda.synchronize()
    kernels = [each for each in recorded.events() if each.device_type == DeviceType.CUDA]
    kernels.sort(key=lambda each: each.time_range.start)
    found: Counter[str] = Counter()
    end = kernels[0].time_range.start
    for each in kernels:
        found["idle"] += max(each.time_range.start - end, 0) / 1e3
        found[each.name] += each.time_range.elapsed_us() / 1e3
        end = max(end, each.time_range.end)
    return found


def time_watching(
    config: Config, parallel: Parallel, rounds: int, run_dir: Path, top: int = 0
) -> dict[str, list[float]]:
    """Seconds per step of the three kinds of pairs in turn, and of the verdict; `top` kernels of the difference."""
    phase = config.phases[-1]
    trainee = OurTrainee(config, phase, parallel)
    model = trainee.model
    batches = random_batches(config, parallel)
    phase_range = phase_ranges(config.phases)[-1]
    monitor = Monitor(
        config.monitor, phase_range, parallel.device, MonitorState(), lambda event: None, lambda: None
    )
    unwatched = NoDetector(parallel.device)
    clock = IntervalClock(parallel.device)
    wandb = open_wandb(config.logging, run_dir, config.run.name, {}, run_id=None)
    sinks = open_sinks(config.logging, run_dir, [phase.name], None, wandb)
    goodput = GoodputLog(RunClock())
    goodput.open(run_dir, phase_range.start, [], [], is_complete=False)
    goodput.clock.begin("training")
    log = RunLog(sinks, None, None, writes_late=parallel.device.type == "cuda")
    step, tokens = phase_range.start, config.train.global_batch_size * config.train.seq_len_tokens

    def plain() -> None:
        trainee.detector = unwatched  # type: ignore[assignment]
        trainee.step(batches)

    def watched(measures: bool = False) -> None:
        nonlocal step
        trainee.detector = monitor.detector
        trainee.step(batches, measures)
        step += 1
        clock.count(tokens, 0.0)
        monitor.observe(step, trainee.result.verdict)
        log.write_late()
        monitor.read(step - READ_DELAY_STEPS)

    def logged() -> None:
        """As `gsa_train.trainer` does it."""
        watched(measures=True)
        monitor.read(step)
        result, interval = trainee.result, clock.read_and_reset()
        worked, totals = model.work_time.read_and_reset(), data_totals({}, config.data)
        measured = Measured(interval, worked, totals, 0, result.visible_keys, result.update_norm)
        reduced = send_step(model.runtime.stats, result.loss_sum, result.loss_tokens, measured, parallel)
        logged_step = LoggedStep(step, phase, {"base": phase.lr}, monitor.last_grad_norm, tokens)
        of_monitor = monitor.metrics()

        def make_and_log() -> None:
            numbers = reduced()
            record = step_record(logged_step, numbers, interval, config, parallel, "bf16")
            goodput.clock.share_out({"text": numbers.part_seconds["data_wait"], "stragglers": 0.0})
            goodput.note(logged_step.step, phase.name)
            record |= {"update_norm": numbers.update_norm, **of_monitor, **goodput.metrics()}
            log.log(record)
            monitor.watch_layers(logged_step.step, record)

        log.log_late(make_and_log)

    def verdict() -> None:
        monitor.detector.judge(trainee.result.grad_norm, trainee.result.grad_norm, config.train.grad_clip)

    kinds: dict[str, Pair] = {
        "unwatched": (plain, plain),
        "watched": (watched, watched),
        "logged": (logged, watched),
    }

    def pair_of(name: str) -> float:
        first, second = kinds[name]

        def both() -> None:
            first()
            second()

        return time_steps(both, 1, parallel.device)[0] / 2

    for name in kinds:  # compiles
        pair_of(name)
    gc.collect()
    gc.freeze()  # as training does
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    # In all orders alike: a step behind one that waited for the host finds a cooler device, 1% faster.
    for order in itertools.islice(itertools.cycle(itertools.permutations(kinds)), rounds):
        for name in order:
            seconds[name].append(pair_of(name))
    seconds["verdict alone"] = time_steps(verdict, 50, parallel.device)
    if top:
        show_difference(kinds["logged"], kinds["watched"], top)
    gc.unfreeze()
    log.write_late()
    sinks.close()
    goodput.close()
    trainee.close()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
