"""Starts a real Slurm with two nodes on one machine. Its daemons (slurmctld, slurmd and munged, from the Debian
packages slurm-wlm and munge) are child processes, and all files are in one folder. Without cgroups, Slurm finds the
processes of a job by the process tree."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=15
KillWait=10
JobRequeue=1
MinJobAge=600
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        ports = [_free_port() for _ in range(3)]
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        places = dict(zip(("port", "port1", "port2"), ports, strict=True))
        host, user = socket.gethostname().partition(".")[0], getpass.getuser()
        conf = CONF.format(host=host, user=user, folder=self.folder, **places)
        (self.folder / "slurm.conf").write_text(conf)
        options = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        options.append(f"--socket={self.folder}/munge.socket")
        self._run("munged", "munged", "--foreground", "--force", *options)
        wait_for(lambda: (self.folder / "munge.socket").exists())
        self._run("slurmctld", "slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            self.start_node(node)
        wait_for(lambda: self.command("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"])

    def start_node(self, node: str) -> None:
        self._run(node, "slurmd", "-D", "-N", node)

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )

    def command(self, *words: str) -> str:
        result = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        return result.stdout if result.returncode == 0 else f"{result.stdout}{result.stderr}"

    def state(self, job: str) -> str:
        found = self.command("scontrol", "show", "job", "-o", job)
        return found.partition("JobState=")[2].partition(" ")[0]

    def end(self) -> None:
        """End all jobs, then the daemons, by their ids."""
        try:
            if "n2" in self.daemons:
                self.command("scancel", "--user", getpass.getuser())
                wait_for(lambda: not self.command("squeue", "-h").strip(), seconds=60)
        finally:
            for name in ("n1", "n2", "slurmctld", "munged"):
                daemon = self.daemons.get(name)
                if daemon is not None and daemon.poll() is None:
                    daemon.send_signal(signal.SIGTERM)
                    daemon.wait(60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "Slurm did not get there; its logs are in the folder of the test"
        time.sleep(0.2)
