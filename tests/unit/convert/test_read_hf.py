"""Tests that each reader rejects an inconsistent transformers folder with a one-line error."""

import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from gsa_data.tokenize import Tokenizer
from gsa_eval.commands import evaluate, generate, import_hf
from gsa_eval.convert.read_hf import named_eos, read_gsa_model, read_hf_config
from gsa_eval.convert.tokenizer import write_tokenizer
from gsa_hf import GSAConfig, GSAForCausalLM
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


def pipe(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def weights(alter: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        alter(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def in_shards(folder: Path) -> None:
    """Write the whole model as one shard with an index. Also write a part of the model as a file without an index.
    transformers prefers the file without an index."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
    index(dict.fromkeys(tensors, "model-00001-of-00001.safetensors"))(folder)
    save_file({NORM: tensors[NORM]}, folder / "model.safetensors", {"format": "pt"})


def index(weight_map: object) -> Callable[[Path], object]:
    return content("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


def index_alone(weight_map: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        index(weight_map)(folder)

    return change


NESTED = "[" * 100_000 + "]" * 100_000
NORM = "model.norm.weight"
INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
SPECIAL = "special_tokens_map.json"
UNNAMED = "weight_map names no file for each tensor"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a gate that the weights have": (config(output_gate=False), "output_gate_proj"),
    "a gate that they have not": (config(key_gate=True), "key_gate_proj"),
    "fewer layers": (config(num_hidden_layers=1, layer_types=None), "model.layers.1."),
    "another width": (config(intermediate_size=40), "has the shape"),
    "a field out of its bounds": (config(index_topk=-4), "config.json: index_topk = -4: less than 1"),
    "a field of another kind": (config(index_topk="many"), "index_topk"),
    "no such activation": (config(gate_activation="tanh"), "gate_activation"),
    "half a config": (content("config.json", "{"), "config.json is damaged"),
    "a list": (content("config.json", "[]"), "config.json is damaged"),
    "a list of settings": (
        content(GENERATION, "[]"),
        f"{GENERATION} is damaged: it holds no fields; copy it",
    ),
    "half a tokenizer's settings": (
        content("tokenizer_config.json", "{"),
        "tokenizer_config.json is damaged",
    ),
    "weights cut off": (cut, "model.safetensors is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "a pipe for a config": (pipe("config.json"), "config.json: is a pipe, no regular file"),
    "a pipe for weights": (pipe("model.safetensors"), "model.safetensors: is a pipe"),
    "a pipe for a tokenizer": (pipe("tokenizer.model"), "tokenizer.model: is a pipe"),
    "a pipe for a file of transformers alone": (pipe(SPECIAL), f"{SPECIAL}: is a pipe"),
    "a nested config": (content("config.json", f'{{"a": {NESTED}}}'), "nested more than 64 levels deep"),
    "a nested file of transformers": (content(GENERATION, NESTED), f"{GENERATION} is damaged"),
    "a nested index": (content(INDEX, NESTED), "index.json is damaged: lists and objects"),
    "infinity": (config(rms_norm_eps=float("inf")), "config.json: rms_norm_eps is not finite"),
    "NaN by transformers": (config(rms_norm_eps={"__float__": "NaN"}), "rms_norm_eps is not finite"),
    "layers without end": (config(num_hidden_layers=10**11, layer_types=None), "num_hidden_layers = 1000000"),
    "a size of 100 bits": (config(hidden_size=10**30), "hidden_size has more than 62 bits"),
    "a size of 60 bits": (
        config(vocab_size=10**18),
        f"config.json: vocab_size = {10**18}: more than 131072, the",
    ),
    "a negative size": (
        config(hidden_size=-1),
        "config.json: hidden_size = -1: less than 1; give the number",
    ),
    "a negative size of experts": (
        config(shared_expert_intermediate_size=-1),
        "size = -1: less than 0; give",
    ),
    "a dtype of nothing": (config(dtype=[]), "config.json: "),
    "weights of another name": (config(transformers_weights="other"), "transformers_weights = other"),
    "quantised weights": (config(quantization_config={"quant_method": "fp8"}), "quantization_config = "),
    "NaN in the weights": (weights(lambda all: all[NORM].fill_(math.nan)), f"{NORM} holds NaN or infinity"),
    "integers": (weights(lambda all: all.update({NORM: all[NORM].int()})), f"{NORM} has dtype int32"),
    "another output layer, tied": (config(tie_word_embeddings=True), "true, but lm_head.weight"),
    "a part of the weights before the index": (in_shards, "the weights"),
    "an index of numbers": (index_alone({NORM: 3}), UNNAMED),
    "an index of a list": (index_alone([NORM]), UNNAMED),
    "an index of nothing": (index_alone({}), UNNAMED),
    "an index that leads to the folder": (index_alone({NORM: ".."}), "which leads out of the folder"),
    "an index that leads out of it": (index_alone({NORM: "../model"}), "which leads out of the folder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name, whole, tmp_path, monkeypatch, capsys):
    folder, out = tmp_path / "wrong", tmp_path / "out"
    shutil.copytree(whole, folder)
    change, expected = WRONG[name]
    change(folder)
    for command, words in (
        (generate, ["--prompt", "The man", "--max-new-tokens", "2"]),
        (evaluate, ["--name", "n", "--data", str(Path(TOKENIZER).parent / "validation"), "--out", str(out)]),
        (import_hf, ["--out", str(out)]),
    ):
        monkeypatch.setattr(sys, "argv", ["command", "--hf", str(folder), *words])
        assert command.main() == 2, command.__name__
        said = capsys.readouterr().err.splitlines()
        assert expected in said[-1], command.__name__
        assert str(folder) in said[-1], command.__name__
        assert not out.exists()


def test_tied_embeddings_and_dense_layers_are_no_contradiction(tmp_path, monkeypatch):
    tokenizer = Tokenizer(TOKENIZER)
    changes = {"tie_word_embeddings": True, "layer_types": ["full_attention", GSAConfig().layer_types[0]]}
    tiny_model(vocab_size=tokenizer.vocab_size, **changes).save_pretrained(tmp_path / "hf")
    write_tokenizer(tokenizer, tmp_path / "hf", SIZES["max_position_embeddings"])
    words = ["--prompt", "The man", "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, "argv", ["command", "--hf", str(tmp_path / "hf"), *words])
    assert generate.main() == 0


def test_no_code_of_a_folder_runs(whole, tmp_path, monkeypatch, capsys):
    """The code of a folder does not run even if the standard input, which transformers asks, says yes."""
    folder = shutil.copytree(whole, tmp_path / "hf")
    ran = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "tokenizer_class": "Mine"}
    path.write_text(json.dumps({**settings, "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}))
    config(attn_implementation="kernels-community/none", auto_map={"AutoConfig": "mine.Mine"})(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\ny\n"))
    words = ["--prompt", "The man", "--max-new-tokens", "2"]
    monkeypatch.setattr(sys, "argv", ["command", "--hf", str(folder), *words])
    assert generate.main() == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--hf {folder}: its tokenizer is code of the folder, which is never run here" in said
    monkeypatch.setattr(sys, "argv", ["command", "--hf", str(folder), "--out", str(tmp_path / "in")])
    assert import_hf.main() == 0  # it reads only the tokenizer's file
    assert sys.stdin.read() == "y\ny\ny\n"
    assert not ran.exists()
    path.write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    monkeypatch.setattr(sys, "argv", ["command", "--hf", str(folder), *words])
    assert generate.main() == 0  # with plain torch, whatever kernel the config names


def test_an_end_of_documents_that_is_no_text_is_refused(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "hf")
    for wrong in (5, {"content": 5}, ["</s>"]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": wrong}))
        with pytest.raises(ValueError, match=r"tokenizer_config.json: eos_token = .*: is not text"):
            named_eos(folder)


def test_of_two_sets_of_weights_the_one_that_transformers_reads_counts(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    zeros = {name: 0 * each for name, each in tensors.items()}
    save_file(zeros, folder / "shard.safetensors", {"format": "pt"})
    index(dict.fromkeys(tensors, "shard.safetensors"))(folder)
    found = read_hf_config(folder, [GSAConfig.model_type])
    model = read_gsa_model(folder, found, found, "sdpa")
    theirs = GSAForCausalLM.from_pretrained(folder)
    for name, each in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], each), name
        assert name not in tensors or torch.equal(tensors[name], each)
