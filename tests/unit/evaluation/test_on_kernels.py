"""Compares evaluation by the fused kernels with plain torch, in Triton's interpreter or on a GPU."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from gsa_eval.evaluated_model import EvaluatedModel, Execution, Source, load_evaluated_model
from gsa_eval.perplexity import score_text
from gsa_eval.text import Piece, Text
from helpers.evaluated import evaluated_config, evaluated_model, save_run


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[EvaluatedModel]:
    config = evaluated_config(
        model={"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}, gsa={"indexer_heads": 2, "indexer_dim": 16}
    )
    run = save_run(evaluated_model(config), config, tmp_path_factory.mktemp("kernels") / "run")
    return [
        load_evaluated_model(Source(run=run), execution=Execution(attention=name)) for name in ("gsa", "sdpa")
    ]


def test_scores_of_packed_documents_and_of_windows(subjects: list[EvaluatedModel]) -> None:
    tokens = np.random.default_rng(0).permutation(np.arange(5, 60)).astype(np.int32)
    packed = np.concatenate([np.arange(9), np.arange(11)])
    pieces = [
        Piece(tokens[:21], packed != 8, packed),
        Piece(tokens[:21], np.arange(20) > 3, np.arange(20)),
        Piece(tokens[30:42], np.ones(11, bool), np.arange(11)),
    ]
    found = [score_text(evaluated.model, Text(pieces, 100), batch_size=3) for evaluated in subjects]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[0]["tokens"] == 18 + 16 + 11


def test_the_choice_is_in_the_results(subjects: list[EvaluatedModel], tmp_path: Path) -> None:
    assert [evaluated.about["attention"] for evaluated in subjects] == ["gsa", "sdpa"]
    with pytest.raises(ValueError, match="attention fused: give one of gsa, sdpa, eager"):
        load_evaluated_model(Source(run=tmp_path), execution=Execution(attention="fused"))
