"""Tests submissions to Slurm: a whole script, from a known source."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ("--config", "configs/demo.yaml")


def submit(
    *words: str, cwd: Path = ROOT, script: Path = ROOT, path: str = os.environ["PATH"]
) -> subprocess.CompletedProcess[str]:
    """Run submit.py of the checkout `script`, with git and sbatch from `path`."""
    command = [sys.executable, str(script / "launch/slurm/submit.py"), *words]
    environment = {**os.environ, "PATH": path}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


def test_a_dry_run_prints_the_script_and_leaves_nothing(tmp_path: Path) -> None:
    options = ["--nodes=2", "--gpus-per-node=4", "--time=1:00:00", "--partition=gpu"]
    overrides = [f"run.dir={tmp_path / 'my runs'}", "train.global_batch_size=32"]
    result = submit(*DEMO, *options, "--sbatch=--account=me", *overrides, "--dry-run")
    assert result.returncode == 0, result.stderr
    written = [line for line in result.stdout.splitlines() if line.startswith("#SBATCH")]
    assert {f"#SBATCH {option}" for option in (*options, "--account=me")} <= {*written}
    assert "#SBATCH --signal=B:USR1@360" in written
    assert "--nproc_per_node=4" in result.stdout
    assert f"run_dir='{tmp_path}/my runs/demo'" in result.stdout
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    assert [*tmp_path.iterdir()] == []


def test_what_the_machine_lacks_is_said_and_nothing_is_frozen(tmp_path: Path) -> None:
    words = ["--config=configs/demo.yaml", "--nodes=1", "--gpus-per-node=0", "--allow-uncommitted"]
    git = shutil.which("git")
    (tmp_path / "bin").mkdir()
    for found, said in ((None, "no git on this machine"), ("git", "no sbatch on this machine")):
        if found:
            (tmp_path / "bin" / found).symlink_to(git)
        result = submit(*words, f"run.dir={tmp_path / 'runs'}", path=str(tmp_path / "bin"))
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(said)
    assert not (tmp_path / "runs").exists()

    (tmp_path / "bin" / "sbatch").symlink_to(git)
    (tmp_path / "runs").write_text("a file")
    result = submit(*words, f"run.dir={tmp_path / 'runs'}", path=str(tmp_path / "bin"))
    assert result.returncode == 2
    assert result.stderr.startswith(f"{tmp_path}/runs/demo/slurm/")
    assert "cannot be written: [Errno 20] Not a directory" in result.stderr


def test_changes_that_are_not_committed_are_refused_by_name(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in ("launch/slurm/submit.py", "launch/slurm/job.sh"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text((ROOT / name).read_text())
    words = (*DEMO, "--nodes=1", "--gpus-per-node=0", f"run.dir={tmp_path}")
    no_checkout = submit(*words, script=copy)
    assert no_checkout.returncode == 2
    assert "submit from a git checkout" in no_checkout.stderr

    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(copy)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    (copy / "new.py").touch()
    refused = submit(*words, script=copy)
    assert refused.returncode == 2
    assert "?? new.py" in refused.stderr
    assert "--allow-uncommitted" in refused.stderr
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--nodes=0"], "give an integer of 1 or more"),
        (["--nodes=1", "--chain=0"], "give an integer of 1 or more"),
        (["--nodes=1", "--gpus-per-node=-1"], "--gpus-per-node: -1: give an integer of 0 or more"),
        (["--nodes=3", "--gpus-per-node=8", "--dry-run"], "train.global_batch_size"),  # checked for all ranks
        (["--nodes=1", "--dry-run", 'run.dir="/tmp/a\\ntouch /tmp/b"'], "run.dir = '/tmp/a\\ntouch /tmp/b"),
        (["--nodes=1", "--dry-run", "--sbatch=--account=a\n#SBATCH --wrap=b"], "--sbatch = '--account=a\\n"),
        (["--nodes=1", "--dry-run", "--time=1\n"], "--time = '1\\n': has a character that cannot be printed"),
        (["--nodes=1", "--dry-run", "--partition=a\rb"], "--partition = 'a\\rb'"),
        (["--nodes=1", "--resume-from=/no/such", "--dry-run"], "--resume-from /no/such: no such folder"),
    ],
)
def test_wrong_use_has_code_2(words: list[str], fragment: str) -> None:
    result = submit(*DEMO, "--gpus-per-node=0", *words)
    assert result.returncode == 2
    assert fragment in result.stderr
    assert result.stdout == ""


def test_a_working_directory_with_a_newline_does_not_reach_the_script(tmp_path: Path) -> None:
    (place := tmp_path / "a\ntouch b").mkdir()
    (place / "data").symlink_to(ROOT / "data")
    words = [f"--config={ROOT / 'configs/demo.yaml'}", "--nodes=1", "--gpus-per-node=0", "--dry-run"]
    result = submit(*words, "run.dir=/tmp", cwd=place)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("the working directory = ")
