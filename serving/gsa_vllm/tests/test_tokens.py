"""Tests that vLLM and transformers give equal greedy tokens and log-probabilities."""

from pathlib import Path

import pytest
import torch

from gsa_vllm.pages import PagedCache, Request
from small_models import (
    MIXED_LENGTHS,
    VARIANTS,
    by_transformers,
    by_vllm,
    engine,
    log_probs_of,
    prompts,
    save_model,
    tokens_of,
)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("paper"), VARIANTS["paper"])


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_and_log_probabilities_equal_transformers(name: str, tmp_path: Path) -> None:
    """Prompts have mixed lengths and chunked prefill. The second call finds them in the prefix cache."""
    folder = save_model(tmp_path, VARIANTS[name])
    tokens, log_probs = by_transformers(folder, MIXED_LENGTHS)
    with engine(folder) as llm:
        first = by_vllm(llm, MIXED_LENGTHS)
        again = by_vllm(llm, MIXED_LENGTHS)
        scored = by_vllm(llm, MIXED_LENGTHS, max_tokens=1, prompt_logprobs=0)
    assert tokens_of(first) == tokens
    assert tokens_of(again) == tokens
    assert sum(output.num_cached_tokens for output in first) == 0
    assert sum(output.num_cached_tokens for output in again) == 32 + 64 + 128
    torch.testing.assert_close(log_probs_of(scored), log_probs, atol=1e-5, rtol=0)


def test_a_preempted_request_gets_the_same_tokens(paper: str) -> None:
    batch = prompts(100, 90, 110, 95, 80, 70)
    with engine(paper, kv_cache_memory_bytes=1_700_000, disable_log_stats=False) as llm:
        outputs = by_vllm(llm, batch)
        preempted = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0
    assert tokens_of(outputs) == by_transformers(paper, batch)[0]


def test_tokens_differ_without_selection(paper: str) -> None:
    """Attention to all keys changes vLLM's tokens, so comparing tokens to transformers reveals a missing selection."""
    with engine(paper, hf_overrides={"dense_below": 10_000}) as llm:
        outputs = by_vllm(llm, MIXED_LENGTHS)
    wanted = by_transformers(paper, MIXED_LENGTHS)[0]
    assert [a != b for a, b in zip(tokens_of(outputs), wanted, strict=True)][1:] == [True] * 3


@pytest.mark.parametrize("fault", ["earlier pages are lost", "rows are shifted"])
def test_a_fault_in_the_indexers_cache_is_found(
    paper: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = PagedCache.read

    def faulty(cache: PagedCache, request: Request) -> torch.Tensor:
        rows = read(cache, request)
        if not cache.name.endswith("indexer_keys"):
            return rows
        if fault == "rows are shifted":
            return rows.roll(1, 1)
        return torch.where(torch.arange(rows.shape[1])[:, None] < rows.shape[1] - 32, 0, rows)

    monkeypatch.setattr(PagedCache, "read", faulty)
    tokens, log_probs = by_transformers(paper, MIXED_LENGTHS)
    with engine(paper) as llm:
        outputs = by_vllm(llm, MIXED_LENGTHS, prompt_logprobs=0)
    assert tokens_of(outputs) != tokens
    assert (log_probs_of(outputs) - log_probs).abs().max() > 0.1
