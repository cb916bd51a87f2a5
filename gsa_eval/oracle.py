"""Measure how well a model retrieves if each query attends only to the keys that a perfect indexer selects.

The perfect indexer selects the keys with the highest attention probabilities of the model itself. The result is an
upper bound for a learned indexer of the same `Form`, which says how many neighbouring queries share a selection, and
how many neighbouring keys are selected together.

Shapes: H query heads, Hkv key-value heads, G = H / Hkv, D head size, L tokens, C queries of a chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from gsa_eval.convert.read_hf import check_config

NAME = "oracle"
"""Name of the attention function in transformers' registry. It has one form at a time."""

CHUNK_QUERIES = 512
"""Queries whose probabilities are in memory at once."""

FORM = re.compile(r"q(\d+)k(\d+)(?:h(all|kv))?")


@dataclass(frozen=True)
class Form:
    """Which queries share a selection, and which keys are selected together."""

    queries: int = 1
    """Number of neighbouring queries that share the selection of the first query."""
    keys: int = 1
    """Number of neighbouring keys that are selected together, by their maximum."""
    per_kv_head: bool = False
    """Whether each key-value head has its own selection. Otherwise the mean probability over all heads selects."""

    def __str__(self) -> str:
        return f"q{self.queries}k{self.keys}" + ("hkv" if self.per_kv_head else "")

    @staticmethod
    def parse(text: str) -> Form:
        """Parse forms such as `q1k16`, `q32k1`, `q1k16hkv`.

        Raises:
            ValueError: the text is not a form.
        """
        found = FORM.fullmatch(text)
        if found is None or "0" in found.groups()[:2]:
            raise ValueError(
                f"form {text!r}: give q<queries>k<keys>, such as q1k16, with hkv for a selection a key-value head"
            )
        return Form(int(found[1]), int(found[2]), found[3] == "kv")


@dataclass(frozen=True)
class Budget:
    """The budget of each query, in tokens."""

    selected: int
    window: int = 64
    """Number of latest keys that a query attends to in addition to the selected keys."""


class OracleAttention:
    """Runs attention over selected keys, in the interface of transformers' attention functions."""

    def __init__(self, form: Form, budget: Budget) -> None:
        if budget.selected % form.keys:
            raise ValueError(
                f"form {form}: {budget.selected} keys are not a multiple of {form.keys}; give such a budget"
            )
        self.form, self.budget = form, budget
        self.kept = torch.zeros(())
        """Share of attention probability on the selected keys, summed over calls. It stays on the device."""
        self.calls = 0

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns [1, L, H, D] for query [1, H, L, D], key and value [1, Hkv, L, D]. The mask is ignored, because there
        is no padding."""
        assert query.shape[0] == 1, "one sequence at a time"
        length, kv_heads = query.shape[2], key.shape[1]
        queries = query[0].unflatten(0, (kv_heads, -1))
        keys, values = key[0], value[0]
        # A chunk begins where a group of queries begins.
        chunk = -(-CHUNK_QUERIES // self.form.queries) * self.form.queries
        out, kept = [], torch.zeros((), device=query.device)
        for first in range(0, length, chunk):
            until = min(first + chunk, length)  # later keys are in the future of the whole chunk
            rows = torch.arange(first, until, device=query.device)
            probs = _probabilities(queries[:, :, first:until], keys[:, :until], rows, scaling)
            selected = select(probs, rows, self.form, self.budget)
            mass = probs.mul_(selected[:, None])
            sums = mass.sum(-1)
            kept += sums.mean() * len(rows)
            added = torch.einsum("ngck,nkd->cngd", mass.to(values.dtype), values[:, :until])
            out.append((added / sums.permute(2, 0, 1)[..., None]).to(values.dtype))
        self.kept = self.kept + kept / length
        self.calls += 1
        return torch.cat(out).flatten(1, 2)[None], None


def _probabilities(
    queries: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor, scaling: float
) -> torch.Tensor:
    logits = torch.einsum("ngcd,nkd->ngck", queries, keys).float().mul_(scaling)
    places = torch.arange(keys.shape[1], device=keys.device)
    return logits.masked_fill_(places > rows[:, None], float("-inf")).softmax(-1)


def select(probs: torch.Tensor, rows: torch.Tensor, form: Form, budget: Budget) -> torch.Tensor:
    """Returns the selection, bool [Hkv or 1, C, L], from the attention probabilities [Hkv, G, C, L] of C queries.
    `rows` are the positions of the queries, and start at a multiple of `form.queries`. The selection is causal."""
    length = probs.shape[-1]
    scores = probs.mean(1) if form.per_kv_head else probs.mean((0, 1))[None]
    leaders = scores[:, :: form.queries]
    groups = -(-length // form.keys)
    padded = torch.nn.functional.pad(leaders, (0, groups * form.keys - length))
    best = padded.unflatten(-1, (groups, form.keys)).amax(-1)
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(-1, best.topk(min(budget.selected // form.keys, groups), sorted=False).indices, True)
    of_leaders = chosen.repeat_interleave(form.keys, -1)[..., :length]
    selected = of_leaders.repeat_interleave(form.queries, 1)[:, : len(rows)]
    places, row = torch.arange(length, device=probs.device), rows[:, None]
    beside = (places > row - budget.window) | (places == row)
    return (selected | beside) & (places <= row)


def load_decoder(folder: Path, **options: Any) -> Any:
    """
    Raises:
        ValueError: config.json or the weights are damaged, or do not fit each other. Without this check,
            transformers would fill missing weights with random values.
    """
    check_config(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, loaded[1][f"{kind}_keys"])):
            raise ValueError(
                f"--hf {folder}: {kind} in the weights: {names[0]}; copy the folder from its source again"
            )
    return loaded[0]


@dataclass(frozen=True)
class Retrieved:
    exact: float
    """Percentage of prompts for which all tokens of the answer are the most probable ones."""
    log_probability: float
    """Mean over the answers' tokens, in nats."""
    kept_mass: float | None
    """Share of attention probability that the selection keeps, mean over queries, heads and layers; None: dense."""


@torch.no_grad()
def retrieve(
    model: PreTrainedModel,
    prompts: Iterable[tuple[Sequence[int], Sequence[int]]],
    how: OracleAttention | None,
) -> Retrieved:
    """Score the right answers by teacher forcing.

    Args:
        prompts: token ids of each prompt and its answer
        how: the oracle's attention; None: the model's own attention, dense or with its learned indexers
    """
    implementation = model.config._attn_implementation
    if how is not None:
        AttentionInterface.register(NAME, how)
        model.set_attn_implementation(NAME)
    exact, log_probabilities = [], []
    try:
        for prompt, answer in prompts:
            tokens = torch.tensor([[*prompt, *answer]], device=model.device)
            logits = model(tokens, logits_to_keep=len(answer) + 1, use_cache=False).logits[0, :-1].float()
            expected = tokens[0, len(prompt) :]
            exact.append(bool((logits.argmax(-1) == expected).all()))
            log_probabilities += logits.log_softmax(-1).gather(1, expected[:, None])[:, 0].tolist()
    finally:
        model.set_attn_implementation(implementation)
    return Retrieved(
        100 * sum(exact) / len(exact),
        sum(log_probabilities) / len(log_probabilities),
        None if how is None else float(how.kept) / how.calls,
    )
