"""Run an evaluation: load the model, score it and write the results."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gsa_data.faults import DEFAULT_READING, Reading
from gsa_data.request_files import is_request_file, score
from gsa_eval.evaluated_model import EvaluatedModel, Execution, Source, load_evaluated_model
from gsa_eval.generation import answer_prompts
from gsa_eval.perplexity import score_text, token_losses
from gsa_eval.results import circumstances, result_folder, table, write_results
from gsa_eval.ruler import TASKS, Sample
from gsa_eval.ruler_score import (
    RulerOptions,
    ruler_table,
    score_ruler,
)
from gsa_eval.text import TextOptions, as_piece, read_text, words_of
from gsa_eval.wandb_run import log_to_wandb
from gsa_hf.generation import Generator
from gsa_train.config import Config
from gsa_train.data.tokenizer import reading_of
from gsa_train.metrics.wandb_sink import WandbRefused, wandb_mode
from gsa_train.validation.requests import encode_requests, read_tasks, requests_table

logger = logging.getLogger(__name__)


def run_evaluation(arguments: argparse.Namespace, words: Sequence[str]) -> tuple[Path, str]:
    """Run an evaluation. Returns the folder with the results, and the table to print.

    Args:
        words: the command line, which results.json records.

    Raises:
        ValueError, DataFault, OSError: an input cannot be read, the name is in use, or WANDB_MODE is invalid.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    source = Source(arguments.run, arguments.checkpoint, arguments.hf, arguments.step)
    if source.run is not None or arguments.out is not None:  # before anything is loaded
        result_folder(arguments.name, source.run, arguments.out)
    execution = Execution(arguments.device, arguments.attention, arguments.dtype)
    evaluated = load_evaluated_model(source, arguments.settings, execution)
    folder = result_folder(arguments.name, evaluated.run_dir, arguments.out)
    if evaluated.config is not None:
        _check(evaluated.config, arguments)
    _warn_of_length(evaluated, arguments)
    results: dict[str, Any] = {
        "name": arguments.name,
        "model": evaluated.about,
        "options": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if value not in (None, "", [], ())
        },
        **circumstances(words),
        "tables": [],
    }
    try:
        _score(evaluated, arguments, results)
        text = write_results(folder, results)
    except BaseException:
        if results["tables"] or results.get("data"):  # the results may be the work of hours
            print(f"{table(results)}\n{folder} was not written; these results were finished")
        raise
    del results["tables"]
    if evaluated.config is not None:
        log_to_wandb(results, folder, evaluated.config, evaluated.wandb_run_id, arguments.wandb)
    return folder, text


def _check(config: Config, arguments: argparse.Namespace) -> None:
    """Refuse bad arguments before hours of scoring.

    Raises:
        ValueError: as in `run_evaluation`.
    """
    try:
        wandb_mode(arguments.wandb or config.logging.wandb, os.environ)
    except WandbRefused as error:
        raise ValueError(str(error)) from error
    asks_for_other = arguments.data or arguments.tasks or arguments.ruler
    if config.data.format == "chat" and (arguments.validation or not asks_for_other):
        raise ValueError(
            "the run's validation sets are conversations, which its own validations score (validation_loss in "
            "metrics.jsonl); give --data PLACE, a text"
        )


def _warn_of_length(evaluated: EvaluatedModel, arguments: argparse.Namespace) -> None:
    """Warn if texts are longer than the training sequences, but no argument changes the rotary embedding."""
    length = max([arguments.context_length or 0, *arguments.ruler])
    rotary = any(setting.startswith("model.rope") for setting in arguments.settings)
    if length > evaluated.trained_length and not rotary:
        logger.warning(
            "%d tokens: more than the %d of a sequence in training, whose positions the model knows; for longer ones "
            "see model.rope_scaling",
            length,
            evaluated.trained_length,
        )


def _score(evaluated: EvaluatedModel, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Add the requested scores to `results` one by one, so that `results` has the finished scores after a failure."""
    tables = results["tables"]
    files = [task for task in arguments.tasks if is_request_file(task)]
    tasks = [task for task in arguments.tasks if task not in files]
    if files:
        results["requests"] = _requests(evaluated, arguments, files)
        tables.append(requests_table(results["requests"]))
    if tasks:
        try:
            from gsa_eval.harness import run_tasks, task_table
        except ModuleNotFoundError as missing:
            raise ValueError(
                f"--tasks needs the package {missing.name}; run in the checkout: pip install '.[hf,eval]'"
            ) from missing
        options = (
            arguments.batch_size or 1,
            arguments.context_length,
            arguments.limit,
            arguments.num_fewshot,
        )
        results["tasks"] = run_tasks(evaluated, tasks, *options)
        tables.append(task_table(results["tasks"]))
    if arguments.ruler:
        results["ruler"] = _ruler(evaluated, arguments)
        tables.append(ruler_table(results["ruler"]))
    if arguments.data or arguments.validation or not tables:
        results["data"] = {}
        for name, scores in _texts(evaluated, arguments):
            results["data"][name] = scores


def _requests(
    evaluated: EvaluatedModel, arguments: argparse.Namespace, files: Sequence[str]
) -> dict[str, Any]:
    found = {}
    length = arguments.context_length or evaluated.trained_length  # of context and continuation
    for task in read_tasks(files, arguments.limit):
        pieces = list(map(as_piece, encode_requests(task.requests, evaluated.tokenizer, length, task.name)))
        sums = np.zeros(len(pieces))
        for each in token_losses(evaluated.model, pieces, arguments.batch_size or 1):
            sums[each.number] = -each.nats.sum(dtype=np.float64)
        counts = {"questions": len(task.questions), "requests": len(pieces), "file": str(task.file)}
        found[task.name] = {**score(task, sums.tolist()), **counts}
        logger.info("%s: %d questions", task.name, len(task.questions))
    return found


def _texts(evaluated: EvaluatedModel, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    places = named_places(arguments.data)
    max_tokens: int | None = arguments.max_tokens
    context_length: int = arguments.context_length or evaluated.trained_length
    if (arguments.stride or 0) > context_length:
        raise ValueError(
            f"--stride {arguments.stride}: above the context length {context_length}; give at most that"
        )
    how = _reading(arguments, None)
    if not places:
        if evaluated.config is None:
            raise ValueError("nothing to do: give --data PLACE")
        places = evaluated.config.data.validation_folders
        max_tokens = max_tokens or evaluated.config.evaluate.max_blocks * context_length
        how = _reading(arguments, evaluated.config)
    options = TextOptions(
        context_length, arguments.stride, max_tokens, evaluated.attend_across_documents, *how
    )
    for name, place in places.items():
        text = read_text(place, evaluated.tokenizer, options)
        logger.info("%s: %d sequences of up to %d tokens", name, len(text.pieces), context_length)
        scores = score_text(evaluated.model, text, arguments.batch_size or 1, name)
        yield name, {"place": place, "context_length": context_length, "stride": options.stride, **scores}


def _reading(arguments: argparse.Namespace, config: Config | None) -> tuple[str, Reading]:
    """Returns the field with a document's text, and the limits for reading.

    Args:
        config: config of the run if the text is its validation set, else None.
    """
    if config is None:
        return arguments.text_field or "text", DEFAULT_READING
    return arguments.text_field or config.data.text_field, reading_of(config)


def _ruler(evaluated: EvaluatedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = evaluated.model, evaluated.tokenizer
    haystack: str | None = arguments.haystack
    how = _reading(arguments, None)
    if haystack is None and evaluated.config is not None and evaluated.config.data.format != "chat":
        haystack = next(iter(evaluated.config.data.validation_folders.values()))
        how = _reading(arguments, evaluated.config)
    essay = words_of(haystack, tokenizer, max(arguments.ruler), *how) if haystack else []
    tasks = arguments.ruler_tasks.split(",") if arguments.ruler_tasks else []
    tasks = tasks or [name for name, task in TASKS.items() if essay or not task.needs_essay]

    options = RulerOptions(arguments.ruler, tasks, arguments.ruler_samples, arguments.seed, essay)
    begin = time.perf_counter()
    generation_config: Any = model.generation_config
    generation_config.eos_token_id = list(tokenizer.stop_ids)
    generator = Generator(model, vocab_size=tokenizer.vocab_size, context_tokens=max(arguments.ruler))

    def generate(asked: Sequence[Sample], new_tokens: int) -> list[str]:
        tokens = [sample.tokens for sample in asked]
        return answer_prompts(generator, tokenizer, tokens, new_tokens, arguments.batch_size)

    found = score_ruler(generate, tokenizer, options)
    found["seconds"] = round(time.perf_counter() - begin, 2)
    count = len(tasks) * len(options.lengths_tokens) * options.samples
    logger.info("RULER, %d samples: %.1f s", count, found["seconds"])
    return {**found, "haystack": haystack, "without": [name for name in TASKS if name not in tasks]}


def named_places(words: Sequence[str]) -> dict[str, str]:
    """Parse `[NAME=]PLACE` arguments into a dict from name to place. The default name is the last part of PLACE.

    Raises:
        ValueError: two names are equal, or a place is empty (for example, an unset shell variable).
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not equals or "/" in name or ":" in name:
            place = word
            name = Path(place.rstrip("/")).name
        if not place.strip():
            raise ValueError(f"--data {word!r}: names no place; give the folder of a text, or leave it out")
        if name in found:
            raise ValueError(f"--data {word}: {name} is used already; give NAME={place}")
        found[name] = place
    return found
