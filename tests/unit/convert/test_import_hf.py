"""Tests dense transformers models as GSA models: equal first loss, further training, and errors."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gsa_eval.commands import import_hf as command
from gsa_eval.convert.dense_models import OPEN_BIAS
from gsa_eval.convert.export_hf import export_hf
from gsa_eval.convert.import_hf import TokenizerChoice, import_hf
from gsa_train.checkpoint.files import find_checkpoint
from gsa_train.config import Config, load_config
from helpers.converted import (
    TOKENIZER,
    VOCABULARY,
    hf_logits,
    model_with_weights_of,
    some_tokens,
    training_logits,
)
from helpers.single_rank import DENSE, tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.2, "eos_token_id": 2,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, **YARN}
DENSE_MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama, YaRN": lambda: LlamaConfig(
        **SIZES, rope_parameters={**YARN_ROPE, "mscale": 1.5, "mscale_all_dim": 0.5}
    ),
    "llama, tied": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=16, sliding_window=64),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3, YaRN": lambda: Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN_ROPE),
}


def dense_model(name: str, folder: Path) -> PreTrainedModel:
    """Save a model with random norms and biases, and a tokenizer."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(DENSE_MODELS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    shutil.copyfile(TOKENIZER, folder / "tokenizer.model")
    return model


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()


def phase_config(imported: Config, phases: list[Any]) -> Config:
    tiny = tiny_config(phases)
    train = dataclasses.replace(tiny.train, seq_len_tokens=imported.train.seq_len_tokens)
    sections = {"model": imported.model, "gsa": imported.gsa, "data": imported.data, "train": train}
    return dataclasses.replace(tiny, **sections)


@pytest.mark.parametrize("name", DENSE_MODELS)
def test_the_first_loss_matches_the_dense_model_and_it_leaves_as_a_gsa_model(name, tmp_path):
    theirs, tokens = dense_model(name, tmp_path / "hf"), some_tokens()
    with torch.no_grad():
        expected = theirs(tokens).logits.float()
    imported = import_hf(tmp_path / "hf", tmp_path / "in")
    config = phase_config(imported, [DENSE])
    logits = training_logits(model_with_weights_of(tmp_path / "in", config), DENSE, tokens)
    assert loss_of(logits, tokens) == pytest.approx(loss_of(expected, tokens), rel=1e-6)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    out = export_hf(tmp_path / "in", tmp_path / "out").folder
    assert json.loads((out / "config.json").read_text())["model_type"] == "gsa"
    torch.testing.assert_close(hf_logits(out, tokens), expected, rtol=1e-4, atol=1e-4)
    assert loss_of(hf_logits(out, tokens), tokens) == pytest.approx(loss_of(expected, tokens), rel=1e-6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "hf"
    dense_model("llama", folder)
    return folder


def test_open_gates_change_no_bit(llama: Path, tmp_path: Path) -> None:
    tokens, logits = some_tokens(), {}
    assert torch.sigmoid(torch.tensor(OPEN_BIAS)) == 1
    assert torch.sigmoid(torch.tensor(OPEN_BIAS, dtype=torch.bfloat16).float()) == 1
    for gates in ("none", "open"):
        imported = import_hf(llama, tmp_path / gates, gates=gates)
        assert imported.gsa.output_gate == imported.gsa.value_gate == (gates == "open")
        model = model_with_weights_of(tmp_path / gates, phase_config(imported, [DENSE]))
        logits[gates] = training_logits(model, DENSE, tokens)
    assert torch.equal(logits["open"], logits["none"])


def test_the_config_to_start_from_loads(llama: Path, tmp_path: Path) -> None:
    import_hf(llama, tmp_path / "in", seq_len_tokens=32)
    config = load_config(tmp_path / "in" / "config.yaml")
    assert config.model.rope_base == 5e5
    assert config.train.seq_len_tokens == 32
    assert config.gsa.attention == "dense"
    assert config.checkpoint.initial_weights == str(tmp_path / "in")
    assert Path(config.data.tokenizer).is_file()
    assert find_checkpoint(tmp_path / "in") == tmp_path / "in"
    (tmp_path / "in" / "config.yaml").write_text("model: {}")  # the user's file
    model_with_weights_of(tmp_path / "in", phase_config(config, [DENSE]))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {**ROPE, "rope_type": "linear", "factor": 2.0}
PARTS = {**ROPE, "rope_type": "yarn", **YARN, "truncate": False}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type = gpt2: unknown architecture; give a model of llama"),
    ({"attention_bias": True}, "attention_bias = True: biases on all projections"),
    ({"mlp_bias": True}, "mlp_bias = True: biases in the feed-forward layer"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: a softcap"),
    ({"hidden_act": "gelu"}, "hidden_act = gelu: a GSA model has silu"),
    ({"rope_parameters": LINEAR}, "rope_type = linear: a GSA model has the default and yarn"),
    ({"rope_parameters": PARTS}, "truncate = false: YaRN of a GSA model has whole channels"),
    ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "0.5: llama of transformers turns all"),
    (
        {"model_type": "mistral", "sliding_window": 16},
        "= 16: shorter than the 64.*--seq-len-tokens 16 or less",
    ),
    ({"model_type": "qwen3_next"}, "model_type = qwen3_next: unknown architecture"),
    ({"num_key_value_heads": 0}, "config.json: num_key_value_heads = 0: less than 1; give the number of the"),
    (
        {"num_attention_heads": 10**18},
        "num_attention_heads = 10+: more than 131072, the numbers in the largest",
    ),
    ({"vocab_size": 4000}, "vocab_size = 4000: .* has 4096 tokens, more than the embedding has rows"),
    ({"intermediate_size": 40}, r"mlp.gate_proj.weight has the shape \[48, 32\], and \[40, 32\]"),
    ({"model_type": "qwen2"}, "self_attn.q_proj.bias: missing in the weights; copy the folder"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_what_a_gsa_model_cannot_represent_is_refused(fields, message, llama, tmp_path):
    folder = tmp_path / "hf"
    shutil.copytree(llama, folder)
    change(folder, **fields)
    with pytest.raises(ValueError, match=message) as error:
        import_hf(folder, tmp_path / "in")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "in").exists()


def second_shard(folder: Path) -> Path:
    return next(folder.glob("model-00002-*"))


def renamed(folder: Path) -> None:
    tensors = load_file(second_shard(folder))
    tensors["other"] = tensors.pop(min(tensors))
    save_file(tensors, second_shard(folder))


def one_more(folder: Path) -> None:
    shard, index = second_shard(folder), folder / "model.safetensors.index.json"
    save_file({**load_file(shard), "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, shard)
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.0.self_attn.q_proj.bias"] = shard.name
    index.write_text(json.dumps(content))


def pickles(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    # test_read_hf.py damages folders of GSA models.
    "without a shard": (
        lambda folder: second_shard(folder).unlink(),
        "model-00002-of-.*: the shard is missing; copy",
    ),
    "renamed": (renamed, "holds other tensors than .*index.json says: .* is (not in|only in)"),
    "one more": (one_more, "q_proj.bias: in the weights, but a GSA model of its config.json has no"),
    "pickles": (pickles, "has pytorch_model.bin, a pickle, which is not read; give a folder with model.safe"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_altered_weights_are_refused(name: str, llama: Path, tmp_path: Path) -> None:
    folder, (damage, message) = tmp_path / "hf", DAMAGES[name]
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    AutoModelForCausalLM.from_pretrained(llama).save_pretrained(folder, max_shard_size="300KB")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        import_hf(folder, tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_without_a_tokenizer_one_is_asked_for(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no tokenizer\.model; give .* by --tok"):
        import_hf(folder, tmp_path / "in")
    config = import_hf(folder, tmp_path / "in", tokenizer=TokenizerChoice(Path(TOKENIZER), "<s>"))
    assert config.data.eos_token == "<s>"


def test_the_command(llama, tmp_path, monkeypatch, capsys):
    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["import_hf.py", "--hf", str(llama), "--out", *words])
        return command.main()

    assert run(str(tmp_path / "in"), "--gates", "open") == 0
    assert "start from" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "in" / "config.yaml").read_text())["gsa"]["gate_bias_init"] == OPEN_BIAS
    assert run(str(tmp_path / "in")) == 2
    assert "exists and is not empty" in capsys.readouterr().err
