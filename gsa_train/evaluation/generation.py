"""Continuations of prompts, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import StoppingCriteria

from gsa_data.tokenize import Tokenizer
from gsa_hf import GSAForCausalLM
from gsa_train.evaluation.trained_model import TrainedModel


class _AtStops(StoppingCriteria):
    """Ends a sequence whose continuation spells one of some texts."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt_length: int) -> None:
        self._tokenizer, self._stops, self._prompt_length = tokenizer, stops, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        rows = input_ids[:, self._prompt_length :].cpu().numpy().astype(np.int32)
        done = [any(stop in text for stop in self._stops) for text in map(self._tokenizer.decode, rows)]
        return torch.tensor(done, device=input_ids.device)


@torch.no_grad()
def continue_prompts(
    model: GSAForCausalLM | TrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Sequence[str] = (),
    batch_size: int = 1,
    **sampling: Any,
) -> list[str]:
    """The text of each continuation up to a token of `tokenizer.stop_ids`, or up to where it first spells one of
    `stops`, which is left out. No token is written that the tokenizer does not have, as the end of a padded vocabulary.

    Args:
        prompts: token ids, each at least one. Shorter ones of a batch have padding in front.
        sampling: of transformers' `generate`; greedy without.
    """
    stops = [stop for stop in stops if stop]
    if isinstance(model, TrainedModel):
        if sampling.get("do_sample"):
            raise ValueError("a model that gsa_hf does not have continues greedily alone; leave sampling out")
        return [_without_cache(model, tokenizer, prompt, max_new_tokens, stops) for prompt in prompts]
    settings = {"do_sample": False, **sampling}
    left_out = [
        *(settings.pop("suppress_tokens", None) or ()),
        *range(tokenizer.vocab_size, model.config.vocab_size),
    ]
    texts = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    for first in tqdm(range(0, len(order), batch_size), "generate", leave=False, disable=None):
        batch = order[first : first + batch_size]
        length = len(prompts[batch[0]])
        tokens = torch.full((len(batch), length), tokenizer.eos_id)
        mask = torch.zeros_like(tokens)
        for row, number in enumerate(batch):
            start = length - len(prompts[number])
            tokens[row, start:] = torch.tensor(prompts[number])
            mask[row, start:] = 1
        generated: Any = model.generate(  # type: ignore[misc]
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_id,
            eos_token_id=list(tokenizer.stop_ids),
            suppress_tokens=left_out or None,
            use_cache=True,
            stopping_criteria=[_AtStops(tokenizer, stops, length)] if stops else None,
            **settings,
        )
        for number, row in zip(batch, generated[:, length:].cpu().numpy().astype(np.int32), strict=True):
            texts[number] = _cut(tokenizer, row, stops)
    return texts


def _without_cache(
    model: TrainedModel,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    max_new_tokens: int,
    stops: Sequence[str],
) -> str:
    """A forward pass over everything for each token."""
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        hidden = model.hidden_states(torch.tensor([tokens], device=model.device), None)
        tokens.append(int(model.lm_head(hidden[:, -1])[:, : tokenizer.vocab_size].argmax(-1)))
        new = np.array(tokens[len(prompt) :], np.int32)
        if new[-1] in tokenizer.stop_ids or any(stop in tokenizer.decode(new) for stop in stops):
            break
    return _cut(tokenizer, np.array(tokens[len(prompt) :], np.int32), stops)


def _cut(tokenizer: Tokenizer, tokens: np.ndarray, stops: Sequence[str]) -> str:
    ends = np.flatnonzero(np.isin(tokens, tokenizer.stop_ids))
    text = tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens)
    for stop in stops:
        text = text.split(stop)[0]
    return text
