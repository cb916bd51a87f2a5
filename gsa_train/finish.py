"""The end of a run: last validation, baselines, summary, plots."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from gsa_train.config import PhaseConfig
from gsa_train.evaluate import ngram_perplexities, scores_of
from gsa_train.plots import write_plots
from gsa_train.resume import run_dir
from gsa_train.trainer import Run, validate


def finish(run: Run, last_phase: PhaseConfig) -> None:
    """Write summary.json and plots, and print the summary. Collective."""
    config = run.config
    validation = validate(run, last_phase.name)
    if run.sinks is not None and run.progress is not None:
        baselines: dict[str, Any] = {"unigram_perplexity": None, "bigram_perplexity": None}
        if config.evaluate.ngram_baselines:
            samples = run.tokens // config.train.seq_len_tokens  # right also if the batch size has changed
            blocks = run.validation_sets[0].text.blocks
            baselines = ngram_perplexities(blocks, run.tokenizer, samples, config)
        summary = {
            "steps": run.step,
            "tokens": run.tokens,
            **{
                f"val_{name.removeprefix('validation_')}": value
                for name, value in scores_of(validation).items()
            },
            **baselines,
            "recall": validation["validation_recall"],
            "random_recall": validation["validation_random_recall"],
            "spikes": run.monitor.spikes,
            "skipped_updates": run.monitor.skipped_updates,
            "rewinds": len(run.monitor.rewinds),
        }
        run.progress.close()
        run.sinks.finish(summary)
        for name, value in summary.items():
            parts = value if isinstance(value, dict) else {"": value}
            for part, number in parts.items():
                label = f"{name} {part}".strip()
                run.progress.message(f"{label:>20}  {'--' if number is None else number}")
        if config.logging.plots:
            for path in write_plots(run_dir(config)):
                run.progress.message(f"wrote {path}")
    dist.barrier()
