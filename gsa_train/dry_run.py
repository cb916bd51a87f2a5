"""What a run would be, told before it starts: layout, parameters, operations, memory and tokens.

Exact: the layout, the parameters, the tokens. By formula: operations per token (matrix products only, document
boundaries ignored, budget k_base; see model/flops.py). An estimate: the memory. It counts weights, gradients,
optimizer state and the large activations (`attention_impl: reference` keeps L x L tensors, the fused kernels do
not; `auto` is counted as on a GPU). It leaves out elementwise temporaries, communication buffers, the allocator's
fragmentation and the CUDA context, so leave a margin of some 20%. `precision: auto` is counted as bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gsa_train.config import Config, PhaseConfig
from gsa_train.config_checks import check_data
from gsa_train.kernel_checks import MASKED_MAX_TOKENS, unsupported_by_kernels
from gsa_train.layout_checks import data_parallel_size
from gsa_train.model.flops import count_parameters, flops_per_token, indexer_layers
from gsa_train.pipeline_layout import stage_chunks, stage_layers

MAX_LAYOUT_LINES = 32
KERNEL_CHUNK_BYTES = 512 * 2**20  # gsa_kernels: selection.op row_chunk_bytes; kl.op has two of half the size
GATHERED_SCRATCH_BYTES = 2 * 2**30  # gsa_kernels.attention.gathered: scratch_bytes
UNION_RATIO = 4.0  # assumed: keys that 32 adjacent queries select together, over those of one
GIB = 2**30


def describe(config: Config, world_size: int) -> str:
    """The report of a dry run, for a config without mistakes on this world size."""
    sections = {
        "Layout": _layout(config, world_size),
        "Parameters": _parameters(config),
        "Tokens": _tokens(config),
        "Floating-point operations per token (training, in 1e9)": _flops(config),
        "Memory per rank (estimate, in GiB)": _memory(config, world_size),
        "Data": check_data(config.data) or ["the local files are there"],
    }
    title = f"{config.run.name} on {world_size} {'rank' if world_size == 1 else 'ranks'}"
    blocks = ["\n  ".join([name, *lines]) for name, lines in sections.items()]
    return "\n\n".join([title, *blocks])


# ---- layout, parameters, tokens, operations


def _layout(config: Config, world_size: int) -> list[str]:
    parallel, train = config.parallel, config.train
    replicas = data_parallel_size(config, world_size)
    micro_batches = train.global_batch_size // (train.micro_batch_size * replicas)
    over = "data- and context-parallel" if parallel.context > 1 else "data-parallel"
    sharded = f"sharded over {over} ranks" if parallel.distributed_optimizer else "replicated"
    lines = [
        f"{world_size} = tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline} "
        f"x data {replicas}",
        f"sequence parallel {'on' if _is_sequence_parallel(config) else 'off'}, optimizer state {sharded}",
        f"{_layers_per_stage(config)}; {micro_batches} micro-batches of {train.micro_batch_size} sequences per "
        "step and replica",
    ]
    ranks = []
    for stage in range(parallel.pipeline):
        spans = ", ".join(_span(chunk) for chunk in stage_chunks(config, stage))
        span = f"stage {stage} (layers {spans})"
        for replica in range(replicas):
            first = rank_of(config, world_size, tensor=0, context=0, pipeline=stage, data=replica)
            ranks.append(f"{span}, data {replica}: {_rank_range(first, parallel.tensor, parallel.context)}")
    if len(ranks) > MAX_LAYOUT_LINES:
        ranks = [*ranks[:MAX_LAYOUT_LINES], f"... and {len(ranks) - MAX_LAYOUT_LINES} more in the same order"]
    return lines + ranks


def _layers_per_stage(config: Config) -> str:
    virtual = config.parallel.virtual_pipeline
    chunks = f" in {virtual} chunks (interleaved)" if virtual > 1 else ""
    counts = [len(stage_layers(config, stage)) for stage in range(config.parallel.pipeline)]
    layers = f"{counts[0]} layers per stage" if len(set(counts)) == 1 else f"{counts} layers on the stages"
    return layers + chunks


def _span(layers: range) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def rank_of(config: Config, world_size: int, tensor: int, context: int, pipeline: int, data: int) -> int:
    """Global rank of a place in the layout: tensor fastest, then context, data, pipeline (megatron-core's order)."""
    replicas, parallel = data_parallel_size(config, world_size), config.parallel
    return tensor + parallel.tensor * (context + parallel.context * (data + replicas * pipeline))


def _rank_range(first: int, tensor: int, context: int) -> str:
    if tensor * context == 1:
        return f"rank {first}"
    axes = {"tensor": tensor, "context": context}
    places = ", ".join(f"{axis} 0-{size - 1}" for axis, size in axes.items() if size > 1)
    return f"ranks {first}-{first + tensor * context - 1} ({places})"


def _is_sequence_parallel(config: Config) -> bool:
    return config.parallel.sequence and config.parallel.tensor > 1


def _parameters(config: Config) -> list[str]:
    count = count_parameters(config.model, config.gsa)
    rows = [[part, f"{number:,}"] for part, number in asdict(count).items()]
    rows += [["total", f"{count.total:,}"]]
    overhead = f"gates and indexer add {count.overhead:,} ({count.overhead_percent:.2f}%) to the plain model"
    return [*_table(rows), overhead]


def _tokens(config: Config) -> list[str]:
    per_step = config.train.global_batch_size * config.train.seq_len_tokens
    rows = [["phase", "steps", "tokens", "attention", "trains"]]
    rows += [[p.name, f"{p.steps:,}", f"{p.steps * per_step:,}", p.attention, p.train] for p in config.phases]
    steps = sum(phase.steps for phase in config.phases)
    rows += [["total", f"{steps:,}", f"{steps * per_step:,}", "", ""]]
    return [f"{per_step:,} tokens per step", *_table(rows)]


def _flops(config: Config) -> list[str]:
    counts = [
        flops_per_token(config.model, config.gsa, phase, config.train.seq_len_tokens)
        for phase in config.phases
    ]
    rows = [["part", *(phase.name for phase in config.phases)]]
    rows += [
        [part, *(f"{asdict(count)[part] / 1e9:.3f}" for count in counts)]
        for part in asdict(counts[0])
        if part != "dense_equivalent"
    ]
    rows += [["total", *(f"{count.total / 1e9:.3f}" for count in counts)]]
    rows += [["dense equivalent", *(f"{count.dense_equivalent / 1e9:.3f}" for count in counts)]]
    return _table(rows)


# ---- memory


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on each rank of one pipeline stage, in one phase."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept from forward to backward, over all micro-batches in flight."""
    working: float
    """Of the layer (or recomputed unit) under way: what is recomputed, and L x L gradients."""
    logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def estimate_memory(config: Config, phase: PhaseConfig, world_size: int, stage: int) -> MemoryEstimate:
    """Memory of a stage's ranks in a phase, by formula; the module's docstring says what is left out."""
    model, parallel, train = config.model, config.parallel, config.train
    replicas = data_parallel_size(config, world_size)
    value_bytes = 4 if train.precision == "fp32" else 2

    # Weights in the working precision, gradients as they are reduced, and Adam's two moments in fp32 with, under
    # bf16, the fp32 weights. Only what the phase trains has gradients and optimizer state.
    base, indexer = _parameters_per_rank(config, stage)
    trained = {"all": base + indexer, "base": base, "indexer": indexer}[phase.train]
    state_bytes = 8 if train.precision == "fp32" else 12
    shards = replicas * parallel.context if parallel.distributed_optimizer else 1

    # Activations. A warm-up keeps none: its base runs without a graph, and each layer's indexer learns on the spot.
    layer = _layer_bytes(config, phase, value_bytes)
    held = stage_layers(config, stage)
    layers = len(held)
    sequence_shards = parallel.tensor if _is_sequence_parallel(config) else 1
    tokens = _tokens_per_rank(config)
    if phase.train == "indexer":
        kept, working = 0.0, layer.linear + layer.gathered + layer.scratch
    elif train.recompute == "none":
        kept, working = layers * (layer.linear + layer.gathered + layer.square), layer.scratch
    elif train.recompute == "selective":
        # The selections stay: choosing again in the backward pass could choose otherwise.
        selecting = _indexers_among(held, config) if phase.attention == "sparse" else 0
        kept = layers * layer.linear + selecting * layer.selection
        working = layer.gathered + layer.square + layer.scratch
    else:
        unit = train.recompute_num_layers
        kept = layers // unit * value_bytes * tokens * model.hidden_size / sequence_shards
        working = unit * (layer.linear + layer.gathered + layer.square) + layer.scratch
    micro_batches = train.global_batch_size // (train.micro_batch_size * replicas)
    virtual = parallel.virtual_pipeline
    if virtual == 1:  # 1F1B
        in_flight = float(min(parallel.pipeline - stage, micro_batches))
    else:  # interleaved: chunks in flight (megatron-core's warm-up and one more), of which each has a share of `kept`
        ahead = 2 * (parallel.pipeline - stage - 1) + (virtual - 1) * parallel.pipeline + 1
        in_flight = min(ahead, micro_batches * virtual) / virtual

    # Logits in the working precision, over which the fused loss writes their gradient; otherwise their softmax in
    # fp32, and its gradient in fp32 where there is one.
    is_last = stage == parallel.pipeline - 1
    softmax_bytes = 4 if phase.train == "indexer" else 8
    logit_bytes = value_bytes + (0 if train.fused_ops != "none" else softmax_bytes)
    return MemoryEstimate(
        weights=value_bytes * (base + indexer),
        gradients=(4 if parallel.grad_reduce_dtype == "fp32" else 2) * trained,
        optimizer=state_bytes * trained / shards,
        activations=in_flight * kept,
        working=working,
        logits=logit_bytes * tokens * model.vocab_size / parallel.tensor if is_last else 0.0,
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


@dataclass(frozen=True)
class _LayerBytes:
    """What one layer needs for one micro-batch."""

    linear: float
    """Kept for the backward pass, growing with L."""
    gathered: float
    """K and V of the whole sequence, under context parallelism; recomputation gathers them again."""
    square: float
    """Kept for the backward pass, growing with L x L; the selection is a part of it."""
    selection: float
    scratch: float
    """In use while the layer runs."""


def _layer_bytes(config: Config, phase: PhaseConfig, value_bytes: int) -> _LayerBytes:
    model, gsa, train = config.model, config.gsa, config.train
    tensor = config.parallel.tensor
    sequence_shards = tensor if _is_sequence_parallel(config) else 1
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    uses_indexer = phase.attention == "sparse" or (phase.train != "base" and gsa.attention == "sparse")

    # Per token, in the working precision: in- and output of both norms; Q, K, V as attention reads them; its output;
    # SwiGLU's two halves and their product; logits of the gates.
    gated = gsa.value_gate * key_value + gsa.output_gate * query
    values = 4 * model.hidden_size / sequence_shards
    values += (query + 2 * key_value + query + 3 * model.ffn_hidden_size + gated) / tensor
    singles = 0.0
    if train.fused_ops != "none":  # G1's logits once more, in the order of the heads
        values += gsa.output_gate * query / tensor
    else:  # Q, K as projected, SiLU, results of the gates; in fp32 each gate's input and sigmoid
        values += (query + key_value + model.ffn_hidden_size + gated) / tensor
        singles = 2 * gated / tensor
    if uses_indexer:  # replicated over tensor-parallel ranks; its detached input is the norm's output
        values += gsa.indexer_heads * gsa.indexer_dim + gsa.indexer_dim + gsa.indexer_heads
    uses_kernels = gsa.attention_impl != "reference" and not unsupported_by_kernels(config)
    if not uses_kernels:  # its Q, K and V in fp32
        singles += (query + 2 * key_value) / tensor
    tokens = _tokens_per_rank(config)
    linear = tokens * (value_bytes * values + 4 * singles)
    gathered, keys_per_query = 0.0, float(train.seq_len_tokens)
    if (context := config.parallel.context) > 1:
        gathered = value_bytes * context * tokens * 2 * key_value / tensor
        if uses_indexer:
            linear += value_bytes * context * tokens * gsa.indexer_dim
        keys_per_query *= (2 * context + 1) / (4 * context)  # each chunk sees the keys up to its own end
    if uses_kernels:
        if not uses_indexer:
            return _LayerBytes(linear, gathered, 0.0, 0.0, 0.0)
        selection, scratch = _kernel_selection_bytes(config, value_bytes)
        return _LayerBytes(linear, gathered, selection, selection, scratch)
    # Per query and key, in fp32: each head's softmax and its masked copy. One byte each: visible and selected.
    pairs = 4 * 2 * model.num_heads / tensor + 2
    if uses_indexer:  # each indexer head's activation, then I, the target and log softmax(I)
        pairs += 4 * (gsa.indexer_heads + 3) / gsa.selection_block
    square = tokens * keys_per_query * pairs
    return _LayerBytes(linear, gathered, square, tokens * keys_per_query, square)


def _tokens_per_rank(config: Config) -> int:
    """Tokens of a micro-batch that a rank holds, without sequence parallelism."""
    return config.train.micro_batch_size * config.train.seq_len_tokens // config.parallel.context


def _kernel_selection_bytes(config: Config, value_bytes: int) -> tuple[float, float]:
    """The fused kernels' selection as bits or lists, and what is in use beside it while a layer runs: scores and
    probabilities of a chunk of rows, and over lists the partial gradients of K and V and their sums in fp32."""
    gsa, train = config.gsa, config.train
    length = train.seq_len_tokens
    tokens = _tokens_per_rank(config)
    if gsa.selection_block > 1:
        near = gsa.local_window + gsa.selection_block
        entries = min(gsa.k_max + near, length)  # there is room for the largest budget
        queries = min(gsa.selection_block, 32)
        selection = 4 * tokens * (entries / gsa.selection_block + near / queries)
    elif gsa.attention_kernel == "gathered" or length > MASKED_MAX_TOKENS:
        queries = 32
        entries = min(int(UNION_RATIO * gsa.k_base), length)
        selection = 8 * tokens * entries / queries
    else:
        return tokens * length / 8, KERNEL_CHUNK_BYTES
    partials = tokens / queries * entries * 2 * config.model.head_dim * value_bytes
    kv_values = 2 * config.model.num_kv_heads * config.model.head_dim / config.parallel.tensor
    sums = 4 * train.micro_batch_size * length * kv_values
    return selection, KERNEL_CHUNK_BYTES + min(partials, GATHERED_SCRATCH_BYTES) + sums


def _memory(config: Config, world_size: int) -> list[str]:
    rows = [["phase", "stage", *MemoryEstimate.__dataclass_fields__, "total"]]
    for phase in config.phases:
        for stage in range(config.parallel.pipeline):
            estimate = estimate_memory(config, phase, world_size, stage)
            parts = [*asdict(estimate).values(), estimate.total]
            rows.append([phase.name, str(stage), *(f"{part / GIB:.2f}" for part in parts)])
    return [f"recompute: {config.train.recompute}", *_table(rows)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
