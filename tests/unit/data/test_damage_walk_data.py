"""Tests damage to text, prepared tokens and indexed datasets before a start, and between two starts of a run.

A start after the damage must raise an error. `pytest -s tests/unit/data/test_damage_walk_data.py` prints a table with
each file, the damage, and the result of a resume.
"""

import builtins
import re
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpus import document, write_corpus
from test_data_indexed import write_indexed

from gsa_data.content import SAMPLE_BYTES, changed_files, sample_contents
from gsa_data.corpus import open_corpus, shard_reader
from gsa_data.faults import DataFault, Reading
from gsa_data.prepare_tokens import prepare_tokens
from gsa_data.tokenize import Tokenizer
from helpers.damage import Table, damages_of, files_below

READING = Reading(retries=0)
LINES = 40


def read(root: Path, tokenizer: Tokenizer, before: dict[str, Any] | None) -> tuple[dict[str, Any], int]:
    """Return sampled hashes of the corpus's files, and the sum of all token ids. Raises DataFault if the hashes differ
    from `before`, or if the corpus cannot be read."""
    corpus = open_corpus(str(root), reading=READING)
    samples = sample_contents(corpus, READING)
    changed = changed_files(before, samples)
    if changed:
        raise DataFault(f"differs from the saved run's: {changed}")
    reader = shard_reader(corpus, tokenizer, READING)
    total = 0
    for relpath, _ in reader.manifest.shards:
        lines = reader.open(relpath, 0, 1, Counter())
        for place in range(len(lines)):
            line = lines[place]
            total += 0 if isinstance(line, str) else int(line.tokens.sum())
    return samples, total


def write_text(root: Path, first: int, tokenizer: Tokenizer) -> None:
    write_corpus(root, num_shards=2, documents_per_shard=LINES)
    if first:  # other documents with the same names
        write_corpus(root / "new", num_shards=2 + first, documents_per_shard=LINES)
        for shard in range(2):
            (root / f"new/chunk1/s{shard + first}.jsonl.zst").replace(root / f"chunk1/s{shard}.jsonl.zst")
        shutil.rmtree(root / "new")


def write_tokens(root: Path, first: int, tokenizer: Tokenizer) -> None:
    text = root.with_name(f"{root.name}_text")
    write_text(text, first, tokenizer)
    prepare_tokens(str(text), tokenizer, root, 1, READING)
    (root / ".lock").unlink()  # no part of the corpus


def write_datasets(root: Path, first: int, tokenizer: Tokenizer) -> None:
    (root / "wiki").mkdir(parents=True)
    for name in ("a", "wiki/b"):
        documents = [np.append(tokenizer.encode(document(first + n)), tokenizer.eos_id) for n in range(LINES)]
        write_indexed(root, name, documents)
        first += LINES


def outcome_of(folder: Path, tokenizer: Tokenizer, before: dict[str, Any] | None) -> str:
    try:
        read(folder, tokenizer, before)
    except DataFault as fault:
        return f"refused: {fault}"
    return "read"


@pytest.mark.parametrize(
    ("write", "first_start_accepts"),
    [
        (write_text, "deleted|other corpus|bit in middle"),  # other text is text; zstd's checksum is optional
        (write_tokens, "nothing"),
        (write_datasets, "bit in .*"),  # of ids
    ],
)
def test_every_file_of_a_corpus(write, first_start_accepts, tokenizer, tmp_path):
    own, other, folder = (tmp_path / name for name in ("own", "other", "folder"))
    write(own, 0, tokenizer)
    write(other, 2, tokenizer)
    before, total = read(own, tokenizer, None)
    assert read(own, tokenizer, before) == (before, total)
    table = Table()
    for name in files_below(own):
        sibling = next(each for each in files_below(own) if each != name and each[-4:] == name[-4:])
        others = {"other corpus": other / name, "other shard": own / sibling}
        for damage, change in damages_of(own / name, others).items():
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(own, folder)
            change(folder / name)
            resumed, first = outcome_of(folder, tokenizer, before), outcome_of(folder, tokenizer, None)
            table.add(name, damage, resumed.replace(str(tmp_path), ""))
            assert re.fullmatch("refused: .*", resumed), (name, damage)  # one line
            assert Path(name).stem.split(".")[0] in resumed or "holds 1 prepared datasets of" in resumed, (
                name,
                damage,
                resumed,
            )
            if first == "read":
                assert re.search(first_start_accepts, damage), (name, damage)
    print(f"\n{table}")


def test_samples_are_of_head_middle_and_tail(tmp_path: Path) -> None:
    """A file of up to three samples is read whole."""
    path = tmp_path / "a.jsonl"

    def sampled(content: bytes, place: int) -> bool:
        path.write_bytes(content)
        before = sample_contents(open_corpus(str(tmp_path)), READING)
        path.write_bytes(content[:place] + b"x" + content[place + 1 :])
        return bool(changed_files(before, sample_contents(open_corpus(str(tmp_path)), READING)))

    small, large = bytes(3 * SAMPLE_BYTES), bytes(9 * SAMPLE_BYTES)
    assert all(sampled(small, place) for place in (0, SAMPLE_BYTES, 2 * SAMPLE_BYTES, len(small) - 1))
    assert [place for place in range(9) if sampled(large, place * SAMPLE_BYTES)] == [0, 4, 8]


def test_samples_of_many_shards_do_not_wait_for_one_another(tmp_path, monkeypatch):
    """On a network file system, opening a file takes milliseconds, so files are opened in parallel. In this test each
    opening waits until another one has begun. If the files were opened one after another, the test would fail."""
    for number in range(64):
        (tmp_path / f"{number}.jsonl").write_bytes(bytes(4 * SAMPLE_BYTES + number))
    corpus, plain_open, two_are_opened = open_corpus(str(tmp_path)), open, threading.Barrier(2)

    def open_with_another(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(".jsonl"):
            two_are_opened.wait(60)
        return plain_open(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", open_with_another)
    assert len(sample_contents(corpus, READING)["files"]) == 64


def test_which_files_changed_is_said_in_a_line() -> None:
    def files(**sizes: str) -> dict[str, Any]:
        return {"kind": "text", "files": sizes}

    before = files(a="5 aa", b="6 bb", c="7 cc")
    assert changed_files(before, before) == changed_files(None, before) == ""
    assert changed_files(before, {**before, "kind": "tokens"}) == ""
    now = files(a="5 ab", c="8 cc", d="1 d", e="1 e")
    assert changed_files(before, now) == "b is gone; d is new; e is new (and 2 more)"
    both = "a: its content is another; c: 8 bytes instead of 7"
    assert changed_files(before, files(a="5 ab", b="6 bb", c="8 cc")) == both
