"""Tests continuations: in batches with padding, stops, and tokens that the tokenizer does not have."""

from pathlib import Path

import torch

from gsa_eval.evaluated_model import Source, load_evaluated_model
from gsa_eval.generation import answer_prompts, continue_prompts
from gsa_hf.generation import Generator
from helpers.evaluated import evaluated_config, evaluated_model, save_run


def test_continuations_in_batches(tmp_path: Path) -> None:
    config = evaluated_config()
    one = load_evaluated_model(Source(run=save_run(evaluated_model(config), config, tmp_path / "run")))
    prompts = [[5, 9, 31], [7]]
    texts = continue_prompts(one.model, one.tokenizer, prompts, 6, batch_size=2)
    assert texts == [continue_prompts(one.model, one.tokenizer, [each], 6)[0] for each in prompts]
    # RULER's answers, in batches of two with padding, in the order of the prompts.
    generator = Generator(one.model, vocab_size=one.tokenizer.vocab_size, context_tokens=16)
    assert answer_prompts(generator, one.tokenizer, [[7], *prompts], 6, 2) == [texts[1], *texts]
    # The stops are at the beginning, and name a special token.
    stops = [texts[1][:2], "</s>"]
    assert continue_prompts(one.model, one.tokenizer, prompts[1:], 6, stops) == [""]


def test_no_token_is_written_that_the_tokenizer_does_not_have(tmp_path: Path) -> None:
    """The vocabulary is padded to a round number."""
    config = evaluated_config(model={"vocab_size": 4224})
    model = evaluated_model(config)
    with torch.no_grad():
        model.gpt.output_layer.weight[4096:] *= 100
    evaluated = load_evaluated_model(Source(run=save_run(model, config, tmp_path / "run")))
    assert evaluated.tokenizer.vocab_size == 4096
    (text,) = continue_prompts(evaluated.model, evaluated.tokenizer, [[5, 9, 31]], 6)
    assert text
