"""Tests the one-line error for a port in use. If torchrun opens the port, it reports the error itself."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gsa_train.distributed.parallel import RendezvousError, _join_world


def test_a_port_in_use_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def join(*_arguments: Any, **_options: Any) -> None:  # as rank 0, because this process may be in a world
        dist.TCPStore("127.0.0.1", taken.port, is_master=True, wait_for_workers=False)

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.port)}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **place}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError) as caught:
        _join_world(False, torch.device("cpu"), timedelta(minutes=1))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{taken.port}: the port is in use; set MASTER_PORT"
    )


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({}, "no WORLD_SIZE and no MASTER_ADDR and no MASTER_PORT"),
        ({"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, "no MASTER_PORT"),
    ],
)
def test_a_rank_without_the_address_of_the_others(monkeypatch, environment, missing):
    """RANK may be left over in a shell, or the launcher is not torchrun."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError) as caught:
        _join_world(False, torch.device("cpu"), timedelta(minutes=1))
    assert str(caught.value) == (
        f"RANK = 0 in the environment, but {missing}: start with torchrun, or unset it"
    )
