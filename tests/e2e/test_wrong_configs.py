"""Tests that a config that cannot run fails within seconds, with one message and exit code 2."""

import os
import socket
import subprocess
import sys

import pytest

from helpers.forked import ForkedAgent
from helpers.runs import CONFIG, ENVIRONMENT, REPOSITORY

# This runs the launcher and then prints which heavy packages it loaded.
REPORT = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("loaded:", [name for name in ("torch", "megatron", "gsa_train.distributed.parallel") if name in sys.modules])
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"cwd": REPOSITORY, "capture_output": True, "text": True, "timeout": 300, "check": False}
    return subprocess.run([sys.executable, *words], env={**os.environ, **environment}, **settings)


def launch(*arguments: str, ranks: int = 1, rank: int = 0) -> subprocess.CompletedProcess[str]:
    command = ["-c", REPORT, "launch/pretrain.py", "--config", CONFIG, *arguments]
    return run(*command, WORLD_SIZE=str(ranks), RANK=str(rank))


def message_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stdout == "loaded: []\n"  # so no process group was made
    assert "Traceback" not in result.stderr
    return result.stderr


def test_what_another_rank_alone_finds_is_not_lost():
    """The node of this rank lacks a file. Rank 0 continues, and nothing ends this rank."""
    message = message_of(launch("data.tokenizer=/none.model", ranks=2, rank=1))
    assert f"rank 1 on {socket.gethostname()}: " in message
    assert "data.tokenizer = /none.model: " in message


def test_a_dry_run_refuses_a_tokenizer_as_the_start_does():
    message = message_of(launch("--dry-run", "model.vocab_size=512"))
    assert message.startswith("model.vocab_size = 512: data/sample/tokenizer.model has 4096 tokens; set")
    without = launch("--dry-run", "model.vocab_size=512", "data.tokenizer=/no/such")
    assert (without.returncode, without.stderr) == (0, "")
    assert without.stdout.startswith("tiny on 1 rank")
    assert without.stdout.endswith("loaded: []\n")


NODES = """
import os, runpy, sys
import gsa_train.run_folder.same_on_all
gsa_train.run_folder.same_on_all.SEEN_AFTER_SECONDS = 1.0  # no file server is waited for
if os.environ["RANK"] == "1":
    {fault}
sys.path.insert(0, {launch!r})
runpy.run_path({launch!r} + "/pretrain.py", run_name="__main__")
"""


FAULTS = {
    # Without an error the run would train to the end, with a different model on each rank.
    "sys.argv.append('model.rope_base=5000')": "has another config: model.rope_base = 5000.0, on rank 0 10000.0. Give",
    "os.chdir('/')": "does not see the run folder of rank 0, /runs/r: ",  # it would fail at the first save
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_node_has_otherwise_ends_all_ranks_at_the_start(fault, tmp_path):
    script, log, sample = tmp_path / "nodes.py", tmp_path / "log", REPOSITORY / "data" / "sample"
    script.write_text(NODES.format(fault=fault, launch=str(REPOSITORY / "launch")))
    data = {"train_dir": "train", "validation_dir": "validation", "tokenizer": "tokenizer.model"}
    arguments = [f"data.{field}={sample / name}" for field, name in data.items()]
    command = [str(script), "--config", str(REPOSITORY / CONFIG), "run.name=r", *arguments]
    torchrun, environment = ("--standalone", "--nproc_per_node=2"), {**os.environ, **ENVIRONMENT}
    agent = ForkedAgent(torchrun, command, tmp_path, environment, {}, log)
    assert agent.wait(300) == 1
    assert log.read_text().count(FAULTS[fault]) == 1


def test_under_torchrun_the_message_comes_once_and_last():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "launch/pretrain.py"]
    result = run(*torchrun, "--config", CONFIG, "modle.num_layers=2", **ENVIRONMENT)
    assert result.returncode == 1
    output = result.stdout + result.stderr
    assert output.count("did you mean model?") == 1
    assert "did you mean model?" in output.rstrip().splitlines()[-2]  # the last line is a rule
