"""Ways to run a decoding step's kernels, for `bench_row_product.py --step`: order of launches, tilings, waits."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from gsa_hf import row_layers
from gsa_hf.decoding import FusedDecoder
from gsa_hf.row_layers import Order
from gsa_kernels.decode import joined as entry
from gsa_kernels.decode import state, triton_attend, triton_score
from gsa_kernels.row_product import op
from gsa_kernels.row_product.tiling import Tiling, default_tiling


@dataclass(frozen=True)
class Way:
    """What differs from the code as it is."""

    order: Order = row_layers.ORDER
    reads_ahead: bool = triton_score.READ_AHEAD
    """Scores ask for old keys before they wait."""
    releases_at_wait: bool = triton_attend.RELEASE_AT_WAIT
    """Attention lets the next kernel start as soon as its wait is over."""
    joined: Tiling = entry.DEFAULT_TILING
    indexer: Tiling = entry.INDEXER_TILING
    """Of the indexer's rows by themselves."""
    products: dict[str, Tiling] = field(default_factory=dict)
    """By name: out, gate_up, down."""
    parts: int = 0
    """Into which attention cuts the keys of a head; 0: as it does by itself."""
    settled_tile: triton_attend.Tile = triton_attend.SETTLED_TILE
    keys_before_wait: bool = True
    """Attention that keeps its selection."""

    def with_product(self, name: str, tiling: Tiling) -> "Way":
        return replace(self, products={**self.products, name: tiling})


Change = Callable[[Way], Way]


def groups() -> dict[str, dict[str, Change]]:
    """Changes by what they are about: of each group the fastest one is kept before the next group is tried."""

    def order(heads: Any, gate: Any) -> Change:
        return lambda way: replace(way, order=Order(heads, gate))

    def product(name: str, *tiling: int) -> Change:
        return lambda way: way.with_product(name, Tiling(*tiling))

    def tiled(what: str, *tiling: int) -> Change:
        return lambda way: replace(way, **{what: Tiling(*tiling)})  # type: ignore[arg-type]

    return {
        "order": {
            "gate beside attention": order("front", "attention"),
            "heads beside scores": order("scores", "heads"),
            "heads beside bin": order("bin", "heads"),
            "heads beside scores, gate beside attention": order("scores", "attention"),
            "heads beside bin, gate beside attention": order("bin", "attention"),
        },
        "scores": {"old keys before the wait": lambda way: replace(way, reads_ahead=True)},
        "attention releases": {"at the wait": lambda way: replace(way, releases_at_wait=True)},
        "attention": {
            "16 parts": lambda way: replace(way, parts=16),
            "64 parts": lambda way: replace(way, parts=64),
            "tiles of 128 keys, 4 warps": lambda way: replace(
                way, settled_tile=triton_attend.Tile(128, 4, 1)
            ),
            "no keys before the wait": lambda way: replace(way, keys_before_wait=False),
        },
        "indexer": {
            "1 pair": tiled("indexer", 1, 4),
            "1 pair, 2 warps": tiled("indexer", 1, 2),
            "4 pairs, 8 warps": tiled("indexer", 4, 8),
        },
        "joined": {
            "2 pairs, all at once": tiled("joined", 2, 4),
            "4 pairs": tiled("joined", 4, 4),
            "2 pairs, 396 programs": tiled("joined", 2, 4, 396),
            "2 pairs, 264 programs": tiled("joined", 2, 4, 264),
            "4 pairs, 8 warps, 264 programs": tiled("joined", 4, 8, 264),
        },
        "gate_up": {
            "4 rows, 8 warps, 264 programs": product("gate_up", 4, 8, 264),
            "2 rows": product("gate_up", 2, 4),
            "2 rows, 2 warps": product("gate_up", 2, 2),
            "8 rows, 8 warps": product("gate_up", 8, 8),
        },
        "down": {
            "2 rows, 264 programs": product("down", 2, 4, 264),
            "4 rows, 8 warps": product("down", 4, 8),
            "2 rows": product("down", 2, 4),
            "1 row, 1 warp": product("down", 1, 1),
        },
        "out": {
            "4 rows, 2 warps": product("out", 4, 2),
            "16 rows, 8 warps": product("out", 16, 8),
            "4 rows": product("out", 4, 4),
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
    tilings = {sizes[name]: tiling for name, tiling in way.products.items()}

    def chosen(batch: int, columns: int, count: int, gated: bool) -> Tiling:
        return tilings.get((columns, count, gated)) or default_tiling(batch, columns, count, gated)

    made = decoder._layer_cache

    def made_late(place: int, leader: int, lengths: Any, settled: bool) -> Any:
        return made(place, leader, lengths, settled=False)

    changed = ExitStack()
    for where, name, value in (
        (row_layers, "ORDER", way.order),
        (triton_score, "READ_AHEAD", way.reads_ahead),
        (triton_attend, "RELEASE_AT_WAIT", way.releases_at_wait),
        (triton_attend, "SETTLED_TILE", way.settled_tile),
        (entry, "DEFAULT_TILING", way.joined),
        (entry, "INDEXER_TILING", way.indexer),
        (op, "default_tiling", chosen),
    ):
        changed.enter_context(mock.patch.object(where, name, value))
    if not way.keys_before_wait:
        changed.enter_context(mock.patch.object(decoder, "_layer_cache", made_late))
    workspace = decoder._workspace
    if way.parts and workspace is not None:
        other = state.new_workspace(
            1,
            workspace.scores.shape[1],
            heads=heads,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            device=workspace.scores.device,
            splits=way.parts,
        )
        changed.enter_context(mock.patch.object(decoder, "_workspace", other))
    return changed
