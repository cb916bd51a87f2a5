"""Tests training with transformers' tools, and its pipelines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gsa_eval.commands.serve import serve_by_transformers
from gsa_hf import GSAForCausalLM
from helpers.hf import distinct_tokens, tiny_model
from helpers.runs import run_script


def gradients(model: Any, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("name", ["gsa", "window-rope-reuse"])
def test_checkpointed_gradients_are_equal(name: str) -> None:
    model = tiny_model(name, indexer_loss_coef=0.5, indexer_temperature="learned").train()
    tokens = distinct_tokens(2, 20)
    loss, plain = gradients(model, input_ids=tokens, labels=tokens)
    leaders = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    assert all(parameter.grad is not None for indexer in leaders for parameter in indexer.parameters())
    model.gradient_checkpointing_enable()
    again, checkpointed = gradients(model, input_ids=tokens, labels=tokens)
    assert again == loss
    assert plain.keys() == checkpointed.keys()
    for key, value in plain.items():
        torch.testing.assert_close(checkpointed[key], value, msg=key)


def test_the_indexer_learns_from_its_own_loss_alone() -> None:
    model, tokens = tiny_model(indexer_loss_coef=2.0).train(), distinct_tokens(2, 20)
    model.config.indexer_loss_coef = 0.0
    loss, without = gradients(model, input_ids=tokens, labels=tokens)
    assert not any("indexer" in key for key in without)
    model.config.indexer_loss_coef = 2.0
    outputs = model(tokens, labels=tokens)
    assert float(outputs.loss.detach()) == pytest.approx(loss + 2 * float(outputs.indexer_loss.detach()))
    _, with_it = gradients(model, input_ids=tokens, labels=tokens)
    for key, value in without.items():
        torch.testing.assert_close(with_it[key], value, msg=key)
    assert model.eval()(tokens, labels=tokens).indexer_loss is None


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backbone", [False, True])
def test_the_indexer_learns_where_the_loss_is_outside(backbone: bool, checkpointed: bool) -> None:
    """The loss comes from the logits, as with label smoothing, or from hidden states, as with TRL's fused heads."""
    model, tokens = tiny_model(indexer_loss_coef=0.5).train(), distinct_tokens(2, 20)
    _, inside = gradients(model, input_ids=tokens, labels=tokens)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model.zero_grad()
    logits = model.lm_head(model.model(tokens).last_hidden_state) if backbone else model(tokens).logits
    model.loss_function(logits=logits, labels=tokens, vocab_size=512).backward()
    assert any("indexer" in name for name in inside)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, inside[name], msg=name)
    with torch.no_grad():
        assert model(tokens).indexer_loss is None
    assert model.eval()(tokens).indexer_loss is None


@pytest.mark.parametrize("passes", [1, 4])
def test_weight_of_the_indexers_loss_over_accumulated_passes(passes: int) -> None:
    """A caller that adds the returned indexer loss may divide it. Otherwise it counts once per pass, undivided."""
    model, tokens = tiny_model(indexer_loss_coef=0.5).train(), distinct_tokens(passes, 20)

    def accumulated(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for row in tokens.split(1):
            (loss_of(row) / passes).backward()
        return {
            name: each.grad
            for name, each in model.named_parameters()
            if "indexer" in name and each.grad is not None
        }

    def outside(row: torch.Tensor, **options: Any) -> Any:
        outputs = model(row, **options)
        loss = model.loss_function(logits=outputs.logits, labels=row, vocab_size=512)
        return loss + 0.5 * outputs.indexer_loss if options else loss

    inside = accumulated(lambda row: model(row, labels=row).loss)
    assert inside
    torch.testing.assert_close(accumulated(lambda row: outside(row, output_indexer_loss=True)), inside)
    torch.testing.assert_close(accumulated(outside), {name: passes * each for name, each in inside.items()})
    model.config.indexer_loss_coef = 0.5 / passes
    torch.testing.assert_close(accumulated(outside), inside)
    with pytest.raises(ValueError, match="output_indexer_loss is True with labels"):
        model(tokens, labels=tokens, output_indexer_loss=True)


def test_a_coefficient_that_nothing_adds_is_refused() -> None:
    tokens = distinct_tokens(2, 20)
    model = tiny_model(indexer_loss_coef=0.5).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("indexer" not in name)
    for labels in (None, tokens):
        with pytest.raises(ValueError, match=r"indexer_loss_coef is 0.5 and no parameter of an indexer"):
            model(tokens, labels=labels)
    half = tiny_model(indexer_loss_coef=0.5).train()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(ValueError, match=r"indexer_loss_coef is 0.5 in training with float16"),
    ):
        half(tokens)


def test_an_idle_indexer_waits_for_no_gradient() -> None:
    model, tokens = tiny_model().train(), distinct_tokens(2, 20)
    _, found = gradients(model, input_ids=tokens, labels=tokens)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == found.keys()


class Wrapped(torch.nn.Module):
    """Replaces a linear layer as quantisation and adapters do. Reading its weight is an error."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear, self.more = linear, torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
        torch.nn.init.zeros_(self.more.weight)

    @property
    def weight(self) -> torch.Tensor:
        raise AssertionError("the weight was read")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.more(x)


@pytest.mark.parametrize(
    ("name", "activation"), [("gsa", "sigmoid"), ("window-rope-reuse", "sigmoid"), ("gsa", "relu")]
)
def test_linear_layers_are_called(name: str, activation: str) -> None:
    model, tokens = (
        tiny_model(name, indexer_loss_coef=0.5, indexer_activation=activation).train(),
        distinct_tokens(2, 20),
    )
    loss, _ = gradients(model, input_ids=tokens, labels=tokens)
    for path, module in list(model.model.layers.named_modules()):
        if type(module) is torch.nn.Linear:
            parent, _, child = path.rpartition(".")
            setattr(model.model.layers.get_submodule(parent), child, Wrapped(module))
    wrapped, found = gradients(model, input_ids=tokens, labels=tokens)
    assert wrapped == pytest.approx(loss, rel=1e-5)
    adapters = [name for name, _ in model.named_parameters() if ".more." in name]
    assert all(float(found[each].abs().max()) > 0 for each in adapters)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    model.eval()
    cached = model.generate(tokens, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))
    bias = model.model.layers[0].self_attn.indexer.weight_bias  # The kernels refuse a bias for ReLU.
    assert (bias is None) == (model.config.indexer_activation == "relu")


def test_the_indexer_scores_in_fp32_under_autocast() -> None:
    indexer = tiny_model().model.layers[0].self_attn.indexer
    made = indexer(torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0)), None)
    expected = indexer.scores(made)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(indexer.scores(made), expected)


def test_masked_labels_and_the_mean_over_a_step() -> None:
    """Two passes of unequal length, with the label count of both, equal one pass of both."""
    model = tiny_model(indexer_loss_coef=1.0).train()
    rows = [distinct_tokens(1, length, seed=length) for length in (20, 12)]
    labels = [row.clone() for row in rows]
    labels[0][:, :5] = -100
    count = sum(int((row[:, 1:] != -100).sum()) for row in labels)
    parts, losses = [], []
    for row, wanted in zip(rows, labels, strict=True):
        outputs = model(row, labels=wanted, num_items_in_batch=count)
        share = int((wanted[:, 1:] != -100).sum()) / count
        text = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], wanted[0, 1:], reduction="sum")
        losses.append(outputs.loss)
        parts.append(text / count + share * outputs.indexer_loss)
    torch.testing.assert_close(torch.stack(losses), torch.stack(parts))


def test_ten_steps_of_trainer(tmp_path: Path) -> None:
    """A separate process runs it, because accelerate sets variables and infers a world of ranks from LOCAL_RANK."""
    command = ["tests/helpers/hf_trainer.py", str(tmp_path)]
    run_script(command, tmp_path / "log", ranks=1, launcher="python")


def test_checkpointed_steps_of_two_ranks(tmp_path: Path) -> None:
    run_script(["tests/helpers/hf_ranks.py"], tmp_path / "log", ranks=2)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(512)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", unk_token="w0", padding_side="left")


def test_the_server_of_transformers_loads_a_folder(tokenizer, tmp_path, monkeypatch):
    serving = pytest.importorskip("transformers.cli.serving.model_manager")
    tiny_model(attention="sdpa").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    manager = serving.ModelManager(device="cpu", model_timeout=-1)
    monkeypatch.setattr(transformers, "GSAForCausalLM", None, raising=False)  # restored at the end
    monkeypatch.setattr("transformers.cli.transformers.app", lambda words: None)
    serve_by_transformers([])
    model, processor = manager.load_model_and_processor(str(tmp_path))
    assert type(model) is GSAForCausalLM
    assert manager.get_model_modality(model).name == "LLM"
    assert processor("w5 w9").input_ids == [5, 9]
