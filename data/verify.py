"""Check a corpus folder: every shard unpacks, every line parses, and all is as manifest.json says.

    python data/verify.py data/sample

Prints one row per shard and the problems found; the exit code is 1 when there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gsa_data.documents import Document, read_documents
from gsa_data.faults import Reading
from gsa_data.shards import DataFault, build_manifest, read_lines


@dataclass(frozen=True)
class ShardReport:
    relpath: str
    size_bytes: int
    documents: int
    text_bytes: int
    sources: Counter[str]
    problems: list[str]


def verify_shard(root: Path, relpath: str, expected: dict[str, Any] | None) -> ShardReport:
    """Read one shard. `expected` is its entry in manifest.json, None when there is no manifest."""
    problems: list[str] = []
    parsed: list[Document | str] = []
    reading, manifest = Reading(max_bad_line_fraction=1.0), build_manifest(str(root), relpath)
    try:
        parsed = read_documents(manifest, relpath, reading, Counter())
    except DataFault as fault:
        problems.append(str(fault))
    documents = [item for item in parsed if isinstance(item, Document)]
    faults = Counter(item for item in parsed if isinstance(item, str))
    problems += [f"{relpath}: {count} lines with {name}" for name, count in sorted(faults.items())]
    size_bytes = (root / relpath).stat().st_size
    if expected is not None and not problems:
        found = {
            "size_bytes": size_bytes,
            "sha256": hashlib.sha256((root / relpath).read_bytes()).hexdigest(),
            "documents": len(documents),
            "line_bytes": sum(len(line) + 1 for line in read_lines(manifest, relpath, reading, Counter())),
        }
        problems += [
            f"{relpath}: {field} is {value}, manifest.json says {expected.get(field)}"
            for field, value in found.items()
            if value != expected.get(field)
        ]
    text_bytes = sum(len(document.text_utf8) for document in documents)
    sources = Counter(document.source for document in documents)
    return ShardReport(relpath, size_bytes, len(documents), text_bytes, sources, problems)


def verify_corpus(root: Path) -> tuple[list[ShardReport], list[str]]:
    """Reports of all shards under `root`, and all problems: theirs, and shards missing or not listed."""
    manifest_file = root / "manifest.json"
    listed: dict[str, dict[str, Any]] | None = None
    if manifest_file.is_file():
        listed = {shard["path"]: shard for shard in orjson.loads(manifest_file.read_bytes())["shards"]}
    found = [relpath for relpath, _ in build_manifest(str(root)).shards]
    problems: list[str] = []
    if listed is not None:
        problems += [
            f"{relpath}: listed in manifest.json but missing" for relpath in sorted(listed.keys() - found)
        ]
        problems += [f"{relpath}: not listed in manifest.json" for relpath in found if relpath not in listed]
    reports = [verify_shard(root, relpath, (listed or {}).get(relpath)) for relpath in found]
    return reports, problems + [problem for report in reports for problem in report.problems]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    try:
        reports, problems = verify_corpus(parser.parse_args(arguments).folder)
    except DataFault as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    print(f"{'shard':50} {'packed bytes':>13} {'documents':>10} {'text bytes':>12}  sources")
    for report in reports:
        sources = ", ".join(f"{name or '(none)'} {count}" for name, count in sorted(report.sources.items()))
        row = f"{report.relpath:50} {report.size_bytes:13} {report.documents:10} {report.text_bytes:12}"
        print(f"{row}  {sources}")
    packed, documents, text = (
        sum(getattr(report, field) for report in reports)
        for field in ("size_bytes", "documents", "text_bytes")
    )
    print(f"{f'{len(reports)} shards':50} {packed:13} {documents:10} {text:12}")
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
