"""Tests arms that begin with other arms' weights: order, errors, packing, and counts."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from gsa_study.caveats import weights_in_words
from gsa_study.jobs import jobs_of
from gsa_study.pack import pack_study, pack_weights
from gsa_study.plan import chosen, next_job, plan_study
from gsa_study.states import changed_fields, read_state
from gsa_study.study_file import Study, StudyRun
from gsa_study.tables import read_results, run_rows
from gsa_train.config import ConfigError, config_to_yaml
from helpers.studies import TOKENS_A_STEP, load, log_run, record, unpack

DENSE, SPARSE = {"name": "dense", "steps": 6, "attention": "dense"}, {"name": "sparse", "steps": 4}
ARMS: list[dict[str, Any]] = [
    {"name": "late", "initial_weights": "base", "initial_step": 3, "set": {"phases": [{**SPARSE}]}},
    {"name": "whole"},
    {"name": "later", "initial_weights": "late", "set": {"phases": [{**SPARSE}]}},
    {
        "name": "base",
        "set": {"phases": [{**DENSE}], "checkpoint.every_steps": 1, "checkpoint.keep_every_steps": 3},
    },
]
METRICS = [{"key": "loss", "equal_time": True}, {"key": "loss", "statistic": "max"}]


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return load(tmp_path, seeds=[1], arms=ARMS, metrics=METRICS)


def of_arm(study: Study, arm: str) -> StudyRun:
    return next(run for run in study.runs if run.arm == arm)


def save(run: StudyRun, step: int) -> None:
    folder = run.folder / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    (folder / "weights").write_bytes(bytes(9))


def finish(run: StudyRun) -> None:
    records = [record(step, 10.0 - step, seconds=2.0, phase="any") for step in range(1, run.steps + 1)]
    log_run(run, records, {})


def test_a_run_begins_with_the_other_arm_s_run_of_its_seed_and_reads_on(tmp_path: Path) -> None:
    study = load(tmp_path, arms=ARMS)
    assert [run.name for run in study.runs][:4] == ["late-seed1", "whole-seed1", "later-seed1", "base-seed1"]
    for late in (run for run in study.runs if run.arm == "late"):
        saved = tmp_path / "runs" / "small" / f"base-seed{late.seed}" / "checkpoints" / "step_00000003"
        assert late.config.checkpoint.initial_weights == str(saved)
        assert late.config.checkpoint.initial_text == "continue"
        assert f"checkpoint.initial_weights={saved}" in late.overrides
        assert late.source.tokens == 3 * TOKENS_A_STEP
    later = of_arm(study, "later")
    assert (later.source.step, later.source.tokens, later.tokens) == (4, 7 * TOKENS_A_STEP, 4 * TOKENS_A_STEP)
    assert [run.arm for run in later.before] == ["late", "base"]


def test_the_text_begins_again_where_an_arm_says_so(tmp_path: Path) -> None:
    study = load(tmp_path, arms=[A, {**B, "set": {"checkpoint.initial_text": "fresh"}}])
    assert of_arm(study, "b").config.checkpoint.initial_text == "fresh"


A, B = {"name": "a"}, {"name": "b", "initial_weights": "a"}
EACH_4TH = {"checkpoint.every_steps": 2, "checkpoint.keep_every_steps": 4}
REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([{**B, "initial_weights": "bse"}], "arms.0.initial_weights = bse: the study has no such arm"),
    ([{**B, "initial_weights": "b"}], "arms.0.initial_weights = b: a circle: b <- b"),
    ([{**A, "initial_weights": "b"}, B], "arms.1.initial_weights = a: a circle: b <- a <- b"),
    ([{**A, "initial_step": 3}], "arms.0.initial_step = 3: of no arm"),
    ([A, {**B, "initial_step": -1}], "initial_step = -1: below 0"),
    (
        [{**A, "seeds": [1]}, B],
        "initial_weights = a: has no runs with seeds [2]; give a these seeds, or b fewer",
    ),
    ([A, {**B, "set": {"checkpoint.initial_weights": "x"}}], "a: set has checkpoint.initial_weights, too"),
    (
        [A, {**B, "initial_step": 11}],
        "arm b: initial_step = 11: a keeps its last one, 10, and no other; give",
    ),
    ([{**A, "set": EACH_4TH}, {**B, "initial_step": 6}], "= 6: a keeps its last one, 10, and each 4th"),
    ([{**A, "set": {"gsa.k_bsae": 3}}, B], "arm a: gsa.k_bsae = 3"),
]


@pytest.mark.parametrize(("arms", "said"), REFUSED)
def test_what_is_refused(arms: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, arms=arms)
    assert str(refused.value).count(said) == 1


# ---- order


def test_a_training_waits_for_the_one_with_whose_weights_it_begins(study: Study) -> None:
    due, order = jobs_of(study), []
    while due:
        job = next_job(due, [], None)
        due.remove(job)
        order.append(job.run.arm)
    assert order == ["whole", "base", "late", "later"]
    late, base = (next(job for job in jobs_of(study) if job.run.arm == arm) for arm in ("late", "base"))
    assert next_job([late], [base], 8) is None, "it is not over yet"


def test_what_begins_with_the_weights_of_a_failed_run_is_blocked(study: Study) -> None:
    states = [read_state(job) for job in jobs_of(study)]
    plan = plan_study(states, {"base-seed1 train": "exit code 1"})
    assert [job.run.arm for job in plan.blocked] == ["late", "later"]
    assert [job.run.arm for job in plan.due] == ["whole"]
    assert len(plan_study(states, {"base-seed1 train": "exit code 1"}, retry_failed=True).due) == 4


def test_an_arm_that_is_asked_for_brings_those_that_it_needs(study: Study) -> None:
    states = [read_state(job) for job in jobs_of(study)]
    assert [state.job.run.arm for state in chosen(states, ["later"], None)] == ["late", "later", "base"]
    assert [state.job.run.arm for state in chosen(states, ["whole"], None)] == ["whole"]


# ---- another machine


def test_weights_that_later_arms_need_go_to_another_machine(study: Study, tmp_path: Path) -> None:
    base, late, later = (of_arm(study, arm) for arm in ("base", "late", "later"))
    finish(base)
    save(base, 3)
    save(base, 6)
    small, large = tmp_path / "small.tar.gz", tmp_path / "large.tar"
    assert pack_study(study, {}, small) == 1
    assert pack_weights(study, {}, large) == ["base-seed1 at step 3"]
    with tarfile.open(small) as file:
        assert not [name for name in file.getnames() if "checkpoints" in name]

    (tmp_path / "elsewhere").mkdir()
    moved = load(tmp_path / "elsewhere", seeds=[1], arms=ARMS)
    moved.folder.mkdir(parents=True)
    for path in (small, large):
        if path == large:  # first without them
            plan = plan_study([read_state(job) for job in jobs_of(moved)], {})
            assert [job.key for job in plan.without_checkpoint] == ["late-seed1 train"]
            assert [job.run.arm for job in plan.blocked] == ["later"]
            assert [job.run.arm for job in plan.due] == ["whole"]
        unpack(path, moved.folder.parent)
    plan = plan_study([read_state(job) for job in jobs_of(moved)], {})
    assert [job.run.arm for job in plan.due] == ["late", "whole", "later"]
    assert [job.run.arm for job in plan.finished] == ["base"]

    finish(late)
    assert pack_weights(study, {}, large) == [], "the last step of late is not saved here"
    save(late, 4)
    assert pack_weights(study, {}, large) == ["late-seed1 at step 4"]
    finish(later)
    assert pack_weights(study, {}, large) == []


def test_a_run_that_has_begun_needs_no_other_one_s_weights(study: Study) -> None:
    finish(of_arm(study, "base"))
    late = of_arm(study, "late")
    job = next(job for job in jobs_of(study) if job.run == late)
    assert read_state(job).lacks_checkpoint
    (late.folder / "checkpoints").mkdir(parents=True)
    (late.folder / "checkpoints" / "latest").write_text("step_00000002")
    assert not read_state(job).lacks_checkpoint


def test_the_folder_before_the_other_run_may_change_and_its_step_may_not(study, tmp_path):
    late = of_arm(study, "late")
    finish(late)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step, expected in (
        (3, []),
        (6, ["checkpoint.initial_weights: base-seed1/checkpoints/step_00000003 -> "]),
    ):
        arms = [{**ARMS[0], "initial_step": step}, *ARMS[1:]]
        moved = of_arm(load(elsewhere, seeds=[1], arms=arms), "late")
        moved.folder.mkdir(parents=True, exist_ok=True)
        (moved.folder / "config.yaml").write_text(config_to_yaml(late.config))
        found = list(changed_fields(moved))
        assert [line[: len(start)] for line, start in zip(found, expected, strict=True)] == expected


# ---- what is counted


def test_tokens_time_and_curves_go_on_from_the_other_run_s(study: Study) -> None:
    base, late, whole = (of_arm(study, arm) for arm in ("base", "late", "whole"))
    for run in (base, late, whole):
        finish(run)
    results = read_results(study, {})
    of_late = next(each for each in results.values if each.run == late)
    assert of_late.tokens[-1] == (4, 7 * TOKENS_A_STEP)
    assert of_late.seconds[-1] == (4, 3 * 2.0 + 4 * 2.0)
    points = of_late.curve("loss", "tokens")
    assert points == [(TOKENS_A_STEP * step, 10.0 - own) for step, own in enumerate((1, 2, 3, 1, 2, 3, 4), 1)]
    assert [x for x, _ in of_late.curve("loss", "seconds")] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]

    at_tokens, at_time, largest = results.columns
    # whole and late share at most 7 steps' tokens; base, with which late begins, has 6.
    assert at_tokens.values == {"late-seed1": 6.0, "whole-seed1": 3.0, "base-seed1": None}
    assert at_time.values == {"late-seed1": 6.0, "whole-seed1": 3.0, "base-seed1": None}
    assert largest.values["late-seed1"] == 9.0

    head, *rows = run_rows(results)
    row = next(dict(zip(head, row, strict=True)) for row in rows if row[0] == "late-seed1")
    assert (row["tokens"], row["training time"]) == ("768 + 1.02k", "6s + 8s")
    said = weights_in_words(study)
    assert said[0].startswith("late: begin with the weights of base at step 3 of 6. ")
    assert said[1].startswith("later: begin with the weights of late at step 4 of 4. ")
    assert "count the 768 tokens up to there, which were trained once" in said[0]
