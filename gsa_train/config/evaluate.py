"""`evaluate.*`: validation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluateConfig:
    every_steps: int = 0
    """Steps between validations; 0 = only at the end of the run."""
    max_blocks: int = 64
    """Sequences scored of each validation set."""
    split_by_source: bool = False
    """Score the documents of these sequences once more, packed by `meta.redpajama_set_name`, for a perplexity per
    source."""
    ngram_baselines: bool = False
    """At the end, score unigram and bigram models of the same training tokens. They read these again: for small
    runs."""
