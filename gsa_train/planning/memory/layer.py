"""Estimate the memory that one layer keeps of a micro-batch from forward to backward pass, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

from gsa_train.config import Config, PhaseConfig
from gsa_train.config.gates import has_paper_form
from gsa_train.planning.memory.experts import kept_by_mixture
from gsa_train.planning.memory.selection import selection_bytes
from gsa_train.planning.memory.sizes import Sizes, fuses_heads, uses_indexer, uses_kernels

Tensors = dict[str, float]
"""Maps name and shape of a tensor to its bytes."""


@dataclass(frozen=True)
class Layer:
    """Holds the bytes of one micro-batch, for all B sequences on this rank."""

    attention: float
    """Attention outside its core, including the core's inputs."""
    core: float
    """Attention after its projections; recomputed with recompute=selective."""
    feed_forward: float
    """The feed-forward layer with its input norm."""
    indexer: float
    """0 if the phase runs no indexer."""
    selection: float
    """0 if the phase runs no selection."""


def layer_of(config: Config, phase: PhaseConfig, sizes: Sizes, mixture: bool) -> Layer:
    """Returns the bytes of a layer, which owns an indexer if the config has any."""
    indexes = uses_indexer(config, phase)
    core = _core(config, sizes)
    selection = 0.0
    if indexes and uses_kernels(config):
        selection = selection_bytes(config, phase, sizes)
    elif indexes:
        selection = sizes.pairs  # bool [B, L, Lw]
        activations = "activations, I, target and log softmax(I), fp32 [B, H_I + 3, L, Lw]"
        core[activations] = 4 * sizes.pairs * (config.gsa.indexer_heads + 3)
    return Layer(
        attention=sum(_attention(config, sizes).values()),
        core=sum(core.values()),
        feed_forward=sum(_feed_forward(config, sizes, mixture).values()),
        indexer=sum(_indexer(config, phase, sizes).values()) if indexes else 0.0,
        selection=selection,
    )


def _attention(config: Config, sizes: Sizes) -> Tensors:
    gsa, rms = config.gsa, 4 * sizes.tokens / sizes.shards
    # Under context parallelism the attention core keeps K and V of the whole sequence, or gathers them again if it is
    # recomputed. The fused G2 keeps the gated V in any case, and K shares its memory (fused/split_rotate_gate/op.py).
    reads_own = config.parallel.context == 1 or config.train.recompute == "selective"
    keeps_both = reads_own or (gsa.value_gate and fuses_heads(config))
    kept = {
        "layer's input [L / shards, B, d]": sizes.stream,
        "1 / rms, fp32 [L / shards, B]": rms,
        "gates' logits [L, B, columns of the gates of heads]": sizes.bytes(sizes.gates),
        "Q, rotated [L, B, q]": sizes.bytes(sizes.query),
        "K, rotated, and gated V, 2 x [L, B, kv]": sizes.bytes(2 * keeps_both * sizes.key_value),
        "input of linear_proj [L, B, q]": sizes.bytes(sizes.query),
    }
    # The gates' projection gathers the input of all projections, and keeps the gathered input instead.
    if sizes.shards > 1 and sizes.gates_gather:
        kept["normed input, gathered [L, B, d]"] = sizes.gathered
    else:
        kept["normed input [L / shards, B, d]"] = sizes.stream
    if sizes.fp8:  # Attention and the layers below keep the inputs in bf16, too.
        gathers = sizes.shards > 1 and sizes.gates_gather
        copies = sizes.tokens * sizes.hidden / (1 if gathers else sizes.shards)
        if not (sizes.gates or sizes.projection_gate or gsa.attention == "sparse"):
            del kept["normed input [L / shards, B, d]"]
        kept["inputs of linear_qkv and linear_proj in FP8"] = copies + sizes.tokens * sizes.query
        kept["their weights in FP8 [d, 2 q + 2 kv]"] = 2 * sizes.hidden * (sizes.query + sizes.key_value)
    kept |= _gate_variants(config, sizes)
    if config.model.sandwich_norm:
        kept["attention's result, normed, and 1 / rms, fp32 [L / shards, B]"] = sizes.stream + rms
    if fuses_heads(config):
        return kept
    if gsa.value_gate:
        kept["V and sigmoid of G2, fp32, 2 x [L, B, kv]"] = 2 * 4 * sizes.tokens * sizes.key_value
    if config.model.qk_norm:  # Norms keep their inputs: a copy of Q, and K in the projection's output.
        heads = sizes.heads * (1 + sizes.key_value / sizes.query)
        kept["Q before its norm [L, B, q]"] = sizes.bytes(sizes.query)
        kept["1 / rms of heads, fp32 [L, B, n_h + n_kv]"] = 4 * sizes.tokens * heads
    v_is_view = reads_own and not gsa.value_gate  # V is then a view of QKV, counted above.
    if config.model.qk_norm or v_is_view:
        kept["QKV [L, B, q + 2 kv]"] = sizes.bytes(sizes.query + (2 - v_is_view) * sizes.key_value)
    local_tokens = sizes.tokens // config.train.micro_batch_size
    turned = config.model.rotary_channels
    kept["cos and sin for Q and K, 4 x [L, turned channels of d_k]"] = sizes.value * 4 * local_tokens * turned
    return kept


def _gate_variants(config: Config, sizes: Sizes) -> Tensors:
    """Returns what gates in plain torch keep: their input and the gate in fp32, and attention's output if G1 (output
    gate) does not have the paper's form. Other functions count gates of the paper's form."""
    gsa = config.gsa
    gated = {"K of G3": gsa.key_gate * sizes.key_value, "Q of G4": gsa.query_gate * sizes.query}
    if gsa.output_gate and not has_paper_form(gsa):
        gated["output of G1"] = sizes.query
    kept = {
        f"{name} and its gate, fp32, 2 x [L, B, columns]": 2 * 4 * sizes.tokens * columns
        for name, columns in gated.items()
        if columns
    }
    if "output of G1" in gated or gsa.output_transform != "none":
        kept["output before G1, or what has its place [L, B, q]"] = sizes.bytes(sizes.query)
    if gsa.projection_gate:
        share = sizes.tokens * sizes.projection_gate / sizes.shards
        kept["result, logits of G5 and both in fp32 [L / shards, B, d]"] = (2 * sizes.value + 2 * 4) * share
    return kept


def _core(config: Config, sizes: Sizes) -> Tensors:
    kept = {}
    if uses_kernels(config):
        kept["log-sum-exp, fp32 [B, n_h, L]"] = 4 * sizes.tokens * sizes.heads
    else:
        kept["Q, K, V, fp32 [B, L, q + 2 kv]"] = 4 * sizes.tokens * (sizes.query + 2 * sizes.key_value)
        kept["softmax and its masked copy, fp32, 2 x [B, n_h, L, Lw]"] = 2 * 4 * sizes.heads * sizes.pairs
        kept["visible, bool [B, L, Lw]"] = sizes.pairs
        if config.gsa.output_gate and has_paper_form(config.gsa):
            kept["output before G1 [B, L, q]"] = sizes.bytes(sizes.query)
            kept["the same and sigmoid of G1, fp32, 2 x [B, L, q]"] = 2 * 4 * sizes.tokens * sizes.query
    if config.parallel.context > 1:
        both = sizes.value * 2 * sizes.key_value * sizes.all_tokens
        kept["K and V of the whole sequence, 2 x [B, Lw, kv]"] = both
        kept["outputs of the chunks before they are joined [B, L, q]"] = sizes.bytes(sizes.query)
    return kept


def _feed_forward(config: Config, sizes: Sizes, mixture: bool) -> Tensors:
    rms = 4 * sizes.tokens / sizes.shards
    kept = {
        "stream after attention [L / shards, B, d]": sizes.stream,
        "1 / rms, fp32 [L / shards, B]": rms,
        **(kept_by_mixture(config, sizes) if mixture else _kept_by_dense(config, sizes)),
    }
    if config.model.sandwich_norm:
        kept["its result, normed, and 1 / rms, fp32 [L / shards, B]"] = sizes.stream + rms
    return kept


def _kept_by_dense(config: Config, sizes: Sizes) -> Tensors:
    kept = {
        "normed input [L / shards, B, d]": sizes.linear_input(sizes.hidden) / sizes.shards,
        "both halves of SwiGLU's input [L, B, 2 f]": sizes.bytes(2 * sizes.ffn),
        "SwiGLU's output [L, B, f]": sizes.linear_input(sizes.ffn),
    }
    if sizes.fp8:
        kept["weights in FP8 [d, 3 f]"] = 3 * sizes.hidden * sizes.ffn
    if config.train.fused_ops == "none":
        kept["SiLU and the other factor, 2 x [L, B, f]"] = sizes.bytes(2 * sizes.ffn)
    return kept


def _indexer(config: Config, phase: PhaseConfig, sizes: Sizes) -> Tensors:
    """Returns what an indexer keeps: gradients of queries, weights and keys, computed by the loss in the forward pass.
    Selective recomputation also keeps the projections, of equal size, and keys of the whole sequence. All are
    replicated over tensor-parallel ranks."""
    gsa, train = config.gsa, config.train
    recomputes = train.recompute == "selective"
    if phase.train == "base" and not recomputes:
        return {}
    keys = train.micro_batch_size * (train.seq_len_tokens if recomputes else sizes.keys_of_chunks)
    of_heads = gsa.indexer_heads * (gsa.indexer_dim + 1)
    kept = {
        "of queries and weights [B, L, H_I (d_I + 1)]": sizes.bytes(of_heads),
        "of keys, each chunk's [B, keys, d_I]": sizes.value * keys * gsa.indexer_dim,
    }
    if gsa.indexer_norm and phase.train != "base":
        normed = (gsa.indexer_heads + 1) * gsa.indexer_dim
        if train.fused_ops == "none":
            of_rms = 4 * sizes.tokens * (gsa.indexer_heads + 1)
            kept["queries and keys before their norms, fp32 [L, B, (H_I + 1) d_I]"] = of_rms * gsa.indexer_dim
            kept["1 / rms of them, fp32 [L, B, H_I + 1]"] = of_rms
        else:
            together = sizes.bytes(normed + gsa.indexer_heads)
            kept["projections before their norms [L, B, (H_I + 1) d_I + H_I]"] = together
    if sizes.shards > 1 and not sizes.gates_gather:
        kept["its input, gathered [L, B, d]"] = sizes.gathered
    return kept
