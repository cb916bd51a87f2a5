"""Run tasks of lm-evaluation-harness on an evaluated model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError
from lm_eval import simple_evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from gsa_eval.evaluated_model import EvaluatedModel
from gsa_eval.generation import continue_prompts
from gsa_eval.harness_tasks import EncodingLM, find_tasks, task_errors
from gsa_eval.perplexity import token_losses
from gsa_eval.text import as_piece, windows
from gsa_train.validation.requests import Request

MAX_GENERATED_TOKENS = 256
"""Default if a task gives none, as in the harness."""


class EvaluatedLM(EncodingLM):
    """Scores and generates for lm-evaluation-harness.

    Args:
        max_length: limit of context and continuation in tokens; None: the length of a training sequence.
    """

    def __init__(self, evaluated: EvaluatedModel, batch_size: int, max_length: int | None = None) -> None:
        super().__init__(evaluated.tokenizer)
        self.evaluated, self.batch_size = evaluated, batch_size
        self.max_length = max_length or evaluated.trained_length
        self._device = evaluated.model.device

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score requests. If a context is too long, its beginning is cut off."""
        pieces = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens; give max_length of at least that"
                )
            tokens = np.array([*context, *continuation][-self.max_length - 1 :], np.int32)
            pieces.append(as_piece(Request(tokens, len(continuation))))
        found = [(0.0, True)] * len(pieces)
        for scored in token_losses(self.evaluated.model, pieces, self.batch_size):
            found[scored.number] = (-float(scored.nats.sum(dtype=np.float64)), bool(scored.greedy.all()))
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        pieces, owners = [], []
        for number, request in enumerate(requests):
            document = np.array(self.tok_encode(request.args[0]), np.int32)
            parts = list(windows(document, self.eot_token_id, self.max_length, self.max_length))
            pieces += parts
            owners += [number] * len(parts)
        found = [0.0] * len(requests)
        for scored in token_losses(self.evaluated.model, pieces, self.batch_size):
            found[owners[scored.number]] -= float(scored.nats.sum(dtype=np.float64))
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        found = [""] * len(requests)
        alike: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(number)
        for numbers in alike.values():
            settings: dict[str, Any] = dict(
                normalize_gen_kwargs(requests[numbers[0]].args[1], MAX_GENERATED_TOKENS)
            )
            stops = handle_stop_sequences(settings.pop("until", None), eos=None)
            max_new = settings.pop("max_gen_toks")
            if not settings.get("do_sample"):
                settings.pop("temperature", None)
            room = self.max_length - max_new
            if room < 1:
                raise ValueError(
                    f"a task generates {max_new} tokens, the context has {self.max_length}; give a larger max_length"
                )
            encoded = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            prompts = [each or [self.eot_token_id] for each in encoded]
            texts = continue_prompts(
                self.evaluated.model,
                self.evaluated.tokenizer,
                prompts,
                max_new,
                stops,
                self.batch_size,
                **settings,
            )
            for number, text in zip(numbers, texts, strict=True):
                found[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found


def run_tasks(
    evaluated: EvaluatedModel,
    tasks: Sequence[str],
    batch_size: int,
    max_length: int | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, Any]:
    """Returns the scores, versions and numbers of examples of tasks, in the format of lm-evaluation-harness.

    Args:
        tasks: the harness' names of tasks, or the user's YAML files.

    Raises:
        ValueError: a task does not exist, or is faulty.
    """
    manager, wanted = find_tasks(tasks)
    model = EvaluatedLM(evaluated, batch_size, max_length)
    with task_errors(", ".join(tasks), (TemplateError,)):  # for a field that the data lack
        found: Any = simple_evaluate(
            model, tasks=wanted, num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
        )
    kept = {name: found[name] for name in ("results", "versions", "n-shot", "n-samples")}
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def task_table(found: dict[str, Any]) -> dict[str, Any]:
    rows = []
    for task, scores in found["results"].items():
        for key, value in scores.items():
            metric, _, filtered = key.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr,{filtered}")
                numbers = [f"{each:.4f}" if isinstance(each, float) else "" for each in (value, error)]
                rows.append([task, metric, filtered, *numbers, str(found["n-shot"].get(task, ""))])
    return {"title": "Tasks:", "head": ["task", "metric", "filter", "value", "±", "shots"], "rows": rows}
