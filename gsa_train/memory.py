"""Memory of each rank's device in a training step, from a config alone.

Counted tensor by tensor from what the layers keep: on GPUs the autograd functions of gsa_kernels (`*/op.py`), torch's
RMSNorm and megatron-core's linear layers; the reference core by its large tensors only. It is held against traces of
the real step (tests/unit/test_memory_trace.py). Not in it: what a checkpoint, a validation and a logged step need for a
moment, buffers of NCCL and DeepSpeed, the CUDA context, and the allocator's gaps (`max_memory_reserved`).

`attention_impl: auto` is counted as on a GPU, `precision: auto` as bf16. Lists of keys are counted at their longest:
neighbouring queries select nothing in common, as an untrained indexer does on random tokens. A trained one's are a
tenth to a half as long. Of context-parallel ranks it is the one with most.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gsa_train.config import Config, PhaseConfig
from gsa_train.kernel_checks import MASKED_MAX_TOKENS, unsupported_by_kernels
from gsa_train.layout_checks import data_parallel_size
from gsa_train.model.flops import count_parameters, indexer_layers
from gsa_train.pipeline_layout import stage_layers
from gsa_train.sequence_cut import QueryRun, SequenceCut, query_runs

SCORE_CHUNK_BYTES = 512 * 2**20
"""gsa_kernels.selection.op: ROW_CHUNK_BYTES, of fp32 scores."""
KL_CHUNK_PAIRS = 64 * 2**20
"""gsa_kernels.kl.op: row_chunk_bytes (256 MiB) over the 4 bytes of a pair of query and key."""
GATHERED_KL_BYTES = 512 * 2**20
"""gsa_kernels.kl.gathered: scratch_bytes."""
GATHERED_PARTIAL_BYTES = 2**30
"""gsa_kernels.attention.gathered: SCRATCH_BYTES."""
TILE_QUERIES = 32
"""gsa_kernels.lists: queries whose selections share a list."""
WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS on Hopper (torch's CUDABlas: 32 MiB)."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each rank of one pipeline stage, in one phase."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from forward to backward, over all micro-batches in flight."""
    working: float
    """Beside them while a layer (or a recomputed unit) runs forward or backward."""
    logits: float
    """Beside them while the output layer and the loss run."""
    buffers: float
    """Held all the time."""

    @property
    def total(self) -> float:
        """At the peak: a layer and the loss never run at once."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.buffers
        return held + max(self.working, self.logits)


def estimate_memory(config: Config, phase: PhaseConfig, world_size: int, stage: int) -> MemoryEstimate:
    """Memory of a stage's ranks in a phase; the module's docstring says what is left out."""
    parallel, train = config.parallel, config.train
    sizes = _Sizes(config)

    # Weights in the working precision, gradients as they are reduced, and Adam's two moments in fp32 with, under
    # bf16, the fp32 weights. Only what the phase trains has gradients and optimizer state.
    base, indexer = _parameters_per_rank(config, stage)
    trained = {"all": base + indexer, "base": base, "indexer": indexer}[phase.train]
    state_bytes = 8 if train.precision == "fp32" else 12
    replicas = data_parallel_size(config, world_size)
    ranks = replicas * parallel.context
    shards = ranks // parallel.optimizer_instances if parallel.distributed_optimizer else 1
    zero_stage = parallel.zero_stage if parallel.strategy == "deepspeed" else 1
    micro_batches = train.global_batch_size // (train.micro_batch_size * replicas)
    gather_buffer = sizes.value * sizes.tokens * sizes.hidden if sizes.sequence_shards > 1 else 0.0
    return MemoryEstimate(
        weights=sizes.value * (base + indexer) / (shards if zero_stage == 3 else 1),
        gradients=(4 if parallel.grad_reduce_dtype == "fp32" else 2)
        * trained
        / (shards if zero_stage > 1 else 1),
        optimizer=0.0 if parallel.offload_optimizer else state_bytes * trained / shards,
        activations=_in_flight(config, stage, micro_batches) * _kept(config, phase, sizes, stage),
        working=_working(config, phase, sizes),
        logits=_logits(config, phase, sizes) if stage == parallel.pipeline - 1 else 0.0,
        buffers=WORKSPACE_BYTES + gather_buffer,
    )


def _parameters_per_rank(config: Config, stage: int) -> tuple[float, float]:
    """Parameters of the base and of the indexers on one rank of a stage; norms and indexers are replicated over
    tensor-parallel ranks, and with tied embeddings the last stage holds a copy."""
    parallel, count = config.parallel, count_parameters(config.model, config.gsa)
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    final_norm = config.model.hidden_size
    held = stage_layers(config, stage)
    share = len(held) / config.model.num_layers
    base = (count.attention + count.gates + count.mlp) / parallel.tensor * share
    base += (count.norms - final_norm) * share
    if is_first:
        base += count.embedding / parallel.tensor
    if is_last:
        tied_copy = count.embedding if config.model.tie_embeddings and not is_first else 0
        base += final_norm + (count.output + tied_copy) / parallel.tensor
    indexers = indexer_layers(config.model, config.gsa)
    indexer = count.indexer / indexers * _indexers_among(held, config) if indexers else 0.0
    return base, indexer


def _indexers_among(layers: list[int], config: Config) -> int:
    """Those of `layers` that own an indexer."""
    if config.gsa.attention == "dense":
        return 0
    return sum(layer % config.gsa.selection_reuse == 0 for layer in layers)


def _in_flight(config: Config, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    stages, virtual = config.parallel.pipeline, config.parallel.virtual_pipeline
    if virtual == 1:  # 1F1B
        return float(min(stages - stage, micro_batches))
    # Interleaved: chunks in flight (megatron-core's warm-up and one more), of which each has a share of what is kept.
    ahead = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(ahead, micro_batches * virtual) / virtual


# ---- one micro-batch


class _Sizes:
    """Of one micro-batch on one rank."""

    def __init__(self, config: Config) -> None:
        model, parallel, train = config.model, config.parallel, config.train
        self.value = 4 if train.precision == "fp32" else 2
        """Bytes of an activation."""
        self.all_tokens = train.micro_batch_size * train.seq_len_tokens
        """Of the whole sequences."""
        self.tokens = self.all_tokens // parallel.context
        self.sequence_shards = parallel.tensor if parallel.sequence else 1
        self.hidden = model.hidden_size
        self.query = model.num_heads * model.head_dim / parallel.tensor
        self.key_value = model.num_kv_heads * model.head_dim / parallel.tensor
        self.ffn = model.ffn_hidden_size / parallel.tensor
        self.heads = model.num_heads / parallel.tensor
        context = parallel.context
        runs = parallel.context_chunks if context > 1 else 1
        # Half of a rank's runs of queries are a group's r-th chunk, half its r-th from behind.
        self.keys_of_runs = train.seq_len_tokens * (
            (runs * context + 1) / (2 * context) if context > 1 else 1
        )
        """Keys that the runs of this rank's queries see, added up."""
        self.pairs = self.tokens / runs * self.keys_of_runs
        """Of a query and a key up to its run's end."""


def _uses_kernels(config: Config) -> bool:
    return config.gsa.attention_impl != "reference" and not unsupported_by_kernels(config)


def _uses_indexer(config: Config, phase: PhaseConfig) -> bool:
    return config.gsa.attention == "sparse" and (phase.attention == "sparse" or phase.train != "base")


def _has_graph(config: Config, phase: PhaseConfig) -> bool:
    """Whether the base runs with one. A warm-up by megatron's strategy has none: each layer's indexer learns on the
    spot."""
    return phase.train != "indexer" or config.parallel.strategy == "deepspeed"


def _kept(config: Config, phase: PhaseConfig, sizes: _Sizes, stage: int) -> float:
    """Bytes that a stage keeps of one micro-batch."""
    if not _has_graph(config, phase):
        return 0.0
    recompute, held = config.train.recompute, stage_layers(config, stage)
    hidden = sizes.value * sizes.tokens * sizes.hidden / sizes.sequence_shards
    sent = hidden if stage < config.parallel.pipeline - 1 else 0.0  # the schedule holds what it sent on
    if recompute == "full":
        return len(held) // config.train.recompute_num_layers * hidden + sent
    selecting = _indexers_among(held, config) if _uses_indexer(config, phase) else 0
    layer = _layer(config, phase, sizes)
    kept = len(held) * layer.dense + selecting * layer.indexer
    if phase.attention == "sparse":
        kept += selecting * layer.selection  # also under recomputation: choosing again could choose otherwise
    if recompute == "none":
        kept += len(held) * layer.core
    return kept + sent


@dataclass(frozen=True)
class _Layer:
    """What one layer keeps of one micro-batch, in bytes."""

    dense: float
    """Of every layer."""
    core: float
    """Of the attention core; recomputed with `selective`."""
    indexer: float
    """Of a layer that has one."""
    selection: float


def _layer(config: Config, phase: PhaseConfig, sizes: _Sizes) -> _Layer:
    gsa, context = config.gsa, config.parallel.context
    fused, kernels = config.train.fused_ops != "none", _uses_kernels(config)
    gate_logits = gsa.value_gate * sizes.key_value + gsa.output_gate * sizes.query

    # Values per token: in- and output of both norms; Q, K and gated V as attention reads them; what linear_proj
    # reads; both halves of SwiGLU's input, and its output.
    values = 4 * sizes.hidden / sizes.sequence_shards
    values += sizes.query + 2 * sizes.key_value + sizes.query + 3 * sizes.ffn
    singles = 2 / sizes.sequence_shards  # 1 / rms of both norms
    if sizes.sequence_shards > 1 and gate_logits:  # what all projections read, gathered
        values += sizes.hidden
    if fused:  # the projection's output for both gates
        values += gate_logits
    else:  # SiLU and the other factor; gates: logits, and of G2 in fp32 input and sigmoid; else V inside of QKV
        values += 2 * sizes.ffn + gate_logits
        values += 0 if gsa.value_gate else sizes.query + sizes.key_value
        singles += 2 * gsa.value_gate * sizes.key_value
    if not kernels:  # G1: its result, and in fp32 input and sigmoid
        values += gsa.output_gate * sizes.query
        singles += 2 * gsa.output_gate * sizes.query
    core_bytes = 0.0
    if kernels:
        core_bytes += 4 * sizes.tokens * sizes.heads  # lse
    else:
        # Q, K, V in fp32; per query and key, in fp32, each head's softmax and its masked copy; a byte: visible.
        core_bytes += 4 * sizes.tokens * (sizes.query + 2 * sizes.key_value)
        core_bytes += sizes.pairs * (4 * 2 * sizes.heads + 1)
    if context > 1:  # K and V of the whole sequence; the runs' outputs before they are joined
        core_bytes += sizes.value * 2 * sizes.key_value * sizes.all_tokens
        core_bytes += sizes.value * sizes.query * sizes.tokens
    dense = sizes.tokens * (sizes.value * values + 4 * singles)
    if not _uses_indexer(config, phase):
        return _Layer(dense, core_bytes, 0.0, 0.0)

    # The gradients of its queries, weights and keys, which the loss makes in the forward pass; these projections
    # themselves with `selective`, as many. Replicated over tensor-parallel ranks.
    queries = sizes.tokens / gsa.selection_block
    indexer = sizes.value * queries * gsa.indexer_heads * (gsa.indexer_dim + 1)
    keys = config.train.seq_len_tokens if config.train.recompute == "selective" else sizes.keys_of_runs
    indexer += sizes.value * config.train.micro_batch_size * keys * gsa.indexer_dim
    if sizes.sequence_shards > 1 and not gate_logits:  # its input, gathered
        indexer += sizes.value * sizes.tokens * sizes.hidden
    if kernels:
        return _Layer(dense, core_bytes, indexer, _kernel_selection(config, sizes))
    # Per row and key, in fp32: each head's activation, I, the target and log softmax(I).
    core_bytes += 4 * sizes.pairs / gsa.selection_block * (gsa.indexer_heads + 3)
    return _Layer(dense, core_bytes, indexer, sizes.pairs)


def _kernel_selection(config: Config, sizes: _Sizes) -> float:
    """The fused kernels' selection as bits or lists."""
    gsa = config.gsa
    if gsa.selection_block > 1:
        return 4 * sizes.tokens * sum(_block_entries(config))
    if _gathers(config):
        return 8 * _list_entries(config)  # a key and a word each
    return sizes.pairs / 8


def _gathers(config: Config) -> bool:
    gsa = config.gsa
    gathered = gsa.attention_kernel == "gathered" or config.train.seq_len_tokens > MASKED_MAX_TOKENS
    return gathered or gsa.selection_block > 1


def _list_entries(config: Config) -> float:
    """In the lists of a rank's queries: for each tile all that its queries may select, as far as they see so many keys.
    Of the context-parallel ranks that of the one with most."""
    length, parallel = config.train.seq_len_tokens, config.parallel
    most = TILE_QUERIES * min(config.gsa.k_base + config.gsa.local_window, length)

    def entries(run: QueryRun) -> float:
        turn = min(max(most, run.start), run.end)  # up to here the keys that are there are the limit
        return (turn**2 - run.start**2) / 2 + (run.end - turn) * most

    per_query = max(
        sum(
            entries(run)
            for run in query_runs(
                length // parallel.context, SequenceCut(rank, parallel.context, parallel.context_chunks)
            )
        )
        for rank in range(parallel.context)
    )
    return config.train.micro_batch_size * per_query / TILE_QUERIES


def _block_entries(config: Config) -> tuple[float, float]:
    """Keys and words of shared lists, per query: there is room for the largest budget."""
    gsa, length = config.gsa, config.train.seq_len_tokens
    near = min(gsa.local_window + gsa.selection_block, length)
    room = min(gsa.k_max + near, length)
    # Without documents only the window has words.
    words = near if config.data.attend_across_documents else room
    return room / gsa.selection_block, words / min(gsa.selection_block, 32)


def _working(config: Config, phase: PhaseConfig, sizes: _Sizes) -> float:
    """What a layer has in use beside what is kept: the larger of its forward and its backward pass."""
    gsa, train = config.gsa, config.train
    hidden, token_bytes = 2 * sizes.hidden, sizes.value * sizes.tokens
    layer = _layer(config, phase, sizes)
    one = layer.dense + layer.core + layer.indexer + layer.selection

    scratch = 0.0
    if not _uses_kernels(config):
        scratch = layer.core  # gradients of what is L x L
    elif _uses_indexer(config, phase):
        scratch = max(_selection_scratch(config, sizes), _loss_scratch(config, phase, sizes))
    forward = token_bytes * hidden + scratch
    # While the attention runs, either way, what the last layer's feed-forward part keeps is not there.
    absent = token_bytes * (3 * sizes.ffn + 2 * sizes.hidden / sizes.sequence_shards)
    if not _has_graph(config, phase):
        return one + forward - absent

    # Feed-forward: the gradient of its output, and of SwiGLU's input and output, for which the output itself has gone;
    # before, what stands for a weight's gradient where the product itself has added it up, else that gradient.
    mlp = token_bytes * (hidden + 2 * sizes.ffn) + sizes.value * sizes.ffn * sizes.hidden
    # Attention: the gradient of its output before and after G1, of G1, Q, K, V, and of the projections.
    gated = 2 * gsa.output_gate * sizes.query
    gradients = sizes.query + gated + sizes.query + 2 * sizes.key_value
    projected = sizes.query + 2 * sizes.key_value + gsa.value_gate * sizes.key_value
    if not (_uses_kernels(config) and train.fused_ops != "none"):  # else G1's is where the projection's is
        projected += gated / 2
    attention = token_bytes * (hidden + gradients + projected)
    if _uses_kernels(config) and phase.attention == "sparse":
        attention += _attention_scratch(config, sizes)
    if not _uses_kernels(config):
        attention += scratch
    recomputed = {"none": 0.0, "selective": layer.core, "full": train.recompute_num_layers * one}
    return recomputed[train.recompute] + max(mlp, max(forward, attention) - absent)


def _selection_scratch(config: Config, sizes: _Sizes) -> float:
    """Scores of a chunk of rows in fp32; where lists are made of bits, two chunks' bits and the lists in parts."""
    scores = min(4 * sizes.pairs / config.gsa.selection_block, SCORE_CHUNK_BYTES)
    if _gathers(config) and config.gsa.selection_block == 1:
        return scores + SCORE_CHUNK_BYTES / 16 + _kernel_selection(config, sizes)
    return scores


def _loss_scratch(config: Config, phase: PhaseConfig, sizes: _Sizes) -> float:
    """The target and partial gradients of a chunk of rows."""
    gsa, train = config.gsa, config.train
    if phase.train == "base":
        return 0.0
    heads = _gathered_heads(config, sizes)
    if phase.attention == "sparse" and _gathers(config):
        return heads + GATHERED_KL_BYTES
    # Bytes per pair: the target (fp16 in bf16 runs); keys' gradients of tiles of 64 rows (32 in fp32) and queries'
    # gradients of segments of keys, in fp32 (kl/triton_launch.py: choose_blocks).
    half = sizes.value == 2
    segment = 256
    if half and train.seq_len_tokens > 8192:
        segment = 1024
    elif half and train.micro_batch_size > 1:
        segment = 512
    row_bytes = 4 * gsa.indexer_dim / (64 if half else 32) + 4 * gsa.indexer_heads * gsa.indexer_dim / segment
    shared = config.gsa.selection_block > 1
    rows_share = sizes.pairs / gsa.selection_block / config.parallel.tensor
    pairs = min(KL_CHUNK_PAIRS, rows_share)
    return heads + pairs * ((2 if half and not shared else 4) + row_bytes)


def _gathered_heads(config: Config, sizes: _Sizes) -> float:
    """Queries, keys and log-sum-exps of all tensor-parallel ranks, of one run of queries at a time."""
    tensor = config.parallel.tensor
    if tensor == 1:
        return 0.0
    runs = config.parallel.context_chunks if config.parallel.context > 1 else 1
    queries = sizes.tokens / runs * tensor * (sizes.value * sizes.query + 4 * sizes.heads)
    return queries + sizes.value * sizes.all_tokens * tensor * sizes.key_value


def _attention_scratch(config: Config, sizes: _Sizes) -> float:
    """Of the backward pass over a selection: the bits turned round; or partial gradients of K and V, and their sums."""
    if not _gathers(config):
        return sizes.pairs / 8
    if config.gsa.selection_block > 1:
        entries, queries = (
            _block_entries(config)[0] * config.gsa.selection_block,
            min(config.gsa.selection_block, 32),
        )
    else:
        entries, queries = _list_entries(config) / sizes.tokens * TILE_QUERIES, TILE_QUERIES
    partials = sizes.tokens / queries * entries * 2 * config.model.head_dim * sizes.value
    sums = 4 * 2 * sizes.key_value * sizes.all_tokens
    return min(partials, GATHERED_PARTIAL_BYTES) + sums


def _logits(config: Config, phase: PhaseConfig, sizes: _Sizes) -> float:
    """From the last norm to the loss and back."""
    vocabulary = config.model.vocab_size / config.parallel.tensor
    trains_base = _has_graph(config, phase)
    # Logits in the working precision, over which the fused loss writes their gradient; megatron-core's also holds
    # their softmax in fp32.
    per_logit = sizes.value + (4 if config.train.fused_ops == "none" else 0)
    hidden = sizes.value * sizes.tokens * sizes.hidden
    total = per_logit * sizes.tokens * vocabulary + 2 * hidden / sizes.sequence_shards
    if trains_base:  # the gradient of the output layer's input, and what stands for its weight's
        total += hidden + sizes.value * vocabulary * sizes.hidden
    return total


def fields_of(estimate: MemoryEstimate) -> dict[str, float]:
    """Name -> bytes, the total last."""
    return {**asdict(estimate), "total": estimate.total}
