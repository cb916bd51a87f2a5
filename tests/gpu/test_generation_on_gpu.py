"""Generation on a GPU: steps on the kernels, in CUDA graphs, compiled or not, give the tokens of `model.generate()`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from gsa_hf import generation
from helpers.generation_models import MODELS, PROMPTS, by_transformers, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", list(MODELS))
def test_graphs_give_the_tokens_of_transformers(name: str) -> None:
    """In fp32, by plain torch there. Twice, and then with another batch, for which the graphs are captured again."""
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


@pytest.mark.parametrize("name", ["dense", "blocks"])
def test_compiled_steps_give_the_same(name: str) -> None:
    model = make_model(name).cuda()
    wanted = by_transformers(model, 30)
    if name != "dense":
        model.set_attn_implementation("gsa")
    assert generation.Generator(model, compile=True).generate(PROMPTS, 30).tokens == wanted


def test_generate_itself_on_the_kernels() -> None:
    model = make_model("blocks").cuda()
    wanted = by_transformers(model, 30)
    model.set_attn_implementation("gsa")
    assert by_transformers(model, 30) == wanted


def test_sampling_repeats_with_its_seed() -> None:
    model = make_model("sparse").cuda()
    model.set_attn_implementation("gsa")
    generator = generation.Generator(model)
    sampling = generation.Sampling(temperature=0.8, top_k=20, seed=3)
    first = generator.generate(PROMPTS, 20, sampling).tokens
    assert generator.generate(PROMPTS, 20, sampling).tokens == first
    assert generator.generate(PROMPTS, 20).tokens != first
