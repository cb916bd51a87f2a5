"""Tests evaluation tasks that are scored between training steps. For any number of data-parallel ranks, the
log-likelihoods must equal the results of separate forward passes. Tasks must not change training steps, and must keep
within their share of the time. If a run stops during its tasks, the next start must score them."""

import dataclasses
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch

from gsa_data.faults import DataFault
from gsa_data.tokenize import Tokenizer
from gsa_train import trainer
from gsa_train.checkpoint.files import find_checkpoint
from gsa_train.checkpoint.load import read_run_state
from gsa_train.config import Config
from gsa_train.config.file_checks import check_tasks
from gsa_train.data.batches import to_micro_batch
from gsa_train.metrics.progress import Progress
from gsa_train.metrics.record_format import to_scalars
from gsa_train.model.mcore.build import Model
from gsa_train.phases import PhaseRange, enter_phase
from gsa_train.reliability.hang_watchdog import ACTIVITIES
from gsa_train.run.validate import validate_tasks
from gsa_train.run_folder.resume import Start, start_from
from gsa_train.step import owners_losses
from gsa_train.validation.loop_tasks import TaskError, prepare_tasks
from gsa_train.validation.requests import Request
from gsa_train.validation.tasks import (
    COMPILATION_SECONDS,
    NOBODY,
    TaskClock,
    _deal,
    log_likelihoods,
    pack_requests,
    shared_tasks,
)
from helpers.request_files import choice_requests, gold_requests, write_requests
from helpers.single_rank import EOS, SPARSE, single_rank, tiny_config, tiny_model, token_losses
from helpers.text_runs import SAMPLE, assert_trained_alike, left_by, of_event, text_config, train_on_text
from helpers.tiny_run import tiny_run

TOKENIZER = str(SAMPLE / "tokenizer.model")
CONFIG = tiny_config()
LENGTH = CONFIG.train.seq_len_tokens
PHASE = dataclasses.replace(SPARSE, steps=4)


def random_requests() -> list[Request]:
    """Return requests: one has a sequence's tokens and its last label, one has an EOS in the middle."""
    random = np.random.default_rng(3)
    lengths = [(17, 5), (9, 8), (4, 1), (12, 3), (2, 1), (6, 2), (7, 4)]
    requests = [
        Request(random.integers(1, 32, length).astype(np.int32), scored) for length, scored in lengths
    ]
    requests[3].tokens[4] = EOS
    return requests


def entered(config: Config) -> Model:
    made = tiny_model(config, variance_ema=0.02)
    enter_phase(made, SPARSE)
    return made


@pytest.fixture(scope="module")
def model() -> Model:
    return entered(CONFIG)


def alone(model: Model, request: Request) -> float:
    """Score a request in a sequence padded with other tokens."""
    block = torch.full((1, LENGTH + 1), 7, dtype=torch.int32)
    tokens, scored = request
    block[0, : len(tokens)] = torch.from_numpy(tokens)
    batch = to_micro_batch(block, EOS, attend_across_documents=True)
    with torch.no_grad():
        losses = token_losses(model, batch, evaluating=True)[0]
    return -losses[len(tokens) - 1 - scored : len(tokens) - 1].double().sum().item()


def test_log_likelihoods_match_a_pass_of_its_own() -> None:
    config = tiny_config(model={"init_std": 0.2}, train={"seq_len_tokens": 2 * LENGTH})
    requests, model = random_requests(), entered(config)
    rounds: list[int] = []
    found = log_likelihoods(model, requests, EOS, config, single_rank(), lambda: rounds.append(1))
    assert found == pytest.approx([alone(model, each) for each in requests], rel=1e-5)
    assert rounds == [1]
    assert not model.runtime.attention_pass.evaluating


@pytest.mark.parametrize("replicas", [2, 3])
def test_packing_leaves_nothing_out_and_any_number_of_replicas_has_the_same_sums(model, replicas):
    requests = random_requests()
    packed = pack_requests(requests, EOS, LENGTH)
    assert len(packed.blocks) == 4 < len(requests)
    counts = np.bincount(packed.owners[packed.owners != NOBODY], minlength=len(requests))
    assert counts.tolist() == [each.scored for each in requests]
    ranks = [dataclasses.replace(single_rank(), data_rank=r, data_size=replicas) for r in range(replicas)]
    dealt = [_deal(packed, EOS, CONFIG, rank) for rank in ranks]
    assert len({len(batches) for batches in dealt}) == 1  # the schedule is collective
    parts = [owners_losses(model, batches, len(requests), CONFIG, single_rank()) for batches in dealt]
    whole = log_likelihoods(model, requests, EOS, CONFIG, single_rank())
    assert (-sum(parts)).tolist() == pytest.approx(whole, rel=1e-6)


# ---- a run with tasks, and the same run without


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("requests")
    written = (
        write_requests(folder / "colours" / "rc", choice_requests()),
        write_requests(folder / "gold" / "bpb", gold_requests()),
    )
    return [str(place) for place in written]


def run_config(tasks: list[str], save_every_steps: int = 1000, **evaluate: Any) -> Config:
    evaluate = {"every_steps": 2, "max_blocks": 3, "tasks": tasks, "tasks_max_time_percent": 100, **evaluate}
    evaluate["tasks_every_steps"] = 2 if tasks else 0
    train, checkpoint = {"seq_len_tokens": 32}, {"every_steps": save_every_steps}
    return text_config([PHASE], train=train, evaluate=evaluate, checkpoint=checkpoint)


def trained(
    folder: Path,
    tasks: list[str],
    ask: Callable[[], int] = lambda: 0,
    resume_from: Path | None = None,
    **evaluate: Any,
) -> dict[str, Any]:
    """Return everything that a run writes in four steps, or up to a stop."""
    messages: list[str] = []
    records, run, ended_by = train_on_text(
        run_config(tasks, **evaluate),
        folder,
        resume_from,
        tasks=prepare_tasks(tasks, Tokenizer(TOKENIZER), 32, 0),
        console=Mock(message=messages.append),
        stop_vote=Mock(ask=ask),
        watchdog=MagicMock(heartbeat=lambda step, activity: ACTIVITIES.index(activity)),
    )
    return {**left_by(run, records), "messages": messages, "stopped": ended_by, "clock": run.state.task_clock}


@pytest.fixture(scope="module")
def undisturbed(places: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("undisturbed"), places)


@pytest.mark.parametrize("percent", [100, 1e-6], ids=["scored", "left out"])
def test_training_is_the_same_to_the_last_bit_with_and_without_tasks(percent, places, undisturbed, tmp_path):
    found = undisturbed
    if percent < 100:
        found = trained(tmp_path / "with", places, tasks_max_time_percent=percent)
        assert of_event(found, "tasks") == []
        of_tasks = [message.split(":")[0] for message in found["messages"] if message.startswith("tasks")]
        assert of_tasks == [f"tasks left out at step {step}" for step in (2, 4)]
    else:
        first, second = of_event(found, "tasks")
        assert (first["step"], second["step"]) == (2, 4)
        assert set(first["eval_accuracy"]) == {"colours_rc"}
        assert set(first["eval_bits_per_byte"]) == {"colours_rc", "gold_bpb"}
        assert first["eval_bits_per_byte"] != second["eval_bits_per_byte"]
        assert found["clock"].task_seconds > 0 < found["clock"].train_seconds
        assert found["clock"].train_steps == PHASE.steps
    without = trained(tmp_path / "without", [])
    assert_trained_alike(found, without, but="tasks")


# Each step asks once before it; step 2 asks once in the validation, then once for each task.
@pytest.mark.parametrize(("question", "due"), [(2, (True, True)), (3, (False, True)), (4, (False, True))])
def test_a_run_stopped_in_its_tasks_goes_on_as_if_it_had_not_been(
    question: int, due: tuple[bool, bool], places: list[str], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    answers = iter([0] * question)
    before = trained(tmp_path, places, lambda: next(answers, int(signal.SIGTERM)))
    assert before["stopped"].step == 2
    saved = tmp_path / "step_00000002"
    state = read_run_state(saved)
    assert (state.validation_due, state.tasks_due) == due
    assert (state.task_clock["task_seconds"] > 0) == (question > 2)
    after = trained(tmp_path, places, resume_from=saved)
    assert before["records"] + after["records"] == undisturbed["records"]
    for name, weight in undisturbed["weights"].items():
        assert torch.equal(after["weights"][name], weight), name


def test_an_error_in_tasks_costs_no_step(places, undisturbed, tmp_path, monkeypatch):
    """A step that also saves does so before its tasks."""
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "validate_tasks", Mock(side_effect=RuntimeError("no such continuation")))
        with pytest.raises(RuntimeError, match="no such continuation"):
            trained(tmp_path, places, save_every_steps=2)
    saved = find_checkpoint(tmp_path)
    assert saved.name == "step_00000002"
    after = trained(tmp_path, places, resume_from=saved)
    assert (after["records"][0]["event"], after["records"][0]["step"]) == ("tasks", 2)
    assert after["records"] == undisturbed["records"][-len(after["records"]) :]
    assert all(torch.equal(after["weights"][name], weight) for name, weight in undisturbed["weights"].items())


def test_tasks_that_are_due_at_the_end_of_a_phase_keep_the_run_in_it(monkeypatch, tmp_path):
    phases = [dataclasses.replace(PHASE, name="first"), dataclasses.replace(PHASE, name="second")]
    ranges = [PhaseRange(0, phases[0], 0, 4), PhaseRange(1, phases[1], 4, 8)]
    for due, index in ((True, 0), (False, 1)):
        state = Mock(step=4, phase_index=0, validation_due=False, tasks_due=due)
        monkeypatch.setattr("gsa_train.run_folder.resume.read_run_state", lambda _, state=state: state)
        monkeypatch.setattr("gsa_train.run_folder.resume.read_common", lambda _: {"optimizer": {}})
        monkeypatch.setattr("gsa_train.run_folder.resume._check_same_model", Mock())
        monkeypatch.setattr("gsa_train.run_folder.resume._check_same_phases", Mock())
        assert start_from(tmp_path / "x", CONFIG, ranges, ()).phase_index == index


# ---- their share of the time


def test_the_share_of_the_time() -> None:
    clock = TaskClock(train_seconds=980.0, train_steps=98, task_seconds=0.0)
    assert clock.has_room(20.0, 2.0)  # 20 of 1,000
    assert not clock.has_room(20.1, 2.0)
    assert not dataclasses.replace(clock, task_seconds=1.0).has_room(20.0, 2.0)
    assert dataclasses.replace(clock, train_seconds=2000.0, task_seconds=1.0).has_room(20.0, 2.0)
    assert clock.has_room(1e9, 100)
    assert not TaskClock().has_room(math.inf, 99.0)


def test_what_tasks_will_take(places: list[str]) -> None:
    config = run_config(places)
    tasks = prepare_tasks(places, Tokenizer(TOKENIZER), 32, 0)
    tokens = sum(len(request.tokens) + 1 for task in tasks for request in task.requests)
    clock = TaskClock()
    assert clock.expected_seconds(tasks, config, single_rank()) == math.inf
    clock = TaskClock(train_seconds=30.0, train_steps=10)
    seconds = tokens / 32 / 4  # a step of 3 s takes 1 s forward, over 4 sequences of 32
    assert clock.expected_seconds(tasks, config, single_rank()) == pytest.approx(seconds)
    on_gpu = dataclasses.replace(single_rank(), device=torch.device("cuda"))
    assert clock.expected_seconds(tasks, config, on_gpu) == pytest.approx(COMPILATION_SECONDS + seconds)
    clock.newest_seconds = 5.0
    assert clock.expected_seconds(tasks, config, single_rank()) == 5.0


def test_a_step_has_one_turn_and_a_complete_run_keeps_its_scores(model, tmp_path, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr("gsa_train.run.validate.score_tasks", lambda *_: calls.append(1) or {})
    evaluate = {"tasks": ["./x"], "tasks_max_time_percent": 100}
    config = tiny_config(run={"dir": str(tmp_path), "name": "r"}, evaluate=evaluate)
    run = tiny_run(config, model, step=3)
    for _ in range(2):
        validate_tasks(run, "sparse", lambda: None)
    assert len(calls) == 1
    for scored, expected in ((False, 2), (True, 2)):
        lines = [{"step": 3, "phase": "sparse", "event": "tasks"}] * scored
        (tmp_path / "r").mkdir(exist_ok=True)
        (tmp_path / "r" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        again = tiny_run(config, model, step=3, start=Mock(spec=Start, step=3))
        validate_tasks(again, "sparse", lambda: None)
        assert len(calls) == expected


# ---- what is refused, and what is shown


def test_tasks_that_are_absent_or_damaged_are_refused_with_the_config(places, tmp_path):
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("{}\n")
    tasks = [*places, "./absent", str(damaged), "olmo:no/such"]
    config = dataclasses.replace(CONFIG, evaluate=dataclasses.replace(CONFIG.evaluate, tasks=tasks))
    lines = check_tasks(config)
    assert [line.split(" = ")[0] for line in lines] == [f"evaluate.tasks.{number}" for number in (2, 3, 4)]
    assert "line 1: is not a request" in lines[1]


def test_files_damaged_further_on_and_other_requests_of_a_rank_are_refused(places, tmp_path, monkeypatch):
    folder = write_requests(tmp_path / "x" / "y", [*choice_requests(), {"doc_id": 9, "idx": 0}])
    config, tokenizer = run_config(places), Tokenizer(TOKENIZER)
    with pytest.raises(TaskError, match=r"evaluate.tasks.0 = .*line 23: is not a request"):
        shared_tasks(run_config([str(folder)]), tokenizer, single_rank())
    names = [task.name for task in shared_tasks(config, tokenizer, single_rank())]
    assert names == ["colours_rc", "gold_bpb"]

    def of_two_ranks(mine: dict[str, str], _: Any) -> dict[int, dict[str, str]]:
        return {0: mine, 1: {**mine, "requests of gold_bpb": "other"}}

    monkeypatch.setattr("gsa_train.validation.tasks.gather_outcomes", of_two_ranks)
    with pytest.raises(DataFault, match=r"rank 1 has requests of gold_bpb other.*evaluate.tasks"):
        shared_tasks(config, tokenizer, single_rank())


def test_where_scores_go(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"event": "tasks", "step": 4, "phase": "sparse", "tokens": 40, "eval_seconds": 3.0}
    record |= {"eval_accuracy": {"rc": 0.25}, "eval_bits_per_byte": {"rc": 1.5, "gold_bpb": 2.5}}
    scalars = {"eval/accuracy/rc": 0.25, "eval/bits_per_byte/rc": 1.5, "eval/bits_per_byte/gold_bpb": 2.5}
    assert to_scalars(record) == {**scalars, "eval/seconds": 3.0}
    Progress(10, interactive=False).show(record)
    said = [" ".join(line.split("sparse")[1].split()) for line in capsys.readouterr().out.splitlines()]
    assert said == ["rc accuracy 0.2500 bits per byte 1.5000", "gold_bpb bits per byte 2.5000"]
