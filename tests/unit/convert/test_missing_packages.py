"""Tests commands that need transformers if it is not installed, and what else they print with their results."""

import sys
import warnings

import pytest

from gsa_eval import model_options
from gsa_eval.commands import evaluate, export_hf, generate, import_hf

COMMANDS = {
    "evaluate": (evaluate, "--run r --name n"),
    "generate": (generate, "--run r --prompt x"),
    "export_hf": (export_hf, "--run r --out o"),
    "import_hf": (import_hf, "--hf h --out o"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_package_is_one_line(name, monkeypatch, capsys):
    command, words = COMMANDS[name]
    monkeypatch.setattr(model_options, "PACKAGES", ("sys", "a_package_that_is_not_there"))
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main()
    said = "the package a_package_that_is_not_there is not installed; run in the checkout: "
    assert capsys.readouterr().err == f"{said}pip install '.[hf]'\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_libraries_say_of_packages_that_nobody_needs_is_not_shown(name, tmp_path, monkeypatch, capsys):
    """megatron-core warns five times about Apex during import."""
    pytest.importorskip("transformers")
    command, words = COMMANDS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert command.main() == 2
        warnings.warn("Transformer Engine and Apex are not installed. Falling back", stacklevel=1)
        warnings.warn("Something else", stacklevel=1)
    said = [str(warning.message) for warning in shown]
    assert "Something else" in said
    assert [each for each in said if "not installed" in each] == []
    assert len(capsys.readouterr().err.splitlines()) == 1
