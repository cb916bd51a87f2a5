"""Record the attention of a model on one text, from a forward pass in plain torch.

Letters in shapes: L tokens, H query heads, D head size, Hkv key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gsa_hf import GSAConfig, GSAForCausalLM
from gsa_hf.gates_gsa import opening
from gsa_train.model.probes.measured_queries import LEAST_KEYS

BOUNDED = ("sigmoid", "ns_sigmoid")
"""Values of `gsa.gate_activation` with outputs from 0 to 1. Other gates are unbounded, and not recorded."""
GATE_BINS = 20
"""Number of equal bins from 0 to 1."""


@dataclass(frozen=True)
class HeadMaps:
    """Holds maps of one head of one layer. A map is [L, L] on the CPU, with a row for each query. The entry of a key
    after the query is 0 or False."""

    weights: torch.Tensor
    """fp32: the head's attention weights."""
    full: torch.Tensor
    """fp32: the head's softmax over all causal keys. It equals `weights` in a dense layer."""
    scores: torch.Tensor | None = None
    """fp32: scores of the indexer that selects for the layer; None for a dense layer."""
    selected: torch.Tensor | None = None
    """bool"""
    indexer_layer: int | None = None
    """Layer of that indexer, which is an earlier layer with `gsa.selection_reuse`."""

    @property
    def recall(self) -> float | None:
        """Returns the share of `full` on the selected keys, as a mean over queries that omit keys, or None if no query
        does."""
        if self.selected is None:
            return None
        leaves_out = self.selected.sum(-1) < torch.arange(1, len(self.selected) + 1)
        of_queries = (self.full * self.selected).sum(-1)[leaves_out]
        return float(of_queries.mean()) if len(of_queries) else None


@dataclass(frozen=True)
class Gate:
    means: list[float]
    """Mean opening of each head over its channels and all tokens; one value if all heads share the gate."""
    histogram: list[int]
    """Number of openings, for each channel and token, in each of `GATE_BINS`."""


@dataclass
class AttentionRecord:
    least_keys: int
    """Queries with fewer causal keys do not count in `sink`."""
    maps: HeadMaps | None = None
    sink: list[list[float]] = field(default_factory=list)
    """[layers][H]: attention on the first token, mean over the counted queries."""
    keys: list[list[int] | None] = field(default_factory=list)
    """[layers][L]: number of keys that each query attends to; None for a dense layer, which attends to all."""
    output_gates: list[Gate] = field(default_factory=list)
    """G1 of each layer; empty if the model has no G1, or an unbounded one."""
    value_gates: list[Gate] = field(default_factory=list)
    """G2 of each layer, by key-value heads."""


@torch.no_grad()
def record_attention(model: GSAForCausalLM, tokens: list[int], layer: int, head: int) -> AttentionRecord:
    """Run the model once and record its attention.

    Args:
        model: with `attn_implementation` "eager", the only one that returns its probabilities.
        tokens: token ids of one document.
        layer, head: place of the maps, from 0.

    Raises:
        ValueError: the layer or head does not exist.
    """
    check_place(model, layer, head)
    assert model.config._attn_implementation == "eager"
    recorder = _Recorder(model, len(tokens), layer, head)
    hooks = [
        each.self_attn.register_forward_hook(recorder.of_layer(number), with_kwargs=True)
        for number, each in enumerate(model.model.layers)
    ]
    try:
        model.model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.record


def check_place(model: GSAForCausalLM, layer: int, head: int) -> None:
    for name, number, count in (
        ("layer", layer, model.config.num_hidden_layers),
        ("head", head, model.config.num_attention_heads),
    ):
        if not 0 <= number < count:
            raise ValueError(f"--{name} {number}: the model has {count}; give one from 0 to {count - 1}")


class _Recorder:
    """Reads an attention layer's inputs and outputs by hooks."""

    def __init__(self, model: GSAForCausalLM, count: int, layer: int, head: int) -> None:
        self.layer, self.head = layer, head
        self.leader = model.config.indexer_layer(layer)
        self.scores: torch.Tensor | None = None
        # As in training. A shorter text has no such query, and its second half counts instead.
        self.record = AttentionRecord(LEAST_KEYS if count >= LEAST_KEYS else max(1, count // 2))

    def of_layer(self, number: int) -> Callable[..., None]:
        def read(
            attention: Any, inputs: tuple[Any, ...], given: dict[str, Any], returned: tuple[Any, ...]
        ) -> None:
            hidden = inputs[0]
            weights, selection = returned[1][0], returned[2]
            counted = weights[:, self.record.least_keys - 1 :, 0]
            self.record.sink.append(counted.float().mean(-1).tolist())
            self.record.keys.append(selection[0].sum(-1).tolist() if attention.is_sparse else None)
            for projection, gates in (
                (attention.output_gate_proj, self.record.output_gates),
                (attention.value_gate_proj, self.record.value_gates),
            ):
                if projection is not None and attention.config.gate_activation in BOUNDED:
                    gates.append(gate_of(projection(hidden)[0], attention.config))
            visible = given["attention_mask"][0, 0]
            if number == self.leader:
                self.scores = torch.where(visible, indexer_scores(attention, hidden, given)[0], 0).cpu()
            if number == self.layer:
                self.record.maps = HeadMaps(
                    weights[self.head].float().cpu(),
                    full_attention(attention, hidden, given, visible, self.head).cpu(),
                    self.scores,
                    selection[0].cpu() if attention.is_sparse else None,
                    self.leader,
                )

        return read


def indexer_scores(attention: Any, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Returns the layer's scores: fp32 [1, L, L].

    Args:
        attention: a layer with an indexer.
        hidden: [1, L, d], the layer's input.
        given: the other arguments of the layer.
    """
    indexer = attention.indexer
    scores: torch.Tensor = indexer.scores(indexer(hidden, given["indexer_embeddings"]))
    return scores


def full_attention(
    attention: Any, hidden: torch.Tensor, given: dict[str, Any], visible: torch.Tensor, head: int
) -> torch.Tensor:
    """Returns the softmax of one head over all causal keys: fp32 [L, L]. Arguments as in `indexer_scores`."""
    shape = (*hidden.shape[:2], -1, attention.head_dim)
    q, k, _ = attention.project(hidden, given["position_embeddings"], shape)
    logits = q[0, head].float() @ k[0, head // attention.num_key_value_groups].float().T * attention.scaling
    return logits.masked_fill(~visible, float("-inf")).softmax(-1)


def gate_of(logits: torch.Tensor, config: GSAConfig) -> Gate:
    """
    Args:
        logits: [L, rows]: one row for each head and channel, or fewer if heads or channels share a gate.
    """
    opened = opening(logits, config)
    channels = 1 if config.gate_granularity == "headwise" else config.head_dim
    means = opened.unflatten(-1, (-1, channels)).mean((0, 2)).tolist()
    return Gate(means, torch.histc(opened, GATE_BINS, 0, 1).long().tolist())
