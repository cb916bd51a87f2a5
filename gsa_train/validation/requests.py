"""Score request files: read their tokens, and compute a model's log-likelihoods of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gsa_data.request_files import SCORES, RequestTask, read_requests
from gsa_data.tokenize import Tokenizer


class Request(NamedTuple):
    tokens: NDArray[np.int32]
    """[context + continuation]"""
    scored: int
    """Number of the last tokens, which are the continuation."""


def encode_requests(
    requests: Sequence[tuple[str, str]], tokenizer: Tokenizer, max_tokens: int, where: str
) -> list[Request]:
    """Encode requests. Contexts that are too long lose their beginning. An empty context becomes an EOS.

    Context and continuation are encoded separately, as in `ai2-olmo-eval`, unless the tokenizer puts a space in front
    of each text, as sentencepiece tokenizers do. Separate encoding would put this space between context and
    continuation.

    If the tokenizer adds a space, context and continuation are encoded together. If the tokens of this whole text begin
    with the tokens of the context, the remaining tokens are the continuation. If white space at the end of the context
    merges into the next token, the merged token belongs to the continuation.

    Args:
        max_tokens: number of inputs of a forward pass. A request has at most one token more.

    Raises:
        ValueError: a continuation has no token, or more than `max_tokens`.
    """
    adds_space = tokenizer.front_bytes > 0

    @lru_cache(maxsize=2)
    def context_tokens(context: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(context).tolist()
        return tokens

    encoded = []
    for context, continuation in requests:
        before = context_tokens(context)
        after: list[int] = []
        if adds_space:
            whole: list[int] = tokenizer.encode(context + continuation).tolist()
            pairs = zip(before, whole, strict=False)
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if alike < len(before) and not tokenizer.decode(before[alike:]).strip():
                before = before[:alike]
            after = whole[len(before) :] if whole[: len(before)] == before else []
        after = after or tokenizer.encode(continuation).tolist()
        if not 0 < len(after) <= max_tokens:
            raise ValueError(
                f"{where}: a continuation has {len(after)} tokens; it needs at least 1, and the context length "
                f"{max_tokens} must hold it"
            )
        tokens = [*(before or [tokenizer.eos_id]), *after][-max_tokens - 1 :]
        encoded.append(Request(np.array(tokens, np.int32), min(len(after), len(tokens) - 1)))
    return encoded


def read_tasks(tasks: Sequence[str], limit: int | None = None) -> list[RequestTask]:
    """
    Raises:
        ValueError: a task cannot be read, or two tasks have the same name.
    """
    found: dict[str, RequestTask] = {}
    for task in tasks:
        read = read_requests(task, limit)
        if read.name in found:
            raise ValueError(
                f"{task}: {read.name} exists already, from {found[read.name].file}; rename a folder"
            )
        found[read.name] = read
    return list(found.values())


def requests_table(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    rows = [
        [name, *(f"{each[key]:.4f}" if key in each else "" for key in SCORES), str(each["questions"])]
        for name, each in found.items()
    ]
    head = ["task", *(key.replace("_", " ") for key in SCORES), "questions"]
    return {"title": "Request files:", "head": head, "rows": rows}
