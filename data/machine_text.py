"""A training corpus out of the text that a machine already has, in SlimPajama's layout: `prepare.py corpus`.

machine_files finds the files, machine_read turns each into text, machine_origins knows their packages; this module
drops repeats, splits, and writes.

Repeats. A document whose words equal an earlier one's is left out (`repeat`). Of licences, changelogs and other
notices the paragraphs that stood in any earlier document are removed, and what is left counts by its own rules. Any
other document is left out (`near_repeat`) when paragraphs that stood in earlier documents make up more than
`max_repeated` of what it has in paragraphs of at least 60 characters: another release of the same module.

Places. The hash of a document, with the seed, decides its split, its shard and its order there: what is added later
moves no document from one split to another. Documents are met in the order of the roots, then of their paths, so the
same files and options give the same bytes.

Memory: one hash of 16 bytes per document and one of 8 per paragraph, the table of the packages' files, what the
workers are reading (at most IN_FLIGHT_BATCHES batches each), and one shard per worker while shards are packed.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import platform
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import zstandard
from machine_files import checked_roots, walk
from machine_origins import Origins
from machine_read import (
    MIN_CHARACTERS,
    NOTICES,
    SETS,
    Text,
    counts,
    paragraph_hash,
    paragraphs,
    read_document,
)

from gsa_data import DataFault, Tokenizer

TOOL = "prepare.py corpus"
VERSION = 1
"""Raise it with any change to the rules: the same machine then gives another corpus."""
NOTICE_TEXT = (
    "This corpus was copied from software installed on one machine. Its parts keep the copyrights and licences of "
    "their packages (see `origins` in manifest.json; many are unknown to it). It is for training on that machine or "
    "by its owner: do not redistribute it."
)
BATCH_FILES = 32
IN_FLIGHT_BATCHES = 3
"""Batches given to each worker ahead."""
TOKEN_SAMPLE_OF = 64
"""One document in this many, by its hash, is tokenized to estimate the tokens of all; and the first 20 of each set."""
ZSTD_LEVEL = 9
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Options:
    out: Path
    tokenizer: Path
    roots: tuple[Path, ...] = ()
    """Folders to walk; empty for those of `default_roots`."""
    seed: int = 0
    train_shards: int = 64
    holdout_shards: int = 2
    """Shards of validation, and of test."""
    validation_fraction: float = 0.01
    test_fraction: float = 0.01
    max_document_bytes: int = 1 << 20
    """Larger documents are left out whole."""
    max_repeated: float = 0.5
    """Of a document's paragraphs, by characters; see the top of this file."""
    workers: int = 1
    """Processes; they change the time, not the corpus."""
    overwrite: bool = False
    """Replace `out`, if it is a corpus that this command made."""
    dpkg: Path = Path("/var/lib/dpkg")
    """Debian's package database; may be missing."""

    def __post_init__(self) -> None:
        for name in ("train_shards", "holdout_shards", "max_document_bytes", "workers"):
            if getattr(self, name) < 1:
                raise DataFault(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("validation_fraction", "test_fraction", "max_repeated"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise DataFault(f"{name}={getattr(self, name)} must be between 0 and 1")
        if self.validation_fraction + self.test_fraction >= 1.0:
            raise DataFault("validation_fraction + test_fraction must be below 1, or train has nothing")


def read_all(paths: Iterator[str], options: Options) -> Iterator[tuple[str, Text | str]]:
    """(path, document or reason) in the order of the paths, read by the workers."""
    if options.workers == 1:
        yield from ((path, read_document(path, options.max_document_bytes)) for path in paths)
        return
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("fork")) as pool:
        waiting: deque[tuple[list[str], Future[list[Text | str]]]] = deque()
        while True:
            while len(waiting) < options.workers * IN_FLIGHT_BATCHES:
                batch = list(islice(paths, BATCH_FILES))
                if not batch:
                    break
                waiting.append((batch, pool.submit(read_batch, batch, options.max_document_bytes)))
            if not waiting:
                return
            batch, future = waiting.popleft()
            yield from zip(batch, future.result(), strict=True)


def read_batch(paths: list[str], max_document_bytes: int) -> list[Text | str]:
    return [read_document(path, max_document_bytes) for path in paths]


class Repeats:
    """What was kept so far, as hashes."""

    def __init__(self, max_repeated: float) -> None:
        self.max_repeated = max_repeated
        self.documents: set[bytes] = set()
        self.paragraphs: set[int] = set()

    def keep(self, document: Text) -> tuple[str, str]:
        """(text to keep, "") or ("", why it is left out). See the top of this file."""
        if document.digest in self.documents:
            return "", "repeat"
        self.documents.add(document.digest)
        if document.source == NOTICES:
            return self.new_paragraphs(document.text)
        total = sum(length for _, length in document.paragraphs)
        repeated = sum(length for key, length in document.paragraphs if key in self.paragraphs)
        if repeated > self.max_repeated * total:
            return "", "near_repeat"
        self.paragraphs.update(key for key, _ in document.paragraphs)
        return document.text, ""

    def new_paragraphs(self, text: str) -> tuple[str, str]:
        kept = []
        for paragraph in paragraphs(text):
            if counts(paragraph):
                key = paragraph_hash(paragraph)
                if key in self.paragraphs:
                    continue
                self.paragraphs.add(key)
            kept.append(paragraph)
        left = "\n\n".join(kept).strip("\n") + "\n"
        # What short lines are left of a notice that was all repeats says nothing alone.
        if len(left) < MIN_CHARACTERS or not any(map(counts, kept)):
            return "", "near_repeat"
        return left, ""


@dataclass(frozen=True)
class Place:
    split: str
    order: int
    """64 bits; decides the shard and the order in it."""


def place_of(digest: bytes, options: Options) -> Place:
    """Where a document goes: a function of its digest (before paragraphs are removed) and the seed alone."""
    mixed = hashlib.blake2b(digest, digest_size=16, key=str(options.seed).encode()).digest()
    draw = int.from_bytes(mixed[:8], "big") / 2**64
    order = int.from_bytes(mixed[8:], "big")
    if draw < options.validation_fraction:
        return Place("validation", order)
    return Place("test" if draw < options.validation_fraction + options.test_fraction else "train", order)


def shard_of(place: Place, options: Options) -> str:
    if place.split == "train":
        return f"train/chunk1/example_train_{place.order % options.train_shards}.jsonl.zst"
    return f"{place.split}/chunk1/example_holdout_{place.order % options.holdout_shards}.jsonl.zst"


def pack_shard(loose: str, path: str) -> dict[str, Any]:
    """Sort the lines of a loose shard, each led by its order in 16 hex digits, and pack them; for the manifest."""
    lines = [line[16:] for line in sorted(Path(loose).read_bytes().split(b"\n")) if line]
    data = b"".join(line + b"\n" for line in lines)
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
    Path(path).write_bytes(packed)
    Path(loose).unlink()
    digest = hashlib.sha256(packed).hexdigest()
    return {
        "size_bytes": len(packed),
        "sha256": digest,
        "documents": len(lines),
        "line_bytes": len(data),
    }


class Progress:
    """A line on stderr now and then: rewritten on a terminal, else one every ten seconds."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.began = self.last = time.monotonic()

    def show(self, files: int, documents: int, text_bytes: int) -> None:
        now = time.monotonic()
        if now - self.last >= (0.5 if self.terminal else 10.0):
            self.last = now
            line = (
                f"{files} files, {documents} documents, {text_bytes / 1e6:.1f} MB, {now - self.began:.0f} s"
            )
            print(line, file=sys.stderr, end="\r" if self.terminal else "\n", flush=True)

    def end(self) -> None:
        if self.terminal:
            print(file=sys.stderr)


class Collection:
    """The documents of one run on their way into loose shards below `folder`, and what was counted."""

    def __init__(self, folder: Path, roots: list[Path], options: Options, stack: ExitStack) -> None:
        self.folder, self.options, self.stack = folder, options, stack
        self.tokenizer = Tokenizer(str(options.tokenizer))
        self.origins = Origins(roots, options.dpkg)
        self.repeats = Repeats(options.max_repeated)
        self.loose: dict[str, BinaryIO] = {}
        self.sets: dict[str, Counter[str]] = {}
        self.packages: dict[str, dict[str, Any]] = {}
        self.documents = self.text_bytes = 0

    def add(self, path: str, document: Text) -> str:
        """Keep a document, or say why it is left out."""
        text, reason = self.repeats.keep(document)
        if reason:
            return reason
        place = place_of(document.digest, self.options)
        line = orjson.dumps({"text": text, "meta": {"redpajama_set_name": document.source}})
        self.shard(shard_of(place, self.options)).write(f"{place.order:016x}".encode() + line + b"\n")
        size = len(text.encode())
        self.documents += 1
        self.text_bytes += size
        counts_of_set = self.sets.setdefault(document.source, Counter())
        counts_of_set[f"{place.split}_documents"] += 1
        counts_of_set[f"{place.split}_text_bytes"] += size
        if place.order % TOKEN_SAMPLE_OF == 0 or counts_of_set["sampled_documents"] < 20:
            counts_of_set["sampled_documents"] += 1
            counts_of_set["sampled_text_bytes"] += size
            counts_of_set["sampled_tokens"] += len(self.tokenizer.encode(text)) + 1  # and its EOS
        origin = self.origins.of(path)
        package = self.packages.setdefault(
            origin.name, {"documents": 0, "text_bytes": 0, "licence": origin.licence}
        )
        package["documents"] += 1
        package["text_bytes"] += size
        return ""

    def shard(self, relpath: str) -> BinaryIO:
        if relpath not in self.loose:
            path = self.folder / relpath
            path.parent.mkdir(parents=True, exist_ok=True)
            self.loose[relpath] = self.stack.enter_context(path.with_suffix(".loose").open("wb"))
        return self.loose[relpath]

    def close(self) -> None:
        for file in self.loose.values():
            file.close()

    def pack(self) -> list[dict[str, Any]]:
        """Turn the loose shards into shards, several at a time; their entries in the manifest."""
        self.close()
        relpaths = sorted(self.loose)
        loose = [str((self.folder / each).with_suffix(".loose")) for each in relpaths]
        final = [str(self.folder / each) for each in relpaths]
        if self.options.workers == 1:
            entries = list(map(pack_shard, loose, final))
        else:
            with ProcessPoolExecutor(self.options.workers, multiprocessing.get_context("fork")) as pool:
                entries = list(pool.map(pack_shard, loose, final))
        return [{"path": relpath, **entry} for relpath, entry in zip(relpaths, entries, strict=True)]

    def set_entries(self) -> dict[str, dict[str, Any]]:
        """The counts of each set, with the tokens estimated from the bytes per token of its sample."""
        entries: dict[str, dict[str, Any]] = {}
        for name, found in sorted(self.sets.items()):
            text_bytes = sum(found[f"{split}_text_bytes"] for split in SPLITS)
            tokens = round(text_bytes * found["sampled_tokens"] / found["sampled_text_bytes"])
            entries[name] = {"what": SETS[name], **dict(sorted(found.items())), "tokens_estimated": tokens}
        return entries


def check_target(options: Options) -> Path:
    """The folder to build in. Raises DataFault when the corpus may not go where it should."""
    out = options.out
    building, aside = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old")
    for path in (building, aside):
        if path.exists():
            raise DataFault(f"{path} exists: another run writes it, or a killed run left it; remove it first")
    if out.exists() and not options.overwrite:
        raise DataFault(f"{out} exists; choose another folder, or replace it with --overwrite")
    if out.exists() and not is_own_corpus(out):
        raise DataFault(
            f"{out} is no corpus made by `{TOOL}`, so --overwrite does not replace it; remove it yourself"
        )
    return building


def is_own_corpus(folder: Path) -> bool:
    manifest = folder / "manifest.json"
    try:
        content = orjson.loads(manifest.read_bytes()) if manifest.is_file() else None
    except orjson.JSONDecodeError:
        return False
    return (
        isinstance(content, dict)
        and isinstance(content.get("tool"), dict)
        and content["tool"].get("name") == TOOL
    )


def build_corpus(options: Options) -> dict[str, Any]:
    """Collect, write `options.out` and return its manifest.

    Raises DataFault, or ValueError for a bad tokenizer file; nothing is left behind then.
    """
    roots = checked_roots(options.roots)
    building = check_target(options)
    left_out = frozenset(str(path.resolve()) for path in (options.out, building))
    skipped: Counter[str] = Counter()
    files = 0
    with ExitStack() as stack:
        building.mkdir(parents=True)
        stack.callback(
            shutil.rmtree, building, ignore_errors=True
        )  # once it is renamed there is nothing left
        try:
            collection = Collection(building, roots, options, stack)
            progress = Progress()
            paths = (path for root in roots for path in walk(str(root), skipped, left_out))
            for path, document in read_all(paths, options):
                files += 1
                reason = document if isinstance(document, str) else collection.add(path, document)
                if reason:
                    skipped[reason] += 1
                progress.show(files, collection.documents, collection.text_bytes)
            progress.end()
            manifest = manifest_of(collection, roots, files, skipped)
            (building / "manifest.json").write_bytes(
                orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n"
            )
            (building / "NOTICE").write_text(NOTICE_TEXT + "\n", encoding="utf-8")
        except BrokenProcessPool as error:
            raise DataFault(
                "a worker process died, perhaps for lack of memory; use fewer --workers"
            ) from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataFault(f"no space left for {building}; free some, or build on another disk") from error
        publish(building, options.out)
    return manifest


def publish(building: Path, out: Path) -> None:
    """Put the finished folder in place of the old one, if any."""
    aside = out.with_name(out.name + ".old")
    if out.exists():
        out.rename(aside)
    building.rename(out)
    shutil.rmtree(aside, ignore_errors=True)


def manifest_of(
    collection: Collection, roots: list[Path], files: int, skipped: Counter[str]
) -> dict[str, Any]:
    """Packs the shards. Raises DataFault when a split that was asked for got no document."""
    options = collection.options
    shards = collection.pack()
    for split, fraction in (
        ("train", 1.0),
        ("validation", options.validation_fraction),
        ("test", options.test_fraction),
    ):
        if fraction > 0 and not any(shard["path"].startswith(f"{split}/") for shard in shards):
            raise DataFault(
                f"{split} got none of {collection.documents} documents from {files} files; name more folders with "
                "--root, or change the fractions"
            )
    sets = collection.set_entries()
    used = {
        key: value for key, value in asdict(options).items() if key not in ("out", "overwrite", "workers")
    }
    origins = sorted(collection.packages.items())
    return {
        "notice": NOTICE_TEXT,
        "tool": {
            "name": TOOL,
            "version": VERSION,
            "python": platform.python_version(),
            "zstandard": zstandard.__version__,
        },
        "options": {
            **{key: _plain(value) for key, value in used.items()},
            "roots": [str(root) for root in roots],
        },
        "totals": {
            "files": files,
            "documents": collection.documents,
            "text_bytes": collection.text_bytes,
            "tokens_estimated": sum(entry["tokens_estimated"] for entry in sets.values()),
            "tokenizer_sha256": collection.tokenizer.fingerprint,
        },
        "skipped": dict(sorted(skipped.items())),
        "sources": sets,
        "shards": shards,
        "origins": [{"name": name, **entry} for name, entry in origins],
    }


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def summary(manifest: dict[str, Any]) -> str:
    """A table by set, and what was left out."""
    rows = [f"{'set':22} {'documents':>10} {'MB':>9} {'tokens, about':>14}"]
    for name, entry in manifest["sources"].items():
        documents, text_bytes = (sum(entry[f"{s}_{key}"] for s in SPLITS if f"{s}_{key}" in entry)
                                 for key in ("documents", "text_bytes"))  # fmt: skip
        rows.append(f"{name:22} {documents:10} {text_bytes / 1e6:9.1f} {entry['tokens_estimated']:14}")
    total = manifest["totals"]
    rows.append(
        f"{'all':22} {total['documents']:10} {total['text_bytes'] / 1e6:9.1f} {total['tokens_estimated']:14}"
    )
    left_out = ", ".join(f"{name} {count}" for name, count in manifest["skipped"].items())
    return "\n".join([*rows, f"left out of {total['files']} files: {left_out}", manifest["notice"]])
