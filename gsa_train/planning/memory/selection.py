"""Estimate the memory of selections, and of the fused kernels during selection, attention and indexer loss.

A key list holds, for a tile of neighbouring queries, the keys that any of the queries selects. Key lists are assumed to
have their largest length, as if the queries shared no keys. The lists of a trained indexer are shorter, but up to
PACKED_MASK_MAX_TOKENS tokens each list has room for all causal keys.
"""

from __future__ import annotations

from gsa_kernels import limits
from gsa_train.config import Config, PhaseConfig
from gsa_train.distributed.context_sharding import ContextSharding, QueryChunk, query_chunks
from gsa_train.planning.memory.sizes import Sizes, gathers


def selection_bytes(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the bytes of a layer's selection for this rank's queries, int32: a packed mask [B, L, Lw / 32], or key
    lists with a key and a word per entry."""
    return 8 * _list_entries(config, with_room=True) if gathers(config, phase) else sizes.pairs / 8


def selecting_bytes(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the temporary bytes of selecting: one row chunk's scores, fp32 [B, rows, Lw]. Key lists of up to
    PACKED_MASK_MAX_TOKENS tokens also need a packed mask. Above CANDIDATES_ABOVE_TOKENS tokens, they also need the
    candidates of one row chunk. `listing_bytes` covers longer sequences."""
    scores, length = min(4 * sizes.pairs_of_chunk, limits.SELECTION_CHUNK_BYTES), config.train.seq_len_tokens
    if not gathers(config, phase):
        return scores
    if length <= limits.PACKED_MASK_MAX_TOKENS:
        guessed = length > limits.CANDIDATES_ABOVE_TOKENS and limits.has_candidates(most_keys(config))
        return scores + (limits.SELECTION_CHUNK_BYTES if guessed else 0) + sizes.pairs_of_chunk / 8
    lists = selection_bytes(config, phase, sizes) / sizes.query_chunks
    return max(
        listing_bytes(config, sizes, queries, lists) for rank in _chunks_of_ranks(config) for queries in rank
    )


def listing_bytes(config: Config, sizes: Sizes, queries: QueryChunk, lists: float) -> float:
    """Returns the temporary bytes while these queries' key lists are built, chunk by chunk:
    - scores of queries with few keys, and two packed masks;
    - the larger of two: candidates of queries without a list yet, or all lists before they are joined.
    """
    batch, room = config.train.micro_batch_size, limits.candidate_room(most_keys(config))
    turn = (
        min(max(limits.CANDIDATES_FROM, queries.start), queries.end)
        if limits.has_candidates(most_keys(config))
        else queries.end
    )
    scored, guessed = turn - queries.start, queries.end - turn
    scores = min(4 * batch * scored * turn, limits.SELECTION_CHUNK_BYTES)
    chunk = min(guessed, limits.SELECTION_CHUNK_BYTES // (limits.CANDIDATE_BYTES * batch * room))
    # Each query has a score and a key per candidate, and before that the scores of one key in 32. It also has two sums
    # for each program's keys.
    program_keys = limits.SCORED_KEYS[sizes.value]
    candidates = (
        batch * chunk * (max(limits.CANDIDATE_BYTES * room, queries.end / 8) + 8 * queries.end / program_keys)
    )
    waiting = lists * chunk / (queries.end - queries.start)
    bits = max(scores / 32, batch * chunk * queries.end / 8)
    return scores + (1 if scored == 0 and chunk == guessed else 2) * bits + max(candidates - waiting, lists)


def attending_bytes(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the bytes of the backward pass over a selection. sizes.py defines the symbols of the shapes.

    With a packed mask, the pass holds the gradients of K and V (2 x [B, Lw, kv]), their partial sums, and the
    transposed mask.

    With key lists, the pass holds:
    - partial gradients of K and V, [list entries, 2 d_k], in portions of at most GATHERED_GRADIENT_BYTES (one or
      more key-value heads, or some tiles of one head);
    - an index for each list entry of a portion;
    - the sum of each key's partial gradients, fp32 [B, Lw, n_kv, 2 d_k];
    - partial gradients of Q (if several programs share a list) or final gradients of K and V, whichever are larger.
    """
    keys = key_gradients(sizes)
    if not gathers(config, phase):
        return keys + _key_parts(config, sizes) + sizes.pairs / 8
    entries = _list_entries(config) / sizes.tokens * limits.TILE_QUERIES
    row = 2 * config.model.head_dim * sizes.value
    room = limits.GATHERED_GRADIENT_BYTES
    of_head = min(sizes.tokens / sizes.query_chunks / limits.TILE_QUERIES * entries * row, room)
    heads = round(sizes.key_value / config.model.head_dim)
    together = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * of_head <= room))
    sums = 4 * 2 * sizes.key_value * sizes.all_tokens
    last = max(keys, limits.segments_bytes(_longest_list(config), limits.MULTIPROCESSORS))
    return of_head * (together + 4 / row) + sums + last


def key_gradients(sizes: Sizes) -> float:
    """Returns the bytes of the gradients of K and V, [B, Lw, kv] each."""
    return 2 * sizes.value * sizes.key_value * sizes.all_tokens


def _key_parts(config: Config, sizes: Sizes) -> float:
    """Returns the bytes of the partial gradients of K and V, one for each part of the query heads: fp32, 2 x
    [parts, B, keys, kv], for the largest chunk of queries."""
    model, batch = config.model, config.train.micro_batch_size
    heads, group = round(sizes.key_value / model.head_dim), model.num_heads // model.num_kv_heads

    def of_chunk(keys: int) -> float:
        programs = batch * heads * limits.ceil_div(keys, limits.GRADIENT_KEYS[sizes.value])
        parts = limits.count_key_parts(programs, group, limits.MULTIPROCESSORS)
        return 2 * 4 * parts * batch * keys * sizes.key_value if parts > 1 else 0.0

    return max(of_chunk(queries.end) for rank in _chunks_of_ranks(config) for queries in rank)


def learning_bytes(config: Config, phase: PhaseConfig, sizes: Sizes) -> float:
    """Returns the bytes of the indexer loss for one chunk of queries, with target and partial gradients of the queries
    that the loss processes at a time."""
    gsa = config.gsa
    if phase.train == "base":
        return 0.0
    heads = gathered_heads(sizes)
    # Before the loss: Q of this rank, Q of all ranks as they sent it, and the same Q in the order of the heads.
    gathering = (
        sizes.bytes(sizes.query) / sizes.query_chunks * (2 * sizes.tensor + 1) if sizes.tensor > 1 else 0.0
    )
    share = gsa.indexer_loss_row_fraction / sizes.tensor
    if phase.attention == "sparse" and gathers(config, phase):
        heads += 4 * sizes.all_tokens * gsa.indexer_dim  # the sum of the keys' gradients, fp32 [B, Lw, d_I]
        lists = share * sizes.tokens / sizes.query_chunks / limits.TILE_QUERIES
        entries = min(lists * _longest_list(config), limits.LIST_LOSS_CHUNK_BYTES / (4 * limits.TILE_QUERIES))
        # For each entry: target and gradient of the score for each query of the tile, and the key's gradient, fp32.
        per_entry = 2 * sizes.value * limits.TILE_QUERIES + 4 * gsa.indexer_dim
        return max(gathering, heads + entries * per_entry)
    pairs = min(limits.LOSS_CHUNK_BYTES // 4, sizes.pairs_of_chunk * share)
    # For each pair: the target and the gradient of the score, which are fp16 in bf16 runs.
    return max(gathering, heads + loss_key_bytes(config, sizes) + pairs * 2 * sizes.value)


def loss_key_bytes(config: Config, sizes: Sizes) -> float:
    """Returns the bytes of the gradients of the indexer's keys, summed over all chunks: fp32 [B, Lw, d_I] for each part
    of the indexer's heads."""
    gsa, batch, length = config.gsa, config.train.micro_batch_size, config.train.seq_len_tokens
    programs = batch * limits.ceil_div(length, limits.GRADIENT_KEYS[sizes.value])
    parts = limits.count_key_parts(programs, gsa.indexer_heads, limits.MULTIPROCESSORS)
    return 4 * parts * sizes.all_tokens * gsa.indexer_dim


def gathered_heads(sizes: Sizes) -> float:
    """Returns the bytes gathered from all tensor-parallel ranks for one chunk of queries: Q [B, L / chunks, q tp], K
    [B, Lw, kv tp], and log-sum-exps, fp32 [B, n_h tp, L / chunks]."""
    if sizes.tensor == 1:
        return 0.0
    queries = sizes.tokens / sizes.query_chunks * sizes.tensor * (sizes.value * sizes.query + 4 * sizes.heads)
    return queries + sizes.value * sizes.all_tokens * sizes.tensor * sizes.key_value


def _list_entries(config: Config, with_room: bool = False) -> float:
    """Returns the list entries of a rank's queries, for the context-parallel rank with most entries. A tile's entries
    are the keys that its queries may select, at most its causal keys. `with_room` adds unused entries."""
    longest = _longest_list(config)

    def entries(queries: QueryChunk) -> float:
        most = queries.end if with_room and queries.end <= limits.PACKED_MASK_MAX_TOKENS else longest
        turn = min(max(most, queries.start), queries.end)  # up to here the number of causal keys is the limit
        return (turn**2 - queries.start**2) / 2 + (queries.end - turn) * most

    per_query = max(sum(entries(queries) for queries in rank) for rank in _chunks_of_ranks(config))
    return config.train.micro_batch_size * per_query / limits.TILE_QUERIES


def _longest_list(config: Config) -> int:
    """Returns the keys of a tile whose queries select no common key."""
    gsa, length = config.gsa, config.train.seq_len_tokens
    return min(max(limits.TILE_QUERIES * (gsa.k_base + gsa.local_window), gsa.dense_below), length)


def most_keys(config: Config) -> int:
    return min(max(config.gsa.k_max, config.gsa.dense_below - 1), config.train.seq_len_tokens)


def _chunks_of_ranks(config: Config) -> list[list[QueryChunk]]:
    ranks, chunks = config.parallel.context, config.parallel.context_chunks
    held = config.train.seq_len_tokens // ranks
    return [query_chunks(held, ContextSharding(rank, ranks, chunks)) for rank in range(ranks)]
