"""Tests a resume with a checkpoint's position in the text: the same data, other data, another tokenizer."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sentencepiece

from gsa_data import source_weights
from gsa_data.faults import DataFault, Reading
from gsa_data.stream import whole_epochs
from gsa_data.tokenize import Tokenizer, TokenizerError
from gsa_data.validation import ValidationSet
from gsa_train.config import Config, DataConfig
from gsa_train.config.checks import LARGEST_SOURCE_WEIGHT
from gsa_train.config.file_checks import longest_read_seconds
from gsa_train.data import batches
from gsa_train.data.batches import TrainBatches, fingerprints, read_validation_sets, shared_validation_sets
from gsa_train.data.tokenizer import load_tokenizer
from gsa_train.run_folder.resume import ResumeError, Start, open_batches
from helpers.single_rank import CONFIG, single_rank

SAMPLE = Path(__file__).parents[2] / "data" / "sample"


def write_text(folder: Path, word: str, bad_lines: int = 0) -> str:
    folder.mkdir()
    for shard in range(3):
        texts = [f"{word} {shard} {number} " * 20 for number in range(50)]
        lines = [json.dumps({"text": text}) for text in texts] + ["{"] * bad_lines
        (folder / f"s{shard}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    data = {"tokenizer": str(SAMPLE / "tokenizer.model"), "num_lanes": 4, "max_bad_line_fraction": 0.1}
    data["train_dir"] = write_text(tmp_path / "old", "old", bad_lines=1)
    return dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, **data))


def with_data(config: Config, **changes: Any) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


def opened(
    config: Config, data: dict[str, Any] | None, tokenizer: Tokenizer, accept: bool = False
) -> TrainBatches:
    start = Start() if data is None else Start(Path("runs/x/step_00000003"), Mock(data=data))
    return open_batches(config, Mock(accept_new_data=accept), start, tokenizer, single_rank())


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(str(SAMPLE / "tokenizer.model"))


@pytest.fixture
def saved(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    batches = opened(config, None, tokenizer)
    while not batches.counters.get("bad_json"):
        batches.next_step()
    return batches.state()


CHANGES: dict[str, dict[str, Any]] = {
    "manifest_fingerprint": {"train_dir": "new"},
    "num_lanes": {"num_lanes": 8},
    "seed": {"seed": 5},
    "shuffle_documents": {"shuffle_documents": False},
}


@pytest.mark.parametrize("field", CHANGES)
def test_other_data_is_refused_until_it_is_accepted(tmp_path, config, tokenizer, saved, field, caplog):
    new_dir = write_text(tmp_path / "new", "new")
    change = {"train_dir": new_dir} if field == "manifest_fingerprint" else CHANGES[field]
    changed = with_data(config, **change)
    with pytest.raises(ResumeError, match=f"saved with {field}=") as refusal:
        opened(changed, saved, tokenizer)
    assert str(refusal.value).startswith("runs/x/step_00000003 cannot go on with this data:")
    assert "add --accept-new-data" in str(refusal.value)

    accepted, fresh = opened(changed, saved, tokenizer, accept=True), opened(changed, None, tokenizer)
    assert "--accept-new-data: the text starts at its beginning" in caplog.text
    before = accepted.counters
    assert before == saved["counters"]  # they continue
    for _ in range(2):
        for mine, its in zip(accepted.next_step(), fresh.next_step(), strict=True):
            assert mine.tokens.equal(its.tokens)
    state = accepted.state()
    assert (state["cursors"], state["consumed_samples"]) == (fresh.state()["cursors"], 2 * 4)
    assert accepted.counters["documents"] == before["documents"] + fresh.counters["documents"]

    # The option may stay on: if the data is the checkpoint's, it has no effect.
    again, plain = opened(changed, state, tokenizer, accept=True), opened(changed, state, tokenizer)
    assert again.next_step()[0].tokens.equal(plain.next_step()[0].tokens)
    assert again.state() == plain.state()


def test_text_that_comes_again_is_said_once(config, tokenizer, caplog):
    batches = opened(config, None, tokenizer)
    state = batches.state()
    while whole_epochs(state) == 0:
        assert "documents repeat" not in caplog.text
        for _ in range(20):
            batches.next_step()
        state = batches.state()
    assert batches.counters["documents"] >= 150  # every one
    assert caplog.text.count("is in epoch 2: its documents repeat") == 1
    batches.next_step()
    batches.state()
    opened(config, state, tokenizer).state()
    assert caplog.text.count("documents repeat") == 1


def test_another_eos_and_a_damaged_position_are_refused_in_any_case(config, tokenizer, saved):
    model = dataclasses.replace(config.model, vocab_size=4096)
    other = load_tokenizer(dataclasses.replace(with_data(config, eos_token="<s>"), model=model))
    assert other.eos_id == 1
    for accept in (False, True):
        with pytest.raises(ResumeError, match=r"set data\.eos_token=</s>") as refusal:
            opened(with_data(config, seed=5), saved, other, accept)
        assert "saved with seed=0" in str(refusal.value)  # all differences are named
        assert "--accept-new-data" not in str(refusal.value)
        with pytest.raises(ResumeError, match="data state is damaged: lane 0"):
            opened(config, saved | {"cursors": [[0, 0, 0, 0]] * 4}, tokenizer, accept)
    with pytest.raises(TokenizerError, match=r"model\.vocab_size = 32: .* has 4096 tokens"):
        load_tokenizer(config)
    with pytest.raises(
        TokenizerError, match=r"data\.tokenizer: .*README.md' is not .*; give a sentencepiece"
    ):
        load_tokenizer(with_data(config, tokenizer="data/sample/README.md"))


# Ranks whose files differ, as where every node has a disk of its own


def other_rank(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any] | DataFault) -> None:
    """Simulate a second rank that finds the same except for `change`, or fails."""

    def gather(found: list[Any], mine: dict[str, Any]) -> None:
        found[:] = [mine, change if isinstance(change, DataFault) else mine | change]

    monkeypatch.setattr(batches.dist, "all_gather_object", gather)


def test_ranks_that_see_other_shards_are_refused(config, tokenizer, monkeypatch):
    other_rank(monkeypatch, {})
    identity = opened(config, None, tokenizer)._stream.identity
    assert identity.keys() >= CHANGES.keys() | {"tokenizer_fingerprint", "packing"}
    other_rank(monkeypatch, {"manifest_fingerprint": "other"})
    with pytest.raises(
        DataFault, match=r"rank 1 has manifest_fingerprint other, rank 0 has .* data\.train_d"
    ):
        opened(config, None, tokenizer)


def test_ranks_that_see_other_validation_text_are_refused(config, tokenizer, monkeypatch):
    def read(first: str, second: str) -> list[ValidationSet]:
        sets = {"a": first, "b": second}
        return read_validation_sets(with_data(config, validation_sets=sets), tokenizer)

    folders = str(SAMPLE / "validation"), config.data.train_dir
    sets = read(*folders)
    whole, swapped = fingerprints(sets, tokenizer), fingerprints(read(*folders[::-1]), tokenizer)
    assert list(whole) == ["tokenizer_fingerprint", "validation set a", "validation set b"]
    assert swapped["validation set a"] == whole["validation set b"] != whole["validation set a"]

    both = with_data(config, validation_sets=dict(zip("ab", folders, strict=True)))
    other_rank(monkeypatch, {})
    assert fingerprints(shared_validation_sets(both, tokenizer, single_rank()), tokenizer) == whole
    other_rank(monkeypatch, {"validation set b": "other"})
    with pytest.raises(DataFault, match="rank 1 has validation set b other, rank 0 has "):
        shared_validation_sets(both, tokenizer, single_rank())
    other_rank(monkeypatch, DataFault("its folder is empty"))
    with pytest.raises(DataFault, match="its folder is empty"):
        shared_validation_sets(both, tokenizer, single_rank())
    with pytest.raises(DataFault, match="does not exist"):
        shared_validation_sets(with_data(config, validation_dir="/no/such"), tokenizer, single_rank())


def test_a_start_warns_of_validation_text_that_is_trained_on(tmp_path, config, tokenizer, caplog):
    opened(config, None, tokenizer)
    assert "its validation text" not in caplog.text
    train = Path(config.data.train_dir)
    write_text(train / "held_out", "new")
    (tmp_path / "link").symlink_to(train)
    sets = {"inside": f"{train}/held_out/", "same": str(tmp_path / "link")}
    sets["other"] = write_text(tmp_path / "o", "o")
    opened(with_data(config, validation_sets=sets), None, tokenizer)
    warned = [record.args for record in caplog.records if "its validation text" in record.message]
    assert warned == [("data.validation_sets.inside",), ("data.validation_sets.same",)]


def test_a_start_warns_once_of_lost_newlines(tmp_path, config, tokenizer, caplog):
    opened(config, None, tokenizer)
    assert "newlines" not in caplog.text
    path = tmp_path / "defaults.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["old 1 2"] * 9), model_writer=file, vocab_size=280, model_type="bpe",
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    opened(config, None, Tokenizer(str(path)))
    assert caplog.text.count(f"data.tokenizer: {path} loses newlines") == 1


def test_names_that_the_config_repeats() -> None:
    assert source_weights.MAX_WEIGHT == LARGEST_SOURCE_WEIGHT
    for retries in (0, 5, 12):
        reading = Reading(retries=retries, timeout_seconds=7.0)
        data = DataConfig(read_retries=retries, read_timeout_seconds=7.0)
        assert longest_read_seconds(data) == reading.longest_wait_seconds


@pytest.mark.parametrize(("workers", "is_said"), [(2, False), (3, True)])
def test_readers_that_share_lanes_are_said(config, tokenizer, caplog, workers, is_said):
    caplog.set_level("INFO")
    opened(with_data(config, num_workers=workers), None, tokenizer).close()
    assert ("readers share lanes, 3 to each" in caplog.text) == is_said
    assert "on_bad_shard" not in caplog.text
    opened(with_data(config, num_workers=workers, on_bad_shard="skip"), None, tokenizer).close()
    assert ("data.on_bad_shard = skip: if only some" in caplog.text) == is_said


def test_a_shard_of_the_same_size_is_named(tmp_path, config, tokenizer, saved):
    """The shard is named even if only its size is known. A state from before there were samples continues."""
    shard = next(path for path in sorted(Path(config.data.train_dir).rglob("*")) if path.is_file())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ResumeError) as refusal:
        opened(config, saved, tokenizer)
    assert f"differs from the saved run's: {shard.name}: its content is another" in str(refusal.value)
    assert "add --accept-new-data" in str(refusal.value)
    assert opened(config, saved, tokenizer, accept=True).state()["consumed_samples"] == 0
    early = {key: value for key, value in saved.items() if key != "files"}
    assert opened(config, early, tokenizer).state()["files"]["files"].keys() == saved["files"]["files"].keys()

    shard.rename(shard.with_name("renamed.jsonl"))
    with pytest.raises(ResumeError, match=rf"Other files: {shard.name} is gone; renamed.jsonl is new"):
        opened(config, saved, tokenizer)
