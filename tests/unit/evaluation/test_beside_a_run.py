"""Tests an evaluation that reads checkpoints of a run while this run deletes old checkpoints. Neither process may
disturb the other. If the evaluation is killed, it must leave no partial results."""

import dataclasses
import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_data.tokenize import Tokenizer
from gsa_eval import evaluated_model as evaluated
from gsa_eval.commands import evaluate as command
from gsa_eval.convert import read_source
from gsa_eval.evaluated_model import EvaluatedModel, Source, load_evaluated_model
from gsa_train.checkpoint import files as checkpoint_files
from gsa_train.checkpoint import tensors
from gsa_train.checkpoint.files import complete_checkpoints, find_checkpoint, recover_folder
from gsa_train.checkpoint.save import CheckpointSaver
from gsa_train.config import CheckpointConfig
from gsa_train.model.mcore.build import Model
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from helpers.checkpoints import run_state
from helpers.evaluated import LENGTH, TOKENIZER, evaluated_config, evaluated_model, files_of_run
from helpers.single_rank import single_rank


class RunUnderWay:
    """Saves on demand, and keeps only its newest checkpoint."""

    def __init__(self, folder: Path, model: Model, optimizer: Any, config: Any) -> None:
        self.folder, self.step = folder, 0
        self._trained, self._config = (model, optimizer), config
        tokenizer = Tokenizer(TOKENIZER)
        settings = CheckpointConfig(async_save=False, keep_last=1)
        files = {tokenizer.file_name: tokenizer.file}
        self.saver = CheckpointSaver(folder / "checkpoints", settings, single_rank(), small_files=files)
        self._data = {"tokenizer_fingerprint": tokenizer.fingerprint}
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        self.save()

    def save(self) -> None:
        self.step += 1
        with torch.no_grad():
            for parameter in self._trained[0].gpt.parameters():
                parameter.add_(0.01)
        state = dataclasses.replace(run_state(self.step, self._config), data=self._data)
        (result,) = self.saver.begin(state, *self._trained)
        assert (result.error, result.warnings) == (None, [])

    def is_read_by(self, found: EvaluatedModel) -> bool:
        ours = {name: each.sum() for name, each in self._trained[0].gpt.named_parameters()}
        norms = [found.model.model.norm.weight.sum(), found.model.lm_head.weight.sum()]
        expected = [ours["decoder.final_layernorm.weight"], ours["output_layer.weight"]]
        return found.about["step"] == self.step and norms == expected


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[Any, ...]]:
    config = evaluated_config(evaluate={"max_blocks": 2})
    model = evaluated_model(config)
    optimizer = build_optimizer(model, config.phases[0], config)
    yield model, optimizer, config
    close_optimizer(model, optimizer)


@pytest.fixture
def run(trained: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunUnderWay]:
    monkeypatch.setattr(read_source, "PAUSE_SECONDS", 0.0)
    found = RunUnderWay(tmp_path, *trained)
    yield found
    found.saver.close()


def before_call(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, do: Callable[[], None]
) -> None:
    """Call `do` before the given call of a function, counted from 1."""
    function, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            do()
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)


MOMENTS = {
    "when it is found": (evaluated, "read_run_state", 1),
    "before the checksums": (tensors, "find_damage_alone", 1),
    "before the first tensor": (tensors.CheckpointTensors, "read", 1),
    "among the tensors": (tensors.CheckpointTensors, "read", 7),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_where_the_run_deletes_the_checkpoint_the_newest_one_is_read(moment, run, monkeypatch, caplog):
    before_call(monkeypatch, *MOMENTS[moment], run.save)
    assert run.is_read_by(load_evaluated_model(Source(run=run.folder)))
    assert run.step == 2
    said = "step_00000001 was deleted by its run while it was read: the newest one is read instead"
    assert said in caplog.text


def test_the_one_asked_for_is_not_replaced_by_another(run, monkeypatch, capsys):
    for words in (["--run", run.folder, "--step"], ["--checkpoint"]):
        step = run.step if len(words) == 3 else run.folder / "checkpoints" / f"step_{run.step:08d}"
        before_call(monkeypatch, tensors.CheckpointTensors, "read", 3, run.save)
        monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, [*words, step]), "--name", "one"])
        assert command.main() == 2
        error = capsys.readouterr().err.strip()
        assert "the run deleted this checkpoint while it was read; give a newer one" in error
        assert error.count("\n") == 0
    assert not (run.folder / "evaluations").exists()


def test_a_run_that_deletes_faster_than_one_reads(run: RunUnderWay, monkeypatch: pytest.MonkeyPatch) -> None:
    read = tensors.CheckpointTensors.read

    def slow(*arguments: Any) -> Any:
        run.save()
        return read(*arguments)

    monkeypatch.setattr(tensors.CheckpointTensors, "read", slow)
    with pytest.raises(ValueError, match=r"deleted 5 checkpoints while they were read; keep more of them"):
        load_evaluated_model(Source(run=run.folder))
    assert run.step == 1 + read_source.TRIES


def test_what_is_damaged_is_refused_at_once(run: RunUnderWay) -> None:
    for pattern in ("*.distcp", "common.pt"):
        next((run.folder / "checkpoints" / "step_00000001").glob(pattern)).unlink()
        with pytest.raises(ValueError, match=rf"is damaged: {pattern.replace('*', '.*')} is missing"):
            load_evaluated_model(Source(run=run.folder))


def test_a_checkpoint_of_the_same_step_again_is_not_mixed_with_the_first(run, monkeypatch):
    """After a start from an earlier checkpoint the run reaches the step again."""

    def again() -> None:
        run.step -= 1
        run.save()

    before_call(monkeypatch, tensors.CheckpointTensors, "read", 5, again)
    assert run.is_read_by(load_evaluated_model(Source(run=run.folder, step=1)))


def test_latest_moves_while_it_is_followed(run: RunUnderWay, monkeypatch: pytest.MonkeyPatch) -> None:
    before_call(monkeypatch, checkpoint_files, "is_complete", 3, run.save)  # of the checkpoint in `latest`
    assert find_checkpoint(run.folder) == run.folder / "checkpoints" / "step_00000002"


def test_a_file_that_is_held_open_stops_neither_a_save_nor_a_start(run, monkeypatch):
    """NFS keeps an open file in its folder under another name."""
    checkpoints, remove = run.folder / "checkpoints", shutil.rmtree
    held = checkpoints / ".tmp_step_00000001"

    def refuses(path: Path, *arguments: Any, **options: Any) -> None:
        if path == held and path.exists() and not options.get("ignore_errors"):
            raise OSError(39, "Directory not empty")
        if path != held:
            remove(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", refuses)
        said = r"step_00000001 could not be deleted: .*Directory not empty"
        with pytest.raises(AssertionError, match=said):
            run.save()  # no warning is allowed, and none occurs
        assert [path.name for path in complete_checkpoints(checkpoints)] == ["step_00000002"]
        recover_folder(checkpoints)
    assert held.exists()
    run.save()
    assert not held.exists()
    assert run.is_read_by(load_evaluated_model(Source(run=run.folder)))


# --- kills -----------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(path: Path, content: str, **_: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(content[: len(content) // 2])
    kill()


def renamed(path: Path, target: Path, rename: Any = Path.rename) -> None:
    rename(path, target)
    kill()


KILLS: dict[str, Any] = {
    # Before the given call, or in place of every call.
    "loading": (tensors.CheckpointTensors, "read", 7),
    "scoring": (torch.nn.functional, "cross_entropy", 1),
    "the folder": (Path, "write_text", 1),
    "half of results.json": (Path, "write_text", half_written),
    "between the files": (Path, "write_text", 2),
    "in front of the name": (Path, "rename", 1),
    "after the name": (Path, "rename", renamed),
}


@pytest.mark.parametrize("moment", KILLS)
def test_a_kill_leaves_nothing_half_written(moment, run, monkeypatch, capfd):
    words = ["--run", str(run.folder), "--name", "first", "--max-tokens", str(2 * LENGTH)]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words])
    before, evaluations = files_of_run(run.folder), run.folder / "evaluations"
    if (child := os.fork()) == 0:
        try:
            owner, name, how = KILLS[moment]
            if isinstance(how, int):
                before_call(monkeypatch, owner, name, how, kill)
            else:
                monkeypatch.setattr(owner, name, how)
            command.main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never return into pytest
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), capfd.readouterr().err
    assert os.WTERMSIG(status) == signal.SIGKILL
    has_name = (evaluations / "first").exists()
    assert has_name == (moment == "after the name")
    assert command.main() == (2 if has_name else 0)
    if has_name:
        assert "exists; give another name, or remove the folder" in capfd.readouterr().err
    assert {path.name for path in evaluations.iterdir()} == {"first"}
    written = {path.name for path in (evaluations / "first").iterdir()}
    assert written == {"results.json", "table.md"}
    assert files_of_run(run.folder) == before
