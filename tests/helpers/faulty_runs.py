"""Trains runs with faults: python faulty_runs.py PLAN.json

PLAN.json is a list of waves, and a wave is a list of runs that run in parallel: {"name", "ranks", "arguments" of
pretrain.py, "faults" of faults.py, "log"}. With "copy_of": [folder, to] and "latest", a run continues from a copy of
another run's folder, as if that run had been killed after that checkpoint. Each run is an unchanged
`launch/pretrain.py` in processes forked for it, and patches inject the faults. The exit codes of each run's ranks go to
PLAN.codes.
"""

import gc
import importlib.util
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gsa_train.train  # noqa: F401 - all that the runs need, before they are forked
from gsa_train.process.console import drain_console
from helpers.faults import Faults

REPOSITORY = Path(__file__).resolve().parents[2]


def pretrain() -> Any:
    spec = importlib.util.spec_from_file_location("pretrain", REPOSITORY / "launch" / "pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start_rank(run: dict[str, Any], rank: int, port: int) -> int:
    """Fork one rank of a run. It has imported everything, and no other run has used its process."""
    child = os.fork()
    if child:
        return child
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run["ranks"], "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in world.items()})
    log = os.open(f"{run['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["pretrain.py", *run["arguments"]]
    code = 1
    try:
        with Faults(run["faults"]).patched():
            code = pretrain().main()
    except BaseException:
        traceback.print_exc()
    drain_console()
    os._exit(code)


def copy_as_killed(source: Path, target: Path, latest: str) -> None:
    shutil.copytree(source, target)
    (target / "checkpoints" / "latest").write_text(latest)
    for checkpoint in (target / "checkpoints").glob("step_*"):
        if checkpoint.name > latest:
            shutil.rmtree(checkpoint)


def main() -> None:
    plan = Path(sys.argv[1])
    torch.set_num_threads(1)
    gc.freeze()  # Imported objects need not be searched at each collection of each rank.
    codes: dict[str, list[int]] = {}
    for wave in json.loads(plan.read_text()):
        for run in wave:
            if "copy_of" in run:
                copy_as_killed(*map(Path, run["copy_of"]), latest=run["latest"])
        # This process hosts the store, as torchrun's agent does. No rank has to find a free port.
        stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in wave]
        children = {}
        for run, store in zip(wave, stores, strict=True):
            children[run["name"]] = [start_rank(run, rank, store.port) for rank in range(run["ranks"])]
        for name, of_run in children.items():
            codes[name] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in of_run]
    plan.with_suffix(".codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main()
