"""Tests that two tensor-parallel ranks in separate processes give the tokens of transformers."""

from pathlib import Path

import pytest
import torch

from small_models import (
    MIXED_LENGTHS,
    VARIANTS,
    by_transformers,
    by_vllm,
    engine,
    log_probs_of,
    save_model,
    tokens_of,
)


@pytest.mark.parametrize("name", ["other_gates", "experts", "dense_layers"])
def test_two_ranks_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, VARIANTS[name])
    tokens, log_probs = by_transformers(folder, MIXED_LENGTHS)
    with engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        outputs = by_vllm(llm, MIXED_LENGTHS)
        scored = by_vllm(llm, MIXED_LENGTHS, max_tokens=1, prompt_logprobs=0)
    assert tokens_of(outputs) == tokens
    torch.testing.assert_close(log_probs_of(scored), log_probs, atol=1e-5, rtol=0)
