"""Tests hostile checkpoints: pickles that run code, names that leave the folder, wrong sizes."""

import dataclasses
import io
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from torch.distributed.checkpoint.planner import WriteItemType

from gsa_data.tokenize import Tokenizer
from gsa_train.arguments import Arguments
from gsa_train.checkpoint import files as checkpoint_files
from gsa_train.checkpoint.damage import find_damage
from gsa_train.checkpoint.guarded import RefusedContent, read_metadata
from gsa_train.checkpoint.load import load_checkpoint, load_weights, read_run_state
from gsa_train.config import _SAVED_LOADER
from gsa_train.config.text_yaml import TextLoader
from gsa_train.model.mcore.build import Model
from gsa_train.phases import phase_ranges
from gsa_train.run_folder.initial_weights import find_initial_weights, load_initial_weights
from gsa_train.run_folder.resume import ResumeError, choose_start
from helpers import saving
from helpers.damage import flip
from helpers.single_rank import SPARSE, single_rank, tiny_config

config, trained, intact, folder = saving.config, saving.trained, saving.intact, saving.folder
ARGUMENTS = Arguments("", (), None, False, False, False, False, 1)
NO_TOKENIZER = cast(Tokenizer, SimpleNamespace(fingerprint=None))


class Crafted:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@contextmanager
def changing_metadata(folder: Path) -> Iterator[Any]:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    yield metadata
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def craft_metadata(folder: Path, marker: Path) -> None:
    with changing_metadata(folder) as metadata:
        metadata.planner_data = Crafted(marker)


def craft_common(folder: Path, marker: Path) -> None:
    content = torch.load(folder / "common.pt", weights_only=False)
    content["run"]["monitor"] = Crafted(marker)
    torch.save(content, folder / "common.pt")


def craft_object(folder: Path, marker: Path) -> None:
    replace_entry(folder, "_extra_state", [Crafted(marker)])


def craft_tensor(folder: Path, marker: Path) -> None:
    replace_entry(folder, "word_embeddings.weight", Crafted(marker))


def replace_entry(folder: Path, name: str, value: Any) -> None:
    """Append a replacement to the file that contains the entry."""
    content = io.BytesIO()
    torch.save(value, content)
    with changing_metadata(folder) as metadata:
        place = next(place for index, place in metadata.storage_data.items() if name in index.fqn)
        place.offset, place.length = (folder / place.relative_path).stat().st_size, len(content.getvalue())
    with (folder / place.relative_path).open("ab") as file:
        file.write(content.getvalue())


def adapt_manifest(folder: Path) -> None:
    manifest = checkpoint_files.read_manifest(folder)
    described = {name: checkpoint_files.describe_file(folder / name) for name in manifest.files}
    checkpoint_files.write_manifest(folder, dataclasses.replace(manifest, files=described))


PICKLES = [
    (craft_metadata, ".metadata asks for posix.mkdir"),
    (craft_common, "common.pt asks for posix.mkdir"),
    (craft_object, "asks for posix.mkdir"),
]


@pytest.mark.parametrize(("craft", "expected"), PICKLES)
def test_a_crafted_pickle_is_refused_by_both_ways_in(craft, expected, folder, tmp_path):
    marker = tmp_path / "marker"
    craft(folder, marker)
    adapt_manifest(folder)
    base = tiny_config([SPARSE])
    run = dataclasses.replace(base.run, dir=str(tmp_path), name="run")
    weights = dataclasses.replace(base.checkpoint, initial_weights=str(folder), verify="full")
    config = dataclasses.replace(base, run=run, checkpoint=weights)
    with pytest.raises(ResumeError, match=expected):
        choose_start(config, ARGUMENTS, phase_ranges(config.phases), single_rank())
    found = find_initial_weights(config)
    with pytest.raises(ResumeError, match=expected):
        load_initial_weights(config, found, cast(Model, None), NO_TOKENIZER, single_rank())
    assert not marker.exists()


@pytest.mark.parametrize("craft", [craft_metadata, craft_common, craft_object, craft_tensor])
def test_nothing_runs_when_it_is_loaded_unverified(craft, folder, trained, tmp_path):
    marker = tmp_path / "marker"
    craft(folder, marker)
    refused = []
    for load in (
        lambda: read_run_state(folder),
        lambda: load_weights(folder, trained[0], single_rank()),
        lambda: load_checkpoint(folder, *trained, single_rank(), with_optimizer=True),
    ):
        try:
            load()
        except BaseException as error:  # torch wraps errors of its readers in a BaseException
            refused.append(str(error))
    assert refused
    assert all("mkdir" in message for message in refused), refused
    assert not marker.exists()


class GetAttribute:
    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


class PicklerOfPython3112(pickle.Pickler):
    """Writes a member of an enum as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_metadata_of_each_python_is_read(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = list(WriteItemType)
    content = io.BytesIO()
    PicklerOfPython3112(content).dump(metadata)
    assert b"getattr" in content.getvalue()
    (folder / ".metadata").write_bytes(content.getvalue())
    assert read_metadata(folder).planner_data == list(WriteItemType)


@pytest.mark.parametrize(
    "asked", [(torch.Size, "__class__"), (WriteItemType, "mro"), (torch.bfloat16, "itemsize")]
)
def test_no_other_attribute_is_read(asked: tuple[Any, str], folder: Path) -> None:
    with changing_metadata(folder) as metadata:
        metadata.planner_data = GetAttribute(*asked)
    with pytest.raises(RefusedContent, match=r"\.metadata asks for builtins\.getattr"):
        read_metadata(folder)


def point_elsewhere(**fields: Any) -> Callable[[Path], None]:
    """Change the first tensor's place in the metadata."""

    def change(folder: Path) -> None:
        with changing_metadata(folder) as metadata:
            vars(next(iter(metadata.storage_data.values()))).update(fields)
        adapt_manifest(folder)

    return change


def manifest_with(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_bytes())
        (folder / "manifest.json").write_text(json.dumps(content | fields))

    return change


def list_too(name: str, size: int = 0) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder.parent / "outside").write_bytes(b"")
        files = json.loads((folder / "manifest.json").read_bytes())["files"]
        manifest_with(files=files | {name: {"bytes": size, "crc32": "00000000"}})(folder)

    return change


def link_out(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    shard.rename(folder.parent / "outside")
    shard.symlink_to(folder.parent / "outside")


def add_unlisted(folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", folder / "other")
    point_elsewhere(relative_path="other", offset=0, length=1)(folder)


def other_backend(content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "metadata.json").write_text(content)
        adapt_manifest(folder)

    return change


def state_with(**fields: Any) -> Callable[[Path], None]:
    """Change fields in common.pt's record of the run."""

    def change(folder: Path) -> None:
        content = torch.load(folder / "common.pt", weights_only=True)
        content["run"] |= fields
        torch.save(content, folder / "common.pt")
        adapt_manifest(folder)

    return change


def leave_out_shard(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_bytes())["files"]
    del files["__0_0.distcp"]
    manifest_with(files=files)(folder)
    flip(0.5)(folder / "__0_0.distcp")


LIES = [
    (other_backend('{"sharded_backend": "zarr"}'), "metadata.json has the format 'zarr'"),
    (other_backend("{"), "metadata.json is damaged: "),
    (state_with(step=4), "it is the checkpoint of step 4 under the name of step 3"),
    (state_with(tokens="1"), "common.pt is damaged: it holds no run state"),
    (state_with(config_yaml="!!python/object/apply:os.mkdir [x]"), "common.pt is damaged: it does not hold"),
    (state_with(config_yaml=7), "common.pt is damaged: it does not hold the run's config"),
    (manifest_with(run_id="other"), "manifest.json belongs to run "),
    (manifest_with(step=2), "manifest.json belongs to run "),
    (manifest_with(step="3"), "manifest.json is damaged: it names no run and step"),
    (leave_out_shard, ".metadata names __0_0.distcp, which is not in the manifest"),
    (point_elsewhere(relative_path="../outside"), ".metadata names '../outside', which leads out of the "),
    (point_elsewhere(relative_path="/etc/passwd"), ".metadata names '/etc/passwd', which leads out of the "),
    (point_elsewhere(length=1 << 40), ".metadata says that bytes "),
    (point_elsewhere(offset=-1), ".metadata says that bytes -1 to"),
    (point_elsewhere(offset="0"), ".metadata is damaged: no place in a file"),
    (point_elsewhere(transform_descriptors=["zstd"]), ".metadata says that __0_0.distcp is compressed"),
    (add_unlisted, ".metadata names other, which is not in the manifest"),
    (list_too("../outside"), "manifest.json names '../outside', which leads out of the folder"),
    (list_too("/etc/passwd"), "manifest.json names '/etc/passwd', which leads out of the folder"),
    (list_too("__0_0.distcp", size=-1), "manifest.json is damaged: __0_0.distcp has no size and checksum"),
    (
        manifest_with(files={}),
        "manifest.json is damaged: it does not list .metadata, common.pt, metadata.json",
    ),
    (link_out, "__0_0.distcp is a link that leads out of the folder"),
]


@pytest.mark.parametrize(("lie", "expected"), LIES, ids=[expected for _, expected in LIES])
def test_what_leads_out_or_lies_is_named_in_one_line(lie, expected, folder):
    assert find_damage(folder, single_rank(), checksums=True) is None
    lie(folder)
    found = find_damage(folder, single_rank(), checksums=True)
    assert found.startswith(expected), found
    assert "\n" not in found


ROOMS = ("gsa_train", "gsa_eval", "gsa_study", "gsa_hf", "data", "kernels")
ROOMS += ("launch", "benchmarks", "examples")
UNSAFE = re.compile(
    r"""^\s*(?:import|from)\s.*\b(?:pickle|dill|joblib|cloudpickle|marshal|shelve|torch\.distributed\.checkpoint(?![.]))\b
    | \btorch\.load\((?!.*weights_only=True) | \ballow_pickle\b | \bdist_checkpointing\.load\(
    | \byaml\.load\((?!.*(?:TextLoader|_SAVED_LOADER|yaml\.SafeLoader)\))
    | \.(?:unsafe_load|full_load|read_pickle|load_checkpoint|load_state_dict_from_url)\(""",
    re.VERBOSE | re.MULTILINE,
)
"""Lines that may run code from a file. A call whose safe option is on another line is found, too."""


def test_no_loader_but_the_guarded_one_may_run_what_a_file_names() -> None:
    """The test covers loaders of DeepSpeed and torch: ZeRO's state is loaded like megatron-core's state."""
    root = Path(__file__).parents[2]
    sources = [path for room in ROOMS for path in (root / room).rglob("*.py")]
    found = {path.relative_to(root).as_posix(): len(UNSAFE.findall(path.read_text())) for path in sources}
    expected = {"gsa_train/checkpoint/guarded.py": 1}
    expected["gsa_train/checkpoint/parallel_read.py"] = 1  # the guarded one's base
    expected["gsa_train/distributed/megatron_versions.py"] = (
        2  # calls megatron-core's loader with guarded readers
    )
    assert {name: count for name, count in found.items() if count} == expected
    assert issubclass(TextLoader, yaml.SafeLoader)
    assert issubclass(_SAVED_LOADER, (yaml.SafeLoader, yaml.CSafeLoader))
