"""Train under Slurm: python launch/slurm/submit.py --config FILE --nodes N [--gpus-per-node G] [key=value ...]

The command writes the resolved config, the commit and a copy of the source to `runs/<name>/slurm/<time>/`, and submits
`job.sh` from there. Later edits of the source therefore do not change a job that is queued or restarted. The job saves
and requeues itself in three cases: before its time limit, when it is preempted, and when it fails after a new
checkpoint. `--dry-run` prints the script.

The exit code is 2 if the arguments or the config are wrong, if changes are not committed, if a folder cannot be
written, or if git or sbatch is missing. Otherwise the exit code is the exit code of sbatch.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in (".", "kernels", "data")]

from gsa_train.process.as_command import as_command

with as_command():
    from gsa_train.cli import refuse_dashed_fields
    from gsa_train.config import Config, ConfigError, config_to_yaml, load_config
    from gsa_train.planning.choices import unknown_choices

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE = Path(__file__).with_name("job.sh")


@as_command()
def main() -> int:
    arguments = parse_arguments()
    ranks_per_node = arguments.ranks_per_node or arguments.gpus_per_node or 1
    try:
        config = load_config(arguments.config, arguments.overrides, arguments.nodes * ranks_per_node)
        if wrong := unknown_choices(config):
            raise ConfigError(arguments.config, wrong)
        commit, changed = read_commit(REPOSITORY)
    except (ConfigError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if changed and not (arguments.allow_uncommitted or arguments.dry_run):
        print(
            f"{REPOSITORY} has changes that are not committed:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\n"
            "Commit them, or add --allow-uncommitted: the job then trains the files as they are now, and keeps them.",
            file=sys.stderr,
        )
        return 2
    run_dir = Path(config.run.dir).absolute() / config.run.name
    folder = run_dir / "slurm" / time.strftime("%Y%m%d-%H%M%S")
    if problem := unprintable_word(arguments, config):
        print(problem, file=sys.stderr)
        return 2
    script = render(TEMPLATE.read_text(), script_words(arguments, config, run_dir, folder, ranks_per_node))
    if arguments.dry_run:
        print(script, end="")
        return 0
    if shutil.which("sbatch") is None:
        print("no sbatch on this machine: submit from a login node of the cluster", file=sys.stderr)
        return 2
    try:
        freeze(folder, config, script, commit, changed)
    except OSError as error:
        print(f"{folder} cannot be written: {error}; mend that, or set run.dir and run.name", file=sys.stderr)
        return 2
    return submit(folder / "job.sh", arguments.chain)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="submit.py", description="Submit a run to Slurm.", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--nodes", type=positive, required=True, metavar="N")
    parser.add_argument(
        "--gpus-per-node", type=natural, default=8, metavar="G", help="0 for CPUs (default: 8)"
    )
    parser.add_argument("--ranks-per-node", type=positive, metavar="R", help="(default: one per GPU)")
    parser.add_argument("--cpus-per-node", type=positive, metavar="C", help="(default: the whole node)")
    parser.add_argument("--time", metavar="T", help="time limit of a job, as sbatch takes it")
    parser.add_argument("--partition", metavar="P")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option, as --sbatch=--account=x",
    )
    parser.add_argument(
        "--margin-seconds",
        type=positive,
        default=360,
        help="stop so long before the time limit, and wait so long for the save (default: 360)",
    )
    parser.add_argument(
        "--max-restarts", type=natural, default=3, help="by torchrun, within a job (default: 3)"
    )
    parser.add_argument(
        "--chain", type=positive, default=1, metavar="K", help="jobs, each after the one before (default: 1)"
    )
    parser.add_argument("--resume-from", metavar="DIR", help="for the first start")
    parser.add_argument("--resume-after-stop", action="store_true", help="for the first start")
    parser.add_argument("--accept-new-data", action="store_true")
    parser.add_argument(
        "--allow-uncommitted", action="store_true", help="freeze the source as it is, not the commit"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job script, and submit nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    refuse_dashed_fields(parser, None)
    arguments = parser.parse_intermixed_args()
    if arguments.resume_from is not None and not Path(arguments.resume_from).is_dir():
        parser.error(f"--resume-from {arguments.resume_from}: no such folder; give a checkpoint folder")
    return arguments


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: give an integer of 0 or more")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give an integer of 1 or more")
    return int(text)


def read_commit(repository: Path) -> tuple[str, list[str]]:
    """Returns the commit, and the files that differ from it, untracked files included.

    Raises:
        RuntimeError: git or a git checkout is missing.
    """
    if shutil.which("git") is None:
        raise RuntimeError("no git on this machine, which says what commit is trained; install it")

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), *words]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}: {result.stderr.strip()}; submit from a git checkout")
        return result.stdout

    return git("rev-parse", "HEAD").strip(), git("status", "--porcelain").splitlines()


def unprintable_word(arguments: argparse.Namespace, config: Config) -> str | None:
    """Return an error if a value for the job script has a character that is not printable. For example, a newline in a
    value would add a line to the script, and sbatch could read this line as an option."""
    words = {
        "--time": [arguments.time],
        "--partition": [arguments.partition],
        "--sbatch": arguments.sbatch,
        "--resume-from": [arguments.resume_from],
        "run.name": [config.run.name],
        "run.dir": [config.run.dir, str(Path(config.run.dir).absolute())],
        "the working directory": [os.getcwd()],
        "the path of Python": [sys.executable],
    }
    for name, values in words.items():
        for value in values:
            if value is not None and not value.isprintable():
                return (
                    f"{name} = {value!r}: has a character that cannot be printed, such as a newline, which may not "
                    "reach the job script; give a value without"
                )
    return None


def script_words(
    arguments: argparse.Namespace, config: Config, run_dir: Path, folder: Path, ranks_per_node: int
) -> dict[str, str]:
    options = [f"--cpus-per-task={arguments.cpus_per_node}"] if arguments.cpus_per_node else ["--exclusive"]
    options += [f"--gpus-per-node={arguments.gpus_per_node}"] if arguments.gpus_per_node else []
    options += [f"--time={arguments.time}"] if arguments.time else []
    options += [f"--partition={arguments.partition}"] if arguments.partition else []
    passed_on = ["--accept-new-data"] if arguments.accept_new_data else []
    passed_on += ["--resume-after-stop"] if arguments.resume_after_stop else []
    if arguments.resume_from:
        passed_on += ["--resume-from", str(Path(arguments.resume_from).absolute())]
    return {
        "NAME": shlex.quote(config.run.name),
        "NODES": str(arguments.nodes),
        "RANKS_PER_NODE": str(ranks_per_node),
        "MARGIN_SECONDS": str(arguments.margin_seconds),
        "MAX_RESTARTS": str(arguments.max_restarts),
        "OPTIONS": "\n".join(f"#SBATCH {option}" for option in options + arguments.sbatch),
        "FOLDER": shlex.quote(str(folder)),
        "RUN_DIR": shlex.quote(str(run_dir)),
        "WORKING_DIR": shlex.quote(os.getcwd()),
        "PYTHON": shlex.quote(sys.executable),
        "ARGUMENTS": shlex.join(passed_on),
    }


def render(template: str, words: dict[str, str]) -> str:
    """Replace every `__WORD__`. A word without a value raises KeyError."""
    return re.sub(r"__([A-Z_]*[A-Z])__", lambda found: words[found[1]], template)


def freeze(folder: Path, config: Config, script: str, commit: str, changed: list[str]) -> None:
    """Write the job's config, script, commit and source. The source is the working tree without ignored files."""
    source = folder / "source"
    source.mkdir(parents=True)
    listed = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (REPOSITORY / name).is_file():  # not what was deleted
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, source / name)
    (folder / "commit.txt").write_text("\n".join([commit, *changed]) + "\n")
    (folder / "config.yaml").write_text(config_to_yaml(config))
    (folder / "job.sh").write_text(script)


def submit(script: Path, chain: int) -> int:
    after: list[str] = []
    for _ in range(chain):
        result = subprocess.run(["sbatch", "--parsable", *after, str(script)], capture_output=True, text=True)
        print(result.stderr, file=sys.stderr, end="")
        if result.returncode != 0:
            return result.returncode
        job = result.stdout.strip().partition(";")[0]
        after = [f"--dependency=afterany:{job}"]
        print(f"job {job}: {script.parent}/job_{job}.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
