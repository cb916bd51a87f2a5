"""Tokenize the shards of a folder once, into a folder of tokens (`prepare.py tokens`, token_files.py).

Each shard is written atomically and recorded in a journal, from which a killed command continues. Only one command at a
time may write a folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import orjson
from tqdm import tqdm

from gsa_data.faults import BAD_LINES, HARMLESS_LINES, DataFault, Reading, naming, printable
from gsa_data.reader import TextReader
from gsa_data.shards import build_manifest
from gsa_data.token_files import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    UNFINISHED,
    Identity,
    ShardRecord,
    TokenFolder,
    checksum_of,
    identity_of,
    problems,
)
from gsa_data.token_writer import write_shard, write_whole
from gsa_data.tokenize import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    limits = Reading()
    parser.add_argument("--data", help="folder (or fsspec address) of the shards")
    parser.add_argument("--tokenizer", help="the tokenizer that the run will have")
    parser.add_argument("--eos-token", help="as data.eos_token of the run; by default the tokenizer's own")
    parser.add_argument("--out", type=Path, required=True, help="local folder for the tokens")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    parser.add_argument("--check", action="store_true", help="verify --out and write nothing")
    parser.add_argument("--text-field", default="text", help="field of a line that holds the text")
    parser.add_argument("--on-bad-shard", choices=("fail", "skip"), default=limits.on_bad_shard)
    parser.add_argument("--max-bad-line-fraction", type=float, default=limits.max_bad_line_fraction)
    parser.add_argument("--max-document-bytes", type=int, default=limits.max_document_bytes)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return 1 if --check found problems. Raises DataFault and ValueError for bad input."""
    with naming("--tokenizer"):
        tokenizer = Tokenizer(options.tokenizer, options.eos_token) if options.tokenizer else None
    if options.check:
        found = list(check_tokens(options.out, options.data, tokenizer, options.text_field))
        for problem in found:
            print(f"PROBLEM {problem}")
        if not found:
            print(summary(TokenFolder.parse(options.out)))
        return 1 if found else 0
    if options.data is None or tokenizer is None:
        raise DataFault("--data and --tokenizer are needed to prepare tokens; only --check can do without")
    if options.workers < 1:
        raise DataFault(f"--workers={options.workers} must be at least 1")
    reading = Reading(
        on_bad_shard=options.on_bad_shard,
        max_bad_line_fraction=options.max_bad_line_fraction,
        max_document_bytes=options.max_document_bytes,
    )
    folder = prepare_tokens(
        options.data, tokenizer, options.out, options.workers, reading, options.text_field
    )
    print(summary(folder))
    return 0


def prepare_tokens(
    data: str, tokenizer: Tokenizer, out: Path, workers: int, reading: Reading, text_field: str = "text"
) -> TokenFolder:
    """Tokenize every shard of `data` that `out` lacks, and write tokens.json when all shards are done.

    Existing shards of `out` are verified (size, checksum, ids). Intact shards without faults are kept.

    Raises DataFault if `reading` refuses a shard, if `out` holds other tokens, or if all shards together have no
    document. Finished shards stay.
    """
    _check_is_not(out, data)
    with naming("--data"):
        manifest = build_manifest(data, text_field=text_field, reading=reading)
    identity = identity_of(manifest, tokenizer, reading)
    records = {record.path: record for record in _kept(out, identity)}
    left = [relpath for relpath, _ in manifest.shards if relpath not in records]
    print(f"{len(manifest.shards)} shards, {len(records)} of them finished before")
    if not left and (out / MANIFEST_NAME).is_file():
        folder = TokenFolder.open(str(out))
        if folder.manifest.duplicates == manifest.duplicates:  # otherwise only tokens.json changes
            return folder
    parts: list[Identity | ShardRecord] = [identity, *records.values()]
    journal = [orjson.dumps(dataclasses.asdict(part)) + b"\n" for part in parts]
    write_whole(out / JOURNAL_NAME, journal)
    (out / MANIFEST_NAME).unlink(missing_ok=True)  # the folder is unfinished until all shards are done

    reader = TextReader(manifest, tokenizer, reading)
    with (out / JOURNAL_NAME).open("ab") as file, tqdm(total=len(left), unit="shard", disable=None) as bar:
        for record in _write_all(reader, out, identity, left, workers):
            file.write(orjson.dumps(dataclasses.asdict(record)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            records[record.path] = record
            bar.update()

    if not any(record.documents for record in records.values()):
        raise DataFault(
            f"--data {data}: no document in its {len(records)} shards; give other text, or its --text-field"
        )

    content = {
        "identity": dataclasses.asdict(identity),
        "source": data,
        "text_field": manifest.text_field,
        "source_shards": manifest.shards,
        "duplicates": manifest.duplicates,
        "records": [dataclasses.asdict(records[relpath]) for relpath, _ in manifest.shards],
    }
    content["checksum"] = checksum_of(content)
    write_whole(out / MANIFEST_NAME, [orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"])
    (out / JOURNAL_NAME).unlink()
    for path in out.rglob(f"*{UNFINISHED}"):
        path.unlink()
    return TokenFolder.open(str(out))


def check_tokens(
    out: Path, data: str | None, tokenizer: Tokenizer | None, text_field: str = "text"
) -> Iterator[str]:
    """Yield the problems of a folder of tokens, without writing. If `data` is given, compare it with the source."""
    try:
        folder = TokenFolder.parse(out)
        if tokenizer is not None:
            limits = Reading(
                "skip",
                max_bad_line_fraction=folder.identity.max_bad_line_fraction,
                max_document_bytes=folder.identity.max_document_bytes,
            )
            folder.check(tokenizer, limits)
        if data is not None:
            source = build_manifest(data, text_field=text_field, reading=Reading("skip"))
            if source.fingerprint != folder.identity.source_fingerprint:
                yield f"{out} was made of other shards than {data!r} has now"
    except DataFault as fault:
        yield str(fault)
        return
    for record in tqdm(folder.records.values(), unit="shard", disable=None):
        yield from problems(out, record, folder.identity)


def summary(folder: TokenFolder) -> str:
    """Returns counts over all shards, and one line for each shard with omitted lines."""
    records = folder.records.values()
    lines = [
        f"{folder.root}: {len(records)} shards, {sum(r.documents for r in records)} documents, "
        f"{sum(r.tokens for r in records)} tokens ({folder.identity.dtype.name}), "
        f"{sum(r.text_bytes for r in records)} bytes of text"
    ]
    counts = (f"{printable(name)} {count}" for name, count in sorted(folder.documents_by_source.items()))
    lines.append(f"documents by source: {', '.join(counts)}")
    for record in records:
        left_out = {
            name: record.faults[name] for name in (*BAD_LINES, *HARMLESS_LINES) if name in record.faults
        }
        if left_out or record.was_bad():
            faults = ", ".join(f"{name} {count}" for name, count in left_out.items())
            lines.append(
                f"{record.path}: left out of {record.lines} lines: {faults or 0}  {record.was_bad()}"
            )
    return "\n".join(lines)


def _check_is_not(out: Path, data: str) -> None:
    if out.exists() and not out.is_dir():
        raise DataFault(f"--out {out}: a file; give a folder for the tokens")
    if "://" not in data and out.resolve() == Path(data).resolve():
        raise DataFault(
            f"--out {str(out)!r} is the folder of the shards; give the tokens a folder of their own"
        )


def _kept(out: Path, identity: Identity) -> Iterator[ShardRecord]:
    """Yield the records of intact shards that an earlier command finished."""
    found, records = _read_earlier(out)
    if found is None:
        return
    for field in dataclasses.fields(Identity):
        before, now = getattr(found, field.name), getattr(identity, field.name)
        if before != now:
            raise DataFault(
                f"{out} holds tokens with {field.name}={before}, this command has {now}; give another --out, or "
                "delete that folder"
            )
    for record in tqdm(records, desc="verify", unit="shard", disable=None):
        problem = next(problems(out, record, identity), None)
        if problem or record.was_bad():  # a bad source may have been restored
            print(f"again: {problem or f'{record.path} ({record.was_bad()})'}")
        else:
            yield record


def _read_earlier(out: Path) -> tuple[Identity | None, list[ShardRecord]]:
    if (out / MANIFEST_NAME).is_file():
        folder = TokenFolder.parse(out)
        return folder.identity, list(folder.records.values())
    journal = out / JOURNAL_NAME
    if not journal.is_file():
        return None, []
    lines = journal.read_bytes().split(b"\n")[:-1]  # a kill may cut off the last line
    try:
        identity, *records = [orjson.loads(line) for line in lines]
        return Identity(**identity), [ShardRecord(**record) for record in records]
    except (orjson.JSONDecodeError, TypeError, ValueError) as error:
        raise DataFault(
            f"{journal} is damaged ({error!r}); delete it, and all shards are done again"
        ) from error


def _write_all(
    reader: TextReader, out: Path, identity: Identity, left: list[str], workers: int
) -> Iterator[ShardRecord]:
    """Write the remaining shards, and yield their records in order of completion."""
    if workers == 1:
        for relpath in left:
            yield _write_one(reader, out, identity, relpath)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(reader, out, identity)) as pool:
        tasks = [pool.submit(_work, relpath) for relpath in left]
        try:
            for task in as_completed(tasks):
                yield task.result()
        except BrokenProcessPool as error:
            raise DataFault(
                "a worker died (out of memory?); run the command again with fewer --workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _write_one(reader: TextReader, out: Path, identity: Identity, relpath: str) -> ShardRecord:
    counters: Counter[str] = Counter()
    lines = reader.open(relpath, 0, 1, counters)
    return write_shard(out, relpath, lines, counters, identity)


# The state of a worker process, which is set once, because a tokenizer is large.
_worker: tuple[TextReader, Path, Identity]


def _start_worker(reader: TextReader, out: Path, identity: Identity) -> None:
    global _worker
    _worker = (reader, out, identity)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies. The worker would otherwise wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(relpath: str) -> ShardRecord:
    return _write_one(*_worker, relpath)
