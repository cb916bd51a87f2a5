"""Measures a training step of whole models on one CUDA device: time, MFU, memory, and the time of its parts.

    python benchmarks/bench_step.py [key=value ...] [--configs standard_1.7b gsa_1.7b] [--micro-batch 1 4]
    python benchmarks/bench_step.py --lengths 8192 32768 [--shapes 1.7b] [--models standard gsa] [key=value ...]

Each config runs its last phase on random tokens with initial weights, one document per sequence and no data pipeline.
`key=value` overrides a field of all configs (`model.num_layers=4` for a quick look). `--configs NAME,key=value`
overrides a field of one config. `baseline_1.7b` is standard_1.7b in plain torch (whole_steps/baseline.py).
`baseline_float8_1.7b` needs torchao. The last default config trains its indexer on all queries.

A turn is three steps of one config, without logging. Because a device's clock changes with its temperature, turns of
each config alternate with turns of the first. `step_ms` is the median over turns. For each pair of turns, the config's
time is divided by the first config's time. `ratio` is the median quotient, with its standard error. The table by part
shows kernel times of one profiled step in ms per sequence. `idle` is the time without kernels.

With --lengths (`make bench-step`), the bench measures standard models (cuDNN attention) and GSA models at several
lengths (whole_steps/step_sweep.py). The models have few layers, but the full embedding and output layer. Each measured
row goes into bench_step_lengths.json immediately. A later call skips the cases for which the file has a row from the
same device and commit.

- `speed_up`: the step time of the standard model divided by the step time of this model; the two take turns.
- `host_ms`: the time that the host needs to launch a step.
- `mean_k`: the mean number of keys that a query selects.
- `r`, the union ratio: the number of keys that at least one of 32 neighbouring queries selects, divided by `mean_k`.
- `indexer`: what selects the keys. With `own`, the model's untrained indexers select them. With `alike`, fixed random
  projections replace the indexers' own, so that neighbouring queries select similar keys, as in a trained model
  (whole_steps/planted_indexer.py).

Models named `..._graphs` run with train.cuda_graphs, and their `peak_gib` includes the memory of the graphs. The bench
measures each model at two depths, and extrapolates `layer_ms` and the step time of the whole model. With `--layers 24`
it measures whole models instead.
"""

import re
import sys

import harness
import torch

from gsa_train.config import Config, load_config
from gsa_train.distributed.parallel import Parallel, init_parallel, shutdown_parallel
from gsa_train.optimizer.micro_batch_graph import leave_default_stream
from whole_steps import step_sweep
from whole_steps.baseline import Baseline, has_float8
from whole_steps.step_bench import OurTrainee, release_memory
from whole_steps.step_timing import Row, Subject, Turns, measure

DEFAULTS = (
    "standard_1.7b",
    "baseline_1.7b",
    *(["baseline_float8_1.7b"] if has_float8() else []),
    "gsa_1.7b",
    "gsa_1.7b,gsa.indexer_loss_row_fraction=1.0",
)
BASELINE = re.compile("^baseline(_float8)?")


def load(name: str, sequences: int, overrides: list[str]) -> Config:
    name, *own = name.split(",")
    path = harness.ROOT / "configs" / f"{BASELINE.sub('standard', name)}.yaml"
    fixed = [f"train.global_batch_size={sequences}", "train.micro_batch_size=1", "data.num_workers=0"]
    return load_config(path, [*fixed, *overrides, *own], world_size=1, need_data=False)


def build(name: str, config: Config, parallel: Parallel) -> OurTrainee | Baseline:
    if plain := BASELINE.match(name):
        return Baseline(config, parallel, float8=plain[1] is not None, lr=config.phases[-1].lr)
    return OurTrainee(config, config.phases[-1], parallel)


def add_to(report: harness.Report, rows: list[Row]) -> None:
    for row in rows:
        report.row(**{name: cell for name, cell in vars(row).items() if name != "parts"})
    for part in dict.fromkeys(part for row in rows for part in row.parts):
        times = {f"{row.config}, {row.micro_batch}": row.parts.get(part, 0.0) for row in rows}
        report.row(ms_per_sequence=part, **times)
    for row in rows:
        if row.config.startswith("standard") and row.config == rows[0].config:
            report.bar(f"MFU of {row.config}, micro-batch {row.micro_batch}", row.mfu, at_least=0.42)
            for other in (each for each in rows if each.micro_batch == row.micro_batch):
                what = f"step of {other.config} / {row.config}, micro-batch {row.micro_batch}"
                if (plain := BASELINE.match(other.config)) and plain[1] is None:
                    report.bar(what, other.ratio, at_least=1.05)
                if other.config.split(",")[0] == row.config.replace("standard", "gsa"):
                    report.bar(what, other.ratio, at_most=1.15)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--configs", nargs="+", default=DEFAULTS)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sequences", type=int, default=8, help="per optimizer step")
    parser.add_argument("--warm-up-seconds", type=float, default=10.0)
    parser.add_argument("--turns", type=int, default=10, help="of three steps each")
    parser.add_argument("--no-profile", action="store_true")
    step_sweep.add_options(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    harness.require_cuda()
    if arguments.lengths:
        return step_sweep.main(arguments)
    report = harness.Report("bench_step", arguments)

    configs = {name: load(name, arguments.sequences, arguments.overrides) for name in arguments.configs}
    parallel = init_parallel(next(iter(configs.values())).parallel, seed=1)
    leave_default_stream(parallel.device)  # for CUDA graphs; the same for all models
    rows: list[Row] = []
    reference: Subject | None = None
    for name, config in configs.items():
        others_bytes = torch.cuda.memory_allocated()
        subject = Subject(name, build(name, config, parallel), others_bytes)
        for micro_batch in arguments.micro_batch:
            for one in filter(None, (reference, subject)):
                one.set_micro_batch(micro_batch)
            turns = Turns(arguments.warm_up_seconds, arguments.turns)
            row = measure(subject, reference, turns, not arguments.no_profile)
            rows.append(row)
            print(f"{name}, micro-batch {micro_batch}: {row.step_ms:.1f} ms, MFU {100 * row.mfu:.1f}%")
        if reference is None:
            reference = subject
        else:
            subject.bench.close()
            release_memory(parallel.device)
    assert reference is not None
    reference.bench.close()
    add_to(report, rows)
    shutdown_parallel()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
