"""Tests model folders: written, read, and run without this repository."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import gsa_hf
from gsa_hf import DENSE_LAYER, INDEXED_LAYER, GSAConfig, GSAForCausalLM, GSAModel
from gsa_hf.configuration_gsa import RENAMED
from helpers.hf import SIZES, distinct_tokens, tiny_model

ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
model = AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True).eval()
assert not any(name.split(".")[0] in ("gsa_hf", "gsa_kernels", "gsa_train") for name in sys.modules), "the repository"
assert type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "Trainer would smooth unshifted labels"
tokens = torch.load({tokens!r})
with torch.no_grad():
    torch.save(model(tokens).logits, {logits!r})
torch.save(model.generate(tokens, max_new_tokens=12, do_sample=False, no_repeat_ngram_size=1), {generated!r})
try:
    AutoModelForCausalLM.from_pretrained({folder!r}, trust_remote_code=True, attn_implementation="gsa")(tokens)
except ValueError as error:
    assert "move it to a CUDA device, or pass 'sdpa'" in str(error), error
else:
    raise AssertionError("the kernels ran on a CPU")
"""


@pytest.mark.parametrize("name", ["standard", "window-rope-reuse"])
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    model, tokens = tiny_model(name, indexer_temperature="learned"), distinct_tokens(1, 20)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(loaded) is GSAForCausalLM
    assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is GSAModel
    assert type(AutoConfig.from_pretrained(tmp_path)) is GSAConfig
    with pytest.raises(Exception, match="k_min is 20; pass at most k_max 16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, k_min=20)


def test_dtypes_and_tied_weights_are_loaded(tmp_path: Path) -> None:
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path)
    loaded = GSAForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    average = loaded.model.layers[0].self_attn.indexer.variance_ema
    assert average.dtype == torch.float32
    assert float(average) == float(torch.tensor(0.01))


def test_fields_of_earlier_names_are_refused_with_the_new_ones(tmp_path: Path) -> None:
    """transformers keeps and ignores unknown fields, so that the model would have other budgets."""
    with pytest.raises(ValueError, match=r"index_norm is now indexer_norm: rename it in config\.json or in"):
        GSAConfig(**SIZES, index_norm=True)
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = path.read_text()
    path.write_text(whole.replace('"k_min"', '"index_topk_min"').replace('"k_max"', '"index_topk_max"'))
    message = "index_topk_min is now k_min; index_topk_max is now k_max: rename it"
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)
    path.write_text(whole.replace("{", '{"selection_query": "first", "key_group_size": 1,', 1))
    assert not {"selection_query", "key_group_size"} & AutoConfig.from_pretrained(tmp_path).to_dict().keys()
    assert set(RENAMED.values()) < {field.name for field in dataclasses.fields(GSAConfig)} - set(RENAMED)
    names = ["deepseek_sparse_attention", "indexed_attention"]
    assert GSAConfig(**SIZES, layer_types=names).layer_types == [INDEXED_LAYER] * 2


@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
def test_weights_that_wait_on_the_disk(name: str, tmp_path: Path) -> None:
    """accelerate provides them only in the forward pass of their module."""
    pytest.importorskip("accelerate")
    model, tokens = tiny_model(name), distinct_tokens(2, 20)
    model.save_pretrained(tmp_path / "model")
    device_map = {f"model.{part}": "cpu" for part, _ in model.model.named_children()}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={**device_map, "model.layers": "disk", "lm_head": "cpu"},
        offload_folder=tmp_path / "waiting",
        attn_implementation="eager",
    )
    assert loaded.model.layers[0].self_attn.indexer.score_bias.is_meta
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_folder_with_code_runs_without_the_repository(tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    model, tokens = tiny_model("window-rope-reuse", attention="sdpa"), distinct_tokens(2, 14)
    gsa_hf.GSAConfig.register_for_auto_class()
    gsa_hf.GSAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    try:
        model.save_pretrained(folder)
    finally:
        gsa_hf.GSAConfig._auto_class = gsa_hf.GSAForCausalLM._auto_class = None
    assert json.loads((folder / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "configuration_gsa.GSAConfig",
        "AutoModelForCausalLM": "modeling_gsa.GSAForCausalLM",
    }
    files = {name: str(tmp_path / name) for name in ("tokens", "logits", "generated")}
    torch.save(tokens, files["tokens"])
    left_out = ("PYTHONPATH", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    # -S and only the package folders: the .pth of an editable installation would find this repository.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import sys; sys.path += {packages!r}\n" + ALONE.format(folder=str(folder), **files)
    run = [sys.executable, "-S", "-c", code]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        torch.testing.assert_close(torch.load(files["logits"]), model(tokens).logits)
    expected = model.generate(tokens, max_new_tokens=12, do_sample=False, no_repeat_ngram_size=1)
    assert torch.equal(torch.load(files["generated"]), expected)


def test_a_saved_folder_has_the_code_that_it_names(tmp_path: Path) -> None:
    """The source folder names code, and the package was imported in its place."""
    model = tiny_model()
    model.config.auto_map = {
        "AutoConfig": "configuration_gsa.GSAConfig",
        "AutoModelForCausalLM": "modeling_gsa.GSAForCausalLM",
    }
    model.save_pretrained(tmp_path)
    names = {path.name for path in Path(gsa_hf.__file__).parent.glob("*_gsa.py")}
    assert {path.name for path in tmp_path.glob("*.py")} == names


GATE: dict[str, Any] = {"projection_gate": True, "gate_sharing": "head_shared"}
DENSE_FIRST: dict[str, Any] = {"layer_types": [DENSE_LAYER, INDEXED_LAYER], "index_topk_freq": 2}
FOO: dict[str, Any] = {"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; pass a multiple of num_key_value_heads 3"),
        ({"k_min": 20}, "k_min is 20; pass at most k_max 16"),
        (
            {"selection_block": 4},
            "selection_block is 4: removed; pass 1, or use release studies-0.1 or commit 56919bd1",
        ),
        ({"index_topk": 0}, "index_topk is 0; pass at least 1"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0; pass at least 1"),
        (
            {"selection_query": "previous_mean"},
            "removed; pass 'first', or use release studies-0.1 or commit 56919bd1",
        ),
        (
            {"indexer_pool": 4},
            "indexer_pool is 4: removed; pass 1, or use release studies-0.1 or commit 56919bd1",
        ),
        (
            {"key_group_size": 16},
            "key_group_size is 16: removed; pass 1, or use release studies-0.1 or commit 56919bd1",
        ),
        ({"output_transform": "silu"}, "output_transform is 'silu' with output_gate; pass 'none', or"),
        (GATE, "True with gate_granularity 'elementwise' and gate_sharing 'head_shared'"),
        ({"indexer_temperature": "warm"}, "is 'warm'; pass a positive number or 'learned'"),
        ({"adaptive_k": "up"}, "adaptive_k"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; pass 'silu'"),
        ({"hidden_size": -1}, "hidden_size is -1; pass at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; pass at least 1"),
        ({"dtype": "bf16"}, "dtype is 'bf16'; pass one of torch, such as 'bfloat16'"),
        (FOO, "rope_parameters.rope_type is 'foo'; pass 'default' or one of"),
        ({"indexer_loss_coef": -1.0}, "indexer_loss_coef is -1.0; pass at least 0"),
        ({"layer_types": [DENSE_LAYER, "sliding_attention"]}, "layer_types.1. is 'sliding_attention'; pass"),
        (DENSE_FIRST, "selection of layer 0, which is dense"),
    ],
)
def test_configurations_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message):
        GSAConfig(**{**SIZES, **fields})
