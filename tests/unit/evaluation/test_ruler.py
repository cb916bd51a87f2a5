"""Tests RULER: prompts that fit and contain their answers, scores, and models that find all or nothing."""

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from gsa_data.tokenize import Tokenizer
from gsa_eval import ruler_score, ruler_words
from gsa_eval.commands import evaluate as command
from gsa_eval.ruler import TASKS, Sample, Setting, samples
from gsa_eval.ruler_score import RulerOptions, answer_score, ruler_table, score_ruler
from gsa_eval.ruler_words import FIRST, NOUNS
from helpers.evaluated import SAMPLE, TOKENIZER, evaluated_config, evaluated_model, save_run

LENGTH = 5000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER)


@pytest.fixture(scope="module")
def essay() -> list[str]:
    return (SAMPLE / "README.md").read_text().split()


def reader(asked: Sequence[Sample], new_tokens: int) -> list[str]:
    return [f" {read(each.prompt.rpartition(chr(10) * 2)[2], each.prompt)}, I think." for each in asked]


def read(question: str, prompt: str) -> str:
    body = prompt.removesuffix(question)
    if match := re.search(r"what secret \w+ of (.+) does", question):
        keys = re.split(", | and ", match[1])
        return " ".join(value for key, value in re.findall(r"of (\S+) is (\S+)\.", body) if key in keys)
    if match := re.search(r"have the value (\d+)", question):
        names = re.findall(rf"VAR (\w+) = {match[1]}\.", body)
        copied = re.findall(r"VAR (\w+) = VAR (\w+)\.", body)
        for _ in range(5):
            names += [after for after, before in copied if before in names]
        return " ".join(names)
    if "which 10 words" in question:
        counted = Counter(re.findall(r"\d+\. (\S+)", body.split("\n\n")[-2]))
        return " ".join(word for word, _ in counted.most_common(10))
    counted = Counter(word for word in body.split("\n\n")[1].split() if word != "...")
    return " ".join(word for word, _ in counted.most_common(3))


def test_a_model_that_reads_scores_100_and_one_that_does_not_0(tokenizer, essay):
    assert len(TASKS) == 11
    options = RulerOptions([LENGTH + 1000, LENGTH], samples=2, essay=essay)
    found = score_ruler(reader, tokenizer, options)
    assert found["scores"] == {str(length): dict.fromkeys(TASKS, 100.0) for length in (LENGTH, LENGTH + 1000)}
    assert (found["mean"][str(LENGTH)], found["effective_length"]) == (100.0, LENGTH + 1000)
    assert ruler_table(found)["rows"][0][:2] == [str(LENGTH), "100.0"]

    options = RulerOptions([LENGTH], samples=2, essay=essay)
    found = score_ruler(lambda asked, _: ["I do not know"] * len(asked), tokenizer, options)
    assert found["scores"][str(LENGTH)] == dict.fromkeys(TASKS, 0.0)
    assert found["effective_length"] is None

    turns = itertools.cycle([reader, lambda asked, _: [""] * len(asked)])
    options = RulerOptions([LENGTH], ["niah_single_1", "vt"], samples=4, essay=essay)
    found = score_ruler(lambda asked, _: [next(turns)([each], 0)[0] for each in asked], tokenizer, options)
    assert found["scores"][str(LENGTH)] == {"niah_single_1": 50.0, "vt": 50.0}
    error = 100 * (1 / 3) ** 0.5 / 2  # two of four samples are right
    assert found["standard_errors"][str(LENGTH)] == pytest.approx({"niah_single_1": error, "vt": error})
    assert found["mean_standard_error"][str(LENGTH)] == pytest.approx(error / 2**0.5)


def test_other_processes_make_the_same_prompts(tokenizer, essay, monkeypatch):
    options = RulerOptions([1000, 700], ["niah_single_2", "fwe"], samples=2, essay=essay)
    here = list(ruler_score._asked(tokenizer, options))
    assert [cell[:2] for cell in here] == [
        (700, "niah_single_2"), (700, "fwe"), (1000, "niah_single_2"), (1000, "fwe"),
    ]  # fmt: skip
    monkeypatch.setattr(ruler_score, "IN_PROCESS_TOKENS", 0)
    assert list(ruler_score._asked(tokenizer, options)) == here
    without_room = RulerOptions([1000, 300], ["niah_single_1", "cwe"], samples=1)
    with pytest.raises(ValueError, match="cwe at 300 tokens: has no room"):
        next(ruler_score._asked(tokenizer, without_room))


MANY = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
"""Answers of RULER's tasks that have more than one."""


@pytest.mark.parametrize("name", TASKS)
def test_prompts_fit_hold_their_answers_and_come_again(name, tokenizer, essay):
    made = samples(name, LENGTH, 3, 7, tokenizer, essay)
    for sample in made:
        assert [*sample.tokens] == tokenizer.encode(sample.prompt).tolist()
        tokens = len(sample.tokens) + TASKS[name].new_tokens
        assert 0.9 * LENGTH < tokens <= LENGTH
        assert all(answer in sample.prompt for answer in sample.answers)
        assert len(set(sample.answers)) == len(sample.answers) == MANY.get(name, 1)
    assert samples(name, LENGTH, 3, 7, tokenizer, essay) == made
    assert samples(name, LENGTH, 3, 8, tokenizer, essay) != made
    assert len({sample.prompt for sample in made}) == 3


@pytest.mark.parametrize("words", [["a"] * 500 + ["x" * 400] * 5, ["x" * 400] * 5 + ["a"] * 500])
def test_a_line_through_two_sizes_does_not_overfill_a_length(words: list[str], tokenizer: Tokenizer) -> None:
    """The lengths of the words vary more than in any real text."""
    made = samples("niah_single_2", 1500, 4, 0, tokenizer, words)
    assert all(900 < len(sample.tokens) + 128 <= 1500 for sample in made)


@pytest.mark.parametrize(
    ("length", "in_example", "in_list"), [(4095, {3: 10, 1: 10}, (6, 1)), (4096, {10: 10, 3: 30}, (30, 3))]
)
def test_frequencies_of_common_words_are_rulers(length, in_example, in_list, essay):
    """The counts are from `generate_input_output` of RULER's common_words_extraction.py."""
    sample = TASKS["cwe"].make(random.Random(0), 50, Setting(length, essay))
    parts = sample.prompt.split("\n\n")
    example, asked = (Counter(re.findall(r"\d+\. (\S+)", part)) for part in (parts[1], parts[4]))
    assert Counter(example.values()) == in_example
    assert Counter(asked.values()) == {in_list[0]: 10, in_list[1]: 50}
    assert {word for word, times in asked.items() if times == in_list[0]} == set(sample.answers)


def test_frequencies_of_coded_words_are_rulers(essay: list[str]) -> None:
    """The counts are from `generate_input_output` of RULER's freq_words_extraction.py: 4000 / 50 words with dots."""
    sample = TASKS["fwe"].make(random.Random(0), 900, Setting(4000, essay))
    found = Counter(sample.prompt.split("\n\n")[1].split())
    expected = [int(1000 * rank**-2.0 / (math.pi**2 / 6)) for rank in range(1, 81)]
    assert [times for _, times in found.most_common()] == [each for each in expected if each]
    assert [word for word, _ in found.most_common(4)] == ["...", *sample.answers]


def test_a_length_that_there_are_words_for_is_filled(tokenizer, essay, monkeypatch):
    """The search for the number of units also tries larger numbers, for which there are too few words."""
    monkeypatch.setattr(ruler_words, "USABLE", 380 / (len(FIRST) * len(NOUNS)))
    task = TASKS["niah_multikey_2"]
    of_all = len(tokenizer.encode(task.make(random.Random(0), 350, Setting(5000, essay)).prompt))
    (sample,) = samples("niah_multikey_2", of_all + task.new_tokens, 1, 0, tokenizer, essay)
    assert 0.95 * of_all < len(tokenizer.encode(sample.prompt)) <= of_all + 1
    with pytest.raises(ValueError, match="different words of"):
        samples("niah_multikey_2", 2 * of_all, 1, 0, tokenizer, essay)


def test_the_depth_of_a_single_needle(tokenizer: Tokenizer, essay: list[str]) -> None:
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_3"):
        made = samples(name, LENGTH, 3, 0, tokenizer, essay)
        for sample in made:
            assert sample.depth is not None
            place = sample.prompt.index(sample.answers[0]) / len(sample.prompt)
            assert place == pytest.approx(sample.depth, abs=0.06)
    assert samples("niah_multivalue", LENGTH, 1, 0, tokenizer, essay)[0].depth is None
    without_sentences = ["word"] * 100  # the next end of a sentence is the end of the text
    (sample,) = samples("niah_single_2", LENGTH, 1, 0, tokenizer, without_sentences)
    assert sample.depth == 1.0


def test_scores_of_answers() -> None:
    assert answer_score("They are 17 and 23.", ["17", "23"]) == 1
    assert answer_score("It is the SEA.", ["Sea", "23", "5", "8"]) == 0.25
    assert answer_score("", ["x"]) == 0


def test_what_is_missing_is_named(tokenizer: Tokenizer, essay: list[str]) -> None:
    for options, message in (
        (RulerOptions([LENGTH], ["niah_single_2"]), "give --haystack PLACE"),
        (RulerOptions([LENGTH], ["niah"]), "RULER has no task niah"),
    ):
        with pytest.raises(ValueError, match=message):
            score_ruler(reader, tokenizer, options)


def test_the_command(tmp_path, monkeypatch, capsys, caplog):
    config = evaluated_config()
    run = save_run(evaluated_model(config), config, tmp_path / "run")
    words = ["--run", str(run), "--name", "ruler", "--ruler", "400,300", "--ruler-samples", "1"]
    words += ["--ruler-tasks", "niah_single_1"]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words])
    with caplog.at_level("WARNING"):
        assert command.main() == 0, capsys.readouterr().err
    assert f"400 tokens: more than the {config.train.seq_len_tokens} of a sequence in training" in caplog.text
    found = json.loads((run / "evaluations" / "ruler" / "results.json").read_text())["ruler"]
    assert [*found["scores"]] == ["300", "400"]
    assert len(found["without"]) == 10
    assert "RULER, 1 samples of each; effective length (85.6): below all of these" in capsys.readouterr().out

    words[3:6] = ["essay", "--ruler", "300"]
    words[-1] += ",niah_single_2"
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words, "--validation"])
    assert command.main() == 0, capsys.readouterr().err
    results = json.loads((run / "evaluations" / "essay" / "results.json").read_text())
    assert results["data"]["validation"]["loss"] > 0
    assert [*results["ruler"]["scores"]["300"]] == ["niah_single_1", "niah_single_2"]
