"""A folder of transformers that does not fit together is refused in one line, whoever reads it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from gsa_data.tokenize import Tokenizer
from gsa_hf import GSAConfig
from gsa_train.commands import analyze, evaluate, generate, import_hf
from gsa_train.convert.tokenizer import write_tokenizer
from helpers.converted import TOKENIZER
from helpers.hf import SIZES, tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read_hf") / "whole"
    tokenizer = Tokenizer(TOKENIZER)
    tiny_model(vocab_size=tokenizer.vocab_size).save_pretrained(folder)
    write_tokenizer(tokenizer, folder, SIZES["max_position_embeddings"])
    return folder


def config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def content(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a gate that the weights have": (config(output_gate=False), "output_gate_proj"),
    "a gate that they have not": (config(key_gate=True), "key_gate_proj"),
    "fewer layers": (config(num_hidden_layers=1, layer_types=None), "model.layers.1."),
    "another width": (config(intermediate_size=40), "has the shape"),
    "a field out of its bounds": (config(index_topk=-4), "config.json: index_topk is -4; pass at least 1"),
    "a field of another kind": (config(index_topk="many"), "index_topk"),
    "no such activation": (config(gate_activation="tanh"), "gate_activation"),
    "half a config": (content("config.json", "{"), "config.json is damaged"),
    "a list": (content("config.json", "[]"), "config.json is damaged"),
    "weights cut off": (cut, "model.safetensors is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(
    name: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = tmp_path / "wrong", tmp_path / "out"
    shutil.copytree(whole, folder)
    change, expected = WRONG[name]
    change(folder)
    text = ["--name", "n", "--text", "The man and the sea"]
    for command, words in (
        (generate, ["--prompt", "The man", "--max-new-tokens", "2"]),
        (evaluate, ["--name", "n", "--data", str(Path(TOKENIZER).parent / "validation"), "--out", str(out)]),
        (analyze, [*text, "--out", str(out)]),
        (import_hf, ["--out", str(out)]),
    ):
        monkeypatch.setattr(sys, "argv", ["command", "--hf", str(folder), *words])
        assert command.main() == 2, command.__name__
        said = capsys.readouterr().err.splitlines()
        assert expected in said[-1], command.__name__
        assert str(folder) in said[-1], command.__name__
        assert not out.exists()


def test_tied_embeddings_and_dense_layers_are_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(TOKENIZER)
    changes = {"tie_word_embeddings": True, "layer_types": ["full_attention", GSAConfig().layer_types[0]]}
    tiny_model(vocab_size=tokenizer.vocab_size, **changes).save_pretrained(tmp_path / "hf")
    write_tokenizer(tokenizer, tmp_path / "hf", SIZES["max_position_embeddings"])
    for command, words in (
        (generate, ["--prompt", "The man", "--max-new-tokens", "2"]),
        (
            analyze,
            ["--name", "n", "--text", "The man", "--out", str(tmp_path / "out"), "gsa.attention=dense"],
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["command", "--hf", str(tmp_path / "hf"), *words])
        assert command.main() == 0
