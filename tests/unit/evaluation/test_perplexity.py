"""Compares the perplexity of text with a plain loop over exported weights, and with the run itself."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from gsa_data.corpus import open_corpus
from gsa_data.faults import Reading
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import read_validation_set
from gsa_eval import evaluate as whole
from gsa_eval.commands import evaluate as command
from gsa_eval.convert.export_hf import export_hf
from gsa_eval.evaluated_model import Execution, Source, load_evaluated_model
from gsa_eval.perplexity import by_position, score_text
from gsa_eval.settings import apply_settings
from gsa_eval.text import TextOptions, read_text
from gsa_hf import GSAConfig
from gsa_train.data.batches import read_validation_sets
from gsa_train.validation.perplexity import evaluate
from helpers.evaluated import (
    LENGTH,
    SAMPLE,
    TOKENIZER,
    evaluated_config,
    evaluated_model,
    files_of_run,
    log_likelihood,
    save_run,
)
from helpers.single_rank import single_rank

BLOCKS = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    config = evaluated_config(evaluate={"max_blocks": BLOCKS})
    model = evaluated_model(config)
    return model, config, save_run(model, config, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def exported(run: tuple[Any, Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = run[2] / "checkpoints" / "step_00000003"
    return export_hf(checkpoint, tmp_path_factory.mktemp("exported") / "hf").folder


def evaluated(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, words)])
    return command.main()


def results(run_dir: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "evaluations" / name / "results.json").read_text())
    return found


def straight_line(folder: Path, sequences: list[tuple[list[int], int]]) -> float:
    """Sum the nats of each sequence's labels from a position on, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return -sum(log_likelihood(model, tokens, first) for tokens, first in sequences)


@pytest.mark.parametrize("across", [False, True])
def test_the_run_says_the_same(across: bool, run: tuple[Any, Any, Path], tmp_path: Path) -> None:
    model, config, run_dir = run
    if across:
        config = evaluated_config(data={"attend_across_documents": True})
        model = evaluated_model(config)
        run_dir = save_run(model, config, tmp_path / "run")
    tokenizer = Tokenizer(TOKENIZER)
    arguments = (open_corpus(config.data.validation_dir), tokenizer, LENGTH, BLOCKS, Reading())
    validation = read_validation_set("validation", *arguments, across, split_by_source=False)
    expected = evaluate(model, [validation], tokenizer.eos_id, config, single_rank())

    evaluated = load_evaluated_model(Source(run=run_dir), execution=None)
    options = TextOptions(LENGTH, None, BLOCKS * LENGTH, evaluated.attend_across_documents)
    text = read_text(config.data.validation_dir, tokenizer, options)
    found = score_text(evaluated.model, text, batch_size=3)
    assert found["tokens"] == validation.text.scored_tokens
    assert found["loss"] == pytest.approx(expected["validation_loss"], rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(expected["validation_bits_per_byte"], rel=1e-5)


def test_the_runs_own_text_is_read_as_the_run_reads_it(tmp_path, monkeypatch):
    """The text has another field, and the documents that are too long for it are left out."""
    place = tmp_path / "validation"
    place.mkdir()
    texts = ["A long document, which is left out. " * 20, *["Short ones are read. " * 9] * 200]
    (place / "a.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    data = {"validation_dir": str(place), "text_field": "content", "max_document_bytes": 300}
    config = evaluated_config(evaluate={"max_blocks": BLOCKS}, data=data)
    model = evaluated_model(config)
    run_dir, tokenizer = save_run(model, config, tmp_path / "run"), Tokenizer(TOKENIZER)
    sets = read_validation_sets(config, tokenizer)
    expected = evaluate(model, sets, tokenizer.eos_id, config, single_rank())["validation_loss"]
    assert evaluated(monkeypatch, "--run", run_dir, "--name", "own") == 0
    assert results(run_dir, "own")["data"]["validation"]["loss"] == pytest.approx(expected, rel=1e-5)
    words = ("--text-field", "content", "--max-tokens", BLOCKS * LENGTH)
    assert evaluated(monkeypatch, "--run", run_dir, "--name", "other", "--data", place, *words) == 0
    assert results(run_dir, "other")["data"]["validation"]["loss"] != pytest.approx(expected, rel=1e-5)


def test_a_runs_conversations_are_refused(tmp_path, monkeypatch, capsys):
    chat = SAMPLE.with_name("sample_chat")
    data = {"validation_dir": str(chat / "validation"), "chat_template": str(chat / "chat_template.jinja")}
    config = evaluated_config(data={**data, "format": "chat", "packing": "best_fit"})
    run_dir = save_run(evaluated_model(config), config, tmp_path / "run")
    for words in ((), ("--tasks", str(tmp_path / "absent.jsonl"), "--validation")):
        assert evaluated(monkeypatch, "--run", run_dir, "--name", "own", *words) == 2
        assert "validation sets are conversations" in capsys.readouterr().err
    assert not (run_dir / "evaluations").exists()


def test_a_wrong_mode_of_wandb_is_refused_before_anything_is_scored(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    assert evaluated(monkeypatch, "--run", run[2], "--name", "x", "--out", tmp_path, "--wandb", "auto") == 2
    assert not (tmp_path / "x").exists()


def test_the_command_scores_the_runs_validation_and_touches_nothing(run, exported, monkeypatch, capsys):
    _, config, run_dir = run
    before = files_of_run(run_dir)
    assert evaluated(monkeypatch, "--run", run_dir, "--name", "own") == 0
    assert "| validation |" in capsys.readouterr().out
    assert evaluated(monkeypatch, "--run", run_dir, "--step", 3, "--name", "sparser", "gsa.k_base=3") == 0
    assert evaluated(monkeypatch, "--run", run_dir, "--name", "dense", "gsa.attention=dense") == 0
    words = (
        "--data", f"validation={config.data.validation_dir}", "--max-tokens", BLOCKS * LENGTH,
        "--context-length", LENGTH,
    )  # fmt: skip
    place = ("--out", run_dir / "evaluations")
    assert evaluated(monkeypatch, "--hf", exported, "--name", "hf", *place, *words) == 0
    assert files_of_run(run_dir) == before

    own = results(run_dir, "own")
    about = own["model"]
    assert (about["step"], about["tokens_trained"], about["attention"]) == (3, 192, "sdpa")
    assert own["data"]["validation"]["loss"] == results(run_dir, "hf")["data"]["validation"]["loss"]
    losses = {results(run_dir, name)["data"]["validation"]["loss"] for name in ("own", "sparser", "dense")}
    assert len(losses) == 3
    assert (run_dir / "evaluations" / "own" / "table.md").read_text().startswith("# own\n")

    assert evaluated(monkeypatch, "--run", run_dir, "--name", "own") == 2
    assert "give another name, or remove the folder" in capsys.readouterr().err


def test_what_was_finished_is_shown_when_the_rest_fails(run, monkeypatch, capsys):
    """The rest fails by an error in the next text, or by a full disk."""
    good = (
        "--run", run[2], "--name", "shown", "--data", f"sample={SAMPLE / 'validation'}", "--max-tokens", 64,
    )  # fmt: skip
    folder = run[2] / "evaluations" / "shown"
    assert evaluated(monkeypatch, *good, "--data", SAMPLE / "nowhere") == 2
    failed = capsys.readouterr()
    assert "nowhere' does not exist" in failed.err.splitlines()[-1]
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr("gsa_eval.results.to_strict", Mock(side_effect=full))
        assert evaluated(monkeypatch, *good) == 2
    unwritten = capsys.readouterr()
    assert unwritten.err.splitlines()[-1].startswith(
        f"{folder}: [Errno {errno.ENOSPC}] No space left on device; make"
    )
    assert evaluated(monkeypatch, *good) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| sample"))
    for said in (failed.out, unwritten.out):
        assert row in said
        assert said.endswith(f"{folder} was not written; these results were finished\n")


@pytest.mark.parametrize(("settings", "times"), [([], 1), (["gsa.attention=dense"], 0)])
def test_a_dense_phase_is_named(settings: list[str], times: int, tmp_path: Path, caplog: Any) -> None:
    """The model attends by its indexer, which has not trained."""
    config = evaluated_config()
    dense = dataclasses.replace(config.phases[0], name="first", attention="dense", train="base")
    config = dataclasses.replace(config, phases=[dense])
    folder = save_run(evaluated_model(config), config, tmp_path / "run")
    load_evaluated_model(Source(run=folder), settings)
    assert caplog.text.count("Saved in phase first, which attends to all keys") == times


@pytest.mark.parametrize("batch_size", [1, 4])
def test_windows_equal_a_plain_loop(batch_size, run, exported, tmp_path):
    """Documents of C4 are as published, each separate; some are shorter than a window."""
    texts = ["The tower stood. " * 9, "Short.", "def f(x):\n    return x + 1\n" * 5]
    content = "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in texts)
    (tmp_path / "c4-validation.00000-of-00008.json.gz").write_bytes(gzip.compress(content.encode()))
    length, stride = 16, 5
    evaluated = load_evaluated_model(Source(run=run[2]))
    text = read_text(str(tmp_path), evaluated.tokenizer, TextOptions(length, stride, None, False))
    found = score_text(evaluated.model, text, batch_size)

    sequences = []
    for each in texts:
        tokens = [evaluated.tokenizer.eos_id, *evaluated.tokenizer.encode(each).tolist()]
        sequences.append((tokens[: length + 1], 0))
        done = length
        while done < len(tokens) - 1:
            end = min(done + stride, len(tokens) - 1)
            sequences.append((tokens[end - length : end + 1], length - (end - done)))
            done = end
    expected = straight_line(exported, sequences)
    count = sum(len(evaluated.tokenizer.encode(each)) for each in texts)
    assert found["tokens"] == count
    assert found["loss"] * count == pytest.approx(expected, rel=1e-6)
    spelled = sum(len(each.encode()) for each in texts)  # without the tokenizer's spaces before documents
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2) / spelled, rel=1e-6)
    assert sum(each["tokens"] for each in found["loss_by_position"]) == count


def test_buckets_of_positions() -> None:
    found = by_position(np.array([1.0, 2.0, 4.0, 8.0]), np.array([1, 16, 17, 33]))
    assert [(each["from"], each["to"], each["loss"], each["tokens"]) for each in found] == [
        (1, 16, 1.5, 2),
        (17, 32, 4.0, 1),
        (33, 64, 8.0, 1),
    ]


def rope(*settings: str) -> list[str]:
    return [f"model.rope_scaling.{setting}" for setting in settings]


YARN = rope("rope_type=yarn", "factor=4")


def test_settings_extend_the_rotary_embedding(run: tuple[Any, Any, Path]) -> None:
    config = load_evaluated_model(Source(run=run[2])).model.config
    before = config.rope_parameters
    assert apply_settings(config, [*YARN, "model.rope_base=1e6"]).rope_parameters == {
        **before, "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    more = rope("original_max_position_embeddings=8", "attention_factor=1.5")
    changed = apply_settings(config, [*YARN, *more])
    assert changed.rope_parameters["original_max_position_embeddings"] == 8
    assert changed.rope_parameters["attention_factor"] == 1.5
    assert apply_settings(changed, rope("rope_type=default")).rope_parameters == before
    assert "attention_factor" not in apply_settings(changed, rope("attention_factor=0")).rope_parameters


def test_settings_change_how_the_model_attends_and_nothing_else(run: tuple[Any, Any, Path]) -> None:
    config = load_evaluated_model(Source(run=run[2])).model.config
    settings = ["gsa.k_base=4", "gsa.k_min=4", "gsa.k_max=4", "gsa.local_window=2", "model.rope_base=1e6"]
    changed = apply_settings(config, settings)
    assert (changed.index_topk, changed.k_min, changed.k_max) == (4, 4, 4)
    assert (changed.local_window, changed.rope_parameters["rope_theta"]) == (2, 1e6)
    assert changed.layer_types == config.layer_types
    assert apply_settings(config, ["gsa.dense_below=64"]).dense_below == 64


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["gsa.k_base=100"], "outside of gsa.k_min = 4 and gsa.k_max = 12"),
        (["gsa.k_base=many"], "not a number"),
        (["model.hidden_size=8"], "an evaluation cannot set it; give one of gsa.attention,"),
        (["gsa.attention=none"], "give dense or sparse"),
        (["gsa.adaptive_k=upwards"], "upwards"),
        (["gsa.k_min=0"], "gsa.k_min=0: give 1 to 2147483647"),
        (["gsa.local_window=-1"], "gsa.local_window=-1: give 0 to 2147483647"),
        (["gsa.k_max=99999999999999999999"], "give 1 to 2147483647"),
        (["model.rope_base=nan"], "model.rope_base=nan: give a positive number"),
        (rope("factor=4"), "factor=4.0: does nothing without model.rope_scaling.rope_type=yarn"),
        (rope("rope_type=yarn"), "add model.rope_scaling.factor="),
        (rope("rope_type=linear"), "give default or yarn"),
        ([*YARN, *rope("beta_fast=0.5")], "beta_fast is 0.5 and beta_slow 1.0"),
        ([*YARN, "model.rope_base=1"], "give more than 1 with YaRN"),
    ],
)
def test_wrong_settings_are_refused(settings: list[str], said: str) -> None:
    config = GSAConfig(k_min=4, index_topk=8, k_max=12)
    with pytest.raises(Exception, match=re.escape(said)):
        apply_settings(config, settings)


def test_wrong_use(run, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.touch()
    checkpoint = run[2] / "checkpoints" / "step_00000003"
    of_run = ("--run", run[2])
    for words, message in (
        ((*of_run, "--step", 9), "no complete checkpoint there"),
        (("--checkpoint", checkpoint, "--data", SAMPLE / "nowhere"), "does not exist"),
        (("--hf", SAMPLE), "no config.json there"),
        ((*of_run, "--data", "a=/x", "--data", "a=/y"), "a is used already"),
        ((*of_run, "--data", ""), "--data '': names no place; give the folder of a text"),
        ((*of_run, "--data", "a="), "--data 'a=': names no place"),
        ((*of_run, "--stride", "64"), "above the context length 32"),
        (
            (*of_run, "--context-length", "10000000"),
            "shorter sequences (seq_len_tokens; in evaluate.py --context-length)",
        ),
        ((*of_run, "--device", "abacus"), "--device abacus: not on this machine"),
        ((*of_run, "--device", "meta"), "--device meta: models run only on cpu and cuda"),
        ((*of_run, "--out", file), f"{file} is not a writable folder"),
    ):
        assert evaluated(monkeypatch, *words, "--name", "wrong") == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="attention fused: give one of gsa, sdpa, eager"):
        load_evaluated_model(Source(run=run[2]), execution=Execution(attention="fused"))
    with pytest.raises(ValueError, match="give letters"):
        whole.result_folder("../x", run[2], None)
    with pytest.raises(ValueError, match="give --out DIR"):
        whole.result_folder("x", None, None)
    for option, value, most in (
        ("--max-tokens", "0", 2**31 - 1),
        ("--ruler", "1000000000000", 2**24),
        ("--ruler-samples", "1000000000000", 10_000),
        ("--context-length", "9" * 5000, 2**31 - 1),
    ):
        with pytest.raises(SystemExit):
            command.parse(["--run", "x", "--name", "y", option, value])
        assert f"give a whole number from 1 to {most}" in capsys.readouterr().err
    for option, value, message in (
        ("--num-fewshot", "-4", "--num-fewshot -4: negative; give 0 or more"),
        ("--num-fewshot", "0", "--num-fewshot 0: has an effect only with --tasks; give both or neither"),
        ("--limit", "3", "--limit 3: has an effect only with --tasks"),
        ("--ruler-tasks", "nope", "--ruler-tasks nope: has an effect only with --ruler"),
        ("--ruler-samples", "3", "--ruler-samples 3: has an effect only with --ruler"),
        ("--haystack", "/nope", "--haystack /nope: has an effect only with --ruler"),
        ("--seed", "1", "--seed 1: has an effect only with --ruler"),
    ):
        with pytest.raises(SystemExit):
            command.parse(["--run", "x", "--name", "y", option, value])
        assert message in capsys.readouterr().err
