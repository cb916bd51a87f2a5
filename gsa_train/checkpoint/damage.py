"""Check that a checkpoint's files are intact, and belong to the step and the run that its folder names."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import yaml

from gsa_train.checkpoint.files import (
    MANIFEST,
    MEGATRON_METADATA,
    FileRecord,
    Manifest,
    faults_in,
    faults_in_a_line,
    is_complete,
    read_manifest,
    share_of,
    step_of,
)
from gsa_train.checkpoint.guarded import COMMON_STATE_FNAME, refused_content
from gsa_train.checkpoint.load import read_run_state
from gsa_train.checkpoint.parallel_read import TENSORS
from gsa_train.checkpoint.write import TORCH_METADATA
from gsa_train.config import saved_sections
from gsa_train.distributed.objects import from_main, gathered
from gsa_train.distributed.parallel import Parallel

logger = logging.getLogger(__name__)


def find_damage(
    checkpoint: Path, parallel: Parallel, checksums: bool, run_id: str = "", tensors_later: bool = False
) -> str | None:
    """Returns one line about the fault in a checkpoint's files, or None if they are intact. Collective.

    The ranks divide the files among them. The main rank also looks for manipulated files, which checksums cannot
    detect.

    Args:
        checksums: read the files and compare their checksums; otherwise only compare sizes.
        run_id: ID of the run that the checkpoint must belong to; "" for any.
        tensors_later: leave the checksums of files with tensors (`tensor_files`) to the load.
    """
    fault, manifest = from_main(_read_manifest(checkpoint) if parallel.is_main else (None, None))
    if manifest is None:
        return fault
    mine = [
        f"rank {parallel.rank} on {socket.gethostname()} does not see it: is its folder shared by all nodes?"
    ]
    if checkpoint.is_dir():
        share = share_of(manifest.files, parallel.rank, parallel.world_size)
        later = {name: each for name, each in share.items() if tensors_later and name.endswith(TENSORS)}
        now = {name: each for name, each in share.items() if name not in later}
        mine = [*faults_in(checkpoint, now, checksums), *faults_in(checkpoint, later, checksums=False)]
    fault = faults_in_a_line([each for faults in gathered(mine) for each in faults])
    if fault is None:
        fault = from_main(_refused(checkpoint, manifest, run_id) if parallel.is_main else None)
    return fault


def tensor_files(checkpoint: Path) -> dict[str, FileRecord]:
    """Returns the manifest's records of the files with tensors, for an intact checkpoint."""
    return {name: each for name, each in read_manifest(checkpoint).files.items() if name.endswith(TENSORS)}


def find_damage_alone(checkpoint: Path) -> str | None:
    """Run `find_damage` with checksums in one process without process groups."""
    fault, manifest = _read_manifest(checkpoint)
    if manifest is None:
        return fault
    fault = faults_in_a_line(faults_in(checkpoint, manifest.files, checksums=True))
    return fault or _refused(checkpoint, manifest)


def _read_manifest(checkpoint: Path) -> tuple[str | None, Manifest | None]:
    """Returns the fault of the manifest and None, or None and the manifest."""
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        return f"it has no {MANIFEST}" if is_complete(checkpoint) else "it is missing or incomplete", None
    except (OSError, ValueError) as error:
        return str(error), None
    unlisted = {MEGATRON_METADATA, TORCH_METADATA, COMMON_STATE_FNAME} - manifest.files.keys()
    if unlisted:
        return f"{MANIFEST} is damaged: it does not list {', '.join(sorted(unlisted))}", None
    return None, manifest


def _refused(checkpoint: Path, manifest: Manifest, run_id: str = "") -> str | None:
    """Returns why intact files are refused: a file was made to harm, or belongs to another checkpoint."""
    return refused_content(checkpoint, manifest.files) or _other_identity(checkpoint, manifest, run_id)


def _other_identity(checkpoint: Path, manifest: Manifest, run_id: str) -> str | None:
    """Returns one line if an intact checkpoint is not the one that its folder names, else None."""
    try:
        state = read_run_state(checkpoint)
    except (KeyError, TypeError) as error:
        return f"{COMMON_STATE_FNAME} is damaged: it holds no run state ({error})"
    except ValueError:
        return None  # another version is not damage, and the load reports it
    numbers = (state.step, state.tokens, state.phase_index, state.phase_start, *state.layout)
    if any(type(each) is not int for each in numbers) or not isinstance(state.data, dict):
        return f"{COMMON_STATE_FNAME} is damaged: it holds no run state"
    try:
        sections = saved_sections(state.config_yaml)
        known = isinstance(sections, dict) and sections.keys() >= {"model", "gsa", "phases"}
    except (yaml.YAMLError, AttributeError, TypeError):
        known = False
    if not known:
        return f"{COMMON_STATE_FNAME} is damaged: it does not hold the run's config"
    step = step_of(checkpoint.name)
    if step is not None and state.step != step:
        return f"it is the checkpoint of step {state.step} under the name of step {step}"
    said, meant = (f"run {each.run} ({each.run_id}), step {each.step}" for each in (manifest, state))
    if said != meant:
        return f"{MANIFEST} belongs to {said}, {COMMON_STATE_FNAME} to {meant}"
    if run_id and state.run_id and run_id != state.run_id:
        return (
            f"it belongs to another run, {state.run} ({state.run_id}), and the folder's starts.jsonl names {run_id}; "
            "give it by --resume-from from its own folder, or delete starts.jsonl if that file is wrong"
        )
    return None
