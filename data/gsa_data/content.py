"""Hash small samples of a corpus's files, so that a resume can name a changed file.

Each file is sampled at its start, middle and end. Small files are read whole. In a large file, changes between samples
are not detected. File sizes and modification times would not reliably show changes. A replaced shard may have the same
size, and a copied file gets a new time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from gsa_data.corpus import Corpus
from gsa_data.faults import Reading
from gsa_data.fetch import Pulse, file_system, in_background
from gsa_data.indexed import IndexedFolder
from gsa_data.listing import retried
from gsa_data.prepared import RECORD
from gsa_data.shards import Manifest

SAMPLE_BYTES = 1 << 14
"""Bytes of a sample"""
FILES_AT_ONCE = 32
"""Number of files read concurrently"""
NAMED = 3
"""Number of files that a message names"""


def sample_contents(corpus: Corpus, reading: Reading) -> dict[str, Any]:
    """Returns `kind` of the corpus and `files`: path -> size in bytes and hash of the samples, as text.

    Raises DataFault if a file cannot be read.
    """
    sizes = dict(corpus.shards if isinstance(corpus, Manifest) else corpus.manifest.shards)
    if isinstance(corpus, IndexedFolder):
        others = [str(Path(name).with_suffix(".idx")) for name in sizes]
        others += [str(Path(name).with_suffix(RECORD)) for name in corpus.records]
        sizes |= {name: (corpus.root / name).stat().st_size for name in others}
    root = str(corpus.root)
    filesystem, base = file_system(root, reading)
    files = retried(lambda pulse: _samples(filesystem, base.rstrip("/"), sizes, pulse), root, reading)
    return {"kind": "indexed" if isinstance(corpus, IndexedFolder) else "text", "files": files}


def changed_files(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Returns one line that names the changed files. The line is empty if no file changed, if `before` is None, or if
    `before` has the samples of another kind of corpus (text or tokens)."""
    if before is None or before["kind"] != now["kind"]:
        return ""
    old, new = before["files"], now["files"]
    changes = [f"{name} is gone" for name in old if name not in new]
    changes += [f"{name} is new" for name in new if name not in old]
    for name in (name for name in new if name in old and new[name] != old[name]):
        size, size_before = new[name].split()[0], old[name].split()[0]
        other = "its content is another" if size == size_before else f"{size} bytes instead of {size_before}"
        changes.append(f"{name}: {other}")
    more = f" (and {len(changes) - NAMED} more)" if len(changes) > NAMED else ""
    return "; ".join(changes[:NAMED]) + more


def _samples(filesystem: Any, base: str, sizes: Mapping[str, int], pulse: Pulse) -> dict[str, str]:
    files = list(sizes.items())
    found: dict[str, str] = {}
    for begin in range(0, len(files), FILES_AT_ONCE):
        batch = files[begin : begin + FILES_AT_ONCE]
        wanted = [(name, *part) for name, size in batch for part in _parts(size)]
        paths = [f"{base}/{name}" for name, _, _ in wanted]
        starts, ends = [start for _, start, _ in wanted], [end for _, _, end in wanted]
        if isinstance(filesystem, LocalFileSystem):
            contents = _local_parts([(f"{base}/{name}", _parts(size)) for name, size in batch if size])
        else:
            contents = filesystem.cat_ranges(paths, starts, ends, on_error="raise") if wanted else []
        pulse.beat()
        hashes = {name: hashlib.blake2b(digest_size=8) for name, _ in batch}
        for (name, _, _), content in zip(wanted, contents, strict=True):
            hashes[name].update(bytes(content))
        found |= {name: f"{size} {hashes[name].hexdigest()}" for name, size in batch}
    return found


def _local_parts(files: list[tuple[str, list[tuple[int, int]]]]) -> list[bytes]:
    """Read samples of local files concurrently, because opening a file on a network file system is slow. fsspec would
    be slower: it opens each file three times, and reads one file after another."""
    outcomes = [in_background(partial(_read_parts, *file)) for file in files]
    return [content for outcome in outcomes for content in outcome.result()]


def _read_parts(path: str, parts: list[tuple[int, int]]) -> list[bytes]:
    contents = []
    with open(path, "rb") as file:
        for begin, end in parts:
            file.seek(begin)
            contents.append(file.read(end - begin))
    return contents


def _parts(size: int) -> list[tuple[int, int]]:
    """Returns start and end of each sample of a file of this size."""
    if size <= 3 * SAMPLE_BYTES:
        return [(0, size)] if size else []
    middle = (size - SAMPLE_BYTES) // 2
    return [(begin, begin + SAMPLE_BYTES) for begin in (0, middle, size - SAMPLE_BYTES)]
