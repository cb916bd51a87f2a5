"""Our model class in lm-evaluation-harness gives what its own `hf` class gives of the exported model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from gsa_train.commands import evaluate as command
from gsa_train.convert.export_hf import export_hf
from gsa_train.evaluation.harness import GSATrainLM, run_tasks
from gsa_train.evaluation.loop_tasks import TaskError, prepare_tasks
from gsa_train.evaluation.requests import as_piece
from gsa_train.evaluation.subject import Source, load_subject
from helpers.evaluated import TOKENIZER, evaluated_config, evaluated_model, save_run

LENGTH = 48
CHOICES = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
GENERATES = """
task: continues
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n", "e"], max_gen_toks: 9, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
DOCUMENTS = [
    {"question": "The sky is", "choices": [" blue", " green as grass", " x"], "label": 0},
    {"question": "def f(x):\n    return", "choices": [" x", " 1", "\n\n"], "label": 1},
    {
        "question": "A longer question, which has more words than the others. " * 9,
        "choices": [" a", " b", " c d"],
        "label": 2,
    },
    {"question": "Grass is", "choices": [" green", " blue", " red"], "label": 0},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[GSATrainLM, HFLM, Path]:
    config = evaluated_config(train={"seq_len_tokens": LENGTH})
    folder = tmp_path_factory.mktemp("harness")
    run = save_run(evaluated_model(config), config, folder / "run")
    exported = export_hf(run / "checkpoints" / "step_00000003", folder / "hf").folder
    theirs = HFLM(pretrained=str(exported), device="cpu", batch_size=2, max_length=LENGTH)
    return GSATrainLM(run=str(run), batch_size=3), theirs, run


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "test.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    files = []
    for name, text in (("colours", CHOICES), ("continues", GENERATES)):
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(text.format(data=data))
    return files


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, arguments=each, idx=number) for number, each in enumerate(arguments)]


def test_log_likelihoods_request_by_request(models: tuple[GSATrainLM, HFLM, Path]) -> None:
    ours, theirs, _ = models
    asked = [(document["question"], choice) for document in DOCUMENTS for choice in document["choices"]]
    asked += [("", "The sky"), ("Ends in a space ", "x"), ("x" * 300, " y")]
    found = ours.loglikelihood(requests("loglikelihood", *asked))
    for answer, expected in zip(found, theirs.loglikelihood(requests("loglikelihood", *asked)), strict=True):
        assert answer[0] == pytest.approx(expected[0], rel=1e-5)
        assert answer[1] == expected[1]
    assert len({round(answer[0], 3) for answer in found}) > len(found) // 2


def test_a_continuation_without_tokens_is_refused(models: tuple[GSATrainLM, HFLM, Path]) -> None:
    """It would have the probability 1."""
    with pytest.raises(ValueError, match=r"the continuation '\):' of 'def main\(' has no tokens of its own"):
        models[0].loglikelihood(requests("loglikelihood", ("def main(", "):")))


def test_a_greedy_continuation_is_told(models: tuple[GSATrainLM, HFLM, Path]) -> None:
    ours, _, _ = models
    prompt = ours.tok_encode("The sky is")
    model = ours.subject.model
    whole = model.generate(
        torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    continuation = whole[0, len(prompt) :].tolist()
    asked = [(("", ""), prompt, continuation), (("", ""), prompt, [*continuation[:2], continuation[2] ^ 1])]
    assert [greedy for _, greedy in ours._loglikelihood_tokens(asked)] == [True, False]


def test_rolling_and_generation_request_by_request(models: tuple[GSATrainLM, HFLM, Path]) -> None:
    ours, theirs, _ = models
    texts = [(document["question"],) for document in DOCUMENTS]
    rolling = ours.loglikelihood_rolling(requests("loglikelihood_rolling", *texts))
    expected = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", *texts))
    assert rolling == pytest.approx(expected, rel=1e-5)
    # The two libraries spell bytes that are no UTF-8 differently.
    pieces = sentencepiece.SentencePieceProcessor(model_file=TOKENIZER)
    no_bytes = {"suppress_tokens": [token for token in range(pieces.vocab_size()) if pieces.is_byte(token)]}
    for settings in (
        {"until": ["\n", "e"], "max_gen_toks": 9, **no_bytes},
        {"until": ["."], "max_gen_toks": 12, "do_sample": False, **no_bytes},
    ):
        asked = [(document["question"], settings) for document in DOCUMENTS]
        found = ours.generate_until(requests("generate_until", *asked))
        assert found == theirs.generate_until(requests("generate_until", *asked))
        assert any(found)


def test_tasks_from_files(
    models: tuple[GSATrainLM, HFLM, Path], tasks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, run = models
    found = run_tasks(load_subject(Source(run=run)), [str(task) for task in tasks], batch_size=2)
    wanted = [load_yaml(task, resolve_func=True) for task in tasks]
    expected = simple_evaluate(
        theirs, tasks=wanted, task_manager=TaskManager(include_defaults=False), log_samples=False
    )
    assert set(found["results"]) == {"colours", "continues"}
    for task, scores in found["results"].items():
        for name, value in scores.items():
            assert value == pytest.approx(expected["results"][task][name])
    monkeypatch.setattr(
        "gsa_train.evaluation.harness_tasks.TaskManager", lambda **_: TaskManager(include_defaults=False)
    )
    with pytest.raises(ValueError, match="has no such task"):
        run_tasks(ours.subject, ["no_such_task"], 1)


def test_the_command(
    models: tuple[GSATrainLM, HFLM, Path], tasks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = models[2]
    words = ["--run", str(run), "--name", "tasks", "--tasks", str(tasks[0]), "--limit", "2"]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words])
    assert command.main() == 0
    results = json.loads((run / "evaluations" / "tasks" / "results.json").read_text())
    assert results["tasks"]["n-samples"]["colours"]["effective"] == 2
    assert "data" not in results
    assert "| colours |" in (run / "evaluations" / "tasks" / "table.md").read_text()


def test_it_is_registered_and_asks_for_one_model(models: tuple[GSATrainLM, HFLM, Path]) -> None:
    assert get_model("gsa_train") is GSATrainLM
    with pytest.raises(ValueError, match="give one of run=DIR"):
        GSATrainLM(run="x", hf="y")
    with pytest.raises(ValueError, match="batch_size=auto"):
        GSATrainLM(run="x", batch_size="auto")


@pytest.mark.parametrize("limit", [None, 3])
def test_a_run_scores_tasks_as_the_harness_does(
    limit: int | None, models: tuple[GSATrainLM, HFLM, Path], tasks: list[Path]
) -> None:
    """From the same log-likelihoods: the same tokens, the same accuracies."""
    ours = models[0]
    (prepared,) = prepare_tasks([str(tasks[0])], ours.subject.tokenizer, LENGTH, limit or 0)
    pieces = [as_piece(request) for request in prepared.requests]
    nats = [0.0] * len(pieces)
    for scored in ours._scored(pieces):
        nats[scored.number] = -float(scored.nats.sum(dtype=np.float64))
    (expected,) = run_tasks(ours.subject, [str(tasks[0])], 3, LENGTH, limit)["results"].values()
    assert prepared.questions == (limit or len(DOCUMENTS))
    assert prepared.scores(nats) == {
        "accuracy": expected["acc,none"],
        "length_normalised_accuracy": expected["acc_norm,none"],
    }
    asked = [(document["question"], f" {choice}") for document in DOCUMENTS for choice in document["choices"]]
    expected_nats = [nats for nats, _ in ours.loglikelihood(requests("loglikelihood", *asked[: len(nats)]))]
    assert nats == pytest.approx(expected_nats, rel=1e-6)


def test_tasks_that_a_run_cannot_score_are_refused(
    models: tuple[GSATrainLM, HFLM, Path], tasks: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = models[0].subject.tokenizer
    damaged = tmp_path / "damaged.yaml"
    damaged.write_text("task: mine\ndoc_to_choice: [\n")
    with pytest.raises(TaskError, match=r"damaged.yaml, line 3: is no YAML \(.+\); mend the file"):
        prepare_tasks([str(damaged)], tokenizer, LENGTH, 0)
    damaged.write_text("task: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(TaskError, match=r"damaged.yaml: is nested more than 64 levels deep; mend the file"):
        prepare_tasks([str(damaged)], tokenizer, LENGTH, 0)
    absent = tmp_path / "absent.yaml"
    absent.write_text(tasks[0].read_text().replace("test.jsonl", "nowhere.jsonl"))
    with pytest.raises(TaskError, match=r"evaluate.tasks.0 = .*absent.yaml: Unable to find .*nowhere.jsonl"):
        prepare_tasks([str(absent)], tokenizer, LENGTH, 0)
    with pytest.raises(TaskError, match=r"continues is of generate_until.*give it to launch/evaluate.py"):
        prepare_tasks([str(tasks[1])], tokenizer, LENGTH, 0)
    monkeypatch.setattr(
        "gsa_train.evaluation.harness_tasks.TaskManager", lambda **_: TaskManager(include_defaults=False)
    )
    with pytest.raises(
        TaskError, match=r"evaluate.tasks.0 = no_such_task: lm-evaluation-harness has no such"
    ):
        prepare_tasks(["no_such_task"], tokenizer, LENGTH, 0)
