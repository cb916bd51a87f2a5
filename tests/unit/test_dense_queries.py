"""A start says when its text leaves most queries no choice of keys."""

import dataclasses

import pytest
import torch

from gsa_data.pack import FILLER
from gsa_train.config import load_config
from gsa_train.data.batches import to_micro_batch
from gsa_train.run.dense_queries import dense_queries_warning
from helpers.single_rank import DENSE, EOS, SPARSE, WARM_UP, tiny_config

CONFIG = tiny_config([WARM_UP, SPARSE], gsa={"k_base": 5, "k_min": 2, "k_max": 9})


def blocks(documents: list[int], filler: int = 0) -> torch.Tensor:
    """One sequence of 16 tokens and the label of its last one; the documents' lengths have the EOS in them."""
    tokens = [token for length in documents for token in [*[7] * (length - 1), EOS]]
    return torch.tensor([[*tokens, *[FILLER] * filler]], dtype=torch.int32)


def test_the_share_is_that_of_the_text_as_it_is_packed() -> None:
    short = blocks([6, 6, 5])  # two of 16 queries see more than 5 keys
    said = dense_queries_warning(CONFIG, [to_micro_batch(short, EOS, False)])
    assert said is not None
    assert said.startswith("only 15% of the queries see more than gsa.k_base = 5 keys of its document (of 13")
    assert "data.attend_across_documents=true" in said
    assert dense_queries_warning(CONFIG, [to_micro_batch(short, EOS, True)]) is None  # 11 of 15
    assert dense_queries_warning(CONFIG, [to_micro_batch(blocks([17]), EOS, False)]) is None
    half = [to_micro_batch(each, EOS, False) for each in (blocks([17]), short)]
    assert "46%" in (dense_queries_warning(CONFIG, half) or "")  # 13 of 28 that see two keys
    with_filler = to_micro_batch(blocks([12], filler=5), EOS, False)
    assert dense_queries_warning(CONFIG, [with_filler]) is None  # 7 of 11; of all 16 it were less than half


def test_queries_that_attend_to_all_by_rule_count_as_dense() -> None:
    config = dataclasses.replace(CONFIG, gsa=dataclasses.replace(CONFIG.gsa, dense_below=13))
    said = dense_queries_warning(config, [to_micro_batch(blocks([17]), EOS, False)])
    assert said is not None
    assert said.startswith("only 27% of the queries see more than 12 (gsa.dense_below) keys")  # 4 of 15


def test_runs_that_select_nothing_say_nothing() -> None:
    batch = to_micro_batch(blocks([6, 6, 5]), EOS, False)
    for other in (tiny_config([DENSE]), tiny_config([DENSE], gsa={"attention": "dense"})):
        assert dense_queries_warning(other, [batch]) is None


def test_where_documents_do_not_matter_no_advice_is_about_them() -> None:
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, attend_across_documents=True))
    config = dataclasses.replace(config, gsa=dataclasses.replace(CONFIG.gsa, k_base=9))
    said = dense_queries_warning(config, [to_micro_batch(blocks([6, 6, 5]), EOS, True)])
    assert said is not None
    assert "attend_across" not in said


@pytest.mark.parametrize("length", ["32k", "128k"])
@pytest.mark.parametrize("model", ["gsa", "standard"])
def test_long_configs_attend_across_documents(model: str, length: str) -> None:
    config = load_config(f"configs/{model}_1.7b_{length}.yaml", need_data=False)
    assert config.data.attend_across_documents
    assert config.train.seq_len_tokens > 2 * config.gsa.k_base
