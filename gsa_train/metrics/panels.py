"""List the panels: metrics that TensorBoard and W&B show in one chart.

A metric is a key of the records in metrics.jsonl (docs/reference/monitoring.md explains each). TensorBoard and W&B
name the metric by its tag, which begins with its section: train/loss, gsa/recall, gsa_layers/recall/layer_00,
lr/gates, moe/router_balance, validation/loss, eval/accuracy/<task>, system/mfu.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SECTIONS = {
    "train": "Training",
    "eval": "Tasks",
    "gsa": "GSA attention",
    "moe": "Experts",
    "stability": "Stability",
    "system": "System",
    "data": "Data",
}
"""Maps prefixes of tags to titles."""


@dataclass(frozen=True)
class Panel:
    section: str
    label: str
    """Label of the y axis."""
    keys: tuple[str, ...]
    """Keys of numbers in the record, without `per_set` and `per_entry`."""
    per_set: str = ""
    """Score that gets a line for each validation set, or for each of its sources."""
    per_entry: str = ""
    """Key of a dict; each of its entries gets a line."""

    @property
    def tags(self) -> list[str]:
        """Returns regular expressions that match the whole tags of all lines."""
        patterns = [re.escape(tag_of(key)) for key in self.keys]
        if self.per_set:
            entries = "/.+" if self.per_set.endswith("_by_source") else ""
            patterns.append(rf"validation/(\w+_)?{self.per_set}{entries}")
        if self.per_entry:
            patterns.append(f"{re.escape(tag_of(self.per_entry))}/.+")
        return patterns


PANELS = (
    Panel("train", "loss (nats per token)", ("loss",), per_set="loss"),
    Panel("train", "loss by source (nats per token)", (), per_set="loss_by_source"),
    Panel("train", "bits per byte", (), per_set="bits_per_byte"),
    Panel("train", "learning rate", (), per_entry="lrs"),
    Panel("train", "z-loss (per token)", ("z_loss",)),
    Panel("train", "sequences per step", ("global_batch_size",)),
    Panel("train", "gradient norm", ("grad_norm",)),
    Panel("train", "norm of the update", ("update_norm",)),
    Panel("eval", "accuracy", (), per_entry="eval_accuracy"),
    Panel(
        "eval", "accuracy by log-likelihood per character", (), per_entry="eval_length_normalised_accuracy"
    ),
    Panel("eval", "bits per byte of the right answer", (), per_entry="eval_bits_per_byte"),
    Panel("eval", "share of the run's time", ("eval_time_share",)),
    Panel("gsa", "indexer loss: KL (nats)", ("indexer_kl",)),
    Panel("gsa", "recall of attention mass", ("recall", "validation_recall", "random_recall")),
    Panel("gsa", "overlap with the query's own top keys", ("overlap_heads", "overlap_mean")),
    Panel("gsa", "saturated indexer activations", ("indexer_saturated",)),
    Panel("gsa", "budget k_t (keys)", ("k_mean", "k_min", "k_max")),
    Panel("gsa", "keys per query", ("causal_keys", "selected_keys")),
    Panel("gsa", "queries that attend densely", ("dense_query_share",)),
    Panel("gsa", "mean k_t by the query's position in its document", (), per_entry="k_by_position"),
    Panel("gsa", "variance of the scores (average)", ("variance_ema",)),
    Panel("gsa", "keys shared with the query before", ("adjacent_overlap",)),
    Panel("gsa", "union of 32 queries / mean k_t", ("union_ratio_32",)),
    Panel("gsa", "union of 32 queries / causal keys", ("union_density",)),
    Panel("gsa", "mean gate", ("value_gate_mean", "output_gate_mean")),
    Panel("gsa", "gates below 0.1", ("value_gate_low", "output_gate_low")),
    Panel("gsa", "gates above 0.9", ("value_gate_high", "output_gate_high")),
    Panel("gsa", "value gate: share by opening", (), per_entry="value_gate_histogram"),
    Panel("gsa", "output gate: share by opening", (), per_entry="output_gate_histogram"),
    Panel(
        "gsa",
        "attention to the first token",
        ("first_token_attention", "first_token_attention_spread", "sequence_start_attention"),
    ),
    Panel("gsa", "attention by the key's position in its document", (), per_entry="sink_by_position"),
    Panel("gsa", "largest |activation|", ("max_activation",)),
    Panel("gsa", "largest attention logit", ("max_attention_logit",)),
    Panel("moe", "load of an expert / mean load", ("expert_load_max", "expert_load_min")),
    Panel("moe", "balance loss: 1 where even", ("router_balance",)),
    Panel("moe", "entropy of the router (nats)", ("router_entropy",)),
    Panel("moe", "z-loss of the router", ("router_z",)),
    Panel("moe", "dropped choices", ("dropped_share",)),
    Panel("moe", "range of the biases", ("expert_bias_range",)),
    Panel("stability", "spikes per 100K steps", ("spikes_per_100k_steps",)),
    Panel("stability", "spikes and skips: total", ("spikes", "skipped_updates")),
    Panel("stability", "SpikeScore", ("spike_score",)),
    Panel("system", "tokens per second", ("tokens_per_second",)),
    Panel("system", "TFLOP/s per device", ("tflops_per_second", "tflops_per_second_dense_equivalent")),
    Panel("system", "MFU", ("mfu", "mfu_dense_equivalent")),
    Panel("system", "device memory (bytes)", ("memory_allocated_bytes", "memory_peak_bytes")),
    Panel(
        "system",
        "seconds per step",
        (
            "step_seconds",
            "forward_backward_seconds",
            "gradient_reduction_seconds",
            "optimizer_seconds",
            "data_wait_seconds",
        ),
    ),
    Panel("system", "slowest rank / median rank", ("slowest_rank_ratio",)),
    Panel("system", "ETTR", ("ettr",)),
    Panel("system", "seconds lost so far", (), per_entry="lost_seconds"),
    Panel("system", "seconds per save", ("checkpoint_stall_seconds", "checkpoint_save_seconds")),
    Panel("system", "checkpoint size (bytes)", ("checkpoint_bytes",)),
    Panel("data", "waiting for data", ("data_wait",)),
    Panel(
        "data",
        "faults of the data: total",
        ("data_skipped_documents", "data_skipped_shards", "data_read_retries"),
    ),
    Panel("data", "tokens by source", (), per_entry="data_tokens_by_source"),
    Panel("data", "packing: share of tokens, documents", ("packing_filler_share", "packing_cut_share")),
)
PICTURES = frozenset(["head_first_token_attention", "expert_loads"])
"""Keys of nested lists, by layer and then by head or expert. They have hundreds of numbers, too many for curves."""


BEST = {
    "loss": "min",
    "validation_loss": "min",
    "validation_perplexity": "min",
    "indexer_kl": "min",
    "recall": "max",
    "validation_recall": "max",
    "overlap_heads": "max",
    "grad_norm": "max",
    "max_activation": "max",
    "tokens_per_second": "max",
    "mfu": "max",
    "ettr": "max",
    "memory_peak_bytes": "max",
    "slowest_rank_ratio": "max",
    "data_wait": "max",
}
"""Whether a table of runs shows a metric's minimum or maximum, in addition to the last value."""

_SECTION_OF = {key: panel.section for panel in PANELS for key in panel.keys} | {
    "lr": "train",
    "tokens": "train",
    "phase_index": "train",
    "slowest_rank": "system",
    "checkpoint_failures": "system",
    "lost_seconds": "system",
    "packing_documents_per_block": "data",
    "data_tokens_by_source": "data",
}


def tag_of(key: str) -> str:
    """Returns the tag of a record's key. If the key's value is a dict, returns the prefix of its entries' tags.
    Metrics without a panel belong to section gsa."""
    if key == "lrs":
        return "lr"
    if key.startswith(("validation_", "eval_")):
        return key.replace("_", "/", 1)
    if key.startswith("layer_"):
        section, _, name = tag_of(key.removeprefix("layer_")).partition("/")
        return f"{section if section == 'moe' else 'gsa'}_layers/{name}"
    return f"{_SECTION_OF.get(key, 'gsa')}/{key}"


def tensorboard_layout() -> dict[str, dict[str, list[object]]]:
    """Returns the panels for TensorBoard's tab "Custom Scalars", which matches prefixes of tags."""
    return {
        title: {
            panel.label: ["Multiline", [f"{tag}$" for tag in panel.tags]]
            for panel in PANELS
            if panel.section == section
        }
        for section, title in SECTIONS.items()
    }
