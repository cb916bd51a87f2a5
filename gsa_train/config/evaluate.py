"""`evaluate.*`: validation, and tasks."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    prompts: list[str] = field(default_factory=list)
    """Texts that the model goes on with at each validation, greedily; the run's folder (`samples.jsonl`), report, W&B
    and TensorBoard show what it writes. There is no cache: all prompts together cost `prompt_tokens` forward passes
    over a sequence each, on every replica. At most 1024 (prompts times `prompt_tokens`) are allowed."""
    prompt_tokens: int = 32
    """New tokens of each prompt, fewer where the document ends before."""
    tasks: list[str] = field(default_factory=list)
    """Tasks to score between steps: request files (`olmo:hellaswag/rc_5shot`, a folder or `*.jsonl[.gz]`), and multiple
    choices of lm-evaluation-harness (its name, or FILE.yaml, which runs the code that it names). Scores are
    `eval/...` in report, W&B and TensorBoard."""
    tasks_every_steps: int = 0
    """Steps between scorings of the tasks; 0 = only at the end of the run."""
    tasks_max_questions: int = 0
    """Questions of each task, the first; 0 = all."""
    tasks_max_time_percent: float = 2.0
    """Share of the time of steps and tasks that tasks may take, in percent; a scoring that would take more is left out,
    and a line says so. 100 = no limit."""
