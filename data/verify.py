"""Check that every shard of a corpus folder unpacks, that every line parses, and that manifest.json is right.

    python data/verify.py data/sample
    python data/verify.py data/sample/train --tokenizer data/sample/tokenizer.model --seq-len 4096

The command prints one row per shard, and the problems. The exit code is 1 if there are problems, and 2 if the command
cannot check the folder. With a tokenizer it also prints four values for each way of packing (data.packing):

    the share of labels that only fill sequences
    the share of documents that are cut
    the number of documents, or parts of documents, in a sequence
    the share of queries with more causal keys than they select (gsa.k_base), with a warning below a half
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_data import Tokenizer
from gsa_data.best_fit import best_fit, packing_shares
from gsa_data.documents import Document, read_documents
from gsa_data.faults import Reading, naming, printable
from gsa_data.lanes import LaneReader
from gsa_data.pack import LANE_START, AnyTokens, Cursor
from gsa_data.reader import TextReader
from gsa_data.shards import DataFault, Manifest, build_manifest, read_lines


@dataclass(frozen=True)
class ShardReport:
    relpath: str
    size_bytes: int
    documents: int
    text_bytes: int
    sources: Counter[str]
    problems: list[str]


def verify_shard(
    root: Path, relpath: str, expected: dict[str, Any] | None, text_field: str = "text"
) -> ShardReport:
    """Read one shard. `expected` is its entry in manifest.json, or None without a manifest."""
    problems: list[str] = []
    parsed: list[Document | str] = []
    size_bytes = (root / relpath).stat().st_size
    reading = Reading(max_bad_line_fraction=1.0)
    manifest = Manifest(str(root), ((relpath, size_bytes),), text_field)
    try:
        parsed = read_documents(manifest, relpath, reading, Counter())
    except DataFault as fault:
        problems.append(str(fault))
    documents = [item for item in parsed if isinstance(item, Document)]
    faults = Counter(item for item in parsed if isinstance(item, str))
    problems += [f"{relpath}: {count} lines with {name}" for name, count in sorted(faults.items())]
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


def verify_corpus(root: Path, text_field: str = "text") -> tuple[list[ShardReport], list[str]]:
    """Returns reports of all shards below `root`, and all problems, also of missing and unlisted shards."""
    manifest_file = root / "manifest.json"
    listed: dict[str, dict[str, Any]] | None = None
    if manifest_file.is_file():
        try:
            listed = {shard["path"]: shard for shard in orjson.loads(manifest_file.read_bytes())["shards"]}
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{manifest_file} is not one that prepare.py wrote ({error!r}); move it away to check the shards alone"
            ) from error
    found = [relpath for relpath, _ in build_manifest(str(root)).shards]
    problems: list[str] = []
    if listed is not None:
        problems += [
            f"{relpath}: listed in manifest.json but missing" for relpath in sorted(listed.keys() - found)
        ]
        problems += [f"{relpath}: not listed in manifest.json" for relpath in found if relpath not in listed]
    reports = [verify_shard(root, relpath, (listed or {}).get(relpath), text_field) for relpath in found]
    return reports, problems + [problem for report in reports for problem in report.problems]


class Packed(NamedTuple):
    """Holds the effects of packing on the documents of one epoch."""

    filler_share: float
    """Share of the labels that are filler"""
    cut_share: float
    """Share of the documents that are cut"""
    documents_per_block: float
    """Number of documents or parts of documents per block"""


LEAST_SPARSE_SHARE = 0.5
"""A smaller share of queries with sparse attention gives a warning."""


def sparse_share(parts: NDArray[np.int64], k_base: int) -> float:
    """Returns the share of queries with more than k_base causal keys, if queries attend only within their document.

    Args:
        parts: number of tokens of each document, or part of a document, in a sequence
    """
    return float(np.maximum(parts - k_base, 0).sum() / parts.sum())


def concatenated_parts(lanes: list[list[int]], seq_len_tokens: int) -> NDArray[np.int64]:
    """Returns the lengths of the parts of documents in sequences, with packing `concatenate`."""
    cuts = []
    for lengths in lanes:
        ends = np.cumsum([0, *lengths])
        cuts.append(np.diff(np.union1d(ends, np.arange(0, ends[-1], seq_len_tokens))))
    return np.concatenate(cuts)


def best_fit_parts(lanes: list[list[int]], seq_len_tokens: int) -> NDArray[np.int64]:
    """Returns the lengths of the parts of documents in sequences, with packing `best_fit`."""
    parts: list[int] = []
    for length in itertools.chain(*lanes):
        while length > seq_len_tokens + 1:
            parts.append(seq_len_tokens)
            length -= seq_len_tokens
        parts.append(length)
    return np.array(parts)


def lane_lengths(manifest: Manifest, tokenizer: Tokenizer, num_lanes: int) -> list[list[int]]:
    """Returns the lengths of each lane's documents in one epoch, with EOS, in the order of a run with seed 0."""
    reader = LaneReader(TextReader(manifest, tokenizer, Reading()), num_lanes, 0, True)
    epochs = (
        itertools.takewhile(lambda piece: piece[0].epoch == 0, reader.pieces(lane))
        for lane in range(num_lanes)
    )
    return [[len(tokens) for _, tokens in epoch] for epoch in epochs]


def concatenated(lanes: list[list[int]], seq_len_tokens: int) -> Packed:
    parts = cut = labels = 0
    for lengths in lanes:
        begin = 0
        for length in lengths:
            # Block b holds the tokens b L to (b + 1) L of the lane, both included.
            first, last = begin // seq_len_tokens, max(begin, begin + length - 2) // seq_len_tokens
            parts += last - first + 1
            cut += last > first
            begin += length
        labels += begin
    return Packed(0.0, cut / sum(map(len, lanes)), parts * seq_len_tokens / labels)


def best_fitted(lanes: list[list[int]], seq_len_tokens: int, pool_documents: int) -> Packed:
    """Returns the effects of `best_fit` over one epoch of a run whose pool of documents is already full."""
    counters: Counter[str] = Counter()
    for lengths in filter(None, lanes):  # an epoch of a small corpus may leave a lane out
        documents: Iterator[tuple[Cursor, AnyTokens]] = (
            (Cursor(epoch, 0, place, 0), np.zeros(length, np.int32))
            for epoch in itertools.count()
            for place, length in enumerate(lengths)
        )
        blocks = best_fit(documents, LANE_START, [], 0, seq_len_tokens, pool_documents)
        epoch_blocks = -(-sum(lengths) // seq_len_tokens)
        begin = 2 * max(pool_documents, epoch_blocks)
        for block in itertools.islice(blocks, begin, begin + epoch_blocks):
            counters.update(block.counters)
    shares = packing_shares(counters)
    return Packed(*(shares[name] or 0.0 for name in Packed._fields))


def report_packing(
    manifest: Manifest, tokenizer: Tokenizer, seq_len_tokens: int, num_lanes: int, pool: int, k_base: int
) -> str:
    given = {"--seq-len": seq_len_tokens, "--num-lanes": num_lanes, "--pool": pool, "--k-base": k_base}
    for option, value in given.items():
        if value < 1:
            raise ValueError(f"{option} {value}: below 1; give 1 or more")
    lanes = lane_lengths(manifest, tokenizer, num_lanes)
    lengths = np.concatenate(lanes)
    rows = {
        "concatenate": (
            concatenated(lanes, seq_len_tokens),
            sparse_share(concatenated_parts(lanes, seq_len_tokens), k_base),
        ),
        f"best_fit, pool of {pool}": (
            best_fitted(lanes, seq_len_tokens, pool),
            sparse_share(best_fit_parts(lanes, seq_len_tokens), k_base),
        ),
    }
    across = max(seq_len_tokens - k_base, 0) / seq_len_tokens
    lines = [
        f"packing at {seq_len_tokens} tokens, {num_lanes} lanes: {len(lengths)} documents, mean {lengths.mean():.0f} "
        f"tokens, {np.mean(lengths > seq_len_tokens + 1):.1%} longer than a sequence",
        f"{'':24} {'filler':>8} {'documents cut':>14} {'documents per sequence':>23} {'sparse queries':>15}",
    ]
    lines += [
        f"{name:24} {row.filler_share:8.2%} {row.cut_share:14.1%} {row.documents_per_block:23.2f} {sparse:15.1%}"
        for name, (row, sparse) in rows.items()
    ]
    lines.append(f"sparse queries see more than k_base = {k_base} keys; {across:.1%} across documents")
    few = [f"{name} ({sparse:.1%})" for name, (_, sparse) in rows.items() if sparse < LEAST_SPARSE_SHARE]
    if few:
        lines.append(
            f"WARNING by {' and '.join(few)} fewer than half of the queries see more keys than they may select: GSA is "
            f"dense attention for the others. Across documents (data.attend_across_documents=true) it is {across:.1%}; "
            "or take longer documents, a smaller gsa.k_base or longer sequences"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text-field", default="text", help="data.text_field of the run")
    parser.add_argument(
        "--tokenizer", help="report on packing, too; this reads and tokenizes everything again"
    )
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--num-lanes", type=int, default=8, help="data.num_lanes of the run")
    parser.add_argument("--pool", type=int, default=128, help="data.packing_pool_documents of the run")
    parser.add_argument("--k-base", type=int, default=2048, help="gsa.k_base of the run")
    options = parser.parse_args(arguments)
    packing = ""
    try:
        reports, problems = verify_corpus(options.folder, options.text_field)
        if options.tokenizer and not problems:
            with naming("--tokenizer"):
                tokenizer = Tokenizer(options.tokenizer)
            packing = report_packing(
                build_manifest(str(options.folder), options.text_field),
                tokenizer,
                options.seq_len,
                options.num_lanes,
                options.pool,
                options.k_base,
            )
    except (DataFault, ValueError, OSError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    print(f"{'shard':50} {'packed bytes':>13} {'documents':>10} {'text bytes':>12}  sources")
    for report in reports:
        sources = ", ".join(
            f"{printable(name) or '(none)'} {count}" for name, count in sorted(report.sources.items())
        )
        row = f"{report.relpath:50} {report.size_bytes:13} {report.documents:10} {report.text_bytes:12}"
        print(f"{row}  {sources}")
    packed, documents, text = (
        sum(getattr(report, field) for report in reports)
        for field in ("size_bytes", "documents", "text_bytes")
    )
    print(f"{f'{len(reports)} shards':50} {packed:13} {documents:10} {text:12}")
    if packing:
        print(packing)
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
