"""List the metrics that are shown together, for the HTML report, TensorBoard and W&B.

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
"""Prefix of the tags -> title."""


@dataclass(frozen=True)
class Panel:
    section: str
    label: str
    """Label of the y axis."""
    lines: dict[str, str]
    """Key of the record -> name in the legend."""
    scale: str = "linear"
    """`linear`, `log`, `count` (from 0, as 12k), `share` (0 to 1), or `percent`."""
    band: tuple[str, str] | None = None
    """Keys of the lower and the upper edge of a shaded band."""
    per_set: str = ""
    """Score that gets a line for each validation set, or for each of its sources."""
    per_entry: str = ""
    """Key of a dict; each of its entries gets a line."""
    overlapping: bool = False
    """Lines often coincide. Each line is drawn thinner than the line below it, so that all are visible."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the keys of numbers, without `per_set` and `per_entry`."""
        return (*self.lines, *(self.band or ()))

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


KEYS = {"causal_keys": "causal", "selected_keys": "selected"}
RECALL = {"recall": "indexer", "validation_recall": "validation", "random_recall": "random choice"}
OVERLAP = {"overlap_heads": "of each head", "overlap_mean": "of the mean of heads"}
GATES = {"value_gate_mean": "value gate", "output_gate_mean": "output gate"}
LOW_GATES = {"value_gate_low": "value gate", "output_gate_low": "output gate"}
HIGH_GATES = {"value_gate_high": "value gate", "output_gate_high": "output gate"}
FIRST_TOKEN = {
    "first_token_attention": "of the document",
    "first_token_attention_spread": "spread over heads",
    "sequence_start_attention": "of the sequence",
}
LOADS = {"expert_load_max": "largest", "expert_load_min": "smallest"}
SKIPPED = {"spikes": "spikes", "skipped_updates": "skipped updates", "rewinds": "rewinds"}
SPEED = {"tflops_per_second": "this model", "tflops_per_second_dense_equivalent": "dense equivalent"}
MFU = {"mfu": "MFU", "mfu_dense_equivalent": "dense equivalent"}
MEMORY = {"memory_allocated_bytes": "allocated", "memory_peak_bytes": "peak"}
STEP_TIME = {
    "step_seconds": "step",
    "forward_backward_seconds": "forward and backward",
    "gradient_reduction_seconds": "gradient reduction",
    "optimizer_seconds": "optimizer",
    "data_wait_seconds": "waiting for data",
}
SAVES = {"checkpoint_stall_seconds": "training waited", "checkpoint_save_seconds": "until durable"}
FAULTS = {
    "data_skipped_documents": "unreadable documents",
    "data_skipped_shards": "unreadable shards",
    "data_read_retries": "reads tried again",
}
PACKING = {"packing_filler_share": "filler", "packing_cut_share": "documents cut"}
PANELS = (
    Panel("train", "loss (nats per token)", {"loss": "train"}, per_set="loss"),
    Panel("train", "loss by source (nats per token)", {}, per_set="loss_by_source"),
    Panel("train", "bits per byte", {}, per_set="bits_per_byte"),
    Panel("train", "learning rate", {}, "log", per_entry="lrs", overlapping=True),
    Panel("train", "z-loss (per token)", {"z_loss": "z-loss"}, "log"),
    Panel("train", "sequences per step", {"global_batch_size": "batch"}),
    Panel("train", "gradient norm", {"grad_norm": "gradient norm"}, "log"),
    Panel("train", "norm of the update", {"update_norm": "update norm"}, "log"),
    Panel("eval", "accuracy", {}, "share", per_entry="eval_accuracy"),
    Panel(
        "eval",
        "accuracy by log-likelihood per character",
        {},
        "share",
        per_entry="eval_length_normalised_accuracy",
    ),
    Panel("eval", "bits per byte of the right answer", {}, per_entry="eval_bits_per_byte"),
    Panel("eval", "share of the run's time", {"eval_time_share": "tasks"}, "percent"),
    Panel("gsa", "indexer loss: KL (nats)", {"indexer_kl": "indexer KL"}),
    Panel("gsa", "recall of attention mass", RECALL, "share"),
    Panel("gsa", "overlap with the query's own top keys", OVERLAP, "share"),
    Panel("gsa", "saturated indexer activations", {"indexer_saturated": "saturated"}, "percent"),
    Panel("gsa", "budget k_t (keys)", {"k_mean": "mean"}, "count", band=("k_min", "k_max")),
    Panel("gsa", "keys per query", KEYS, "log"),
    Panel("gsa", "queries that attend densely", {"dense_query_share": "dense"}, "share"),
    Panel("gsa", "mean k_t by the query's position in its document", {}, "log", per_entry="k_by_position"),
    Panel("gsa", "variance of the scores (average)", {"variance_ema": "variance"}, "log"),
    Panel("gsa", "keys shared with the query before", {"adjacent_overlap": "overlap"}, "share"),
    Panel("gsa", "union of 32 queries / mean k_t", {"union_ratio_32": "union of 32"}),
    Panel("gsa", "union of 32 queries / causal keys", {"union_density": "density"}, "share"),
    Panel("gsa", "mean gate", GATES, "share"),
    Panel("gsa", "gates below 0.1", LOW_GATES, "percent"),
    Panel("gsa", "gates above 0.9", HIGH_GATES, "percent"),
    Panel("gsa", "value gate: share by opening", {}, "percent", per_entry="value_gate_histogram"),
    Panel("gsa", "output gate: share by opening", {}, "percent", per_entry="output_gate_histogram"),
    Panel("gsa", "attention to the first token", FIRST_TOKEN, "percent"),
    Panel(
        "gsa", "attention by the key's position in its document", {}, "percent", per_entry="sink_by_position"
    ),
    Panel("gsa", "largest |activation|", {"max_activation": "maximum"}, "log"),
    Panel("gsa", "largest attention logit", {"max_attention_logit": "maximum"}),
    Panel("moe", "load of an expert / mean load", LOADS, "count"),
    Panel("moe", "balance loss: 1 where even", {"router_balance": "loss"}),
    Panel("moe", "entropy of the router (nats)", {"router_entropy": "entropy"}),
    Panel("moe", "z-loss of the router", {"router_z": "z-loss"}, "log"),
    Panel("moe", "dropped choices", {"dropped_share": "dropped"}, "percent"),
    Panel("moe", "range of the biases", {"expert_bias_range": "range"}),
    Panel("stability", "spikes per 100K steps", {"spikes_per_100k_steps": "rate"}, "count"),
    Panel("stability", "spikes, skips and rewinds: total", SKIPPED, "count"),
    Panel("stability", "SpikeScore", {"spike_score": "SpikeScore"}, "percent"),
    Panel("system", "tokens per second", {"tokens_per_second": "tokens/s"}, "count"),
    Panel("system", "TFLOP/s per device", SPEED, "count"),
    Panel("system", "MFU", MFU, "percent"),
    Panel("system", "device memory (bytes)", MEMORY, "count"),
    Panel("system", "seconds per step", STEP_TIME),
    Panel("system", "slowest rank / median rank", {"slowest_rank_ratio": "slowest rank"}),
    Panel("system", "ETTR", {"ettr": "ETTR"}, "share"),
    Panel("system", "seconds lost so far", {}, per_entry="lost_seconds"),
    Panel("system", "seconds per save", SAVES),
    Panel("system", "checkpoint size (bytes)", {"checkpoint_bytes": "checkpoint"}, "count"),
    Panel("data", "waiting for data", {"data_wait": "share of the time"}, "percent"),
    Panel("data", "faults of the data: total", FAULTS, "count"),
    Panel("data", "tokens by source", {}, "count", per_entry="data_tokens_by_source"),
    Panel("data", "packing: share of tokens, documents", PACKING, "percent"),
)
LAYERS = {"layer_recall": "recall", "layer_indexer_kl": "indexer KL", "layer_k_mean": "mean k_t"}
"""Metrics by layer, drawn as a picture of layer by step."""


@dataclass(frozen=True)
class Picture:
    """Shows a list by layer of lists by head or expert: hundreds of numbers, too many for curves."""

    section: str
    label: str
    columns: str
    """Meaning of the entries of each layer's list."""
    is_share: bool
    """Whether its numbers lie between 0 and 1."""


PICTURES = {
    "head_first_token_attention": Picture(
        "gsa", "attention to the document's first token, newest step", "head", is_share=True
    ),
    "expert_loads": Picture("moe", "load of experts / mean load, newest step", "expert", is_share=False),
}
"""Key of the record -> picture of its newest value."""


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
"""What a table of runs shows in addition to the last value."""

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
    """Returns the tag of a record's key. For a dict, returns the prefix of its entries' tags. Metrics without a panel
    belong to section gsa."""
    if key == "lrs":
        return "lr"
    if key.startswith("validation_"):
        return key.replace("validation_", "validation/", 1)
    if key.startswith("eval_"):
        return key.replace("eval_", "eval/", 1)
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
