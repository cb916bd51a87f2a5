"""Define the sizes of one micro-batch on one rank, from which the other memory modules count bytes.

Symbols in shapes:
- L: tokens of this context-parallel rank.
- Lw: tokens of the whole sequence.
- B: sequences.
- d: hidden size.
- q: columns of queries on this tensor-parallel rank.
- kv: columns of keys on this tensor-parallel rank. The values have the same number of columns.
- f: columns of the feed-forward layer on this tensor-parallel rank.
- n_h: query heads on this tensor-parallel rank.

Activations are in the working precision unless a text says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from gsa_train.config import Config, PhaseConfig
from gsa_train.config.gates import ON_HEADS, fuses_gates, gate_rows
from gsa_train.config.kernel_checks import unsupported_by_kernels


@dataclass(frozen=True)
class Sizes:
    value: int
    """Bytes of an activation."""
    fp8: bool
    """Linear layers keep their inputs in FP8, a byte per element."""
    tokens: int
    """B L."""
    all_tokens: int
    """B Lw."""
    shards: int
    """Ranks over which sequence parallelism shards the activations between products; 1 without sequence
    parallelism."""
    hidden: int
    """d."""
    query: float
    """q."""
    key_value: float
    """kv."""
    gates: float
    """Columns of the projection for the gates on heads, or of the module that replaces it."""
    gates_gather: bool
    """Whether the gates' projection gathers the tokens of all ranks for all projections with this input."""
    projection_gate: float
    """Columns of G5's projection, which processes 1 / shards of the tokens on a rank."""
    ffn: float
    """f."""
    heads: float
    """n_h."""
    tensor: int
    """Tensor-parallel ranks."""
    query_chunks: int
    """Number of chunks of queries that are contiguous in the sequence (context parallelism)."""
    keys_of_chunks: float
    """Keys that each chunk's queries see, summed over the chunks."""
    pairs: float
    """Pairs of a query and a key up to the end of the query's chunk, in all B sequences."""
    pairs_of_chunk: float
    """Pairs of a query and a key for one chunk, counted as for the last chunk of the sequence."""

    def bytes(self, columns: float) -> float:
        return self.value * self.tokens * columns

    def linear_input(self, columns: float) -> float:
        """Bytes that a linear layer keeps of its input [L, B, columns], if nothing else keeps it."""
        return (1 if self.fp8 else self.value) * self.tokens * columns

    @property
    def stream(self) -> float:
        """Bytes of the residual stream [L / shards, B, d]. The gradient of the stream and the output of a norm have the
        same size."""
        return self.bytes(self.hidden) / self.shards

    @property
    def gathered(self) -> float:
        """Bytes of the gathered stream [L, B, d], which exists in addition to this rank's shard. Without sequence
        parallelism, the stream is not gathered, and the bytes are 0."""
        return self.bytes(self.hidden) if self.shards > 1 else 0.0


def sizes_of(config: Config) -> Sizes:
    model, gsa, parallel, train = config.model, config.gsa, config.parallel, config.train
    context = parallel.context
    chunks = parallel.context_chunks if context > 1 else 1
    all_tokens = train.micro_batch_size * train.seq_len_tokens
    tokens = all_tokens // context
    query = model.num_heads * model.head_dim / parallel.tensor
    key_value = model.num_kv_heads * model.head_dim / parallel.tensor
    # Half of a rank's chunks are the r-th of their group, and half the r-th from the end (context_sharding.py).
    keys_of_chunks = train.seq_len_tokens * ((chunks * context + 1) / (2 * context) if context > 1 else 1)
    rows = gate_rows(gsa, model.num_heads, model.num_kv_heads, model.head_dim, model.hidden_size)
    of_heads = sum(rows[position] for position in ON_HEADS)
    own_heads = gsa.gate_sharing == "head_specific"
    return Sizes(
        value=4 if train.precision == "fp32" else 2,
        fp8=train.linear_layers == "fp8",
        tokens=tokens,
        all_tokens=all_tokens,
        shards=parallel.tensor if parallel.sequence else 1,
        hidden=model.hidden_size,
        query=query,
        key_value=key_value,
        gates=of_heads / (parallel.tensor if own_heads else 1),
        gates_gather=of_heads > 0 and own_heads and gsa.gate_input == "query_dependent",
        projection_gate=rows["projection"],
        ffn=model.ffn_hidden_size / parallel.tensor,
        heads=model.num_heads / parallel.tensor,
        tensor=parallel.tensor,
        query_chunks=chunks,
        keys_of_chunks=keys_of_chunks,
        pairs=tokens / chunks * keys_of_chunks,
        pairs_of_chunk=tokens / chunks * train.seq_len_tokens,
    )


# ---- what runs


def uses_kernels(config: Config) -> bool:
    """Whether the fused kernels run attention, as on a GPU."""
    return config.gsa.attention_impl != "reference" and not unsupported_by_kernels(config)


def fuses_heads(config: Config) -> bool:
    """Whether one kernel runs split, rotary embedding and G2 (model/gsa_attention.py)."""
    plain_heads = not config.model.qk_norm and config.model.rotary_percent == 1 and fuses_gates(config.gsa)
    return config.train.fused_ops != "none" and plain_heads and uses_kernels(config)


def uses_indexer(config: Config, phase: PhaseConfig) -> bool:
    return config.gsa.attention == "sparse" and (phase.attention == "sparse" or phase.train != "base")


def has_graph(config: Config, phase: PhaseConfig) -> bool:
    """Whether the base runs with an autograd graph. An indexer warm-up with `parallel.strategy: megatron` has no graph,
    because each layer differentiates its own loss."""
    return phase.train != "indexer" or config.parallel.strategy == "deepspeed"


def gathers(config: Config, phase: PhaseConfig) -> bool:
    """Whether selections are key lists instead of packed masks."""
    avoid_lists = config.train.cuda_graphs or phase.attention == "dense"  # as in model/attention.py
    return config.gsa.kernel_for(config.train.seq_len_tokens, avoid_lists) == "gathered"
