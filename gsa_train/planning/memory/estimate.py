"""Estimate the memory of each rank's device in a training step, from a config alone.

The estimate adds up the tensors that layers keep for the backward pass (layer.py), and temporary tensors at the peak
(moments.py). On GPUs it follows the autograd functions of gsa_kernels (`*/op.py`), torch's RMSNorm and megatron-core's
linear layers. For attention in plain torch, it counts only large tensors. Tests compare the estimate with traces of the
real step (tests/unit/test_memory_trace.py).

The estimate does not include:
- temporary memory of a checkpoint, a validation, a logged step or Muon's update;
- buffers of NCCL and DeepSpeed;
- the CUDA context;
- the gaps that the allocator leaves between tensors (`max_memory_reserved` includes them).

Assumptions:
- The run uses GPUs: `attention_impl: auto` prefers fused kernels, and `precision: auto` means bf16.
- Key lists (the keys that a tile of queries selects) have their largest length (selection.py).
- Experts run as grouped products with even loads (`worst_expert_load` gives the worst case).
- With context parallelism, the estimate describes the rank that needs the most memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from gsa_train.config import Config, PhaseConfig, TrainConfig
from gsa_train.config.moe import expert_layers
from gsa_train.config.parallel import data_parallel_size, stage_layers
from gsa_train.model.flops import count_parameters, indexer_layers
from gsa_train.optimizer.build import optimizer_kind
from gsa_train.planning.memory.experts import worst_load_bytes
from gsa_train.planning.memory.layer import layer_of
from gsa_train.planning.memory.moments import embedding_bytes, layer_moments, loss_bytes
from gsa_train.planning.memory.sizes import Sizes, has_graph, sizes_of, uses_indexer

WORKSPACE_BYTES = 32 * 2**20
"""Workspace of cuBLAS on Hopper (torch's CUDABlas: 32 MiB)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Holds the bytes on each rank of one pipeline stage, in one phase."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from forward to backward, over all micro-batches in flight."""
    working: float
    """Additional bytes while a layer (or a recomputed unit) runs forward or backward."""
    logits: float
    """Additional bytes while the output layer and the loss run."""
    buffers: float
    """Bytes that are allocated all the time."""
    graph: float
    """Additional bytes for validation with `train.cuda_graphs`, which, unlike steps, cannot use the memory of the
    graphs."""

    @property
    def total(self) -> float:
        """Returns the bytes at the peak. A layer and the loss never run at once."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.buffers + self.graph
        return held + max(self.working, self.logits)


def estimate_memory(config: Config, phase: PhaseConfig, world_size: int, stage: int) -> MemoryEstimate:
    """Estimate the memory of a stage's ranks in a phase. The module's docstring says what is left out."""
    parallel, train = config.parallel, config.train
    sizes = sizes_of(config)
    weights, gradients, optimizer = _parameters_and_state(config, phase, world_size, stage)
    replicas = data_parallel_size(config, world_size)
    micro_batches = train.global_batch_size // (train.micro_batch_size * replicas)
    kept = _kept(config, phase, sizes, stage)
    working = _working(config, phase, sizes, stage)
    if stage == 0 and has_graph(config, phase):
        working = max(working, embedding_bytes(config, sizes) - kept / parallel.virtual_pipeline)
    is_last = stage == parallel.pipeline - 1
    activations = _in_flight(config, stage, micro_batches) * kept
    logits = loss_bytes(config, phase, sizes) if is_last else 0.0
    has_cuda_graph = train.cuda_graphs and has_graph(config, phase)
    buffers = _buffers(config, phase, sizes, micro_batches)
    buffers += _passed_on(config, phase, sizes, stage, micro_batches)
    graph = max(working, logits) if has_cuda_graph else 0.0
    return MemoryEstimate(weights, gradients, optimizer, activations, working, logits, buffers, graph)


def worst_expert_load(config: Config, world_size: int, stage: int) -> float:
    """Returns the bytes that a rank needs in addition if all tokens go to its experts; the estimate assumes even loads.
    Counts all layers of a stage and all micro-batches in flight."""
    replicas = data_parallel_size(config, world_size)
    micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * replicas)
    layers, recomputed = stage_layers(config, stage), config.train.recompute_num_layers
    kept = _in_flight(config, stage, micro_batches) * _mixtures_among(layers, config)
    if config.train.recompute == "full":  # Units run one by one.
        units = (layers[at : at + recomputed] for at in range(0, len(layers), recomputed))
        kept = max(_mixtures_among(unit, config) for unit in units)
    return worst_load_bytes(config, sizes_of(config), kept)


# ---- parameters and their state


def _parameters_and_state(
    config: Config, phase: PhaseConfig, world_size: int, stage: int
) -> tuple[float, float, float]:
    """Returns the bytes of weights (working precision), gradients (precision of their reduction) and optimizer state.
    Only parameters that the phase trains have gradients and optimizer state."""
    parallel, train = config.parallel, config.train
    matrices, others, indexer = _parameters_per_rank(config, stage)
    experts = _expert_parameters_per_rank(config, stage)
    base = matrices + others
    trained = {"all": base + indexer, "base": base, "indexer": indexer}[phase.train]
    trained_experts = 0.0 if phase.train == "indexer" else experts
    ranks = data_parallel_size(config, world_size) * parallel.context
    replicas = ranks * parallel.tensor // (parallel.expert * parallel.expert_tensor)
    shards, expert_shards = (
        (count // parallel.optimizer_instances if parallel.distributed_optimizer else 1)
        for count in (ranks, replicas)
    )
    zero_stage = parallel.zero_stage if parallel.strategy == "deepspeed" else 1
    value, of_matrix = 4 if train.precision == "fp32" else 2, _state_bytes(train, is_matrix=True)
    trained_others = 0.0 if phase.train == "indexer" else others
    state = of_matrix * (trained - trained_others) + _state_bytes(train) * trained_others
    gradient = 4 if parallel.grad_reduce_dtype == "fp32" else 2
    return (
        value * (base + indexer + experts) / (shards if zero_stage == 3 else 1),
        gradient * (trained + trained_experts) / (shards if zero_stage > 1 else 1),
        0.0 if parallel.offload_optimizer else state / shards + of_matrix * trained_experts / expert_shards,
    )


def checkpoint_bytes(config: Config, phase: PhaseConfig) -> float:
    """Returns the bytes of a checkpoint, summed over all ranks: weights in the working precision, and optimizer state
    of the weights that the phase trains. The ranks hold a checkpoint in host memory until it is written."""
    count = count_parameters(config.model, config.gsa, config.moe)
    base = count.total - count.indexer
    trained = {"all": count.total, "base": base, "indexer": count.indexer}[phase.train]
    others = 0 if phase.train == "indexer" else count.embedding + count.output + count.norms + count.router
    value = 4 if config.train.precision == "fp32" else 2
    of_matrices = _state_bytes(config.train, is_matrix=True) * (trained - others)
    return value * count.total + of_matrices + _state_bytes(config.train) * others


def _state_bytes(train: TrainConfig, is_matrix: bool = False) -> int:
    """Returns bytes for each trained parameter: the optimizer's fp32 state and, under bf16, the fp32 weight. Callers
    count biases and indexer norms as matrices."""
    kind = optimizer_kind(train)
    names = kind.matrix_state if is_matrix and kind.matrix_state is not None else kind.state
    return 4 * len(names) + (0 if train.precision == "fp32" else 4)


def _parameters_per_rank(config: Config, stage: int) -> tuple[float, float, float]:
    """Returns three numbers of parameters on one rank of a stage: matrices of hidden layers without routed experts,
    other base parameters, and indexers. Norms, routers and indexers are replicated over tensor-parallel ranks. If
    embeddings are tied, the last stage holds a copy."""
    parallel, count = config.parallel, count_parameters(config.model, config.gsa, config.moe)
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    final_norm = config.model.hidden_size
    held = stage_layers(config, stage)
    share = len(held) / config.model.num_layers
    matrices = (count.attention + count.gates) / parallel.tensor * share
    others = (count.norms - final_norm) * share
    mixtures, dense = _mixtures_among(held, config), config.model.num_layers - len(expert_layers(config))
    if dense:
        matrices += count.mlp / parallel.tensor * (len(held) - mixtures) / dense
    if mixtures:
        matrices += count.shared_experts / parallel.tensor * mixtures / len(expert_layers(config))
        others += count.router * mixtures / len(expert_layers(config))
    if is_first:
        others += count.embedding / parallel.tensor
    if is_last:
        tied_copy = count.embedding if config.model.tie_embeddings and not is_first else 0
        others += final_norm + (count.output + tied_copy) / parallel.tensor
    indexers = indexer_layers(config.model, config.gsa)
    indexer = count.indexer / indexers * _indexers_among(held, config) if indexers else 0.0
    return matrices, others, indexer


def _expert_parameters_per_rank(config: Config, stage: int) -> float:
    mixtures = _mixtures_among(stage_layers(config, stage), config)
    if mixtures == 0:
        return 0.0
    held = count_parameters(config.model, config.gsa, config.moe).experts * mixtures
    return held / len(expert_layers(config)) / (config.parallel.expert * config.parallel.expert_tensor)


def _mixtures_among(layers: list[int], config: Config) -> int:
    return len(set(layers) & set(expert_layers(config)))


def _indexers_among(layers: list[int], config: Config) -> int:
    if config.gsa.attention == "dense":
        return 0
    return sum(layer % config.gsa.selection_reuse == 0 for layer in layers)


# ---- activations of the micro-batches in flight


def _in_flight(config: Config, stage: int, micro_batches: int) -> float:
    stages, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if virtual == 1:  # 1F1B
        return float(min(stages - stage, micro_batches))
    # With interleaving, megatron-core's warm-up and one more chunk are in flight. Each chunk keeps a share of the
    # stage's activations.
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(ahead, micro_batches * virtual) / virtual


def _kept(config: Config, phase: PhaseConfig, sizes: Sizes, stage: int) -> float:
    if not has_graph(config, phase):
        return 0.0
    recompute, held = config.train.recompute, stage_layers(config, stage)
    is_last = stage == config.parallel.pipeline - 1
    # The schedule holds the output of each chunk that has a next one, [L / shards, B, d].
    sent = (config.parallel.virtual_pipeline - is_last) * sizes.stream
    if recompute == "full":
        return len(held) // config.train.recompute_num_layers * sizes.stream + sent
    return _kept_by_layers(config, phase, sizes, held) + sent


def _kept_by_layers(config: Config, phase: PhaseConfig, sizes: Sizes, layers: list[int]) -> float:
    """Returns the bytes that layers keep without recompute=full."""
    mixtures = _mixtures_among(layers, config)
    dense, mixture = (layer_of(config, phase, sizes, kind) for kind in (False, True))
    selecting = _indexers_among(layers, config) if uses_indexer(config, phase) else 0
    kept = len(layers) * dense.attention + selecting * dense.indexer
    kept += (len(layers) - mixtures) * dense.feed_forward + mixtures * mixture.feed_forward
    if phase.attention == "sparse":
        kept += selecting * dense.selection  # recomputation keeps it: a second selection could differ
    if config.train.recompute == "none":
        kept += len(layers) * dense.core
    return kept


def _working(config: Config, phase: PhaseConfig, sizes: Sizes, stage: int) -> float:
    """Returns the peak of temporary bytes while a layer runs: the larger peak of the stage's last mixture of experts
    and its last dense layer. What later layers keep is subtracted, because it is not allocated at that time."""
    held, found = stage_layers(config, stage), []
    for mixture in (False, True):
        of_kind = [at for at, layer in enumerate(held) if (layer in expert_layers(config)) == mixture]
        if not of_kind:
            continue
        layer = layer_of(config, phase, sizes, mixture)
        most = max(layer_moments(config, phase, sizes, layer, mixture).values())
        later = held[of_kind[-1] + 1 :]
        if has_graph(config, phase) and config.train.recompute != "full":
            most -= _kept_by_layers(config, phase, sizes, later)
        found.append(most)
    return max(found)


# ---- other memory


def _buffers(config: Config, phase: PhaseConfig, sizes: Sizes, micro_batches: int) -> float:
    # For each token of a step: the token and its label in int64, its document in int32, its weight in fp32.
    text = (8 + 8 + 4 + 4) * micro_batches * sizes.all_tokens
    local_tokens = sizes.tokens // config.train.micro_batch_size
    # Angles of the rotary embedding, fp32 [L, d_k], or cos and sin of half of them, for each model chunk.
    angles = 2 * 4 * local_tokens * config.model.head_dim * config.parallel.virtual_pipeline
    if config.gsa.indexer_rope and uses_indexer(config, phase):
        # All indexers share cos and sin of half of the channels, fp32 2 x [L, d_I / 2].
        angles += 4 * local_tokens * config.gsa.indexer_dim
    # This is megatron-core's buffer for an input of all tokens [L, B, d]. Products with frozen weights do not use it.
    gather = sizes.gathered if has_graph(config, phase) else 0.0
    return WORKSPACE_BYTES + text + angles + gather


def _passed_on(config: Config, phase: PhaseConfig, sizes: Sizes, stage: int, micro_batches: int) -> float:
    """Returns the bytes of tensors between stages, [L / shards, B, d] each, that the schedule holds in addition to
    the micro-batches in flight."""
    parallel = config.parallel
    if parallel.pipeline == 1 or micro_batches == 1:
        return 0.0
    if not has_graph(config, phase):  # the input of another micro-batch, and an output
        receives = stage > 0 or parallel.virtual_pipeline > 1
        return (receives + (stage < parallel.pipeline - 1)) * sizes.stream
    if parallel.virtual_pipeline == 1:  # the last gradient sent back
        return sizes.stream if stage > 0 else 0.0
    # These are inputs and gradients received ahead, and outputs and gradients not yet sent: the most in any trace.
    return (5 + parallel.virtual_pipeline) * sizes.stream
