"""Training runs with faults: python faulty_runs.py PLAN.json

PLAN.json is a list of waves, a wave a list of runs that go side by side:
{"name", "ranks", "arguments" of pretrain.py, "faults", "log"}. With "copy_of": [folder, to] and "latest" it goes on
from a copy of a run's folder, as a kill after that checkpoint would have left it. Each run is `launch/pretrain.py` as
it is, in processes forked for it; the faults come from outside, by patches. The exit codes of the ranks of each run go
to PLAN.codes.

Faults (steps count from 1):
    random_tokens: [[first, last], ...]   the corpus has uniformly random tokens where these steps read it
    nan_gradient: [step, rank]            one element of a weight's gradient is NaN on that rank, before any reduction
    flipped_bit: [step, bit, rank]        a bit of one weight flips before that step, once; without rank on all
    wrong_gradient: [step, rank]          a bit of one element of a weight's gradient is wrong on that rank, once
    wrong_output: [step, rank]            a layer's output is twice what it should be on that rank, once
    full_disk: [first, last]              no file of rank 0 grows while it makes and logs these steps
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import resource
import shutil
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import gsa_train.train  # noqa: F401 - all that the runs need, before they are forked
import gsa_train.trainer as trainer
from gsa_data.stream import BlockStream

REPOSITORY = Path(__file__).resolve().parents[2]


def pretrain() -> Any:
    spec = importlib.util.spec_from_file_location("pretrain", REPOSITORY / "launch" / "pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def faulty(faults: dict[str, Any]) -> Iterator[None]:
    next_blocks, train_step = BlockStream.next_blocks, trainer.train_step
    done: set[str] = set()

    def poisoned_blocks(stream: BlockStream, count: int) -> Any:
        per_step = count * stream.world_size
        step = stream.consumed_samples // per_step + 1
        blocks = next_blocks(stream, count)
        if any(first <= step <= last for first, last in faults.get("random_tokens", [])):
            generator = np.random.default_rng([step, stream.rank])
            return generator.integers(3, 4096, blocks.shape, dtype=blocks.dtype)
        return blocks

    def double(module: torch.nn.Module, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if "output" in done:
            return None
        done.add("output")
        return 2 * output[0], *output[1:]

    def faulty_step(training: Any, micro_batches: Any, lr: float, steps_before: int, **options: Any) -> Any:
        step, model = steps_before + 1, training.model
        weight = next(p for name, p in model.gpt.named_parameters() if name.endswith("linear_fc2.weight"))
        own_rank = int(os.environ["RANK"])
        hook = None
        for name in ("nan_gradient", "wrong_gradient"):
            if faults.get(name) == [step, own_rank]:

                def spoil(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
                    spoilt = gradient.clone()
                    if name not in done and name == "nan_gradient":
                        spoilt.view(-1)[0] = torch.nan
                    elif name not in done:
                        spoilt.view(-1).view(torch.int32)[0] ^= 1 << 20
                    done.add(name)
                    return spoilt

                hook = weight.register_hook(spoil)
        if faults.get("wrong_output") == [step, own_rank]:
            hook = next(
                module.register_forward_hook(double)
                for name, module in model.gpt.named_modules()
                if name.endswith("linear_fc2")
            )
        first, last = faults.get("full_disk", (0, 0))
        if own_rank == 0 and step in (first, last + 1):
            limit = 0 if step == first else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        at, bit, *ranks = faults.get("flipped_bit", (0, 0))
        if step == at and "bit" not in done and own_rank in (ranks or [own_rank]):
            done.add("bit")
            weight.data.view(torch.int32).view(-1)[0] ^= 1 << bit
        result = train_step(training, micro_batches, lr, steps_before, **options)
        if hook is not None:
            hook.remove()
        return result

    with (
        patch.object(BlockStream, "next_blocks", poisoned_blocks),
        patch.object(trainer, "train_step", faulty_step),
    ):
        yield


def start_rank(run: dict[str, Any], rank: int, port: int) -> int:
    """Fork one rank of a run: everything is imported, and nothing of another run has happened in it."""
    child = os.fork()
    if child:
        return child
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["ranks"], "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_PORT=str(port))
    log = os.open(f"{run['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["pretrain.py", *run["arguments"]]
    code = 1
    try:
        with faulty(run["faults"]):
            code = pretrain().main()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def copy_as_killed(source: Path, target: Path, latest: str) -> None:
    shutil.copytree(source, target)
    (target / "checkpoints" / "latest").write_text(latest)
    for checkpoint in (target / "checkpoints").glob("step_*"):
        if checkpoint.name > latest:
            shutil.rmtree(checkpoint)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> None:
    plan = Path(sys.argv[1])
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be searched at each collection of each rank
    codes: dict[str, list[int]] = {}
    for wave in json.loads(plan.read_text()):
        for run in wave:
            if "copy_of" in run:
                copy_as_killed(*map(Path, run["copy_of"]), latest=run["latest"])
        children = {}
        for run in wave:
            port = free_port()
            children[run["name"]] = [start_rank(run, rank, port) for rank in range(run["ranks"])]
        for name, of_run in children.items():
            codes[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in of_run]
    plan.with_suffix(".codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
