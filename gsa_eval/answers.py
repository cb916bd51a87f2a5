"""Generate greedy answers to many prompts of about one length, in large batches, with CUDA graphs on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gsa_data.tokenize import Tokenizer
from gsa_eval.generation import continuation_text
from gsa_hf.generation import Generator

BATCH_TOKENS = 131072
"""Largest number of tokens of a batch's prompts and answers on a GPU."""


def answer_prompts(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
) -> list[str]:
    """Returns the text of each continuation, without the token that ends it.

    Args:
        prompts: token ids of each prompt, at least one. Shorter prompts of a batch are padded at the start.
        batch_size: prompts per batch; None: on a GPU the number that fits into `BATCH_TOKENS`, on a CPU 1.
    """
    longest = max(map(len, prompts)) + max_new_tokens
    most = batch_size or (max(1, BATCH_TOKENS // longest) if generator.device.type == "cuda" else 1)
    # All batches have one size, with padding in the last batch. Another size would need other CUDA graphs.
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
