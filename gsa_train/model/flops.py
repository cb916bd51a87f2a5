"""Count a model's parameters and floating-point operations from its shapes.

Symbols: d hidden size, n_h query heads, n_kv key-value heads, d_k head size, H_I indexer heads, d_I indexer size, L
sequence length, E experts per layer, k experts per token. A multiply-add counts as 2 operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gsa_kernels.limits import STRETCH_ROWS
from gsa_train.config import GSAConfig, ModelConfig, MoEConfig, PhaseConfig
from gsa_train.config.gates import gate_rows
from gsa_train.config.gsa import SCORES
from gsa_train.config.moe import layers_with_experts


@dataclass(frozen=True)
class ParameterCount:
    embedding: int
    attention: int
    """W_Q, W_K, W_V and W_O, and the QKV biases if any."""
    gates: int
    indexer: int
    mlp: int
    """Dense feed-forward layers."""
    router: int
    """Routers of MoE layers."""
    experts: int
    """All routed experts."""
    shared_experts: int
    norms: int
    output: int
    """0 when the output layer shares the embedding."""
    idle: int
    """Routed experts that a token does not use. The total does not include them."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values()) - self.idle

    @property
    def active(self) -> int:
        """Parameters that one token uses, including the embedding."""
        return self.total - self.idle

    @property
    def overhead(self) -> int:
        return self.gates + self.indexer

    @property
    def overhead_percent(self) -> float:
        """GSA's parameters, as a percentage of the same model without GSA."""
        return 100.0 * self.overhead / (self.total - self.overhead)


def count_parameters(model: ModelConfig, gsa: GSAConfig, moe: MoEConfig) -> ParameterCount:
    d, layers = model.hidden_size, model.num_layers
    mixtures = len(layers_with_experts(moe, layers))
    expert = 3 * d * moe.expert_ffn_hidden_size
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    vocabulary = model.vocab_size * d
    norms = (4 if model.sandwich_norm else 2) * d + model.qk_norm * 2 * model.head_dim
    norms += (gsa.output_transform == "rms_norm") * model.head_dim
    return ParameterCount(
        embedding=vocabulary,
        attention=layers * ((d + model.qkv_bias) * (query + 2 * key_value) + query * d),
        gates=layers * (_gate_weights(model, gsa) + _gates_per_token(model, gsa)),
        indexer=indexer_layers(model, gsa) * parameters_per_indexer(model, gsa),
        mlp=(layers - mixtures) * 3 * d * model.ffn_hidden_size,
        router=mixtures * d * moe.experts,
        experts=mixtures * moe.experts * expert,
        shared_experts=mixtures * 3 * d * moe.shared_expert_ffn_hidden_size,
        norms=layers * norms + d,
        output=0 if model.tie_embeddings else vocabulary,
        idle=mixtures * (moe.experts - moe.top_k) * expert,
    )


def _gates_per_token(model: ModelConfig, gsa: GSAConfig) -> int:
    sizes = model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size
    return sum(gate_rows(gsa, *sizes).values())


def _gate_weights(model: ModelConfig, gsa: GSAConfig) -> int:
    return (gsa.gate_input == "query_dependent") * model.hidden_size * _gates_per_token(model, gsa)


def parameters_per_indexer(model: ModelConfig, gsa: GSAConfig) -> int:
    """Return the number of parameters in W_q, W_k and w, and in any configured biases, norms and beta."""
    heads, dim, scores = gsa.indexer_heads, gsa.indexer_dim, SCORES[gsa.indexer_activation]
    matrices = model.hidden_size * (heads * dim + dim + scores.learns_head_weights * heads)
    biases = (scores.has_score_bias + scores.has_head_weight_bias) * heads
    return matrices + biases + gsa.indexer_norm * 2 * dim + (gsa.indexer_temperature == "learned")


def indexer_layers(model: ModelConfig, gsa: GSAConfig) -> int:
    """Count the layers with an indexer: the first layer of each group that shares a selection."""
    return model.num_layers // gsa.selection_reuse if gsa.attention == "sparse" else 0


@dataclass(frozen=True)
class FlopsPerToken:
    """Counts operations of one training token, forward and backward, by part."""

    projections: float
    """Q, K, V and the attention's output projection."""
    gates: float
    mlp: float
    """Dense feed-forward layers."""
    router: float
    experts: float
    """The token's routed experts and the shared expert."""
    output: float
    """Logits."""
    attention: float
    """Q K^T and P V over the attended keys."""
    indexer_projections: float
    indexer_scores: float
    kl_target: float
    """Target of the indexer loss (head-averaged probabilities): Q K^T over the attended keys of queries in the loss."""
    dense_equivalent: float
    """For comparison, the operations of this model with dense attention, no indexer, and all parameters trained. Not
    part of the total."""

    @property
    def total(self) -> float:
        return sum(asdict(self).values()) - self.dense_equivalent


def flops_per_token(
    model: ModelConfig,
    gsa: GSAConfig,
    moe: MoEConfig,
    phase: PhaseConfig,
    seq_len_tokens: int,
    mean_selected: float | None = None,
    mean_visible: float | None = None,
    dropped_share: float = 0.0,
) -> FlopsPerToken:
    """Count operations per token in a phase, averaged over the positions of a sequence.

    Only matrix products are counted, and recomputation is not. In trained parts, the backward pass costs twice the
    forward pass. Indexer projections run over all queries. Indexer scores have gradients only for queries in the
    indexer loss, and only at their attended keys.

    Args:
        mean_selected: measured mean number of selected keys; None: `mean_selected_keys`, from the budget k_base.
        mean_visible: measured mean causal keys per query; None: a sequence is one document.
        dropped_share: measured fraction of expert choices that were dropped (`moe.capacity_factor`).
    """
    d, layers, tokens = model.hidden_size, model.num_layers, seq_len_tokens
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    base_passes = 1 if phase.train == "indexer" else 3

    visible = causal_mean_keys(tokens) if mean_visible is None else mean_visible
    attended = visible
    if phase.attention == "sparse":
        if mean_selected is None:
            mean_selected = mean_selected_keys(gsa, [range(1, tokens + 1)])
        attended = min(mean_selected, visible)

    projections = layers * 2 * (d * (query + 2 * key_value) + query * d)
    gates = layers * 2 * _gate_weights(model, gsa)
    mixtures = len(layers_with_experts(moe, layers))
    mlp = (layers - mixtures) * 2 * 3 * d * model.ffn_hidden_size
    router = mixtures * 2 * d * moe.experts
    widths = (1 - dropped_share) * moe.top_k * moe.expert_ffn_hidden_size + moe.shared_expert_ffn_hidden_size
    experts = mixtures * 2 * 3 * d * widths
    output = 2 * d * model.vocab_size

    # The indexer runs if it selects or trains.
    learns = phase.train != "base"
    indexers = indexer_layers(model, gsa) if phase.attention == "sparse" or learns else 0
    heads, dim = gsa.indexer_heads, gsa.indexer_dim
    weighted = SCORES[gsa.indexer_activation].learns_head_weights * heads
    indexer_projections = 2 * d * (heads * dim + weighted + dim)
    per_score = 2 * heads * (dim + 1)  # q . k for each head, then the weighted or plain sum over heads
    row_share = sampled_row_share(gsa, tokens) if learns else 0.0
    learned = row_share * attended

    return FlopsPerToken(
        projections=base_passes * projections,
        gates=base_passes * gates,
        mlp=base_passes * mlp,
        router=base_passes * router,
        experts=base_passes * experts,
        output=base_passes * output,
        attention=base_passes * layers * 4 * query * attended,
        indexer_projections=indexers * (3 if learns else 1) * indexer_projections,
        indexer_scores=indexers * per_score * (visible + 2 * learned),
        kl_target=indexers * 2 * query * attended * row_share,
        dense_equivalent=3
        * (projections + gates + mlp + router + experts + output + layers * 4 * query * visible),
    )


def sampled_row_share(gsa: GSAConfig, seq_len_tokens: int) -> float:
    """Return the expected fraction of the queries that are in the indexer loss.

    The loss uses every n-th stretch of STRETCH_ROWS adjacent queries, but at least one stretch per sequence. n is the
    inverse of `gsa.indexer_loss_row_fraction`.
    """
    stretches = -(-seq_len_tokens // STRETCH_ROWS)
    return 1 / min(round(1 / gsa.indexer_loss_row_fraction), stretches)


def causal_mean_keys(seq_len_tokens: int) -> float:
    """Average the causal keys over the queries of a sequence with one document: (L + 1) / 2."""
    return (seq_len_tokens + 1) / 2


def mean_selected_keys(gsa: GSAConfig, causal_keys: Sequence[Sequence[int]]) -> float:
    """Return the mean number of selected keys per query with budget k_base. Queries with fewer than `gsa.dense_below`
    causal keys select all of them.

    Each query also selects its local window. The other selected keys are assumed to lie outside the window, so with a
    window the result is an upper bound.
    """
    total = 0
    for sequence in causal_keys:
        for visible in sequence:
            chosen = visible if visible < gsa.dense_below else min(gsa.k_base, visible)
            total += min(chosen + gsa.local_window, visible)
    return total / sum(map(len, causal_keys))


# Dense peak rates by the driver's device name. bf16 rates use tensor cores (half the datasheet's figure "with
# sparsity"), and fp32 rates do not. Names are exact, because variants of a chip differ.
_A100 = (312e12, 19.5e12)  # A100 datasheet: the same for all variants
_H100_SXM = (989e12, 67e12)  # H100 datasheet, SXM; H200 datasheet: the same rates
_PEAK_FLOPS_PER_SECOND: dict[str, tuple[float, float | None]] = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": (756e12, 51e12),  # H100 datasheet, PCIe
    "NVIDIA H200": _H100_SXM,
    "NVIDIA B200": (2250e12, None),  # HGX B200 datasheet: 36 PFLOP/s with sparsity for eight
    "NVIDIA L40S": (362e12, 91.6e12),  # L40S datasheet
}

DEVICES = tuple(_PEAK_FLOPS_PER_SECOND)
"""Devices with a known peak rate."""
_MEASURED_MFU = {"NVIDIA H200": 0.46}  # whole steps of paper_gsa_1.7b (docs/reference/performance.md)
_MEASURED_FROM_PARAMETERS = 10**9  # smaller models leave the device idle and are unmeasured


def measured_mfu(device_name: str, count: ParameterCount) -> float | None:
    """Return the measured MFU of GSA training on this device, or None if unknown. MoE models are excluded, because
    only one of them was measured."""
    measured = count.experts == 0 and count.total >= _MEASURED_FROM_PARAMETERS
    return _MEASURED_MFU.get(device_name) if measured else None


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """Return the device's peak rate. If it is unknown, return None, and no MFU is reported.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
    """
    if device_name not in _PEAK_FLOPS_PER_SECOND:
        return None
    bf16, fp32 = _PEAK_FLOPS_PER_SECOND[device_name]
    return {"bf16": bf16, "fp32": fp32}[precision]
