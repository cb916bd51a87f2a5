"""A port that is taken is said in one line. Where torchrun makes the port, it says so itself."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gsa_train.parallel import RendezvousError, _join_world


def test_a_port_in_use_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def join(*_arguments: Any, **_options: Any) -> None:  # as rank 0, and this process may be in a world
        dist.TCPStore("127.0.0.1", taken.port, is_master=True, wait_for_workers=False)

    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError) as caught:
        _join_world(False, torch.device("cpu"), timedelta(minutes=1))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{taken.port}: the port is in use; set MASTER_PORT"
    )
