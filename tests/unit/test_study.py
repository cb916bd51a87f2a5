"""Tests studies: the study file, finished and next jobs, errors, and the shipped files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gsa_study.commands.study import main
from gsa_study.jobs import Job, jobs_of
from gsa_study.plan import judge, next_job
from gsa_study.states import (
    FAILURES,
    JobState,
    changed_fields,
    is_complete,
    note_failure,
    read_failures,
    read_state,
)
from gsa_study.study_file import StudyRun, load_study
from gsa_train.config import ConfigError, config_to_yaml
from gsa_train.process import exit_codes
from helpers.studies import ROOT, TOKENS_A_STEP, load, log_run, record, write

# ---- the file


def test_the_runs_are_all_arms_with_the_first_seed_then_with_the_next(tmp_path: Path) -> None:
    arms = [{"name": "one"}, {"name": "two", "seeds": [7]}]
    study = load(tmp_path, arms=arms)
    assert [run.name for run in study.runs] == ["one-seed1", "two-seed7", "one-seed2"]
    first = study.runs[0]
    assert (first.config.run.seed, first.config.data.seed) == (1, 1)
    assert first.folder == tmp_path / "runs" / "small" / "one-seed1"
    assert (first.steps, first.tokens, first.ranks) == (10, 10 * TOKENS_A_STEP, 1)


def test_the_arm_overrides_the_command_line_which_overrides_the_study_and_the_base(tmp_path: Path) -> None:
    phases = [{"name": "only", "steps": 3}]  # a list replaces the list
    arms = [{"name": "one", "set": {"gsa.k_base": 24, "phases.0.lr": "1e-4"}}, {"name": "two"}]
    path = write(tmp_path, set={"phases": phases, "gsa.k_base": 20, "data.num_lanes": 4}, arms=arms)
    words = ["gsa.k_min=4", "data.num_lanes=2", "data.train_dir=/text"]
    one, two = (run.config for run in load_study(path, words, need_data=False).runs[:2])
    assert (one.gsa.k_base, two.gsa.k_base, one.gsa.k_min, one.data.num_lanes) == (24, 20, 4, 2)
    assert [(phase.steps, phase.lr) for phase in one.phases] == [(3, 1e-4)]
    assert one.data.train_dir == "/text"
    for word in ("gsa.k_base=12", "phases.0.lr=1e-5", "phases=[]"):
        with pytest.raises(ConfigError, match=r"= .*: arm one sets it; leave it out"):
            load_study(path, [word], need_data=False)
    for word in ("run.seed=9", "run.name=zz", "run.dir=/x", "data.seed=4"):
        with pytest.raises(ConfigError, match=r"= .*: the study .* sets it; leave it out"):
            load_study(path, [word], need_data=False)
    assert load_study(path, ["run.kernel_cache_dir=/x"], need_data=False).runs[0].seed == 1


def test_devices_follow_from_the_layout(tmp_path: Path) -> None:
    arms = [{"name": "wide", "set": {"parallel.tensor": 2}}]
    (job,) = jobs_of(load(tmp_path, arms=arms, seeds=[1], data_parallel=2))
    assert (job.run.ranks, "--nproc_per_node=4" in job.command) == (4, True)


def arm(**fields: Any) -> dict[str, Any]:
    return {"arms": [{"name": "one", **fields}]}


def metric(**fields: Any) -> dict[str, Any]:
    return {"metrics": [{"key": "loss", **fields}]}


def evaluation(**fields: Any) -> dict[str, Any]:
    return {"evaluations": [{"name": "e", **fields}]}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"sedes": [1]}, "sedes = {...}: unknown key; did you mean seeds?"),
    (arm(sett={}), "arms.0.sett = {...}: unknown key; did you mean arms.0.set?"),
    (arm(set={"gsa.k_bsae": 3}), "arm one: gsa.k_bsae = 3: unknown key; did you mean"),
    (arm(set={"run.seed": 3}), "arms.0.set.run.seed = 3: the study sets it"),
    ({"set": {"run.dir": "x"}}, "set.run.dir = x: the study sets it"),
    ({"set": {"model.rope_scaling": {"factor": 4.0}}}, "such as set.model.rope_scaling.factor"),
    ({"arms": [{"name": "one"}, {"name": "one"}]}, "arms.name = one: there twice"),
    (arm(name="a-b"), "arms.0.name = a-b: not a plain name"),
    ({"arms": []}, "arms = []: nothing there"),
    ({"seeds": [1, 1]}, "seeds = [1, 1]: a seed twice"),
    ({"seeds": [-1]}, "seeds = [-1]: a seed below 0"),
    (metric(paper={"three": "4"}), "metrics.0.paper = three: the study has no such arm"),
    (metric(reaches="three"), "metrics.0.reaches = three: the study has no such arm"),
    (metric(source="summary", at_tokens=[5]), "metrics.0.source = summary"),
    (metric(statistic="max", equal_time=True), "metrics.0.statistic = max"),
    (metric(source="evaluation"), "the study evaluates nothing"),
    ({**metric(source="evaluation", evaluations=["a"]), **evaluation()}, "metrics.0.evaluations = a: the"),
    (metric(at_tokens=[10_000_000, 20_000_000, 10_010_000]), "10010000]: two of them are 10M in"),
    (evaluation(context_lengths=[0]), "evaluations.0.context_lengths = 0: below 1"),
    (evaluation(context_lengths=[64, 64]), "evaluations.0.context_lengths = [64, 64]: a number twice"),
    (evaluation(arms=["on"]), "evaluations.0.arms = on: the study has no such arm"),
    (evaluation(validation=True), "evaluations.0.validation = true: the run's sets are scored beside tasks"),
    (evaluation(data={"a": "/no/where"}), "evaluations.0.data.a = /no/where: not there"),
    (evaluation(tasks=["piqa", "/no/where.jsonl"]), "evaluations.0.tasks.1 = /no/where.jsonl"),
    ({"config": "no.yaml"}, "all arms: cannot be read"),
    ({"data_parallel": 0}, "data_parallel = 0: below 1"),
    ({"set": {"train.objective": "focal"}}, "all arms: train.objective = focal: no such name"),
]


@pytest.mark.parametrize(("changes", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, **changes)
    assert said in str(error.value)
    assert len(error.value.problems) == 1


def test_the_command_refuses_a_mistake_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["study.py", "--study", str(write(tmp_path, sedes=[1]))])
    assert main() == exit_codes.REFUSED
    assert "did you mean seeds?" in capsys.readouterr().err


def test_evaluations_take_each_length_and_may_be_of_some_arms(tmp_path: Path) -> None:
    far = {"data": {"books": "/tmp"}, "context_lengths": [64, 128]}
    far |= {"name": "far", "settings": ["gsa.adaptive_k=off"]}
    needle = {
        "name": "needle",
        "arms": ["two"],
        "ruler": [512, 1024],
        "ruler_samples": 20,
        "validation": True,
    }
    jobs = jobs_of(load(tmp_path, seeds=[1], evaluations=[far, needle]))
    assert [(job.run.arm, job.kind, job.name) for job in jobs] == [
        ("one", "train", ""),
        *(("one", "evaluate", f"far-L{length}") for length in (64, 128)),
        ("two", "train", ""),
        *(("two", "evaluate", name) for name in ("far-L64", "far-L128", "needle")),
    ]
    words = "--name far-L128 --data books=/tmp --context-length 128 gsa.adaptive_k=off"
    assert " ".join(jobs[2].command).endswith(words)
    assert " ".join(jobs[-1].command).endswith("--ruler 512,1024 --ruler-samples 20 --validation")


# ---- planning


def job(run: StudyRun, kind: Any = "train", devices: int = 1) -> Job:
    return Job(run, kind, "", ("true",), devices)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[StudyRun, ...]:
    return load(tmp_path).runs


def test_jobs_start_in_order_where_devices_are_free_and_training_is_over(runs: Sequence[StudyRun]) -> None:
    wide, narrow, after = job(runs[0], devices=4), job(runs[1]), job(runs[1], "evaluate")
    assert next_job([wide, narrow, after], [], 8) == wide
    assert next_job([wide, narrow, after], [], 2) == narrow
    assert next_job([wide, after], [narrow], 1) is None, "its training is under way"
    assert next_job([wide, after], [], 1) == after
    assert next_job([narrow], [wide], None) is None, "on CPUs one after another"
    assert next_job([narrow], [], None) == narrow


ENDED = {
    "code": 1,
    "error": "",
    **dict.fromkeys(("complete", "progressed", "stopping", "monitor_stop"), False),
}


@pytest.mark.parametrize(
    ("changes", "what", "reason"),
    [
        ({"code": 0, "complete": True}, "finished", ""),
        ({"complete": True, "stopping": True}, "finished", ""),
        ({"code": 0}, "failed", "left no result"),
        ({"error": "CUDA out of memory"}, "failed", "exit code 1: CUDA out of memory"),
        ({"progressed": True}, "again", "exit code 1 after a new checkpoint"),
        ({"code": 2, "progressed": True}, "failed", "refused, exit code 2"),
        ({"code": 3, "progressed": True}, "failed", "checkpoints cannot be written"),
        ({"code": 13, "progressed": True}, "failed", "diverged"),
        ({"code": 1, "monitor_stop": True}, "failed", "diverged"),
        ({"code": 75, "stopping": True}, "interrupted", "stopped"),
        ({"code": 1, "stopping": True}, "interrupted", "stopped"),
        ({"code": 75, "progressed": True}, "again", "stopped after a new checkpoint"),
        ({"code": -9, "progressed": True}, "again", "killed by SIGKILL after a new checkpoint"),
        ({"code": -9}, "interrupted", "killed by SIGKILL before a new checkpoint"),
    ],
)
def test_how_a_job_ended_decides_what_follows(changes: Mapping[str, Any], what: str, reason: str) -> None:
    found, why = judge(**{**ENDED, **changes})
    assert found == what
    assert reason in why


# ---- states


def test_a_run_is_finished_when_its_summary_has_all_steps(runs: Sequence[StudyRun]) -> None:
    run = runs[0]
    assert not is_complete(run)
    log_run(run, [record(2, 5.0)])
    assert not is_complete(run)
    (run.folder / "summary.json").write_text('{"steps": 9}')
    assert not is_complete(run)
    (run.folder / "summary.json").write_text('{"steps": 10, ')
    assert not is_complete(run), "a damaged one is written again"
    (run.folder / "summary.json").write_text('{"steps": 10}')
    assert is_complete(run)


def test_changed_fields_are_named_wherever_they_are(tmp_path: Path) -> None:
    before = load(tmp_path).runs[0]
    log_run(before, [])
    assert list(changed_fields(before)) == []
    now = load(tmp_path, **arm(set={"phases.1.steps": 5, "data.source_weights.a": 2})).runs[0]
    changes = ["phases.1.steps: 4 -> 5", "data.source_weights: {} -> None"]
    changes.append("data.source_weights.a: None -> 2.0")
    assert list(changed_fields(now)) == changes
    places = dataclasses.replace(before.config.run, dir="elsewhere", kernel_cache_dir="there")
    moved = dataclasses.replace(before.config, run=places)
    (before.folder / "config.yaml").write_text(config_to_yaml(moved))
    assert list(changed_fields(before)) == [], "the same folder, seen from elsewhere"
    (before.folder / "config.yaml").write_text("gsa: [")
    assert "cannot be read" in next(iter(changed_fields(before)))


def test_an_evaluation_of_the_same_name_and_another_length_is_a_change(tmp_path: Path) -> None:
    study = load(tmp_path, evaluations=[{"name": "end", "max_tokens": 100}])
    (job, *_) = (job for job in jobs_of(study) if job.kind == "evaluate")
    assert not read_state(job).finished
    job.result.parent.mkdir(parents=True)
    command = "gsa-evaluate --run somewhere/else --name end --max-tokens "
    job.result.write_text(json.dumps({"command": command + "100"}))
    assert read_state(job) == JobState(job, True)
    job.result.write_text(json.dumps({"command": command + "200"}))
    (change,) = read_state(job).changed
    assert "--max-tokens 200 -> --name end --max-tokens 100" in change


def test_failures_are_kept_and_forgotten(tmp_path: Path) -> None:
    assert read_failures(tmp_path) == {}
    note_failure(tmp_path, "one-seed1 train", "exit code 1")
    note_failure(tmp_path, "two-seed1 train", "diverged")
    note_failure(tmp_path, "one-seed1 train", None)
    with (tmp_path / FAILURES).open("a") as file:
        file.write('{"job": "cut')  # by a kill
    assert read_failures(tmp_path) == {"two-seed1 train": "diverged"}
    note_failure(tmp_path, "three-seed1 train", "refused")
    assert read_failures(tmp_path) == {"two-seed1 train": "diverged", "three-seed1 train": "refused"}


# ---- the shipped ones


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_studies_are_accepted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if "arms" in yaml.safe_load(path.read_text()):
        load_study(path, need_data=False)


def test_the_study_that_the_guide_shows_is_accepted(tmp_path: Path) -> None:
    (shown,) = re.findall(
        r"^```\n(name: .*?)^```", (ROOT / "docs/how_to/studies.md").read_text(), re.M | re.S
    )
    (tmp_path / "demo_base.yaml").write_text((ROOT / "studies/demo_base.yaml").read_text())
    (tmp_path / "study.yaml").write_text(shown)
    study = load_study(tmp_path / "study.yaml", need_data=False)
    shipped = load_study(ROOT / "studies/demo.yaml")
    assert [run.overrides for run in study.runs] == [run.overrides for run in shipped.runs]
