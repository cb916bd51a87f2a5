"""Generate continuations of prompts in batches: by transformers, or greedily by our `Generator`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import StoppingCriteria

from gsa_data.tokenize import Tokenizer, text_after
from gsa_hf import GSAForCausalLM
from gsa_hf.generation import Generator

PROMPT_TAIL_TOKENS = 32
"""Prompt tokens that are decoded together with a continuation, because some tokenizers drop the first space."""
BATCH_TOKENS = 131072
"""Largest number of tokens of a batch's prompts and answers on a GPU."""


class _AtStops(StoppingCriteria):
    """Ends a sequence whose continuation contains one of the stop texts."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt_length: int) -> None:
        self._tokenizer, self._stops, self._prompt_length = tokenizer, stops, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        first = max(self._prompt_length - PROMPT_TAIL_TOKENS, 0)
        tail = self._prompt_length - first
        rows = input_ids[:, first:].tolist()
        texts = [text_after(self._tokenizer.decode, row[:tail], row[tail:]) for row in rows]
        done = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)


@torch.no_grad()
def continue_prompts(
    model: GSAForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Sequence[str] = (),
    batch_size: int = 1,
    **sampling: Any,
) -> list[str]:
    """Returns the continuation of each prompt as text, up to the first stop token or text of `stops`.

    The returned text has no special tokens, but `stops` may name some. Padding of the vocabulary is never generated.

    Args:
        prompts: token ids, at least one per prompt. Shorter prompts in a batch are padded in front.
        sampling: options of transformers' `generate`. Without options, decoding is greedy.
    """
    stops = [stop for stop in stops if stop]
    ends = _ends(tokenizer, stops)
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
            eos_token_id=ends,
            suppress_tokens=left_out or None,
            use_cache=True,
            stopping_criteria=[_AtStops(tokenizer, stops, length)] if stops else None,
            **settings,
        )
        for number, row in zip(batch, generated[:, length:].cpu().numpy(), strict=True):
            texts[number] = continuation_text(tokenizer, prompts[number], row.tolist(), ends, stops)
    return texts


def answer_prompts(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
) -> list[str]:
    """Returns the greedy continuation of each prompt as text, without the token that ends it.

    Args:
        prompts: token ids, at least one per prompt. All prompts have about the same length.
        batch_size: prompts per batch. None: 1 on a CPU, and on a GPU the number that fits into `BATCH_TOKENS`.
    """
    longest = max(map(len, prompts)) + max_new_tokens
    most = batch_size or (max(1, BATCH_TOKENS // longest) if generator.device.type == "cuda" else 1)
    # The last batch is padded to the size of the others, because another size would need other CUDA graphs.
    rows = math.ceil(len(prompts) / math.ceil(len(prompts) / most))
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    texts = [""] * len(prompts)
    for first in range(0, len(order), rows):
        batch = order[first : first + rows]
        filled = batch + batch[-1:] * (rows - len(batch))
        made = generator.generate([prompts[number] for number in filled], max_new_tokens)
        for number, tokens in zip(batch, made.tokens, strict=False):
            texts[number] = continuation_text(tokenizer, prompts[number], tokens, tokenizer.stop_ids)
    return texts


def _ends(tokenizer: Tokenizer, stops: Sequence[str]) -> list[int]:
    """Returns the tokens that end a text: the stop tokens, and special tokens named in `stops`."""
    named = [tokenizer.encode_chat(stop, [])[0].tolist() for stop in stops if tokenizer.has_token(stop)]
    special = [each[0] for each in named if len(each) == 1 and tokenizer.token_bytes[each[0]] == 0]
    return list(dict.fromkeys([*tokenizer.stop_ids, *special]))


def continuation_text(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    new: Sequence[int],
    ends: Sequence[int],
    stops: Sequence[str] = (),
) -> str:
    """Returns the text of the new tokens, up to the first token of `ends` or text of `stops`."""
    until = next((place for place, token in enumerate(new) if token in ends), len(new))
    spelled = [token for token in new[:until] if tokenizer.token_bytes[token] > 0]
    text = text_after(tokenizer.decode, list(prompt[-PROMPT_TAIL_TOKENS:]), spelled)
    for stop in stops:
        text = text.split(stop)[0]
    return text
