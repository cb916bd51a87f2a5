"""Compares generation with `model.generate()`: token by token, with padding, groups of layers; and errors."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from gsa_hf import decoding, generation
from helpers.generation_models import MODELS, PROMPTS, by_transformers, make_model

CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_the_models_own_steps_give_the_tokens_of_transformers(name: str) -> None:
    model = make_model(name)
    made = generation.Generator(model).generate(PROMPTS, 20)
    assert made.tokens == by_transformers(model, 20)
    assert (made.prompt_tokens, made.decode_steps) == (66, 19)
    assert made.decode_rate == pytest.approx(57 / made.decode_seconds)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key_gate": True, "gate_activation": "silu"}, "gate_activation is 'silu'"),
        ({"sandwich_norm": True}, "sandwich_norm is True"),
    ],
)
def test_what_fused_steps_have_not_is_decoded_by_the_model(changes: dict[str, Any], said: str) -> None:
    model = make_model("sparse", **changes)
    model.set_attn_implementation("gsa")
    with pytest.raises(ValueError, match=f"{said}; decode by the model"):
        decoding.FusedDecoder(model)
    model.set_attn_implementation("sdpa")
    generator = generation.Generator(model)
    assert isinstance(generator.decoder, decoding.ModelDecoder)
    assert generator.generate(PROMPTS, 5).tokens == by_transformers(model, 5)


def chosen(model: Any, monkeypatch: pytest.MonkeyPatch) -> type:
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(type(model), "device", torch.device("cuda"))
        return type(generation.Generator(model).decoder)


LAYER = "model.layers.0."


@pytest.mark.parametrize(
    "path",
    [
        *("lm_head", "model.embed_tokens", "model.norm", LAYER + "mlp", LAYER + "mlp.down_proj"),
        *(LAYER + f"self_attn.{name}" for name in ("q_proj", "indexer.wq", "indexer.weights_proj")),
    ],
)
def test_layers_of_other_classes_are_called(path, monkeypatch, caplog):
    """Adapters and quantisation create such layers. The model's forward pass runs, and the log says why."""
    caplog.set_level("INFO", "gsa_hf")
    model = make_model("sparse")
    model.set_attn_implementation("gsa")
    assert chosen(model, monkeypatch) is decoding.FusedDecoder
    calls, layer = [], model.get_submodule(path)
    kind = type(layer)

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(path)
        return -kind.forward(module, x)

    layer.__class__ = type("Linear", (kind,), {"forward": forward, "__module__": "adapters"})
    assert chosen(model, monkeypatch) is decoding.ModelDecoder
    assert f"decoding by the model's forward pass ({path} is adapters.Linear)" in caplog.messages[-1]
    with pytest.raises(ValueError, match=f"{path} is adapters.Linear; decode by the model, or merge"):
        decoding.FusedDecoder(model)
    model.set_attn_implementation("sdpa")
    tokens = generation.Generator(model).generate(PROMPTS, 3).tokens
    assert calls
    assert tokens == by_transformers(model, 3)


def test_weights_that_fused_steps_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are quantised inside nn.Linear, as by torchao, or on another device by `device_map`."""
    quantised, offloaded = make_model("sparse"), make_model("sparse")
    linear = quantised.model.layers[0].mlp.up_proj
    linear.weight = type("Int4", (torch.nn.Parameter,), {})(linear.weight.detach())
    offloaded.lm_head.to("meta")
    said = ("model.layers.0.mlp.up_proj.weight is ", "the weights are on cpu and meta")
    for model, obstacle in zip((quantised, offloaded), said, strict=True):
        model.set_attn_implementation("gsa")
        assert (decoding.not_fused(model) or "").startswith(obstacle)
        assert chosen(model, monkeypatch) is decoding.ModelDecoder


def fused(model: Any, name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> generation.Generator:
    if name != "dense":
        model.set_attn_implementation("gsa")
    monkeypatch.setattr(generation, "DecodingGraph", lambda decoder: decoder)
    generator = generation.Generator(model)
    generator.decoder = decoding.FusedDecoder(model, **options)
    return generator


@pytest.mark.skipif(CUDA, reason="on a GPU it is captured: tests/gpu")
@pytest.mark.parametrize("name", list(MODELS))
def test_fused_steps_give_the_tokens_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call with the same generator uses the cache of the first."""
    model = make_model(name)
    wanted = by_transformers(model, 10)
    generator = fused(model, name, monkeypatch)
    assert generator.generate(PROMPTS, 10).tokens == wanted
    first = generator._graph
    assert generator.generate(PROMPTS, 2).tokens == [row[:2] for row in wanted]
    assert generator._graph is first


@pytest.mark.skipif(CUDA, reason="on a GPU it is captured: tests/gpu")
@pytest.mark.parametrize(
    ("name", "count", "new"),
    [
        ("mixed", 3, 3),
        ("sparse", 1, 2),
        ("dense", 1, 3),
        ("norms, group of layers", 1, 4),
        ("norms, group of layers", 2, 3),
    ],
)
def test_products_of_few_rows_give_the_same_tokens(name, count, new, monkeypatch):
    model = make_model(name)
    wanted = [row[:new] for row in by_transformers(model, new)[:count]]
    generator = fused(model, name, monkeypatch, products="rows")
    assert generator.generate(PROMPTS[:count], new).tokens == wanted
    assert generator.decoder.products == "rows"


def test_which_products_are_taken() -> None:
    """torch's are used on a CPU and in fp32; the kernels where requested and supported."""
    chosen = decoding.FusedDecoder(make_model("dense"))
    chosen.open(1, 16)
    assert chosen.products == "torch"
    with pytest.raises(ValueError, match="products is 'row'"):
        decoding.FusedDecoder(make_model("dense"), products="row")
    with pytest.raises(ValueError, match="do not take a batch of 17, of at most 16"):
        decoding.FusedDecoder(make_model("dense"), products="rows").open(17, 16)
    model = make_model("norms, no head weights", attn_implementation="gsa")
    with pytest.raises(ValueError, match="do not take an indexer without head weights"):
        decoding.FusedDecoder(model, products="rows").open(1, 64)
    with pytest.raises(ValueError, match="do not take products of 100 columns"):
        decoding.FusedDecoder(make_model("dense", intermediate_size=100), products="rows").open(1, 16)


def test_sampling_draws_what_transformers_draws() -> None:
    model = make_model("sparse")
    options = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
    torch.manual_seed(5)
    wanted = by_transformers(model, 12, do_sample=True, **options)
    sampling = generation.Sampling(**options, seed=5)
    generator = generation.Generator(model)
    assert generator.generate(PROMPTS, 12, sampling).tokens == wanted
    assert generator.generate(PROMPTS, 12).tokens != wanted


def test_a_sequence_ends_at_its_own_end() -> None:
    model = make_model("sparse")
    free = generation.Generator(model).generate(PROMPTS, 30).tokens
    end = free[1][5]
    model.generation_config.eos_token_id = [end]
    made = generation.Generator(model).generate(PROMPTS, 30).tokens
    assert made == [row[: row.index(end) + 1] if end in row else row for row in free]
    assert made[1][-1] == end


@pytest.mark.parametrize(
    ("prompts", "count", "words"),
    [
        ([], 4, "no prompts"),
        ([[1], []], 4, "prompt 2 is empty"),
        ([[1] * 61], 4, "61 tokens, and with 4 new ones more than the model's context of 64; pass at most 3"),
        ([[1] * 64], 4, "pass a shorter prompt"),
        ([[64]], 4, "a vocabulary of 64"),
        ([[1]], 0, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_generated(prompts: list[list[int]], count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generation.Generator(make_model("dense")).generate(prompts, count)


def test_fused_steps_want_the_kernels() -> None:
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa' with sparse layers"):
        decoding.FusedDecoder(make_model("sparse"))
