"""List checkpoint folders, make them durable on disk, and check that they are unchanged.

    <run folder>/checkpoints/step_00000200/                 one checkpoint, with the run's config.yaml and a copy of its
                                                            tokenizer (tokenizer.model or tokenizer.json)
    <run folder>/checkpoints/step_00000200/manifest.json    run, step, and each file's size and checksum; written last
    <run folder>/checkpoints/step_00000400.damaged/         a damaged checkpoint that a resume has skipped
    <run folder>/checkpoints/latest                         the name of the newest checkpoint; a save replaces this
                                                            file last, atomically
    <run folder>/checkpoints/set_aside/                     checkpoints newer than the one that --resume-from has
                                                            loaded

A save writes into `.tmp_step_00000200/`, and renames this folder once every file is on the disk. A folder with a final
name is therefore complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gsa_data.whole_files import parse_json
from gsa_train.checkpoint.checksums import crc32_of
from gsa_train.files import write_atomically, write_durably

LATEST = "latest"
MANIFEST = "manifest.json"
DAMAGED = ".damaged"
SET_ASIDE = "set_aside"
"""Folder of the checkpoints that a `--resume-from` set aside."""
MEGATRON_METADATA = "metadata.json"
"""megatron-core recognizes its checkpoints by this file, which it writes last."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    crc32: str
    """Checksum of the whole file, in hexadecimal. CRC-32 detects accidental damage, is faster than the hashes in
    hashlib, and releases the GIL."""


@dataclass(frozen=True)
class Manifest:
    run: str
    """`run.name` of the run that wrote it."""
    run_id: str
    """gsa_train.run_folder.starts.new_run_id"""
    step: int
    files: dict[str, FileRecord]


# --- which checkpoint ------------------------------------------------------------------------------------


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Returns 200 for step_00000200, and None for a name that no checkpoint has."""
    match = re.fullmatch(r"step_(\d{8,})", name)
    return int(match[1]) if match else None


def _step(checkpoint: Path) -> int:
    return step_of(checkpoint.name) or 0


def is_complete(folder: Path) -> bool:
    return (folder / MEGATRON_METADATA).is_file()


def read_latest(checkpoints: Path) -> str | None:
    """Returns the checkpoint that `latest` names, or None without the file or a valid name."""
    pointer = checkpoints / LATEST
    name = pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""
    return None if step_of(name) is None else name


def newest_name(checkpoints: Path) -> str | None:
    """Returns the name in `latest`, or else the name of the newest complete checkpoint."""
    complete = complete_checkpoints(checkpoints)
    return read_latest(checkpoints) or (complete[-1].name if complete else None)


def _warn_of_latest(checkpoints: Path) -> None:
    pointer, name = checkpoints / LATEST, read_latest(checkpoints)
    if pointer.is_file() and name is None:
        logger.warning("%s names no checkpoint in its folder: using the newest one there", pointer)
    newer = [] if name is None else newer_than(checkpoints / name)
    if newer:
        logger.warning(
            "%s names %s, but %s is newer: using %s. To continue from the newest one, delete %s",
            pointer,
            name,
            ", ".join(path.name for path in newer),
            name,
            pointer,
        )


def newer_than(checkpoint: Path) -> list[Path]:
    """Returns the complete checkpoints of later steps in the same folder, oldest first."""
    complete, step = complete_checkpoints(checkpoint.parent), step_of(checkpoint.name)
    return [path for path in complete if step is not None and _step(path) > step]


def find_checkpoint(folder: Path) -> Path | None:
    """Returns `folder` if it is a complete checkpoint, else the checkpoint that the file `latest` names, in the folder
    or in its subfolder `checkpoints`.

    Without `latest`, returns the newest complete checkpoint, or None.

    Raises:
        FileNotFoundError: `latest` names a checkpoint that is missing or incomplete.
    """
    if is_complete(folder):
        return folder
    for checkpoints in (folder, folder / "checkpoints"):
        name = newest_name(checkpoints)
        while name is not None and not is_complete(checkpoints / name):
            newer = newest_name(checkpoints)
            if newer == name:
                break
            name = newer  # its run has meanwhile saved a newer checkpoint and deleted this one
        if name is None:
            continue
        found = checkpoints / name if is_complete(checkpoints / name) else None
        _warn_of_latest(checkpoints)
        if found is not None:
            return found
        complete = [path.name for path in complete_checkpoints(checkpoints)]
        raise FileNotFoundError(
            f"{checkpoints / LATEST} names {name}, which is missing or incomplete; complete checkpoints: "
            f"{', '.join(complete) or 'none'}. Give one of these folders."
        )
    return None


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Returns the complete checkpoints, oldest first."""
    found = [path for path in checkpoints.glob("step_*") if step_of(path.name) is not None]
    return [path for path in sorted(found, key=_step) if is_complete(path)]


def resume_candidates(checkpoints: Path) -> list[Path]:
    """Returns the checkpoints that a resume may load: the one that `latest` names, then older ones, newest first.

    Checkpoints newer than `latest` are left out, with a warning, because a user may have set `latest` back. If `latest`
    is damaged or missing (as after a kill during the first save), all complete checkpoints are candidates.
    """
    _warn_of_latest(checkpoints)
    complete = complete_checkpoints(checkpoints)[::-1]
    name = read_latest(checkpoints)
    if name is None:
        return complete
    return [checkpoints / name, *(path for path in complete if _step(path) < _step(checkpoints / name))]


# --- after a kill, after damage --------------------------------------------------------------------------


def put_back(checkpoints: Path) -> None:
    """Restore the name of a checkpoint that a killed save was replacing. Call on one process before any read."""
    for replaced in checkpoints.glob(".replaced_step_*"):
        original = checkpoints / replaced.name.removeprefix(".replaced_")
        if not original.exists():
            replaced.rename(original)


def recover_folder(checkpoints: Path) -> None:
    """Undo the incomplete changes of a killed save. Call on one process."""
    put_back(checkpoints)
    for failure in _delete_leftovers(checkpoints):
        logger.warning("%s: %s", checkpoints, failure)


def pass_over(damaged: Iterable[Path], chosen: Path) -> list[Path]:
    """Rename damaged checkpoints to `*.damaged`, and let `latest` name the chosen checkpoint. Returns the new names.

    Because of the new names, no later save replaces a damaged checkpoint, and no resume loads it. Nothing is deleted.
    """
    renamed = []
    for folder in damaged:
        target, count = folder.with_name(folder.name + DAMAGED), 1
        while target.exists():
            count += 1
            target = folder.with_name(f"{folder.name}{DAMAGED}.{count}")
        if folder.exists():
            folder.rename(target)
            renamed.append(target)
    _write_latest(chosen)
    return renamed


# --- a start from an earlier checkpoint ------------------------------------------------------------------


def go_back_to(checkpoint: Path) -> bool:
    """Make an earlier checkpoint the latest one, and move newer checkpoints to `set_aside/`. Call on one process.

    Returns False, and changes nothing, if `checkpoint` is the latest one already.
    """
    if not newer_than(checkpoint) and newest_name(checkpoint.parent) in (None, checkpoint.name):
        return False
    _write_latest(checkpoint)
    aside = checkpoint.with_name(SET_ASIDE)
    for newer in newer_than(checkpoint):
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / newer.name, ignore_errors=True)
        newer.rename(aside / newer.name)
    sync(checkpoint.parent)
    return True


# --- integrity -------------------------------------------------------------------------------------------


def describe_file(path: Path) -> FileRecord:
    size, checksum = crc32_of(path)
    return FileRecord(size, f"{checksum:08x}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the last file of a checkpoint, and sync the file and the folder to disk.

    Raises:
        OSError: the file cannot be written; or a listed file does not have the size that its rank wrote, for
            example because the ranks do not share one file system.
    """
    for name, record in manifest.files.items():
        size = (folder / name).stat().st_size
        if size != record.bytes:
            raise OSError(f"{folder / name} has {size} bytes where {record.bytes} were written")
    content = asdict(manifest)
    content["files"] = dict(sorted(content["files"].items()))
    write_durably(folder / MANIFEST, json.dumps(content, indent=1).encode())
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: the file is not a manifest.
    """
    try:
        content = parse_json((folder / MANIFEST).read_bytes())
        files = {name: FileRecord(each["bytes"], each["crc32"]) for name, each in content["files"].items()}
        manifest = Manifest(content["run"], content["run_id"], content["step"], files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    for name, record in files.items():
        if not _is_plain(name):
            raise ValueError(f"{MANIFEST} names {name!r}, which leads out of the folder")
        if type(record.bytes) is not int or record.bytes < 0 or not isinstance(record.crc32, str):
            raise ValueError(f"{MANIFEST} is damaged: {name} has no size and checksum")
    names = (manifest.run, manifest.run_id)
    if not all(isinstance(each, str) for each in names) or type(manifest.step) is not int:
        raise ValueError(f"{MANIFEST} is damaged: it names no run and step")
    return manifest


def _is_plain(name: str) -> bool:
    """Whether the file lies directly in the folder, as all files of a checkpoint do."""
    return name not in ("", "..") and "\0" not in name and Path(name).name == name


def leads_out(folder: Path, name: str) -> bool:
    """Whether a file's name leads out of the folder, by itself or by a link."""
    return not _is_plain(name) or (folder / name).resolve().parent != folder.resolve()


def share_of(files: Mapping[str, FileRecord], index: int, count: int) -> dict[str, FileRecord]:
    """Returns the files that process `index` of `count` checks. Each process reads about the same number of bytes."""
    loads = [0] * count
    share = {}
    for name, record in sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += record.bytes
        if least == index:
            share[name] = record
    return share


def faults_in(folder: Path, files: Mapping[str, FileRecord], checksums: bool) -> list[str]:
    """Returns one line for each faulty file of a checkpoint. Reads whole files only for `checksums`."""
    faults = []
    for name, record in files.items():
        try:
            size = (folder / name).stat().st_size
            if leads_out(folder, name):
                faults.append(f"{name} is a link that leads out of the folder")
            elif size != record.bytes:
                faults.append(f"{name} has {size} bytes instead of {record.bytes}")
            elif checksums and (found := describe_file(folder / name).crc32) != record.crc32:
                faults.append(f"{name} has checksum {found} instead of {record.crc32}")
        except FileNotFoundError:
            faults.append(f"{name} is missing")
        except OSError as error:
            faults.append(f"{name} cannot be read: {error}")
    return faults


def faults_in_a_line(faults: Sequence[str], between: str = "; ") -> str | None:
    """Returns None if there are no faults."""
    return between.join([*faults[:3], *([f"and {len(faults) - 3} more"] if faults[3:] else [])]) or None


# --- durable ---------------------------------------------------------------------------------------------


def publish(unfinished: Path, final: Path) -> None:
    """Give a durable folder its name, then let `latest` name it."""
    replaced = final.with_name(f".replaced_{final.name}")
    if final.exists():  # the run was rewound and has reached this step again
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    _write_latest(final)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(
    checkpoints: Path,
    keep_last: int,
    newest: Path,
    keep_every_steps: int = 0,
) -> list[str]:
    """Delete all complete checkpoints up to `newest` except the last `keep_last`. Returns failures.

    Call this only while no save is running. Checkpoints newer than `newest`, which exist if a user has set `latest`
    back, are not deleted and do not count towards `keep_last`.

    Args:
        keep_every_steps: also keep the checkpoints at multiples of this number of steps; 0 for none.
    """
    failures: list[str] = []
    own = [path for path in complete_checkpoints(checkpoints) if _step(path) <= _step(newest)]
    kept = own[-keep_last:]
    if keep_every_steps:
        kept += [path for path in own if _step(path) % keep_every_steps == 0]
    for old in (path for path in own if path not in kept):
        try:
            # Rename first, so that a kill midway leaves no incomplete checkpoint under the final name.
            doomed = old.with_name(f".tmp_{old.name}")
            shutil.rmtree(doomed, ignore_errors=True)
            old.rename(doomed)
        except OSError as error:
            failures.append(f"{old.name} could not be deleted: {error}")
    return failures + _delete_leftovers(checkpoints)


def _delete_leftovers(checkpoints: Path) -> list[str]:
    """Delete folders that a save has replaced or left unfinished. Returns one line for each failure.

    After a failure, the next call tries again. If a user has moved a folder and left a link in its place, only the link
    is deleted.
    """
    failures = []
    for leftover in (*checkpoints.glob(".replaced_step_*"), *checkpoints.glob(".tmp_step_*")):
        try:
            if leftover.is_symlink():
                leftover.unlink()
            else:
                shutil.rmtree(leftover)
        except OSError as error:  # on NFS another process may hold a file open; the next save tries again
            failures.append(f"{leftover.name[leftover.name.index('step_') :]} could not be deleted: {error}")
    return failures


def write_recorded(path: Path, content: bytes) -> FileRecord:
    write_durably(path, content)
    return FileRecord(len(content), f"{zlib.crc32(content):08x}")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_latest(checkpoint: Path) -> None:
    write_atomically(checkpoint.with_name(LATEST), checkpoint.name)
    sync(checkpoint.parent)
