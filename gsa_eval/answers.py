"""Generate greedy answers to many prompts of about one length, in large batches, with CUDA graphs on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gsa_data.tokenize import Tokenizer
from gsa_eval.generation import continuation_text
from gsa_hf import GSAForCausalLM
from gsa_hf.generation import Generator

FEWEST_BATCH_TOKENS, MOST_BATCH_TOKENS = 65536, 262144
"""Limits of a batch's tokens, prompts and answers together, on a GPU."""
BATCH_CACHE_BYTES = 8 * 2**30
"""Size of the key-value cache that decides between the limits. Free memory does not decide, because the rounding of a
sequence can depend on its batch."""


def answer_prompts(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
) -> list[str]:
    """Returns the text of each continuation, without the token that ends it.

    Args:
        prompts: token ids, at least one each. Shorter prompts in a batch are padded in front.
        batch_size: sequences at once. None: on a GPU the number that fit into `batch_tokens`, on a CPU one.
    """
    longest = max(map(len, prompts)) + max_new_tokens
    most = batch_size or (
        max(1, batch_tokens(generator.model) // longest) if generator.device.type == "cuda" else 1
    )
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


def batch_tokens(model: GSAForCausalLM) -> int:
    """Returns the number of tokens whose keys and values take `BATCH_CACHE_BYTES`, between the limits."""
    config = model.config
    bytes_per_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    )
    return min(max(BATCH_CACHE_BYTES // bytes_per_token, FEWEST_BATCH_TOKENS), MOST_BATCH_TOKENS)
