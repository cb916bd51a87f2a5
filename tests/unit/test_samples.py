"""Tests samples of fixed prompts: the argmax of the model's logits on any layout, without an effect on training."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gsa_data.tokenize import TokenizerError
from gsa_train.config import LoggingConfig
from gsa_train.data.batches import to_micro_batch
from gsa_train.metrics.record_format import read_records, sample_texts
from gsa_train.metrics.sinks import open_sinks
from gsa_train.model.mcore.build import Model
from gsa_train.phases import enter_phase
from gsa_train.run.validate import validate
from gsa_train.validation.samples import encode_prompts, generate_samples
from helpers.single_rank import EOS, SPARSE, single_rank, tiny_config, tiny_model
from helpers.tiny_run import tiny_run

PROMPTS = ["abc", "hello"]


class Letters:
    """Tokenizes with 27 tokens: EOS and the letters."""

    vocab_size, eos_id, stop_ids = 27, EOS, (EOS,)

    def encode_prompt(self, text: str) -> np.ndarray:
        return np.array([ord(letter) - 96 for letter in text if letter != " "], np.int32)

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token + 96) for token in tokens)


CONFIG = tiny_config(evaluate={"prompts": PROMPTS, "prompt_tokens": 6})
LENGTH = CONFIG.train.seq_len_tokens


@pytest.fixture(scope="module")
def model() -> Model:
    made = tiny_model(CONFIG, variance_ema=0.02)
    enter_phase(made, SPARSE)
    return made


def by_whole_logits(model: Model, text: str) -> tuple[str, bool]:
    """Generate token by token, each the argmax over the logits of a sequence padded with other tokens."""
    letters = Letters()
    tokens = letters.encode_prompt(text).tolist()
    start = len(tokens)
    while len(tokens) < start + CONFIG.evaluate.prompt_tokens:
        block = torch.full((1, LENGTH + 1), 7, dtype=torch.int32)
        block[0, : len(tokens)] = torch.tensor(tokens)
        batch = to_micro_batch(block, EOS, False)
        positions = torch.arange(LENGTH)[None]
        evaluating = dataclasses.replace(model.runtime.attention_pass, evaluating=True)
        with torch.no_grad(), model.runtime.during(evaluating):
            logits = model.module(batch.tokens, positions, batch.document_ids)
        token = int(logits[0, len(tokens) - 1, : letters.vocab_size].argmax())
        if token == EOS:
            return letters.decode(tokens[start:]), True
        tokens.append(token)
    return letters.decode(tokens[start:]), False


def samples_of(model: Model, **changes: Any) -> list[dict[str, Any]]:
    prompts = encode_prompts(CONFIG, Letters())
    return generate_samples(model, prompts, Letters(), CONFIG, single_rank(), **changes)


def test_samples_are_the_argmax_of_the_models_logits(model: Model) -> None:
    found = samples_of(model)
    assert [each["prompt"] for each in found] == PROMPTS
    expected = [by_whole_logits(model, text) for text in PROMPTS]
    assert [(each["text"], each["ended"]) for each in found] == expected
    assert any(each["text"] for each in found)


@pytest.mark.parametrize("stop", [EOS, 26], ids=["document", "turn"])
def test_what_ends_is_not_gone_on_with(model: Model, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer is changed to write the end of the document, or of a turn, as the third token."""
    monkeypatch.setattr(Letters, "stop_ids", (EOS, stop))
    first = samples_of(model)
    calls: list[int] = []

    def end_after_two(module: Any, inputs: Any, output: Any) -> Any:
        calls.append(1)
        logits = output[0].clone()
        if len(calls) > 2 * len(PROMPTS):
            logits[..., stop] = 1e4
        return logits, output[1]

    hook = model.gpt.output_layer.register_forward_hook(end_after_two)
    found = samples_of(model)
    hook.remove()
    assert [(each["text"], each["ended"]) for each in found] == [(each["text"][:2], True) for each in first]
    assert len(calls) == 3 * len(PROMPTS)


def test_a_validation_logs_them_and_a_stop_leaves_both_for_the_next_start(model, monkeypatch):
    monkeypatch.setattr("gsa_train.run.validate.evaluate", lambda *_: {"validation_loss": 1.0})
    sinks = Mock()
    fields = {"tokenizer": Letters(), "prompts": encode_prompts(CONFIG, Letters()), "sinks": sinks}
    run = tiny_run(CONFIG, model, **fields)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        validate(run, "sparse", stop)
    assert run.newest_validation is None
    assert not sinks.mock_calls
    validate(run, "sparse", lambda: None)
    (record,) = sinks.log_samples.call_args.args
    assert (record["event"], record["step"], record["samples"]) == ("samples", 0, samples_of(model))
    validate(run, "sparse", lambda: None)
    assert sinks.log_samples.call_count == 1


def test_prompts_that_do_not_fit() -> None:
    too_long = "11 tokens, with evaluate.prompt_tokens = 6 more than train.seq_len_tokens = 16"
    for prompt, words in ((" a " * 11, too_long), (" ", "no tok")):
        config = tiny_config(evaluate={"prompt_tokens": 6})
        evaluate = dataclasses.replace(config.evaluate, prompts=["a", prompt])
        with pytest.raises(TokenizerError, match=rf"evaluate.prompts.1 = .*{words}"):
            encode_prompts(dataclasses.replace(config, evaluate=evaluate), Letters())


def record_of(step: int, text: str) -> dict[str, Any]:
    samples = [{"prompt": "Once <b>", "text": text, "ended": False}]
    return {"event": "samples", "step": step, "phase": "sparse", "tokens": 10 * step, "samples": samples}


def test_where_samples_go(tmp_path: Path) -> None:
    """Samples go to the file, and TensorBoard; samples after the step of a restart are dropped."""
    logging = LoggingConfig(tensorboard=True)

    def logged() -> list[tuple[int, str]]:
        return [
            (each["step"], each["samples"][0]["text"]) for each in read_records(tmp_path / "samples.jsonl")
        ]

    with open_sinks(logging, tmp_path, ["sparse"], None, None) as sinks:
        for step in (2, 4):
            sinks.log({"step": step, "phase": "sparse", "loss": 1.0, "tokens": 10 * step})
            sinks.log_samples(record_of(step, f"text of {step}"))
    assert logged() == [(2, "text of 2"), (4, "text of 4")]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("samples/prompt_00/text_summary")
    texts = [(each.step, b"text of" in each.tensor_proto.string_val[0]) for each in shown]
    assert texts == [(2, True), (4, True)]

    with open_sinks(logging, tmp_path, ["sparse"], 2, None) as sinks:
        assert logged() == [(2, "text of 2")]
        sinks.log_samples(record_of(3, "y"))
        assert logged() == [(2, "text of 2"), (3, "y")]
    with open_sinks(logging, tmp_path, ["sparse"], 2, None, validates_again=True):
        assert logged() == []
    with open_sinks(logging, tmp_path, ["sparse"], None, None):
        assert not (tmp_path / "samples.jsonl").exists()
    assert len(list(tmp_path.glob("previous/*/samples.jsonl"))) == 1


def test_a_file_that_cannot_be_made_costs_its_samples_alone(tmp_path, caplog):
    (tmp_path / "samples.jsonl").mkdir()
    with open_sinks(LoggingConfig(tensorboard=False), tmp_path, ["sparse"], None, None) as sinks:
        (tmp_path / "samples.jsonl").mkdir(exist_ok=True)
        sinks.log_samples(record_of(2, "x"))
        (tmp_path / "samples.jsonl").rmdir()
        sinks.log_samples(record_of(4, "y"))
    assert "samples of step 2 are not in samples.jsonl" in caplog.text
    assert [each["step"] for each in read_records(tmp_path / "samples.jsonl")] == [4]


def test_texts_keep_their_lines_and_what_spells_a_number(tmp_path: Path) -> None:
    record = record_of(1, "a\n# b")
    record["samples"].append({"prompt": "Infinity", "text": "NaN", "ended": True})
    assert sample_texts(record) == {"prompt_00": "    Once <b>⟶a\n    # b …", "prompt_01": "    Infinity⟶NaN"}
    (tmp_path / "samples.jsonl").write_text(json.dumps(record) + "\n")
    assert read_records(tmp_path / "samples.jsonl") == [record]


def test_a_table_for_wandb(tmp_path: Path) -> None:
    from gsa_train.metrics.wandb_sink import WandbSink

    run = Mock(id="abc")
    sink = WandbSink(run, tmp_path)
    sink.log_samples(record_of(4, "text"))
    (logged,) = run.log.call_args.args
    assert logged["step"] == 4
    assert logged["samples"].data == [[4, "Once <b>", "text", False]]
    run.log.side_effect = OSError("disk full")
    sink.log_samples(record_of(5, "text"))
    sink.log_samples(record_of(6, "text"))
    assert run.log.call_count == 3
