"""Commands whose models transformers knows, where it is not installed."""

from __future__ import annotations

import sys

import pytest

from gsa_train import convert
from gsa_train.commands import analyze, evaluate, export_hf, generate, import_hf

COMMANDS = {
    "evaluate": (evaluate, "--run r --name n"),
    "analyze": (analyze, "--run r --name n"),
    "generate": (generate, "--run r --prompt x"),
    "export_hf": (export_hf, "--run r --out o"),
    "import_hf": (import_hf, "--hf h --out o"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_package_is_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, words = COMMANDS[name]
    monkeypatch.setattr(convert, "PACKAGES", ("sys", "a_package_that_is_not_there"))
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    assert command.main() == 2
    said = (
        "the package a_package_that_is_not_there is not installed; run in the checkout: pip install '.[hf]'\n"
    )
    assert capsys.readouterr().err == said
