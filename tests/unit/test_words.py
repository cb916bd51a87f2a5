"""Tests that source, comments and pages use the field's terms, with one meaning each, as in the literature."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Folders and files that the list applies to. Add yours, and never remove a folder.
COVERED = ["benchmarks", "configs", "data", "docs", "examples", "gsa_eval", "gsa_hf", "gsa_study"]
COVERED += ["gsa_train", "kernels", "launch", "studies", "tests"]
COVERED += ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
REFUSED = {
    "behind": "after, below, following or fused into",
    "anew": "again",
    "but for": "except",
    "so many": "the number",
    "as many as": "the number",
    "those of": "the noun again",
    "that of": "the noun again",
    "of which": "the noun again",
    "visible keys": "causal keys",
    "words of a mask": "packed mask",
}
# Real uses: an earlier value of a field, texts of a probe and of a request, this file's table.
ALLOWED = [("gsa_train/config/other_names.py", "anew"), ("tests/unit/test_config.py", "anew")]
ALLOWED += [("tests/helpers/request_files.py", "of which")]
ALLOWED += [("tests/unit/test_words.py", each) for each in REFUSED]
# A line break, a comment mark or the quotes of two joined strings may separate the words.
PATTERNS = {
    words: re.compile(
        r"(?<![a-zA-Z_])" + r"""[\s#>"']+f?["']?""".join(words.split()) + r"(?![a-zA-Z_])", re.I
    )
    for words in REFUSED
}


def refused_words(path: str, text: str) -> list[str]:
    """Return one line for each refused word in ``text``: ``path:line: words: use ...``."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: '{words}': use {REFUSED[words]}"
        for words, pattern in PATTERNS.items()
        if (path, words) not in ALLOWED
        for match in pattern.finditer(text)
    ]


def test_covered_folders_use_the_fields_words() -> None:
    command = ["git", "ls-files", "-z", *COVERED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    files = [path for path in listed if path.endswith((".py", ".md", ".yaml", ".sh", ".toml"))]
    assert len(files) > 300
    found = [line for path in files for line in refused_words(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)
