from __future__ import annotations

import gzip
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine_text
import orjson
import pytest
import zstandard
from data_corpus import WORDS
from machine_files import checked_roots, walk
from machine_origins import UNKNOWN, Origin, Origins
from machine_read import Text, classify, read_document
from machine_text import Options, build_corpus
from man_text import manual_to_text
from prepare import main
from verify import verify_corpus

from gsa_data import DataFault

LIMIT = 1 << 20


def prose(seed: int, paragraphs: int = 6) -> str:
    """Paragraphs of their own, each of more than 60 characters."""
    rng = random.Random(seed)
    return "\n\n".join(
        " ".join(rng.choice(WORDS) + rng.choice(WORDS) for _ in range(12)) for _ in range(paragraphs)
    )


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def code(seed: int) -> str:
    return "\n\n".join(
        f"def f{n}():\n    return '{line}'" for n, line in enumerate(prose(seed).split("\n\n"))
    )


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root with every kind of file, and a dpkg database beside it."""
    root = tmp_path / "machine"
    packages = root / "usr/lib/python3/dist-packages"
    for number in range(40):
        put(packages / f"tool/m{number}.py", code(number))
    metadata = (
        "Name: tool\nVersion: 1.5\nLicense: MIT License\nClassifier: License :: OSI Approved :: MIT License\n"
    )
    put(packages / "tool-1.5.dist-info/METADATA", metadata)
    put(packages / "tool-1.5.dist-info/RECORD", "".join(f"tool/m{n}.py,,\n" for n in range(20)))
    put(root / "usr/include/lib.h", code(100))
    put(root / "usr/share/man/man1/cmd.1.gz", ".TH CMD 1\n.SH NAME\ncmd \\- does\n.PP\n" + prose(101))
    put(root / "usr/share/doc/cmd/README.md", prose(102))
    put(root / "usr/share/doc/cmd/copyright", prose(103))
    put(root / "usr/share/doc/cmd/index.html", f"<html><body><h1>T</h1><p>{prose(104)}</p></body></html>")
    put(root / "usr/lib/jvm/jdk/docs/guide.md", prose(105))
    put(tmp_path / "dpkg/status", "Package: cmd\nVersion: 2.0-1\n\nPackage: libc\nVersion: 3\n")
    listed = "".join(
        f"{root}/usr/{path}\n"
        for path in ("share/doc/cmd", "share/doc/cmd/README.md", "share/doc/cmd/copyright", "include/lib.h")
    )
    put(tmp_path / "dpkg/info/cmd:amd64.list", listed)
    return root


@pytest.fixture
def options(machine: Path, sample_folder: Path, tmp_path: Path) -> Options:
    return Options(
        out=tmp_path / "corpus",
        tokenizer=sample_folder / "tokenizer.model",
        roots=(machine,),
        train_shards=3,
        validation_fraction=0.2,
        test_fraction=0.2,
        dpkg=tmp_path / "dpkg",
    )


def documents_of(folder: Path) -> dict[str, tuple[str, str]]:
    """Split and set of every document, by its text."""
    found = {}
    for path in folder.rglob("*.jsonl.zst"):
        for line in zstandard.decompress(path.read_bytes()).splitlines():
            record = orjson.loads(line)
            split = path.relative_to(folder).parts[0]
            found[record["text"]] = (split, record["meta"]["redpajama_set_name"])
    return found


def shard_hashes(manifest: dict[str, Any]) -> dict[str, str]:
    return {shard["path"]: shard["sha256"] for shard in manifest["shards"]}


def test_corpus_has_every_kind_and_is_sound(options: Options) -> None:
    manifest = build_corpus(options)
    reports, problems = verify_corpus(options.out)
    assert problems == []
    sources = sum((report.sources for report in reports), Counter())
    assert sources == {
        "MachinePython": 40, "MachineHeaders": 1, "MachineManuals": 1, "MachineDocs": 2, "MachineToolchainDocs": 1,
        "MachineNotices": 1,
    }  # fmt: skip
    assert {split for split, _ in documents_of(options.out).values()} == {"train", "validation", "test"}
    assert orjson.loads((options.out / "manifest.json").read_bytes()) == manifest
    assert "do not redistribute" in (options.out / "NOTICE").read_text()
    totals = manifest["totals"]
    assert totals["documents"] == 46
    assert totals["text_bytes"] == sum(report.text_bytes for report in reports)
    assert totals["text_bytes"] / 6 < totals["tokens_estimated"] < totals["text_bytes"]
    assert not list(options.out.rglob("*.loose"))
    assert not options.out.with_name("corpus.tmp").exists()


def test_same_files_give_the_same_bytes(options: Options, tmp_path: Path) -> None:
    first = build_corpus(options)
    second = build_corpus(replace(options, out=tmp_path / "again", workers=2))
    assert first == second  # with the sha256 of every shard
    other = build_corpus(replace(options, out=tmp_path / "other", seed=1))
    assert shard_hashes(other) != shard_hashes(first)


def test_what_is_added_moves_nothing(options: Options, machine: Path, tmp_path: Path) -> None:
    build_corpus(options)
    before = documents_of(options.out)
    for number in range(200, 220):
        put(machine / f"aaa/{number}.py", code(number))
    build_corpus(replace(options, out=tmp_path / "more"))
    after = documents_of(tmp_path / "more")
    assert len(after) == len(before) + 20
    assert before.items() <= after.items()


def test_repeats(options: Options, machine: Path) -> None:
    put(machine / "z/same.py", code(0).replace("\n\n", "\n\n\n").replace("    ", "\t"))
    put(machine / "z/release.py", code(1).replace("f5():\n    return '", "f5():\n    return 'another "))
    put(machine / "z/half_new.py", "\n\n".join(code(2).split("\n\n")[:2]) + "\n\n" + code(300))
    put(machine / "z/LICENSE", prose(103))
    old, new = prose(103).split("\n\n")[:3], prose(301).split("\n\n")
    put(machine / "z/CHANGELOG", "\n\n".join([*new, *old, new[0]]))
    manifest = build_corpus(options)
    assert {name: manifest["skipped"][name] for name in ("repeat", "near_repeat")} == {
        "repeat": 2,
        "near_repeat": 1,
    }
    texts = documents_of(options.out)
    assert "\n\n".join(new) + "\n" in texts  # without what the copyright file said before, and once each
    assert any(code(300) in text for text in texts)


def test_notices_of_repeated_paragraphs_are_left_out() -> None:
    repeats = machine_text.Repeats(0.5)
    whole, part = prose(1), "\n\n".join(prose(1).split("\n\n")[:5])
    assert repeats.keep(Text("MachineNotices", whole, b"1", ())) == (whole + "\n", "")
    assert repeats.keep(Text("MachineNotices", part + "\n\nshort end", b"2", ())) == ("", "near_repeat")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", prose(1), "other_kind"),
        ("__pycache__/a.py", code(1), "left_out_path"),
        ("share/man/de/man1/a.1", prose(1), "left_out_path"),
        ("share/doc/rust/html/src/core/lib.rs.html", prose(1), "left_out_path"),
        ("share/doc/a/README.gz", None, "bad_gzip"),
        ("a.py", code(1).encode() + b"\xe9\n", "not_utf8"),
        ("a.txt", prose(1) + "\0", "binary"),
        ("a.txt", prose(1) + "\x01" * 5, "binary"),
        ("a.h", "/* Automatically generated by a tool. DO NOT EDIT */\n" + code(1), "generated"),
        ("share/man/man1/a.1", ".Dd May 1\n.Dt A 1\n.Nm a\n" + prose(1), "mdoc_manual"),
        ("share/man/man1/a.1", ".so man1/b.1\n", "too_short"),
        ("a.py", "x = '" + "abc" * 700 + "'\n" + code(1), "minified"),
        ("a.txt", "word" * 6000, "minified"),
        ("a.html", f"<body><![unknown x]]><p>{prose(1)}</p></body>", "bad_html"),
        ("a.txt", "12 0x34 567\n" * 50, "few_letters"),
        ("a.py", "", "too_short"),
        ("a.py", "x = 1\n", "too_short"),
        ("a.txt", (prose(1) + "\n") * 2000, "too_large"),
        ("a.txt.gz", b"\n" * (9 << 20), "too_large"),
    ],
)
def test_left_out(tmp_path: Path, name: str, content: str | bytes | None, reason: str) -> None:
    path = put(tmp_path / name, content or "")
    if content is None:
        path.write_bytes(gzip.compress(prose(1).encode())[:-20])
    assert read_document(str(path), LIMIT) == reason


def test_unreadable_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_document(str(tmp_path / "gone.py"), LIMIT) == "unreadable_ENOENT"

    def refused(path: str) -> bytes:
        raise PermissionError(13, "denied", path)

    monkeypatch.setattr("machine_read.read_bytes", refused)  # tests may run as root, whom no mode refuses
    assert read_document(str(put(tmp_path / "a.py", code(1))), LIMIT) == "unreadable_EACCES"


def test_long_runs_of_white_space_take_no_long_time(tmp_path: Path) -> None:
    blank = (" " * 19_000 + "\n") * 40
    found = read_document(str(put(tmp_path / "a.txt", prose(1) + "\n" + blank + prose(2))), LIMIT)
    assert isinstance(found, Text)
    assert len(found.paragraphs) == 12


def test_text_is_cleaned(tmp_path: Path) -> None:
    path = put(tmp_path / "a.txt", b"\xef\xbb\xbf" + f"\n\n  {prose(1)}\r\n\n\n".encode())
    found = read_document(str(path), LIMIT)
    assert isinstance(found, Text)
    assert found.text == f"  {prose(1)}\n"
    assert len(found.paragraphs) == 6
    page = put(tmp_path / "doc.html", f"<body><p>{prose(2)}</p></body>")
    found = read_document(str(page), LIMIT)
    assert isinstance(found, Text)
    assert found.text.startswith(prose(2)[:60])


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/x/site-packages/a.pyi", "MachinePython"),
        ("/usr/share/man/man3/a.3pm.gz", "MachineManuals"),
        ("/usr/include/c++/12/vector", "MachineHeaders"),
        ("/usr/include/c++/12/bits/stl_map.h", "MachineHeaders"),
        ("/usr/share/doc/a/changelog.Debian.gz", "MachineNotices"),
        ("/x/site-packages/a-1.dist-info/LICENSE.txt", "MachineNotices"),
        ("/usr/share/doc/a/README.Debian", "MachineDocs"),
        ("/root/.rustup/toolchains/s/share/doc/rust/html/book/a.html", "MachineToolchainDocs"),
        ("/usr/lib/jvm/jdk/docs/a.md", "MachineToolchainDocs"),
        ("/usr/share/doc/a/logo.png", None),
        ("/usr/lib/libc.so", None),
    ],
)
def test_kinds(path: str, source: str | None) -> None:
    assert classify(path) == source


def test_walk_follows_no_links_and_opens_no_pipes(tmp_path: Path) -> None:
    outside = put(tmp_path / "outside/secret.py", code(1)).parent
    root = put(tmp_path / "root/b/inside.py", code(2)).parents[1]
    put(root / "a.py", code(3))
    put(root / "corpus/own.py", code(4))
    (root / "link.py").symlink_to(outside / "secret.py")
    (root / "folder").symlink_to(outside)
    os.mkfifo(root / "pipe.py")
    skipped: Counter[str] = Counter()
    found = list(walk(str(root), skipped, frozenset([str(root / "corpus")])))
    assert found == [f"{root}/a.py", f"{root}/b/inside.py"]
    assert skipped == {"symlink": 2, "not_a_file": 1}
    assert list(walk(str(root / "gone"), skipped, frozenset())) == []
    assert skipped["unreadable_folder_ENOENT"] == 1


def test_roots_within_others_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert checked_roots((tmp_path / "a/b", tmp_path / "a", tmp_path / "link")) == [
        (tmp_path / "a").resolve()
    ]
    with pytest.raises(DataFault, match="gone is not a folder"):
        checked_roots((tmp_path / "gone",))
    assert all(path.is_dir() for path in checked_roots(()))


def test_origins(options: Options, machine: Path) -> None:
    manifest = build_corpus(options)
    licence = str(machine / "usr/share/doc/cmd/copyright")
    by_name = {entry["name"]: (entry["documents"], entry["licence"]) for entry in manifest["origins"]}
    assert by_name == {
        "debian:cmd 2.0-1": (3, licence),
        "python:tool 1.5": (20, "MIT License"),
        # The other half of the modules is in no RECORD, and copyright files speak for their own folder.
        f"folder:{machine}/usr/share/doc/cmd": (1, licence),
        "unknown": (22, "unknown"),
    }
    assert sum(entry["text_bytes"] for entry in manifest["origins"]) == manifest["totals"]["text_bytes"]


def test_origins_of_licence_files_above(tmp_path: Path) -> None:
    put(tmp_path / "python3.12/LICENSE.txt", "PSF")
    put(tmp_path / "python3.12/json/__init__.py", "x")
    put(tmp_path / "other/x.py", "x")
    origins = Origins([tmp_path], tmp_path / "no-dpkg")
    folder = f"{tmp_path}/python3.12"
    assert origins.of(f"{folder}/json/__init__.py") == Origin(f"folder:{folder}", f"{folder}/LICENSE.txt")
    assert origins.of(f"{tmp_path}/other/x.py") == Origin(UNKNOWN, UNKNOWN)


def test_existing_folders_are_safe(options: Options, tmp_path: Path) -> None:
    first = build_corpus(options)
    with pytest.raises(DataFault, match=r"corpus exists; .*--overwrite"):
        build_corpus(options)
    second = build_corpus(replace(options, overwrite=True, seed=1))
    assert orjson.loads((options.out / "manifest.json").read_bytes()) == second != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "dpkg", "machine"]

    mine = put(tmp_path / "mine/thesis.txt", "all my work").parent
    for manifest in (b"", b"{", b"[]", b'{"tool": "other"}'):
        put(mine / "manifest.json", manifest)
        with pytest.raises(DataFault, match="no corpus made by"):
            build_corpus(replace(options, out=mine, overwrite=True))
    assert (mine / "thesis.txt").exists()
    (tmp_path / "new.tmp").mkdir()
    with pytest.raises(DataFault, match=r"new\.tmp exists"):
        build_corpus(replace(options, out=tmp_path / "new"))


def die(paths: list[str], max_document_bytes: int) -> list[Text | str]:
    os._exit(1)


def test_failures_leave_nothing_behind(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataFault, match=r"test got none of 46 documents"):
        build_corpus(replace(options, test_fraction=1e-9))

    def full(loose: str, path: str) -> dict[str, Any]:
        raise OSError(28, "No space left on device", path)

    with pytest.raises(ValueError, match=r"none\.model"):
        build_corpus(replace(options, tokenizer=tmp_path / "none.model"))
    monkeypatch.setattr(machine_text, "read_batch", die)
    with pytest.raises(DataFault, match="a worker process died"):
        build_corpus(replace(options, workers=2))
    monkeypatch.setattr(machine_text, "pack_shard", full)
    with pytest.raises(DataFault, match="no space left"):
        build_corpus(options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dpkg", "machine"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 0),
        ("train_shards", 0),
        ("max_repeated", 1.5),
        ("test_fraction", -0.1),
        ("test_fraction", 0.9),
    ],
)
def test_bad_options(options: Options, field: str, value: float) -> None:
    with pytest.raises(DataFault, match=field):
        replace(options, **{field: value})  # type: ignore[arg-type]


def test_command(options: Options, machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["corpus", "--from-machine", "--out", str(options.out), "--root", str(machine)]
    arguments += [
        "--validation-fraction",
        "0.2",
        "--test-fraction",
        "0",
        "--train-shards",
        "2",
        "--seed",
        "3",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "MachinePython" in printed
    assert "do not redistribute" in printed
    manifest = orjson.loads((options.out / "manifest.json").read_bytes())
    assert (manifest["options"]["seed"], manifest["options"]["test_fraction"]) == (3, 0.0)
    assert "test" not in {shard["path"].split("/")[0] for shard in manifest["shards"]}
    assert main(arguments) == 1
    assert "--overwrite" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["corpus", "--out", str(options.out)])


MANUAL = r""".\" a comment
.ie \n(.g .ds Aq \(aq
.el       .ds Aq '
.de XX
.B hidden
..
.TH "CMD" "1" "2026"
.SH NAME
cmd \- print \fBbold\fR words \(em it\*(Aqs \[u00E9]t\('e
and goes on
.SH OPTIONS
.TP
.BR \-a ", " \-\-all " " \fIx\fP
All of \s-1THEM\s0, with
.I care
.IP \(bu 2
one item
.PP
See
.UR https://example.org
the site
.UE .
.if t .B only printed
.if n \{\
.RS 4
.\}
.nf
  if (a \e n) {
      \&.run
  }
.fi
.if n \{\
.RE
.\}
.EQ
x sup 2
.EN
.TS
tab(:);
l l.
\fBname\fR:value
T{
long
cell
T}:end
.TE
"""


def test_manual_to_text() -> None:
    assert manual_to_text(MANUAL) == (
        "CMD(1)\n\nNAME\ncmd - print bold words — it's été and goes on\n\nOPTIONS\n\n"
        "-a, --all x\n    All of THEM, with care\n\n- one item\n\n"
        "See the site <https://example.org>.\n"
        "      if (a \\ n) {\n          .run\n      }\n"
        "name  value\nlong cell  end"
    )
    assert manual_to_text(".Dd May 1\n.Sh NAME\n.Nm cmd\n") == ""
    assert manual_to_text(".so man1/other.1\n") == ""
    unclosed = (".if t \\{\n.B x\n", ".de X\n.B y\n", ".TS\nl.\na\n", "a\\\n", "\\f", "\\", '.B "a')
    assert [manual_to_text(source) for source in unclosed] == ["", "", "a", "a", "f", "", "a"]
