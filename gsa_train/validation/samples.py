"""Generate text after fixed prompts at each validation, as samples.

Decoding is greedy and uses the training model's forward pass, on any layout, without a KV cache. Sequences have the
training length and are padded after the text, so selection works as in training. Each token costs a forward pass over
each prompt's sequence, on every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gsa_data.pack import FILLER
from gsa_data.tokenize import Tokenizer, TokenizerError, text_after
from gsa_train.config import Config
from gsa_train.data.batches import MicroBatch, to_micro_batch
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.mcore.build import Model
from gsa_train.validation.next_tokens import next_tokens


def encode_prompts(config: Config, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of `evaluate.prompts`.

    Raises:
        TokenizerError: a prompt has no tokens, or more than fit into a sequence.
    """
    length, new = config.train.seq_len_tokens, config.evaluate.prompt_tokens
    encoded = []
    for number, prompt in enumerate(config.evaluate.prompts):
        tokens = tokenizer.encode_prompt(prompt).tolist()
        field = f"evaluate.prompts.{number} = {prompt[:40]!r}"
        if not tokens:
            raise TokenizerError(f"{field}: no tokens; give a text")
        if len(tokens) + new > length:
            raise TokenizerError(
                f"{field}: {len(tokens)} tokens, with evaluate.prompt_tokens = {new} more than "
                f"train.seq_len_tokens = {length}; shorten the prompt, or lower evaluate.prompt_tokens"
            )
        encoded.append(tokens)
    return encoded


def generate_samples(
    model: Model,
    prompts: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    config: Config,
    parallel: Parallel,
    before_each: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Generate samples, the same on every rank. Collective. The training state does not change, as in `evaluate`.

    Args:
        before_each: called on every rank before each token; may raise to end it

    Returns:
        For each prompt `prompt`, the generated `text`, and `ended`: whether it ended the document
        or its turn.
    """
    texts = [list(prompt) for prompt in prompts]
    running = list(range(len(texts)))
    for _ in range(config.evaluate.prompt_tokens):
        if not running:
            break
        before_each()
        batches = [_batch(texts[each], tokenizer.eos_id, config, parallel) for each in running]
        positions = [len(texts[each]) - 1 for each in running]
        found = next_tokens(model, batches, positions, tokenizer.vocab_size, config, parallel)
        for each, token in zip(running, found, strict=True):
            texts[each].append(token)
        running = [each for each in running if texts[each][-1] not in tokenizer.stop_ids]
    samples = []
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ended = number not in running
        new = text[len(prompt) : -1] if ended else text[len(prompt) :]
        written = text_after(tokenizer.decode, list(prompt), new)
        samples.append({"prompt": config.evaluate.prompts[number], "text": written, "ended": ended})
    return samples


def _batch(text: list[int], eos_id: int, config: Config, parallel: Parallel) -> MicroBatch:
    block = torch.full((1, config.train.seq_len_tokens + 1), FILLER, dtype=torch.int32)
    block[0, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return to_micro_batch(block.to(parallel.device), eos_id, config.data.attend_across_documents)
