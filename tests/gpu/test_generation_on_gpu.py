"""Tests generation on a GPU: kernel steps, in CUDA graphs, compiled or not, give the tokens of `model.generate()`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from gsa_hf import decoding, generation
from helpers.generation_models import MODELS, PROMPTS, by_transformers, make_model


@pytest.mark.parametrize("name", list(MODELS))
def test_graphs_give_the_tokens_of_transformers(name: str) -> None:
    """The expected tokens come from transformers, which computes in fp32 with plain torch. If the batch size changes,
    the generator captures its graphs again. The option `products="rows"` makes an fp32 decoder use our kernels for
    matrix products with few rows."""
    model = make_model(name).cuda()
    wanted = by_transformers(model, 30)
    if name != "dense":
        model.set_attn_implementation("gsa")
    generator = generation.Generator(model)
    for _ in range(2):
        made = generator.generate(PROMPTS, 30)
        assert made.tokens == wanted
    assert made.prepare_seconds < 0.1  # nothing is captured again
    assert generator.generate(PROMPTS[:1], 30).tokens == wanted[:1]
    if name in ("dense", "sparse"):
        assert generation.Generator(model, compile=True).generate(PROMPTS, 30).tokens == wanted
    if name != "norms, no head weights":
        generator = generation.Generator(model)
        generator.decoder = decoding.FusedDecoder(model, products="rows")
        for count in (3, 1):
            assert generator.generate(PROMPTS[:count], 30).tokens == wanted[:count]
            assert generator.decoder.products == "rows"


@pytest.mark.parametrize("name", ["dense", "sparse", "mixed"])
def test_products_of_few_rows_in_bf16(name: str) -> None:
    """Three decoders give logits: one in fp32, one with torch's bf16 products, and one with our kernels for matrix
    products with few rows. The error is the distance from the fp32 logits. The error of our kernels is at most twice
    the error of torch's bf16 products. Queries select all keys, so that rounding changes no selection."""
    everything = {"index_topk": 64, "k_min": 64, "k_max": 64}
    exact = make_model(name, **everything).cuda()
    if name != "dense":
        exact.set_attn_implementation("gsa")
    prompt, mask = generation.pad_left(PROMPTS[:1], exact.device)
    logits = {}
    for label, products in (("fp32", "torch"), ("bf16", "torch"), ("rows", "auto")):
        model = exact if label == "fp32" else make_model(name, **everything).cuda().bfloat16()
        model.set_attn_implementation(exact.config._attn_implementation)
        decoder = decoding.FusedDecoder(model, products=products)
        with torch.no_grad():
            decoder.open(1, 64)
            decoder.prefill(prompt, mask)
            decoder.tokens.fill_(5)
            logits[label] = generation.DecodingGraph(decoder).step().double().clone()
    assert decoder.products == "rows"
    error = {label: (logits[label] - logits["fp32"]).norm() for label in ("bf16", "rows")}
    assert error["rows"] <= 2 * error["bf16"]


def test_sampling_repeats_with_its_seed() -> None:
    model = make_model("sparse").cuda()
    model.set_attn_implementation("gsa")
    generator = generation.Generator(model)
    sampling = generation.Sampling(temperature=0.8, top_k=20, seed=3)
    first = generator.generate(PROMPTS, 20, sampling).tokens
    assert generator.generate(PROMPTS, 20, sampling).tokens == first
    assert generator.generate(PROMPTS, 20).tokens != first
