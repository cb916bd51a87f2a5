"""Estimate the memory of a mixture of experts with even loads: what it keeps for the backward pass, and what it uses
temporarily.

Symbols in shapes, in addition to the symbols of sizes.py:
- T: tokens that a rank routes, B L / shards. Each token goes to k of E experts.
- c: ranks that split the width of an expert.
- N: rows that a rank sends, T k c.
- R: rows that the experts of a rank receive.
- w: width of an expert on a rank.
"""

from __future__ import annotations

from gsa_train.config import Config
from gsa_train.planning.memory.sizes import Sizes


def routed_rows(config: Config, sizes: Sizes) -> float:
    """Returns R, the rows that a rank's experts receive, if all experts are chosen equally often. R then equals N, the
    rows that the rank sends."""
    return sizes.tokens / sizes.shards * config.moe.top_k * config.parallel.expert_tensor


def most_rows(config: Config, sizes: Sizes) -> float:
    """Returns R, the rows that this rank's experts receive, in the worst case: all tokens of all ranks that share the
    experts choose them. Each token then brings k rows, or fewer if this rank has fewer experts or less capacity."""
    moe, parallel = config.moe, config.parallel
    own = moe.experts // parallel.expert
    choices = routed_rows(config, sizes) * parallel.expert
    most = choices * min(moe.top_k, own) / moe.top_k
    if moe.capacity_factor > 0:
        most = min(most, moe.capacity_factor * choices / parallel.expert)
    return most


def sends(config: Config) -> bool:
    return config.parallel.expert * config.parallel.expert_tensor > 1


def kept_by_mixture(config: Config, sizes: Sizes) -> dict[str, float]:
    """Returns a dict from name and shape to bytes, for tensors that the layer keeps, without its input norm."""
    moe, tokens, rows = config.moe, sizes.tokens / sizes.shards, routed_rows(config, sizes)
    reads_stream, copies = sizes.value == 4 or moe.shared_expert_ffn_hidden_size > 0, sizes.value == 2
    return {
        "router's input, fp32 [T, d]": copies * 4 * tokens * sizes.hidden,
        "normed input [T, d]": reads_stream * sizes.stream,
        "router's weight, fp32 [E, d]": copies * 4 * moe.experts * sizes.hidden,
        "logits and scores, fp32, 2 x [T, E]": 4 * (1 + (moe.z_loss_coeff > 0)) * tokens * moe.experts,
        "chosen experts, int64, and their scores, fp32 [T, k]": (8 + 4) * tokens * moe.top_k,
        "rows of a choice and tokens of a row, int64, 2 x [N]": 2 * 8 * rows,
        "order by expert and by rank, int64, 2 x [R]": sends(config) * 2 * 8 * rows,
        **kept_by_experts(config, sizes, rows),
        **_kept_by_shared(config, sizes),
    }


def kept_by_experts(config: Config, sizes: Sizes, rows: float) -> dict[str, float]:
    width = config.moe.expert_ffn_hidden_size / config.parallel.expert_tensor
    plain = config.train.fused_ops == "none"
    return {
        "rows of the experts [R, d]": sizes.value * rows * sizes.hidden,
        "both halves of SwiGLU's input [R, 2 w]": sizes.value * rows * 2 * width,
        "SwiGLU's output, weighted [R, w]": sizes.value * rows * width,
        "weights of the outputs, fp32 [R]": 4 * rows,
        "SiLU, and SwiGLU's output without weights, 2 x [R, w]": plain * sizes.value * rows * 2 * width,
    }


def _kept_by_shared(config: Config, sizes: Sizes) -> dict[str, float]:
    width = config.moe.shared_expert_ffn_hidden_size / config.parallel.tensor
    halves = 2 if config.train.fused_ops == "none" else 0
    return {"shared expert's SwiGLU, as of a dense layer [L, B, 3 f]": sizes.bytes((3 + halves) * width)}


def mixture_moments(config: Config, sizes: Sizes) -> dict[str, float]:
    """Returns a dict from moments to bytes in addition to what the layer keeps."""
    rows = routed_rows(config, sizes)
    width = config.moe.expert_ffn_hidden_size / config.parallel.expert_tensor
    of_rows, inner = sizes.value * rows * sizes.hidden, sizes.value * rows * width
    # One of the three matrices of the experts on this rank.
    weight = sizes.value * config.moe.experts / config.parallel.expert * width * sizes.hidden
    stream = sizes.stream
    plain = config.train.fused_ops == "none"
    shared = sum(_kept_by_shared(config, sizes).values())
    return {
        # Forward: the output of W_2 [R, d], the same rows after their return [N, d] and in the order of the tokens [N,
        # d], and their sum for each token [T, d]. The shared expert has not run.
        "outputs come home": stream + (3 if sends(config) else 2) * of_rows - shared,
        # Gradients of the layer's output [T, d], and of the rows [R, d] as received and sorted by expert.
        "rows' gradients arrive": stream + (2 if sends(config) else 1) * of_rows,
        # Gradients of the rows, of the weighted activations [R, w] and of W_2 [experts, d, w].
        "experts' W_2's backward": stream + of_rows + inner + weight,
        # Plain torch: three fp32 tensors [R, w], the gradient of the weighted activations and its products with weights
        # and with activations. W_2's input gives its memory to the first product in the working precision. Fused:
        # gradients of SwiGLU's input [R, 2 w] and of the weighted activations.
        "weighting's backward": stream + (3 * 4 * rows * width if plain else 2 * inner),
        # Gradients of SwiGLU's input [R, 2 w], of the rows [R, d] and of W_1 [experts, 2 w, d]. All that SwiGLU kept
        # is freed.
        "experts' W_1's backward": stream + 2 * inner + of_rows + 2 * weight - (5 if plain else 3) * inner,
    }


def mixture_without_graph(config: Config, sizes: Sizes) -> dict[str, float]:
    """Returns a dict from moments to bytes, for a forward pass that keeps nothing."""
    rows = routed_rows(config, sizes)
    width = config.moe.expert_ffn_hidden_size / config.parallel.expert_tensor
    of_rows, inner = sizes.value * rows * sizes.hidden, sizes.value * rows * width
    plain = config.train.fused_ops == "none"
    return {
        "experts' W_1": of_rows + 2 * inner,
        "weighting": of_rows + 3 * inner + (4 * rows * width if plain else 0),
        # in addition to the rows themselves, as in `mixture_moments`
        "outputs come home": sizes.stream + (4 if sends(config) else 3) * of_rows,
    }


def worst_load_bytes(config: Config, sizes: Sizes, layers: float) -> float:
    """Returns the bytes that a rank needs, in addition to even loads, if all tokens go to its experts: the kept rows of
    `layers` layers, and one layer's outputs, both sorted by expert and sorted by rank, 2 x [R, d]."""
    more = most_rows(config, sizes) - routed_rows(config, sizes)
    kept = sum(kept_by_experts(config, sizes, more).values())
    return layers * kept + 2 * sizes.value * more * sizes.hidden
