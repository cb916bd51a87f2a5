"""Tokenize the shards of a folder once, into one of megatron-core's indexed datasets per shard (`prepare.py tokens`).

Each dataset has a record of its origin (prepared.py). The .idx file of a dataset gets its final name last, so a dataset
with an .idx file is complete. A rerun of a killed command continues with the datasets that lack an .idx file. Only one
command at a time may write to a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
from tqdm import tqdm

from gsa_data.faults import BAD_SHARDS, DataFault, Reading, naming
from gsa_data.indexed import HEADER, ID_TYPES, MAGIC, IndexedFolder, read_header
from gsa_data.listing import INDEXED
from gsa_data.prepared import RECORD, Origin, Record, check_records, problem_of, read_record, sha256_of
from gsa_data.reader import TextReader
from gsa_data.shards import build_manifest
from gsa_data.tokenize import Tokenizer

UNFINISHED = ".unfinished"  # a killed command leaves such files, and the next command overwrites them
MOST_OF_TWO_BYTES = 1 << 16  # entries of a vocabulary


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
        if not options.out.is_dir():
            raise DataFault(f"--out {options.out}: no such folder; give the folder of prepared tokens")
        found = list(check_tokens(options.out, options.data, tokenizer, options.text_field))
        for problem in found:
            print(f"PROBLEM {problem}")
        if not found:
            print(summary(IndexedFolder.open(str(options.out))))
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
) -> IndexedFolder:
    """Write one dataset to `out` for each shard of `data`. An existing dataset is kept if it is intact and its shard
    was not bad when the dataset was written. Otherwise it is written again.

    Raises DataFault if the policy `reading` refuses a shard, if `out` holds other datasets, or if another command
    writes to `out`. Finished datasets stay. If no shard has a document, raises DataFault and leaves no dataset.
    """
    if out.exists() and not out.is_dir():
        raise DataFault(f"--out {out}: a file; give a folder for the tokens")
    if "://" not in data and out.resolve() == Path(data).resolve():
        raise DataFault(
            f"--out {str(out)!r} is the folder of the shards; give the tokens a folder of their own"
        )
    with naming("--data"):
        manifest = build_manifest(data, text_field=text_field, reading=reading)
    origin = Origin(
        manifest.fingerprint,
        len(manifest.shards),
        tokenizer.fingerprint,
        reading.max_bad_line_fraction,
        reading.max_document_bytes,
    )
    # The number keeps the order of the shards, such as in 000000-a.jsonl.
    datasets = {
        path: f"{number:06d}-{path.replace('/', '-')}" for number, (path, _) in enumerate(manifest.shards)
    }
    with _alone_in(out):
        kept = set(_kept(out, origin, datasets))
        left = [shard for shard in datasets if shard not in kept]
        print(f"{len(datasets)} shards, {len(kept)} of them finished before")
        reader = TextReader(manifest, tokenizer, reading)
        with tqdm(total=len(left), unit="shard", disable=None) as bar:
            for _ in _write_all(_Writer(reader, out, origin, datasets), left, workers):
                bar.update()
        folder = IndexedFolder.open(str(out))
        if not any(read_header(out / f"{dataset}.idx").documents for dataset in datasets.values()):
            files = [out / f"{name}{end}" for name in datasets.values() for end in (*INDEXED, RECORD)]
            for file in files:
                file.unlink()  # the corrected command would refuse them
            raise DataFault(
                f"--data {data}: no document in its {len(datasets)} shards; give other text, --text-field or "
                "--max-document-bytes"
            )
    return folder


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Lock `out`. Two commands would write the same unfinished files."""
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):  # a read-only disk with finished tokens
        yield
        return
    with (out / ".lock").open("a") as file:  # it stays, because a new file would be another lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataFault(f"--out {out}: another command writes there; wait for it") from None
        except OSError as error:  # the file system has no locks
            print(f"--out {out} cannot be locked ({error.strerror}); let no other command write there")
        yield


def check_tokens(
    out: Path, data: str | None, tokenizer: Tokenizer | None, text_field: str = "text"
) -> Iterator[str]:
    """Yield the problems of prepared datasets. If `data` is given, compare the datasets with its text."""
    try:
        folder = IndexedFolder.open(str(out))
        if not folder.records:
            raise DataFault(f"{out} holds no dataset of `prepare.py tokens`")
        if tokenizer is not None:
            check_records(folder.records, tokenizer, Reading("skip"), str(out))
        if data is not None:
            text = build_manifest(data, text_field=text_field, reading=Reading("skip")).fingerprint
            if any(record.origin.text != text for record in folder.records.values()):
                yield f"{out} was made of other shards than {data!r} has now"
    except DataFault as fault:
        yield str(fault)
        return
    for name, record in tqdm(folder.records.items(), unit="shard", disable=None):
        if problem := problem_of(str((out / name).with_suffix("")), record):
            yield problem


def summary(folder: IndexedFolder) -> str:
    """Returns counts over all datasets, and one line for each dataset with omitted lines."""
    documents = tokens = 0
    for name, size_bytes in folder.manifest.shards:
        header = read_header((folder.root / name).with_suffix(".idx"))
        documents += header.documents
        tokens += size_bytes // header.id_type.itemsize
    lines = [f"{folder.root}: {len(folder.records)} shards, {documents} documents, {tokens} tokens"]
    for record in folder.records.values():
        if record.left_out:
            left_out = ", ".join(f"{name} {count}" for name, count in record.left_out.items())
            lines.append(f"{record.shard}: left out: {left_out}")
    return "\n".join(lines)


def _kept(out: Path, origin: Origin, datasets: dict[str, str]) -> Iterator[str]:
    """Yield the shards whose datasets are intact. Raises DataFault if `out` holds other datasets."""
    stems = {path.stem for path in out.iterdir() if path.suffix in INDEXED} if out.is_dir() else set()
    records = {stem: read_record(f"{out / stem}") for stem in sorted(stems)}
    for stem, record in records.items():
        found = record.origin if record else origin
        for field in dataclasses.fields(Origin):
            before, now = getattr(found, field.name), getattr(origin, field.name)
            if before != now:
                raise DataFault(
                    f"{out} holds tokens with {field.name}={before}, this command has {now}; give another --out, or "
                    "delete that folder"
                )
        if stem not in datasets.values():
            raise DataFault(f"{out} holds the dataset {stem!r} of another text; give another --out")
    for shard, dataset in tqdm(datasets.items(), desc="verify", unit="shard", disable=None):
        record = records.get(dataset)
        if record is None or not all((out / f"{dataset}{suffix}").is_file() for suffix in INDEXED):
            continue
        problem = problem_of(f"{out / dataset}", record)
        if problem or record.was_bad:  # a bad shard may have been restored
            print(f"again: {problem or f'{shard} ({record.left_out})'}")
        else:
            yield shard


@dataclasses.dataclass(frozen=True)
class _Writer:
    reader: TextReader
    out: Path
    origin: Origin
    datasets: dict[str, str]
    """Path of a shard -> name of its dataset"""

    def write(self, shard: str) -> None:
        """Tokenize the lines of one shard. The files get their final names only after all of them are on the disk. The
        .idx gets its name last."""
        counters: Counter[str] = Counter()
        lines = self.reader.open(shard, 0, 1, counters)
        vocab_size = self.reader.tokenizer.vocab_size
        code = 8 if vocab_size <= MOST_OF_TWO_BYTES else 4
        lengths: list[int] = []
        left_out = Counter({name: counters[name] for name in BAD_SHARDS if counters[name]})

        def ids() -> Iterator[bytes]:
            for place in range(len(lines)):
                line = lines[place]
                if isinstance(line, str):
                    left_out[line] += 1
                    continue
                lengths.append(len(line.tokens))
                if not 0 <= int(line.tokens.min()) <= int(line.tokens.max()) < vocab_size:
                    raise DataFault(
                        f"shard {shard}, line {place + 1}: the tokenizer gave id {line.tokens.max()}, but says that "
                        f"its vocabulary has {vocab_size} entries; repair the tokenizer"
                    )
                yield line.tokens.astype(ID_TYPES[code]).tobytes()

        names = [self.out / f"{self.datasets[shard]}{suffix}" for suffix in (".bin", RECORD, ".idx")]
        ids_file, record_file, index_file = (path.with_name(f"{path.name}{UNFINISHED}") for path in names)
        _write(ids_file, ids())
        ends = np.cumsum(lengths, dtype="<i8")
        header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
        pointers = (ends - lengths) * np.dtype(ID_TYPES[code]).itemsize
        tables = np.array(lengths, "<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
        _write(index_file, [header, *(table.tobytes() for table in tables)])
        record = Record(self.origin, shard, dict(left_out))
        sha256 = sha256_of(record, [ids_file, index_file])
        _write(record_file, [dataclasses.replace(record, sha256=sha256).content()])
        for unfinished, path in zip((ids_file, record_file, index_file), names, strict=True):
            unfinished.replace(path)


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _write_all(writer: _Writer, left: list[str], workers: int) -> Iterator[None]:
    if workers == 1:
        yield from map(writer.write, left)
        return
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(writer,)) as pool:
        tasks = [pool.submit(_work, shard) for shard in left]
        try:
            for task in as_completed(tasks):
                yield task.result()
        except BrokenProcessPool as error:
            raise DataFault(
                "a worker died (out of memory?); run the command again with fewer --workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


# The state of a worker process, which is set once, because a tokenizer is large.
_worker: _Writer


def _start_worker(writer: _Writer) -> None:
    global _worker
    _worker = writer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent dies. The worker would otherwise wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(shard: str) -> None:
    _worker.write(shard)
