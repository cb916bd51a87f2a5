"""Compares `model.rope_scaling` with the angles of transformers' `rope_parameters`, in the model and its indexer."""

import math
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gsa_eval.convert.hf_config import from_hf_config, to_hf_config
from gsa_hf.modeling_gsa import rotary_config_of_indexer
from gsa_kernels.rotary import YarnScaling
from gsa_train.config import RopeScalingConfig
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
    # The last bit may differ: transformers computes 1 / (factor * x), and we compute 1 / x / factor.
    exact: dict[str, Any] = {"rtol": 2.5e-7, "atol": 0}
    torch.testing.assert_close(model.gpt.rotary_pos_emb.inv_freq, rates, **exact)
    assert model.attentions[0].rotary_magnitude == pytest.approx(magnitude, rel=1e-12)
    indexer = model.attentions[0].indexer
    of_indexer, none = ROPE_INIT_FUNCTIONS["yarn"](rotary_config_of_indexer(theirs))
    torch.testing.assert_close(indexer.rotary.inv_freq, of_indexer, **exact)
    assert none == 1
    assert from_hf_config(theirs).model == config.model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((0.5, 16), "factor is 0.5; pass at least 1"),
        ((math.nan, 16), "factor is nan"),
        ((2.0, 0), "original_max_position_embeddings is 0"),
        ((2.0, 16, 32.0, 40.0), "beta_fast is 32.0 and beta_slow 40.0"),
        ((2.0, 16, 32.0, 1.0, 0.0), "attention_factor is 0.0; pass a positive number, or None"),
    ],
)
def test_wrong_values(fields: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YarnScaling(*fields)
