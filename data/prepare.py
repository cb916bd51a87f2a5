"""Build the bundled sample, train a tokenizer, or tokenize shards once.

    python data/prepare.py sample --out data/sample
    python data/prepare.py tokenizer --shards data/sample/train --out data/sample/tokenizer.model
    python data/prepare.py tokens --data data/sample/train --tokenizer data/sample/tokenizer.model --out DIR

`sample` collects the Python standard library and the Rust books, drops exact duplicates, and writes shards in
SlimPajama's layout with a manifest.json and the licences. gsa_data/prepare.py describes `tokenizer` and `tokens`. After
an installation, the command `gsa-prepare` also offers these two.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as python_topics

import orjson
import zstandard
from html_text import html_to_text

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_data.documents import Document
from gsa_data.prepare import add_commands, run_command
from gsa_data.shards import DataFault

MIN_CHARACTERS = 200  # shorter files are redirects and empty packages
VALIDATION_FRACTION = 0.025
PYTHON, RUST = "PythonStdlib", "RustBooks"

# These paths hold other people's packages, generated tables, the data of the test suite, and lib2to3 with its fixtures.
PYTHON_LEFT_OUT = re.compile(
    r"^test/(?!test_[^/]*\.py$)|./test/"
    r"|(^|/)(site-packages|tests|idle_test|lib2to3|encodings|ensurepip|config-[^/]*)/"
    r"|^_sysconfigdata|^pydoc_data/|^html/entities\.py$|^LICENSE\.txt$"
)
# The embedded book is left out, because its prose is CC-BY-SA-4.0.
RUST_BOOKS = (
    "book", "cargo", "clippy", "edition-guide", "error_codes", "nomicon", "reference", "rust-by-example",
    "rustc", "rustdoc", "style-guide", "unstable-book",
)  # fmt: skip
# Whole-book pages repeat other pages, translations repeat the English text, and test-summary is a generated table.
RUST_LEFT_OUT = re.compile(r"(^|/)(print|toc|404|test-summary)\.html$|^rust-by-example/(es|ja|ko|zh)/")

RUST_OLD_EDITION = "edition of the book is no longer distributed"  # hundreds of pages have this text


@dataclass(frozen=True)
class Place:
    """Says where one document goes: a split, and a number that decides its shard and its order in the shard."""

    split: str
    order: int


def place_of(text: str) -> Place:
    """Returns the place of a document. The document's hash decides it, so other documents do not change it."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    draw = int.from_bytes(digest[:8], "big") / 2**64
    split = "validation" if draw < VALIDATION_FRACTION else "train"
    return Place(split, int.from_bytes(digest[8:], "big"))


def python_documents(stdlib: Path) -> Iterator[str]:
    """Yields the standard library's sources and notes, and the language reference that `help()` shows."""
    for path in sorted(stdlib.rglob("*")):
        relpath = path.relative_to(stdlib).as_posix()
        if path.suffix in (".py", ".txt", ".rst") and not PYTHON_LEFT_OUT.search(relpath):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                print(f"left out, not UTF-8: {path}")
    yield from without_repeats(python_topics.values())


def without_repeats(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts, longest first. A text is left out if a longer text has more than half of its long lines."""
    given: set[str] = set()
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        lines = {line for line in text.split("\n") if len(line) > 40}
        if len(lines & given) <= len(lines) / 2:
            yield text
        given |= lines


def rust_documents(html: Path) -> Iterator[str]:
    """Yields the pages of the Rust books as text. A long change log gives a document per version."""
    for book in RUST_BOOKS:
        for path in sorted((html / book).rglob("*.html")):
            if RUST_LEFT_OUT.search(path.relative_to(html).as_posix()):
                continue
            text = html_to_text(path.read_text(encoding="utf-8"))
            if RUST_OLD_EDITION in text:
                continue
            yield from re.split(r"\n(?=## )", text) if path.name == "CHANGELOG.html" else [text]
    release_notes = (html / "releases.md").read_text(encoding="utf-8")
    yield from re.split(r"\n(?=Version [\d.]+ \()", release_notes)


def write_corpus(documents: Iterable[Document], out: Path, train_shards: int) -> dict[str, object]:
    """Deduplicate, split, order by hash and write documents. Returns `shards` and `sources` for the manifest."""
    if any((out / split).exists() for split in ("train", "validation")):
        raise DataFault(f"{out} already holds a corpus; remove its train and validation folders first")
    shard_lines: dict[str, list[tuple[int, bytes]]] = {}
    sources: dict[str, Counter[str]] = {}
    seen: set[bytes] = set()
    for document in documents:
        if len(document.text_utf8) < MIN_CHARACTERS or document.text_utf8 in seen:
            continue
        seen.add(document.text_utf8)
        text = document.text_utf8.decode()
        place = place_of(text)
        if place.split == "train":
            relpath = f"train/chunk1/example_train_{place.order % train_shards}.jsonl.zst"
        else:
            relpath = "validation/chunk1/example_holdout_0.jsonl.zst"
        line = orjson.dumps({"text": text, "meta": {"redpajama_set_name": document.source}})
        shard_lines.setdefault(relpath, []).append((place.order, line))
        sources.setdefault(document.source, Counter())[f"{place.split}_documents"] += 1
        sources[document.source][f"{place.split}_text_bytes"] += len(document.text_utf8)

    shards = []
    for relpath, ordered_lines in sorted(shard_lines.items()):
        lines = [line for _, line in sorted(ordered_lines)]
        packed = zstandard.ZstdCompressor(level=19).compress(b"\n".join(lines) + b"\n")
        path = out / relpath
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed)
        shards.append(
            {
                "path": relpath,
                "size_bytes": len(packed),
                "sha256": hashlib.sha256(packed).hexdigest(),
                "documents": len(lines),
                "line_bytes": sum(len(line) + 1 for line in lines),
            }
        )
    return {
        "shards": shards,
        "sources": {name: dict(sorted(c.items())) for name, c in sorted(sources.items())},
    }


def build_sample(out: Path, rust_docs: Path, train_shards: int) -> None:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    licences = {
        "LICENSE.python": stdlib / "LICENSE.txt",
        "LICENSE.rust-MIT": _only(rust_docs, "html/static.files/LICENSE-MIT-*.txt"),
        "LICENSE.rust-APACHE": _only(rust_docs, "html/static.files/LICENSE-APACHE-*.txt"),
    }
    for path in licences.values():
        if not path.is_file():
            raise DataFault(f"licence text {path} is missing; the corpus is not written without it")

    def documents() -> Iterator[Document]:
        for text in python_documents(stdlib):
            yield Document(text.strip().encode(), PYTHON)
        for text in rust_documents(rust_docs / "html"):
            yield Document(text.strip().encode(), RUST)

    out.mkdir(parents=True, exist_ok=True)
    corpus = write_corpus(documents(), out, train_shards)
    for name, path in licences.items():
        shutil.copyfile(path, out / name)
    rust_version = re.search(r"^Version ([\d.]+)", (rust_docs / "html/releases.md").read_text(), re.MULTILINE)
    origins = {
        PYTHON: {
            "what": "sources and notes of the Python standard library, and pydoc's language topics",
            "version": f"Python {platform.python_version()}",
            "copyright": "Python Software Foundation; notices inside the files are kept",
            "licence": "PSF-2.0 (LICENSE.python)",
        },
        RUST: {
            "what": "text of the Rust books and release notes: " + ", ".join((*RUST_BOOKS, "releases")),
            "version": f"Rust {rust_version[1] if rust_version else 'unknown'}",
            "copyright": "The Rust Project Developers (see https://thanks.rust-lang.org); "
            "rust-by-example also 2014 Jorge Aparicio",
            "licence": "MIT OR Apache-2.0 (LICENSE.rust-MIT, LICENSE.rust-APACHE)",
        },
    }
    manifest = {"origins": origins, "validation_fraction": VALIDATION_FRACTION, **corpus}
    (out / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n")


def default_rust_docs() -> Path:
    return _only(Path.home(), ".rustup/toolchains/stable-*/share/doc/rust")


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DataFault(
            f"{len(found)} matches of {pattern} in {folder}, 1 needed; install or name the one to use"
        )
    return found[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sample = commands.add_parser("sample", help="build the bundled corpus")
    sample.add_argument("--out", type=Path, required=True)
    sample.add_argument(
        "--rust-docs", type=Path, help="a toolchain's share/doc/rust (default: rustup's stable)"
    )
    sample.add_argument("--train-shards", type=int, default=20)
    sample.set_defaults(run=run_sample)
    add_commands(commands)
    return run_command(parser.parse_args(arguments))


def run_sample(options: argparse.Namespace) -> int:
    if options.train_shards < 1:
        raise DataFault(f"--train-shards {options.train_shards}: below 1; give 1 or more")
    build_sample(options.out, options.rust_docs or default_rust_docs(), options.train_shards)
    return 0


if __name__ == "__main__":
    sys.exit(main())
