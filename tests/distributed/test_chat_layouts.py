"""Tests that fine-tuning on conversations in every layout equals one rank, also after a resume."""

from pathlib import Path

import pytest

from gsa_train.validation.perplexity import scores_of
from helpers.runs import Run, train

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

CHAT = (
    # Every query selects all its causal keys, so rounding cannot change a selection.
    *("gsa.k_min=64", "gsa.k_base=64", "gsa.k_max=64", "checkpoint.every_steps=3", "data.num_lanes=2"),
    *("phases.0.steps=2", "phases.0.warmup_steps=1", "phases.1.steps=4", "phases.1.warmup_steps=2"),
    *("data.train_dir=data/sample_chat/train", "data.validation_dir=data/sample_chat/validation"),
    *("data.format=chat", "data.chat_template=data/sample_chat/chat_template.jinja"),
    *("data.packing=best_fit", "data.packing_pool_documents=8"),
)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("one"), *CHAT)


def test_tensor_and_context_parallel_ranks_train_what_one_does(one_rank: Run, tmp_path: Path) -> None:
    run = train(tmp_path, *CHAT, "parallel.tensor=2", "parallel.context=2", ranks=4)
    assert_same(run, one_rank, first=1)


def test_a_resume_on_two_replicas_goes_on(one_rank: Run, tmp_path: Path) -> None:
    """The replicas have different numbers of scored tokens, because their conversations differ."""
    checkpoint = one_rank.checkpoints / "step_00000003"
    assert_same(train(tmp_path, *CHAT, "--resume-from", str(checkpoint), ranks=2), one_rank, first=4)


def assert_same(run: Run, reference: Run, first: int) -> None:
    found, expected = run.steps(), [each for each in reference.steps() if each["step"] >= first]
    assert [each["step"] for each in found] == list(range(first, 7))
    for record, other in zip(found, expected, strict=True):
        assert record["data_checksum"] == other["data_checksum"]
        for key in ("loss", "indexer_kl", "grad_norm"):
            assert record[key] == pytest.approx(other[key], rel=1e-5), (key, record["step"])
    scores, others = (scores_of(each.records()[-1]) for each in (run, reference))
    assert scores.keys() == others.keys()
    for key in ("validation_loss", "validation_bits_per_byte"):
        assert scores[key] == pytest.approx(others[key], rel=1e-5)
