"""Tests that `GatedSparseAttention` with a cache gives the results of one call, for single tokens and for pieces.

The tests run with the reference, and with Triton in its interpreter or, marked gpu, on a CUDA device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gsa_kernels import GatedSparseAttention
from gsa_kernels.layer_cache import GSACache
from gsa_kernels.layer_config import GSAConfig

BATCH, LENGTH = 2, 45
SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "indexer_heads": 2, "indexer_dim": 16,
}  # fmt: skip
BUDGET: dict[str, Any] = {"k_base": 8, "k_min": 3, "k_max": 16}
FIELDS: dict[str, dict[str, Any]] = {
    "each": {},
    "relu, window": {"indexer_activation": "relu", "local_window": 3},
    "fixed": {"adaptive_k": "off"},
}
NEAR: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def make_layer(device: str = "cpu", **fields: Any) -> tuple[GatedSparseAttention, torch.Tensor]:
    torch.manual_seed(5)
    layer = GatedSparseAttention(GSAConfig(**{**SIZES, "head_dim": 32, **BUDGET, **fields})).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():  # so that scores, gates and attention differ between keys
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 1.0))
        x = torch.randn(BATCH, LENGTH, 24, device=device)
        layer(x)
        layer.update_variance_ema()
    return layer.eval(), x


def in_pieces(
    layer: GatedSparseAttention, x: torch.Tensor, sizes: list[int], **mode: Any
) -> tuple[torch.Tensor, GSACache]:
    cache = layer.new_cache(BATCH, x.shape[1])
    outputs = []
    for part in x.split(sizes, 1):
        output, returned, _ = layer(part, cache=cache, **mode)
        assert returned is cache
        outputs.append(output)
    assert cache.length == x.shape[1]
    assert cache.decode.lengths.tolist() == [cache.length] * BATCH
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
@pytest.mark.parametrize(
    "sizes",
    [[1] * LENGTH, [7, *[1] * (LENGTH - 7)], [5, 20, 1, 19], [32, 1, 12]],
    ids=lambda sizes: sizes[:4],
)
def test_tokens_in_pieces_equal_one_forward(fields: dict[str, Any], sizes: list[int]) -> None:
    layer, x = make_layer(implementation="reference", **fields)
    wanted, _, _ = layer(x)
    ema = layer.variance_ema.clone()
    late = layer.forward_with_loss(x).selection.budget[:, -4:]  # for queries with more than k_max causal keys
    assert (late.unique().numel() > 1) == (layer.config.adaptive_k != "off")
    found, cache = in_pieces(layer, x, sizes)
    torch.testing.assert_close(found, wanted, **NEAR)
    assert not found.requires_grad
    assert torch.equal(layer.variance_ema, ema)
    assert layer.variance_sum.eq(0).all()
    assert cache.max_length == LENGTH


def test_dense_and_sparse_calls_on_one_cache() -> None:
    """A dense call stores what later sparse calls need: the indexer's keys."""
    layer, x = make_layer(implementation="reference")
    dense, _, _ = layer(x, attention="dense")
    sparse, _, _ = layer(x)
    cache = layer.new_cache(BATCH, LENGTH)
    for first, last, attention, wanted in (
        (0, 20, "dense", dense),
        (20, 21, "sparse", sparse),
        (21, 34, "dense", dense),
        (34, 40, "sparse", sparse),
        (40, 41, "dense", dense),
        (41, 45, "sparse", sparse),
    ):
        output, _, _ = layer(x[:, first:last], cache=cache, attention=attention)
        torch.testing.assert_close(output, wanted[:, first:last], **NEAR)
    assert (dense - sparse)[:, 40:].abs().max() > 0.01


@pytest.mark.parametrize("fields", [{}, FIELDS["relu, window"]], ids=["each", "relu, window"])
def test_the_weights_are_those_that_make_the_output(fields: dict[str, Any]) -> None:
    layer, x = make_layer(implementation="reference", output_gate=False, **fields)
    wanted, _, weights = layer(x, need_weights=True)
    assert weights.shape == (BATCH, 4, LENGTH, LENGTH)
    torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, 4, LENGTH))
    assert (weights[:, :, -1] == 0).any()  # sparse
    assert weights.triu(1).eq(0).all()
    assert not weights.requires_grad
    values = layer._heads(x, None, 0).v.repeat_interleave(2, 2)
    output = layer.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, values).flatten(2))
    torch.testing.assert_close(output, wanted)

    cache = layer.new_cache(BATCH, LENGTH)
    for first, last in ((0, 19), (19, 38), (38, 39), (39, LENGTH)):
        _, _, part = layer(x[:, first:last], cache=cache, need_weights=True)
        torch.testing.assert_close(part, weights[:, :, first:last, :last], **NEAR)


def test_positions() -> None:
    """Only differences of positions matter. By default positions continue at the cache's end."""
    layer, x = make_layer(implementation="reference")
    layer, x = layer.double(), x.double()
    wanted, _, _ = layer(x)
    places = torch.arange(LENGTH)
    for positions in (places, places.expand(BATCH, -1), places + torch.tensor([[0], [100]])):
        found, _, _ = layer(x, positions=positions)
        torch.testing.assert_close(found, wanted, **NEAR)
    stretched, _, _ = layer(x, positions=2 * places)
    assert (stretched - wanted).abs().max() > 0.01
    cache = layer.new_cache(BATCH, LENGTH)
    for part, given in zip(x.split(20, 1), (2 * places).split(20), strict=True):
        output, _, _ = layer(part, cache=cache, positions=given)
        torch.testing.assert_close(output, stretched[:, cache.length - part.shape[1] : cache.length], **NEAR)
    for positions, message in (
        (places.float(), "positions has dtype torch.float32"),
        (places[1:], r"positions has shape \(44,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, positions=positions)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [({}, {}), ({"output_gate": False}, {"attention": "dense"})],
    ids=["each", "dense"],
)
def test_by_triton(device: str, fields: dict[str, Any], mode: dict[str, Any]) -> None:
    """Pieces, a single token after each piece, and a stretch of decoding equal one forward pass of the reference."""
    pytest.importorskip("triton")
    reference, x = make_layer(device, implementation="reference", **fields)
    config = replace(reference.config, implementation="triton" if device == "cpu" else "auto")
    layer = GatedSparseAttention(config).to(device).eval()
    layer.load_state_dict(reference.state_dict())
    sizes = [17, 1, 17, *[1] * (2 if device == "cpu" else 10)]
    x = x[:, : sum(sizes)]
    wanted, _, weights = reference(x, need_weights=True, **mode)
    found, cache = in_pieces(layer, x, sizes, **mode)
    assert cache.decode.workspace is not None
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    _, _, found_weights = layer(x, need_weights=True, **mode)
    torch.testing.assert_close(found_weights, weights, rtol=1e-4, atol=1e-5)


def test_what_a_cache_refuses() -> None:
    layer, x = make_layer(implementation="reference")
    cache = layer.new_cache(BATCH, 8)
    layer(x[:, :5], cache=cache)
    for part, message in (
        (x[:, :4], "the cache holds 5 of 8 tokens and x has 4; make one with max_length of at least 9"),
        (x[:1, :1], "x has 1 sequences and the cache 2"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(part, cache=cache)
    starts = torch.zeros(BATCH, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="document_starts is given with a cache"):
        layer(x[:, :1], cache=cache, document_starts=starts)
    with pytest.raises(ValueError, match="cache is given in training mode"):
        layer.train()(x[:, :1], cache=cache)
    with pytest.raises(ValueError, match="max_length is 0"):
        layer.new_cache(1, 0)


def test_autocast_is_for_the_projections() -> None:
    """Later operations are as precise as in a bf16 layer. Weights that are exact in bf16 give equal bits."""
    layer, x = make_layer(implementation="reference")
    layer, x = layer.bfloat16().float(), x.bfloat16().float()
    with torch.autocast("cpu", torch.bfloat16):
        output, _, weights = layer(x, need_weights=True)
        loss = layer.forward_with_loss(x).indexer_loss
        cache = layer.new_cache(BATCH, LENGTH)
        with pytest.raises(ValueError, match=r"the keys of x are torch.bfloat16 .* pass dtype= to new_cache"):
            layer(x, cache=cache)
        assert cache.length == 0
        cached, _, _ = layer(x, cache=layer.new_cache(BATCH, LENGTH, dtype=torch.bfloat16))
    assert weights.dtype == loss.dtype == torch.float32
    layer, x = layer.bfloat16(), x.bfloat16()
    wanted, _, wanted_weights = layer(x, need_weights=True)
    assert torch.equal(output, wanted)
    assert torch.equal(cached, wanted)
    assert torch.equal(weights, wanted_weights)
    assert torch.equal(loss, layer.forward_with_loss(x).indexer_loss)
