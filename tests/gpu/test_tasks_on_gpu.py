"""Tests evaluation tasks between training steps on a CUDA device. The tasks must not change training. A later
evaluation of the checkpoint must give the same scores, up to bf16 rounding."""

import json

import pytest

from gsa_eval.commands import evaluate as command
from helpers.request_files import choice_requests, gold_requests, write_requests
from helpers.runs import OF_A_GPU, SMALL, numbers_of, start

ACROSS = ("data.attend_across_documents=true", "gsa.attention_impl=triton")


@pytest.mark.parametrize("overrides", [(), ACROSS], ids=["packed", "across documents"])
def test_a_run_with_tasks_is_the_run_without(overrides, tmp_path, monkeypatch):
    places = [
        write_requests(tmp_path / "colours" / "rc", choice_requests()),
        write_requests(tmp_path / "gold" / "bpb", gold_requests()),
    ]
    tasks = f"evaluate.tasks=[{','.join(map(str, places))}]"
    often = ("evaluate.tasks_every_steps=5", "evaluate.tasks_max_time_percent=100")
    scored = start(tmp_path, *SMALL, *overrides, tasks, *often, name="scored", real=True).wait()
    without = start(tmp_path, *SMALL, *overrides, name="without", real=True).wait()
    expected = numbers_of(without.records(), keys=OF_A_GPU)
    assert numbers_of(scored.records(), without=("tasks",), keys=OF_A_GPU) == expected
    records = [record for record in scored.records() if record.get("event") == "tasks"]
    assert [record["step"] for record in records] == [5, 10, 15, 20]
    assert 0 < records[-1]["eval_time_share"] < 1

    words = ["--run", str(scored.folder), "--name", "tasks"]
    words += [word for place in places for word in ("--tasks", str(place))]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words])
    assert command.main() == 0
    found = json.loads((scored.folder / "evaluations" / "tasks" / "results.json").read_text())["requests"]
    for name, value in records[-1]["eval_bits_per_byte"].items():
        assert found[name]["bits_per_byte"] == pytest.approx(value, rel=2e-2), name  # bf16, two packings
