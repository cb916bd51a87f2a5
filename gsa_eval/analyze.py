"""Run an analysis of a model's attention on one text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gsa_data.corpus import open_corpus
from gsa_data.tokenize import check_text
from gsa_data.validation import validation_documents
from gsa_eval.attention_pictures import write_pictures
from gsa_eval.attention_record import HeadMaps, check_place, record_attention
from gsa_eval.convert.export_hf import new_folder
from gsa_eval.evaluated_model import EvaluatedModel, Execution, Source, load_evaluated_model
from gsa_eval.results import circumstances, result_folder
from gsa_train.data.tokenizer import reading_of
from gsa_train.files import read_named
from gsa_train.metrics.record_format import to_strict

LEAST_TOKENS, MOST_TOKENS = 2, 4096
"""Bounds of a text's length. A layer's probabilities, [heads, tokens, tokens], are held in memory."""
MOST_DOCUMENTS = 100
"""Number of documents of validation text to read. The longest is used."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Text:
    tokens: list[int]
    all_tokens: int
    """Number of tokens before truncation."""
    origin: str


def run_analysis(arguments: argparse.Namespace, words: Sequence[str]) -> Path:
    """Analyze a model, and return the folder with pictures, `results.json` (all numbers except the maps) and
    `maps.npz`.

    Args:
        words: the command line, for the record.

    Raises:
        ValueError, DataFault, OSError: something cannot be read, the layer or head does not exist, or the name is in
            use.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    source = Source(arguments.run, arguments.checkpoint, arguments.hf, arguments.step)
    if source.run is not None or arguments.out is not None:  # before anything is loaded
        result_folder(arguments.name, source.run, arguments.out, "analysis")
    given = given_text(arguments)
    evaluated = load_evaluated_model(
        source, arguments.settings, Execution(arguments.device, "eager", arguments.dtype)
    )
    folder = result_folder(arguments.name, evaluated.run_dir, arguments.out, "analysis")
    layer, head = arguments.layer, arguments.head
    model = evaluated.model
    check_place(model, layer, head)
    text = read_one_text(evaluated, given, arguments.max_tokens)
    logger.info("%s: %d tokens", text.origin, len(text.tokens))
    record = record_attention(model, text.tokens, layer, head)
    assert record.maps is not None
    results = {
        "name": arguments.name,
        "model": evaluated.about,
        "text": {"origin": text.origin, "tokens": len(text.tokens), "all_tokens": text.all_tokens},
        "layer": layer,
        "head": head,
        "recall": record.maps.recall,
        **{
            each.name: getattr(record, each.name)
            for each in dataclasses.fields(record)
            if each.name != "maps"
        },
        **circumstances(words, "gsa-analyze"),
    }
    spelled = [evaluated.tokenizer.decode([token]) for token in text.tokens]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as unfinished:
        place = f"layer {layer}, head {head}"
        write_pictures(record, place, spelled, title_of(evaluated, text), unfinished)
        _write_numbers(unfinished, results, record.maps)
    return folder


def given_text(arguments: argparse.Namespace) -> tuple[str, str] | None:
    """Returns the text of --text or --file and its name, before anything is loaded, or None without either.

    Raises:
        ValueError: the text cannot be read, or --max-tokens is out of bounds.
    """
    if not LEAST_TOKENS <= arguments.max_tokens <= MOST_TOKENS:
        raise ValueError(f"--max-tokens {arguments.max_tokens}: give {LEAST_TOKENS} to {MOST_TOKENS:,}")
    file: Path | None = arguments.file
    if file is None:
        return None if arguments.text is None else (check_text(arguments.text, "--text"), "the text given")
    return read_named("--file", file), file.name


def read_one_text(evaluated: EvaluatedModel, given: tuple[str, str] | None, most: int) -> Text:
    """Returns the first `most` tokens of the given text, or else of a document of the run's validation text.

    Raises:
        ValueError, DataFault: there is no text, or it is too short.
    """
    if given is not None:
        tokens, origin = evaluated.tokenizer.encode(given[0]).tolist(), given[1]
    else:
        if evaluated.config is None:
            raise ValueError(
                "the model belongs to no run, so it has no validation text: give --text or --file"
            )
        if evaluated.config.data.format == "chat":
            raise ValueError("the run's validation text is conversations: give --text or --file")
        place = next(iter(evaluated.config.data.validation_folders.values()))
        reading = reading_of(evaluated.config)
        corpus = open_corpus(place, evaluated.config.data.text_field, reading)
        documents = islice(validation_documents(corpus, evaluated.tokenizer, reading), MOST_DOCUMENTS)
        tokens = max((document.tokens[:-1] for document in documents), key=len, default=np.zeros(0)).tolist()
        origin = "a validation document"
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(f"{origin}: {len(tokens)} tokens; give a text of at least {LEAST_TOKENS}")
    return Text(tokens[:most], len(tokens), origin)


def title_of(evaluated: EvaluatedModel, text: Text) -> str:
    about = evaluated.about
    of_run = evaluated.run_dir.absolute().name if evaluated.run_dir is not None else None
    name = of_run or Path(about.get("hf") or about["checkpoint"]).name
    step = f", step {about['step']:,}" if "step" in about else ""
    settings = "".join(f", {each}" for each in about["settings"])
    cut = "" if len(text.tokens) == text.all_tokens else f"the first {len(text.tokens):,} of "
    return f"{name}{step}{settings} · {cut}{text.all_tokens:,} tokens of {text.origin}"


def _write_numbers(folder: Path, results: dict[str, Any], maps: HeadMaps) -> None:
    def of_dataclass(each: Any) -> Any:
        return to_strict(dataclasses.asdict(each))

    strict = to_strict(results)
    content = json.dumps(strict, indent=1, ensure_ascii=False, allow_nan=False, default=of_dataclass)
    (folder / "results.json").write_text(content + "\n", encoding="utf-8")
    arrays = {"weights": maps.weights, "full": maps.full, "scores": maps.scores, "selected": maps.selected}
    present: dict[str, Any] = {name: array.numpy() for name, array in arrays.items() if array is not None}
    np.savez_compressed(folder / "maps.npz", **present)
