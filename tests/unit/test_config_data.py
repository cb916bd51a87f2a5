"""The checks of the folders and files that a config names."""

import pytest

from gsa_train.config import DataConfig
from gsa_train.config_checks import check_data


def test_data_files(tmp_path):
    empty, full, model = tmp_path / "empty", tmp_path / "full", tmp_path / "tokenizer.model"
    empty.mkdir()
    (full / "chunk1").mkdir(parents=True)
    (full / "chunk1" / "a.jsonl.zst").touch()
    model.touch()
    assert check_data(DataConfig(train_dir=str(full), validation_dir=str(full), tokenizer=str(model))) == []
    assert check_data(DataConfig(train_dir="s3://a", validation_dir="gs://b", tokenizer="hf://c")) == []
    found = check_data(
        DataConfig(train_dir=str(empty), validation_dir=str(tmp_path / "no"), tokenizer=str(empty))
    )
    assert [line.split(" = ")[0] for line in found] == [
        "data.train_dir",
        "data.validation_dir",
        "data.tokenizer",
    ]
    assert "holds no *.jsonl, *.jsonl.zst, *.jsonl.gz, *.parquet" in found[0]
    assert "no such folder" in found[1]
    assert "no such file" in found[2]


def test_links_to_folders_are_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jsonl.zst").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "chunk1").symlink_to(tmp_path / "elsewhere")
    assert check_data(DataConfig(str(tmp_path / "linked"), validation_dir="s3://a", tokenizer="s3://a")) == []


@pytest.mark.parametrize("name", ["tokens.json", "tokens.journal", "text_document.idx"])
def test_folders_of_tokens_pass(tmp_path, name):
    (tmp_path / name).touch()
    assert check_data(DataConfig(str(tmp_path), validation_dir="s3://a", tokenizer="s3://a")) == []


def test_every_validation_set_must_be_there(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "a.jsonl.zst").touch()
    (tmp_path / "empty").mkdir()
    sets = {
        "good": str(full),
        "hollow": str(tmp_path / "empty"),
        "gone": str(tmp_path / "no"),
        "far": "s3://a",
    }
    data = DataConfig(
        train_dir=str(full), validation_dir="not read", validation_sets=sets, tokenizer="hf://a"
    )
    hollow, gone = check_data(data)
    assert hollow.startswith(f"data.validation_sets.hollow = {tmp_path / 'empty'}: holds no ")
    assert gone.startswith(f"data.validation_sets.gone = {tmp_path / 'no'}: no such folder")
