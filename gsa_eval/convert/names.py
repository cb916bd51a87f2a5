"""Map tensors of a checkpoint to tensors of a Hugging Face folder (`gsa_hf`), with conversions in both directions.

Symbols: n_h query heads, n_kv key-value heads, g = n_h / n_kv, d_k head size, d hidden size, f feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gsa_train.config import Config, GSAConfig, ModelConfig, MoEConfig
from gsa_train.config.gates import ON_HEADS, gate_rows
from gsa_train.config.gsa import SCORES
from gsa_train.config.moe import layers_with_experts

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """A tensor of a checkpoint, and the tensors of a Hugging Face folder that together have the same values."""

    ours: str
    theirs: tuple[str, ...]
    shape: tuple[int, ...]
    """Shape of our tensor."""
    split: Callable[[torch.Tensor], Tensors]
    """Converts our tensor to the folder's tensors."""
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    """Converts the folder's tensors to ours, bit for bit equal to the tensor before `split`."""
    always_fp32: bool = False
    """Kept in fp32 in every model: no `--dtype` rounds it."""

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(part.shape) for part in self.split(torch.empty(self.shape, device="meta"))]


def pairs(config: Config) -> list[Pair]:
    """Returns the pairs of all tensors, in the model's order."""
    model, mixtures = config.model, layers_with_experts(config.moe, config.model.num_layers)
    vocabulary = (model.vocab_size, model.hidden_size)
    found = [_same("embedding.word_embeddings.weight", "model.embed_tokens.weight", *vocabulary)]
    for layer in range(model.num_layers):
        found += _layer(layer, model, config.gsa)
        mlps = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        if layer in mixtures:
            found += _experts(*mlps, model.hidden_size, config.moe)
        else:
            found += _feed_forward(*mlps, model.hidden_size, model.ffn_hidden_size)
    found.append(_same("decoder.final_layernorm.weight", "model.norm.weight", model.hidden_size))
    if not model.tie_embeddings:
        found.append(_same("output_layer.weight", "lm_head.weight", *vocabulary))
    return found


def _layer(layer: int, model: ModelConfig, gsa: GSAConfig) -> list[Pair]:
    ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
    attention, self_attn = f"{ours}.self_attention", f"{theirs}.self_attn"
    d = model.hidden_size
    found = [_same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", d)]
    query_rows = model.num_heads // model.num_kv_heads * model.head_dim
    columns: dict[str, tuple[int, ...]] = {"weight": (d,), "bias": ()}
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        found.append(
            _by_kv_head(
                f"{attention}.linear_qkv.{kind}",
                [f"{self_attn}.{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj")],
                [query_rows, model.head_dim, model.head_dim],
                model.num_kv_heads,
                columns[kind],
            )
        )
    found += _gates(attention, self_attn, model, gsa)
    query = model.num_heads * model.head_dim
    found.append(_same(f"{attention}.linear_proj.weight", f"{self_attn}.o_proj.weight", d, query))
    if model.qk_norm:
        found.append(_same(f"{attention}.q_layernorm.weight", f"{self_attn}.q_norm.weight", model.head_dim))
        found.append(_same(f"{attention}.k_layernorm.weight", f"{self_attn}.k_norm.weight", model.head_dim))
    if gsa.attention == "sparse" and layer % gsa.selection_reuse == 0:
        found += _indexer(f"{attention}.indexer", f"{self_attn}.indexer", d, gsa)
        ema = f"{self_attn}.indexer.variance_ema"
        found.append(Pair(f"{attention}.variance.ema", (ema,), (), _alone, _first, always_fp32=True))
    if model.sandwich_norm:
        found.append(
            _same(f"{ours}.post_attention_layernorm.weight", f"{theirs}.attention_output_norm.weight", d)
        )
        found.append(_same(f"{ours}.post_mlp_layernorm.weight", f"{theirs}.mlp_output_norm.weight", d))
    found.append(_same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", d))
    return found


def _feed_forward(ours: str, theirs: str, d: int, ffn: int) -> list[Pair]:
    return [
        Pair(
            f"{ours}.linear_fc1.weight",
            (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"),
            (2 * ffn, d),
            lambda whole: whole.chunk(2),
            lambda parts: torch.cat(list(parts)),
        ),
        _same(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", d, ffn),
    ]


def _gates(ours: str, theirs: str, model: ModelConfig, gsa: GSAConfig) -> list[Pair]:
    """Returns the pairs of the gates. The checkpoint has one matrix for all gates on heads, with the rows grouped by
    key-value head."""
    d, found = model.hidden_size, []
    rows = gate_rows(gsa, model.num_heads, model.num_kv_heads, model.head_dim, d)
    on_heads = {f"{name}_gate_proj": rows[name] for name in ON_HEADS if rows[name]}
    groups = model.num_kv_heads if gsa.gate_sharing == "head_specific" else 1
    depends = gsa.gate_input == "query_dependent"
    whole = "linear_gate" if depends and gsa.gate_sharing == "head_specific" else "head_gate"
    columns: dict[str, tuple[int, ...]] = {"weight": (d,), "bias": ()} if depends else {"bias": ()}
    for kind, of_row in columns.items():
        if on_heads:
            names = [f"{theirs}.{name}.{kind}" for name in on_heads]
            of_group = [count // groups for count in on_heads.values()]
            found.append(_by_kv_head(f"{ours}.{whole}.{kind}", names, of_group, groups, of_row))
        if gsa.projection_gate:
            name = f"projection_gate_proj.{kind}"
            found.append(_same(f"{ours}.projection_gate.{kind}", f"{theirs}.{name}", d, *of_row))
    if gsa.output_transform == "rms_norm":
        found.append(_same(f"{ours}.output_layernorm.weight", f"{theirs}.o_norm.weight", model.head_dim))
    return found


def _experts(ours: str, theirs: str, d: int, moe: MoEConfig) -> list[Pair]:
    count, width = moe.experts, moe.expert_ffn_hidden_size
    found = [
        _same(f"{ours}.router.weight", f"{theirs}.gate.weight", count, d),
        _same(
            f"{ours}.experts.experts.linear_fc1.weight", f"{theirs}.experts.gate_up_proj", count, 2 * width, d
        ),
        _same(f"{ours}.experts.experts.linear_fc2.weight", f"{theirs}.experts.down_proj", count, d, width),
    ]
    if moe.balancing == "aux_free":
        bias = (f"{theirs}.gate.e_score_correction_bias",)
        found.append(Pair(f"{ours}.router.expert_bias", bias, (count,), _alone, _first, always_fp32=True))
    if moe.balancing == "global_batch":  # loads of the run's last step, which the model does not use
        even = torch.full((count,), 1 / count)
        found.append(Pair(f"{ours}.router.loads", (), (count,), lambda _: (), lambda _: even))
    if moe.shared_expert_ffn_hidden_size:
        shared = f"{ours}.shared_experts", f"{theirs}.shared_experts"
        found += _feed_forward(*shared, d, moe.shared_expert_ffn_hidden_size)
    return found


def _indexer(ours: str, theirs: str, d: int, gsa: GSAConfig) -> list[Pair]:
    heads, size = gsa.indexer_heads, gsa.indexer_dim
    found = [
        _same(f"{ours}.query_weight", f"{theirs}.wq.weight", heads * size, d),
        _same(f"{ours}.key_weight", f"{theirs}.wk.weight", size, d),
    ]
    scores = SCORES[gsa.indexer_activation]
    if scores.learns_head_weights:
        found.append(_same(f"{ours}.head_weight", f"{theirs}.weights_proj.weight", heads, d))
    if scores.has_head_weight_bias:
        found.append(_same(f"{ours}.weight_bias", f"{theirs}.weights_proj.bias", heads))
    if scores.has_score_bias:
        found.append(_same(f"{ours}.score_bias", f"{theirs}.score_bias", heads))
    if gsa.indexer_norm:
        found.append(_same(f"{ours}.query_norm_weight", f"{theirs}.q_norm.weight", size))
        found.append(_same(f"{ours}.key_norm_weight", f"{theirs}.k_norm.weight", size))
    if gsa.indexer_temperature == "learned":
        name = "log_inverse_temperature"
        found.append(_same(f"{ours}.{name}", f"{theirs}.{name}", 1))
    return found


def _same(ours: str, theirs: str, *shape: int) -> Pair:
    return Pair(ours, (theirs,), shape, _alone, _first)


def _alone(whole: torch.Tensor) -> Tensors:
    return (whole,)


def _first(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0]


def _by_kv_head(
    ours: str, theirs: Sequence[str], rows: Sequence[int], kv_heads: int, columns: tuple[int, ...]
) -> Pair:
    """Returns a pair whose checkpoint tensor, [n_kv * sum(rows), ...], groups the rows of the folder's tensors by
    key-value head."""

    def split(whole: torch.Tensor) -> Tensors:
        per_head = whole.unflatten(0, (kv_heads, sum(rows)))
        return tuple(part.flatten(0, 1) for part in per_head.split(list(rows), 1))

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        per_head = [part.unflatten(0, (kv_heads, count)) for part, count in zip(parts, rows, strict=True)]
        return torch.cat(per_head, 1).flatten(0, 1)

    return Pair(ours, tuple(theirs), (kv_heads * sum(rows), *columns), split, join)
