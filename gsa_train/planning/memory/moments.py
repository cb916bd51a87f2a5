"""List moments (points in time) at which a step's memory may peak, with each moment's bytes beyond kept activations.

estimate.py adds a moment's bytes to the activations that a stage's layers keep for micro-batches in flight. Activations
that are freed already, or not made yet, are subtracted from the moment's bytes.

estimate.py only considers a stage's last dense layer and last mixture of experts, because fewer activations exist while
earlier layers run. Projections, norms and sums are left out, because no memory trace peaked there.
"""

from __future__ import annotations

from gsa_train.config import Config, PhaseConfig
from gsa_train.planning.memory.experts import mixture_moments, mixture_without_graph
from gsa_train.planning.memory.layer import Layer
from gsa_train.planning.memory.selection import (
    attending_bytes,
    key_gradients,
    learning_bytes,
    selecting_bytes,
)
from gsa_train.planning.memory.sizes import Sizes, fuses_heads, has_graph, uses_indexer, uses_kernels


def layer_moments(
    config: Config, phase: PhaseConfig, sizes: Sizes, layer: Layer, mixture: bool
) -> dict[str, float]:
    """Returns a dict moment -> bytes, for the moments at which a layer runs."""
    if not has_graph(config, phase):
        return _without_graph(config, phase, sizes, layer, mixture)
    moments = mixture_moments(config, sizes) if mixture else _feed_forward_backward(config, sizes)
    before = {"attention's backward": _attention_backward(config, phase, sizes, layer)}
    if uses_kernels(config) and uses_indexer(config, phase):
        before["selection"] = _selecting(config, phase, sizes) - layer.core - layer.indexer
        before["indexer loss"] = _learning(config, phase, sizes)
    moments |= {name: size - layer.feed_forward for name, size in before.items()}
    recomputed = _recomputed(config, sizes, layer)
    return {name: size + recomputed for name, size in moments.items()}


def _feed_forward_backward(config: Config, sizes: Sizes) -> dict[str, float]:
    stream, ffn, hidden = sizes.stream, sizes.bytes(sizes.ffn), sizes.bytes(sizes.hidden)
    # If the product itself adds a weight's gradient to its buffer, autograd still gets a placeholder of the same size.
    weight = sizes.value * sizes.ffn * sizes.hidden
    output = sizes.linear_input(sizes.ffn)
    kept_by_swiglu = (4 if config.train.fused_ops == "none" else 2) * ffn + output
    if sizes.fp8:  # Gradient of the output and its transpose, and the weight's gradient in fp32.
        weight += 4 * sizes.ffn * sizes.hidden
        in_fp8 = {"W_2": 2 * sizes.tokens * sizes.hidden, "W_1": 2 * sizes.tokens * 2 * sizes.ffn}
        in_fp8["W_1"] += sizes.gathered / sizes.value  # the gathered input
    else:
        in_fp8 = {"W_2": 0.0, "W_1": 0.0}
    part = stream if sizes.shards > 1 else 0.0
    return {
        # Gradients of the layer's output [L / shards, B, d], of the gathered output [L, B, d], of SwiGLU's output [L,
        # B, f] and of W_2 [d, f].
        "W_2's backward": stream + sizes.gathered + ffn + weight + in_fp8["W_2"],
        # Gradients of the layer's output, of SwiGLU's output and of its input [L, B, 2 f]. SwiGLU's output itself is
        # freed.
        "SwiGLU's backward": stream + ffn + 2 * ffn - output,
        # Gradients of the layer's output, of SwiGLU's input, of the normed input [L, B, d] and its shard [L / shards,
        # B, d], and of W_1 [2 f, d]. All that SwiGLU kept is freed.
        "W_1's backward": stream + 2 * ffn + hidden + part + 2 * weight + in_fp8["W_1"] - kept_by_swiglu,
    }


def _selecting(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the bytes of scores and a selection in the forward pass, less linear_proj's input [L, B, q], which does
    not exist yet."""
    return _indexed(config, sizes) + selecting_bytes(config, phase, sizes) - sizes.bytes(sizes.query)


def _learning(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the bytes of the indexer loss and its gradients in the forward pass."""
    return _indexed(config, sizes) + learning_bytes(config, phase, sizes)


def _indexed(config: Config, sizes: Sizes) -> float:
    """Returns the bytes of the indexer's queries and weights [B, L, H_I (d_I + 1)] and keys [B, Lw, d_I], and of the
    normed input [L / shards, B, d] if the gates' projection keeps only the gathered input."""
    gsa = config.gsa
    queries = sizes.bytes(gsa.indexer_heads * (gsa.indexer_dim + 1))
    keys = sizes.value * sizes.all_tokens * gsa.indexer_dim
    return queries + keys + (sizes.stream if sizes.shards > 1 and sizes.gates_gather else 0.0)


def _attention_backward(config: Config, phase: PhaseConfig, sizes: Sizes, layer: Layer) -> float:
    """Returns the bytes of attention's backward pass, from the gradient of linear_proj's input to the gradients of Q,
    K, V and the gates' logits."""
    gsa = config.gsa
    output = sizes.bytes(sizes.query)  # gradient of the gated output [B, L, q]
    attended = output if gsa.output_gate else 0.0  # gradient of the output before G1
    logits = 0.0
    if gsa.output_gate:  # If one projection computes both gates, G2's logits are included.
        logits = sizes.bytes(sizes.gates if fuses_heads(config) else sizes.query)
    queries = output  # gradient of Q [B, L, q]
    keys = key_gradients(sizes)
    if not uses_kernels(config):
        keys += layer.core  # gradients of the [L, L] tensors
    elif phase.attention == "sparse":
        keys = attending_bytes(config, phase, sizes)
        # delta and log-sum-exp, fp32 [B, n_h, L].
        queries += 2 * 4 * sizes.tokens * sizes.heads / sizes.query_chunks
    return sizes.stream + output + attended + logits + queries + keys


def _recomputed(config: Config, sizes: Sizes, layer: Layer) -> float:
    """Returns the bytes that are recomputed and kept until the end of their backward pass."""
    recompute = config.train.recompute
    if recompute == "selective":
        return layer.core
    if recompute == "none":
        return 0.0
    one = layer.attention + layer.core + layer.feed_forward + layer.indexer + layer.selection
    # The unit's input is kept already, and its output [L / shards, B, d] is recomputed.
    return config.train.recompute_num_layers * one


def _without_graph(
    config: Config, phase: PhaseConfig, sizes: Sizes, layer: Layer, mixture: bool
) -> dict[str, float]:
    """Returns the moments of an indexer warm-up, which keeps nothing. A layer part's tensors exist while the part
    runs."""
    stage_input = sizes.stream  # held by the schedule
    made = stage_input + layer.attention + layer.selection
    ffn = sizes.bytes(sizes.ffn)
    # These are the stream and normed input [L / shards, B, d]. The selection stays until the next layer's selection.
    normed = stage_input + 2 * sizes.stream + layer.selection
    if mixture:
        moments = {name: normed + size for name, size in mixture_without_graph(config, sizes).items()}
    else:
        moments = {"W_1": normed + sizes.gathered + 2 * ffn, "SwiGLU": normed + 2 * ffn + ffn}
    if not uses_kernels(config):
        return moments | {"attention": made + 2 * layer.core + layer.indexer}
    return moments | {
        "selection": made + _selecting(config, phase, sizes),
        "indexer loss": made + layer.core + layer.indexer + _learning(config, phase, sizes),
    }


def embedding_bytes(config: Config, sizes: Sizes) -> float:
    """Returns the bytes in use at the end of a micro-batch's backward pass, when no activation is left:
    - the gradient of the embedding's weight, [V / tp, d];
    - the gradient of its output: sharded [L / shards, B, d], gathered [L, B, d] and transposed [B, L, d].
    """
    vocabulary = config.model.vocab_size / config.parallel.tensor
    return sizes.value * vocabulary * sizes.hidden + sizes.stream + sizes.gathered + sizes.bytes(sizes.hidden)


def loss_bytes(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the bytes from the last norm to the loss and back."""
    vocabulary = config.model.vocab_size / config.parallel.tensor
    logits = sizes.tokens * vocabulary  # [L, B, V / tp]
    normed = 2 * sizes.stream  # the last layer's output and the normed one
    if not has_graph(config, phase):
        normed += sizes.gathered
    # Gradients of the output layer's input [L, B, d] and its shard [L / shards, B, d], and of its weight [V / tp, d].
    backward = 0.0
    if has_graph(config, phase):
        backward = sizes.bytes(sizes.hidden) + (sizes.stream if sizes.shards > 1 else 0.0)
        backward += sizes.value * vocabulary * sizes.hidden
    # The fused loss overwrites the logits with their gradient. megatron-core's loss also holds their softmax in fp32
    # until the gradient exists.
    softmax = 4 * logits if config.train.fused_ops == "none" else 0.0
    if config.train.z_loss_coeff > 0 and (softmax > 0 or config.train.objective != "cross_entropy"):
        softmax += 8 * logits  # exp(logits - maximum) and its gradient, in fp32
    return normed + sizes.value * logits + max(softmax, backward)
