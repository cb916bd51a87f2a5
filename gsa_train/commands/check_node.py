"""Check the GPUs of one or several nodes before training: launch/check_node.py, `gsa-check-node`.

    python launch/check_node.py [--seconds 10]                            # all GPUs of this node, one by one
    torchrun --nproc_per_node=8 launch/check_node.py [--seconds 10]       # all at once, and the links between them

A run makes these checks before its first step (`run.health_check_seconds`):
- matrix products whose results are known bit for bit;
- a pattern in the free memory;
- ECC errors, remapped rows and XIDs, read by NVML;
- known numbers, sent over the links.

Without a GPU the CPU is checked. Exit code 0 means that all devices are healthy. With exit code 15, the output names
a bad device.
"""

from __future__ import annotations

import argparse
import datetime
import os

from gsa_train.process import exit_codes
from gsa_train.process.as_command import as_command


@as_command()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check_node.py", description="Check the health of GPUs.")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds of matrix products on each GPU (default: 10)"
    )
    arguments = parser.parse_args(argv)
    if not 0 < arguments.seconds < float("inf"):
        parser.error(f"--seconds {arguments.seconds}: give a number above 0")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return _check_all_at_once(arguments.seconds)
    return _check_one_by_one(arguments.seconds)


def _check_one_by_one(seconds: float) -> int:
    import torch

    from gsa_train.reliability.health.check import check_device
    from gsa_train.reliability.health.driver import MISSING

    count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    findings = []
    for index, device in enumerate(devices):
        findings.append(check_device(device, index, seconds))
        print(findings[-1].in_words(), flush=True)
    if any(each.without_driver for each in findings):
        print(MISSING)
    bad = sum(bool(each.faults) for each in findings)
    print(f"{bad} of {len(devices)} devices are not healthy")
    return exit_codes.UNHEALTHY if bad else 0


def _check_all_at_once(seconds: float) -> int:
    import torch
    import torch.distributed as dist

    from gsa_train.reliability.health.check import UnhealthyDevice, check_ranks

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=5)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=timeout, device_id=device if on_gpu else None
    )
    is_main = dist.get_rank() == 0
    try:
        check_ranks(device, seconds)
    except UnhealthyDevice as error:
        if is_main:
            print(error, flush=True)
        return exit_codes.UNHEALTHY
    if is_main:
        print(f"{dist.get_world_size()} devices are healthy")
    dist.destroy_process_group()
    return 0
