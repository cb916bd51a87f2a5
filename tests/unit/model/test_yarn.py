"""Compares `model.rope_scaling` with the angles of transformers' `rope_parameters`, wherever angles are computed."""

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gsa_eval.convert.export_hf import export_hf
from gsa_eval.convert.hf_config import from_hf_config, to_hf_config
from gsa_eval.settings import apply_settings
from gsa_hf import GSAConfig
from gsa_hf.modeling_gsa import rotary_config_of_indexer
from gsa_kernels.rotary import YarnScaling
from gsa_train.config import RopeScalingConfig
from gsa_train.distributed.context_sharding import ContextSharding
from gsa_train.model.context_parallel import local_part
from gsa_train.model.rotary import LocalRotaryEmbedding
from helpers.converted import (
    config_of,
    model_with_weights_of,
    random_model,
    save,
    some_tokens,
    training_logits,
)
from helpers.single_rank import SPARSE, tiny_config, tiny_model

SCALINGS: dict[str, tuple[dict[str, Any], RopeScalingConfig]] = {
    "32K to 128K": ({"head_dim": 128, "rope_base": 1e6}, RopeScalingConfig("yarn", 4.0, 32768)),
    "4K to 20K": ({"head_dim": 64, "rope_base": 1e4}, RopeScalingConfig("yarn", 5.0, 4096)),
    "other borders": (
        {"head_dim": 64, "rope_base": 1e4},
        RopeScalingConfig("yarn", 3.0, 512, 20.0, 2.0, 1.25),
    ),
    "half of the channels": (
        {"head_dim": 64, "rope_base": 1e4, "rotary_percent": 0.5},
        RopeScalingConfig("yarn", 8.0, 1024),
    ),
    "two borders in one channel": ({"head_dim": 8, "rope_base": 1e4}, RopeScalingConfig("yarn", 2.0, 6)),
    "no extension": ({"head_dim": 8, "rope_base": 1e4}, RopeScalingConfig("yarn", 1.0, 64)),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rates_and_attention_factor_match_transformers(name: str) -> None:
    fields, scaling = SCALINGS[name]
    config = tiny_config(
        [SPARSE],
        model={"num_layers": 1, **fields, "rope_scaling": scaling},
        gsa={"indexer_rope": True, "indexer_dim": 16},
    )
    model, theirs = tiny_model(config), to_hf_config(config)
    rates, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    # Values agree except for the last bit: 1 / (factor * x) there, 1 / x / factor here.
    exact: dict[str, Any] = {"rtol": 2.5e-7, "atol": 0}
    torch.testing.assert_close(model.gpt.rotary_pos_emb.inv_freq, rates, **exact)
    assert model.attentions[0].rotary_magnitude == pytest.approx(magnitude, rel=1e-12)
    indexer = model.attentions[0].indexer
    assert indexer is not None
    of_indexer, none = ROPE_INIT_FUNCTIONS["yarn"](rotary_config_of_indexer(theirs))
    torch.testing.assert_close(indexer.rotary.inv_freq, of_indexer, **exact)
    assert none == 1
    assert from_hf_config(theirs).model == config.model


def test_each_rank_of_a_sequence_has_the_angles_of_its_positions() -> None:
    yarn, group = YarnScaling(4.0, 16, 3.0, 0.2), Mock()
    options: dict[str, Any] = {
        "kv_channels": 8,
        "rotary_percent": 1.0,
        "use_cpu_initialization": True,
        "cp_group": group,
    }
    whole = LocalRotaryEmbedding(ContextSharding(), yarn, 100.0, **options)(32)
    plain = LocalRotaryEmbedding(ContextSharding(), None, 100.0, **options)(32)
    assert not torch.equal(whole, plain)
    for rank in range(2):
        cut = ContextSharding(rank, 2, 4)
        part = LocalRotaryEmbedding(cut, yarn, 100.0, **options)(32)
        assert torch.equal(part, local_part(whole, cut, dim=0))


def test_tables_of_the_fused_heads_have_the_factor() -> None:
    runtime, angles = tiny_model(tiny_config([SPARSE])).runtime, torch.randn(6, 1, 1, 4).repeat(1, 1, 1, 2)
    cos, sin = runtime.rotary_tables(angles, 1.25)
    assert torch.equal(cos, 1.25 * angles[:, 0, 0, :4].cos())
    assert torch.equal(sin, 1.25 * angles[:, 0, 0, :4].sin())


def test_a_run_goes_on_with_another_base_and_with_yarn(tmp_path: Path) -> None:
    """A small version of 4K -> 32K -> 128K: the next run has another base and length. Its first logits equal an
    evaluation of the earlier export with this base and YaRN."""
    first = config_of("GSA")
    model = random_model(first)
    checkpoint = save(model, first, tmp_path / "checkpoints")
    folder = export_hf(checkpoint, tmp_path / "out").folder
    assert "| rotary embedding | base 10000 |" in (folder / "README.md").read_text()
    tokens = some_tokens()
    seen = [training_logits(model, SPARSE, tokens)]
    settings: list[str] = []
    scaling = RopeScalingConfig("yarn", 4.0, 16, 3.0, 0.2)
    stages: list[tuple[dict[str, Any], list[str]]] = [
        ({"rope_base": 1e6}, ["model.rope_base=1e6"]),
        (
            {"rope_base": 1e6, "rope_scaling": scaling},
            [
                "model.rope_scaling.rope_type=yarn",
                "model.rope_scaling.factor=4",
                "model.rope_scaling.original_max_position_embeddings=16",
                "model.rope_scaling.beta_fast=3",
                "model.rope_scaling.beta_slow=0.2",
            ],
        ),
    ]
    for changes, more in stages:
        settings += more
        longer = config_of("GSA", seq_len_tokens=48, micro_batch_size=1, global_batch_size=2)
        longer = dataclasses.replace(longer, model=dataclasses.replace(first.model, **changes))
        logits = training_logits(model_with_weights_of(checkpoint, longer), SPARSE, tokens)
        config = apply_settings(GSAConfig.from_pretrained(folder), settings)
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, config=config, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            torch.testing.assert_close(logits, theirs(tokens).logits.float(), rtol=1e-5, atol=1e-5)
        assert all((logits - before).abs().max() > 1e-3 for before in seen)
        seen.append(logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 0.5, "original_max_position_embeddings": 16}, "factor is 0.5; pass at least 1"),
        ({"factor": math.nan, "original_max_position_embeddings": 16}, "factor is nan"),
        ({"factor": 2.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (
            {"factor": 2.0, "original_max_position_embeddings": 16, "beta_slow": 40.0},
            "beta_fast is 32.0 and beta_slow 40.0",
        ),
        (
            {"factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": 0.0},
            "attention_factor is 0.0; pass a positive number, or None",
        ),
    ],
)
def test_wrong_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YarnScaling(**fields)
