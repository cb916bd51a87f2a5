"""Ways to run a decoding step's kernels, for `bench_row_product.py --step`: order of launches, tilings, waits."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock

from gsa_hf import row_layers
from gsa_hf.decoding import FusedDecoder
from gsa_hf.row_layers import Order
from gsa_kernels.decode import joined as entry
from gsa_kernels.decode import state, triton_attend, triton_score
from gsa_kernels.row_product import op, tiling
from gsa_kernels.row_product.tiling import Tiling, default_tiling


@dataclass(frozen=True)
class Way:
    """What differs from the code as it is. The constant that a field stands for is named with it."""

    order: Order = row_layers.ORDER
    """gsa_hf/row_layers.py, ORDER"""
    reads_ahead: bool = triton_score.READ_AHEAD
    """Scores ask for old keys before they wait: decode/triton_score.py, READ_AHEAD."""
    release: triton_attend.Release = triton_attend.RELEASE
    """When attention behind a selection lets the next kernel start: decode/triton_attend.py, RELEASE."""
    kept_release: triton_attend.Release = triton_attend.KEPT_RELEASE
    """The same of attention that keeps its selection: decode/triton_attend.py, KEPT_RELEASE."""
    joined: Tiling = entry.DEFAULT_TILING
    """decode/triton_joined.py, DEFAULT_TILING"""
    indexer: Tiling = entry.INDEXER_TILING
    """Of the indexer's rows by themselves: decode/joined.py, INDEXER_TILING."""
    products: dict[str, Tiling] = field(default_factory=dict)
    """By name, out, gate_up, down: row_product/tiling.py, default_tiling."""
    eviction: str = tiling.EVICTION
    """Of weights: row_product/tiling.py, EVICTION."""
    parts: int = state.PARTS
    """Into which attention behind a selection cuts the keys of a head: decode/state.py, PARTS."""
    kept_parts: int = state.KEPT_PARTS
    """The same of attention that keeps its selection: decode/state.py, KEPT_PARTS."""
    kept_tile: triton_attend.Tile = triton_attend.KEPT_TILE
    """Of attention that keeps its selection: decode/triton_attend.py, KEPT_TILE."""
    long_tile: triton_attend.Tile = triton_attend.LONG_TILE
    """Of attention behind a selection: decode/triton_attend.py, LONG_TILE."""

    def with_product(self, name: str, tiling: Tiling) -> "Way":
        return replace(self, products={**self.products, name: tiling})

    def differences(self) -> list[str]:
        """A line for each field that differs from the code as it is."""
        plain = Way()
        return [
            f"{each.name}: {getattr(self, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name)
        ]


Change = Callable[[Way], Way]


def both(*changes: Change) -> Change:
    def change(way: Way) -> Way:
        for each in changes:
            way = each(way)
        return way

    return change


def groups() -> dict[str, dict[str, Change]]:
    """Changes by what they are about: of each group the fastest one is kept before the next group is tried."""

    def order(heads: Any, gate: Any) -> Change:
        return lambda way: replace(way, order=Order(heads, gate))

    def product(name: str, *tiling: int) -> Change:
        return lambda way: way.with_product(name, Tiling(*tiling))

    def changed(**changes: Any) -> Change:
        return lambda way: replace(way, **changes)

    at_wait = changed(release="wait", kept_release="wait")
    return {
        "order": {
            "heads beside scores": order("scores", "heads"),
            "heads beside bin": order("bin", "heads"),
            "gate beside attention": both(order("front", "attention"), at_wait),
            "heads beside scores, gate beside attention": both(order("scores", "attention"), at_wait),
            "heads beside bin, gate beside attention": both(order("bin", "attention"), at_wait),
        },
        "scores": {"old keys before the wait": changed(reads_ahead=True)},
        "out": {"4 rows": product("out", 4, 4), "16 rows, 8 warps": product("out", 16, 8)},
        "weights": {"evicted first": changed(eviction="evict_first")},
        "gate_up": {
            "4 rows, 8 warps": product("gate_up", 4, 8),
            "2 rows": product("gate_up", 2, 4),
            "4 rows, 8 warps, 264 programs": product("gate_up", 4, 8, 264),
        },
        "attention behind a selection": {
            "16 parts": changed(parts=16),
            "128 keys, 8 warps": changed(long_tile=triton_attend.Tile(128, 8, 1)),
        },
    }


def applied(way: Way, decoder: FusedDecoder) -> ExitStack:
    """While it is open, the decoder's steps are launched and captured so."""
    config = decoder.config
    heads, hidden, ffn = config.num_attention_heads, config.hidden_size, config.intermediate_size
    sizes = {
        "out": (heads * config.head_dim, hidden, False),
        "gate_up": (hidden, ffn, True),
        "down": (ffn, hidden, False),
    }
    tilings = {sizes[name]: each for name, each in way.products.items()}

    def chosen(batch: int, columns: int, count: int, gated: bool) -> Tiling:
        return tilings.get((columns, count, gated)) or default_tiling(batch, columns, count, gated)

    changed = ExitStack()
    for where, name, value in (
        (row_layers, "ORDER", way.order),
        (triton_score, "READ_AHEAD", way.reads_ahead),
        (triton_attend, "RELEASE", way.release),
        (triton_attend, "KEPT_RELEASE", way.kept_release),
        (triton_attend, "LONG_TILE", way.long_tile),
        (tiling, "EVICTION", way.eviction),
        (triton_attend, "KEPT_TILE", way.kept_tile),
        (state, "PARTS", way.parts),
        (state, "KEPT_PARTS", way.kept_parts),
        (entry, "DEFAULT_TILING", way.joined),
        (entry, "INDEXER_TILING", way.indexer),
        (op, "default_tiling", chosen),
    ):
        changed.enter_context(mock.patch.object(where, name, value))
    workspace = decoder._workspace
    if (way.parts, way.kept_parts) != (Way.parts, Way.kept_parts) and workspace is not None:
        other = state.new_workspace(
            1,
            workspace.scores.shape[1],
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            device=workspace.scores.device,
        )
        changed.enter_context(mock.patch.object(decoder, "_workspace", other))
    return changed
