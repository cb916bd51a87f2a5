"""Tests that the kernels, in Triton's interpreter, give the tokens and log-probabilities of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import by_transformers, by_vllm, engine, log_probs_of, prompts, save_model, tokens_of

RECOMMENDED = {
    "indexer_activation": "relu",
    "indexer_norm": True,
    "indexer_rope": True,
    "index_n_heads": 8,
    "adaptive_k": "off",
    "local_window": 24,
    "index_topk_freq": 2,
}
OTHER = {
    "gate_sharing": "head_shared",
    "layer_types": ["full_attention", "indexed_attention"],
}
BATCH = prompts(7, 70)


@pytest.mark.parametrize("options", [RECOMMENDED, OTHER], ids=["recommended", "other"])
def test_kernels_equal_transformers(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps have one decoding request and a chunk of a prompt, or two decoding requests."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # before the first import of a kernel
    from gsa_vllm import kernels

    steps = []
    decode = kernels.decode
    monkeypatch.setattr(kernels, "decode", lambda *given: steps.append(len(given[1])) or decode(*given))
    folder = save_model(tmp_path, {**options, "num_hidden_layers": 2})
    tokens, log_probs = by_transformers(folder, BATCH)
    with engine(folder) as llm:
        outputs = by_vllm(llm, BATCH, max_tokens=5, prompt_logprobs=0)
    assert tokens_of(outputs) == [each[:5] for each in tokens]
    torch.testing.assert_close(log_probs_of(outputs), log_probs, atol=1e-5, rtol=0)
    assert {1, 2} == set(steps)
