"""Write the two files of a shard of tokens (token_files.py)."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from gsa_data.faults import DataFault
from gsa_data.reader import ShardLines
from gsa_data.token_files import UNFINISHED, Identity, ShardRecord, shard_file


def write_shard(
    root: Path, relpath: str, lines: ShardLines, counters: Counter[str], identity: Identity
) -> ShardRecord:
    """Tokenize the lines of one shard into its two files, which appear when they are complete.

    `counters` comes from opening the shard. Raises DataFault for an id that is not in the vocabulary.
    """
    lengths, text_bytes, faults = (np.zeros(len(lines), "<i8") for _ in range(3))
    names, sources = lines.sources()
    fault_names: dict[str, int] = {}
    tokens_hash = hashlib.sha256()

    def ids() -> Iterator[bytes]:
        for place in range(len(lines)):
            line = lines[place]
            if isinstance(line, str):
                faults[place] = (
                    list(fault_names).index(line) + 1 if line in fault_names else len(fault_names) + 1
                )
                fault_names[line] = fault_names.get(line, 0) + 1
                continue
            lengths[place], text_bytes[place] = len(line.tokens), line.text_bytes
            if not 0 <= int(line.tokens.min()) <= int(line.tokens.max()) < identity.vocab_size:
                raise DataFault(
                    f"shard {relpath}, line {place + 1}: the tokenizer gave id {line.tokens.max()}, but says that "
                    f"its vocabulary has {identity.vocab_size} entries; repair the tokenizer"
                )
            content = line.tokens.astype(identity.dtype).tobytes()
            tokens_hash.update(content)
            yield content

    write_whole(shard_file(root, relpath, ".tokens"), ids())
    offsets = np.concatenate([np.zeros(1, "<i8"), np.cumsum(lengths)])
    table = np.concatenate([offsets, text_bytes, faults, sources]).astype("<i8").tobytes()
    write_whole(shard_file(root, relpath, ".lines"), [table])
    return ShardRecord(
        path=relpath,
        lines=len(lines),
        documents=len(lines) - sum(fault_names.values()),
        tokens=int(offsets[-1]),
        text_bytes=int(text_bytes.sum()),
        tokens_sha256=tokens_hash.hexdigest(),
        lines_sha256=hashlib.sha256(table).hexdigest(),
        counters={name: count for name, count in sorted(counters.items()) if name != "read_retries"},
        faults=fault_names,
        sources={name: int((sources == number).sum()) for number, name in enumerate(names)},
    )


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file, which gets its name when it is completely on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    with unfinished.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
