"""Compares the joined product, fused with the entry to decoding's attention, with its reference."""

from typing import Any

import pytest
import torch
from covering import covered

pytest.importorskip("triton")

from gsa_kernels.decode import entry_reference as reference
from gsa_kernels.decode import joined
from gsa_kernels.decode.triton_joined import DEFAULT_TILING, PairTiling
from gsa_kernels.row_product.reference import Norm

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU_ONLY = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
ROOM, LENGTH, SLOT = 7, 4, 5


def make(
    hidden: int,
    heads: tuple[int, int, int],
    gates: tuple[bool, bool],
    indexer: tuple[int, int],
    channels: tuple[int, int],
    bias: bool,
    dtype: torch.dtype,
    index_norms: bool = False,
) -> tuple[dict[str, Any], reference.EntryCache]:
    """Return the arguments without the cache, and the cache. heads: of queries, of keys, size; indexer: heads, size."""
    generator = torch.Generator().manual_seed(hidden + channels[0])

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)

    (query_heads, kv_heads, dim), (value_gate, gate), (index_heads, index_dim) = heads, gates, indexer
    sizes = reference.EntrySizes(
        query_heads * dim,
        kv_heads * dim,
        value_gate * kv_heads * dim,
        gate * query_heads * dim,
        index_heads,
        dim,
        index_dim,
        eps=1e-5,
    )
    rows = sizes.width + 5
    product = reference.JoinedProduct(
        normal(rows, hidden) * hidden**-0.5,
        Norm(1 + 0.1 * normal(hidden), 1e-5),
        normal(rows) if bias else None,
        (normal(index_dim), normal(index_dim)) if index_norms and index_heads else None,
    )
    turned, index_turned = channels if index_heads else (channels[0], 0)
    counts = (turned, turned, index_turned, index_turned)
    halves = [normal(ROOM + 1, count // 2) for count in counts]
    table = reference.AngleTable(
        torch.cat([half.repeat(1, 2) for half in halves], -1),
        torch.tensor([LENGTH], dtype=torch.int32, device=DEVICE),
        turned,
        index_turned,
    )
    given = {
        "x": 3 * normal(1, hidden), "product": product, "sizes": sizes, "table": table,
        "slot": torch.tensor([SLOT], device=DEVICE),
    }  # fmt: skip
    index_keys = normal(1, ROOM, index_dim) if index_heads else None
    k, v = normal(1, kv_heads, ROOM, dim), normal(1, kv_heads, ROOM, dim)
    return given, reference.EntryCache(k, v, index_keys)


WHOLE = (("heads", "gate", "index"),)
TURNS = PairTiling(2, 5)
"""Five programs with several tiles each."""


def check(options: dict[str, Any], tiling: PairTiling, groups: tuple[tuple[str, ...], ...] = WHOLE) -> None:
    """Compute the projection with one kernel launch for each group of its sections (`groups`). A launch may overlap
    with the previous one. Compare the results and the whole cache with the reference."""
    given, cache = make(**options)
    copy = reference.EntryCache(*(None if each is None else each.clone() for each in cache))
    arrivals, found = torch.zeros(1, dtype=torch.int32, device=DEVICE), None
    for group in groups:
        beside = found is not None
        part = joined.Part(group, found, beside, arrivals=None if beside else arrivals)
        found = joined.enter_row(**given, cache=cache, tiling=tiling, part=part)
    assert found is not None
    assert arrivals.item() == 0
    wanted = reference.enter_row(**given, cache=copy)
    # The reference rounds to bf16 after each of up to four operations.
    rtol = 1e-5 if options["dtype"] == torch.float32 else 4 * 2**-8
    for one, other in zip((*found, *cache), (*wanted, *copy), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=rtol, atol=4 * rtol)


@covered(
    "options",
    hidden=[16, 40],
    gates=[(False, False), (True, False), (True, True)],
    indexer=[(0, 24), (1, 128), (3, 22), (8, 24)],
    channels=[(16, 0), (32, 8), (32, 22)],
    bias=[False, True],
    dtype=[torch.float32, torch.bfloat16],
    index_norms=[False, True],
    heads=[(4, 2, 32), (2, 1, 256)],
    tiling=[DEFAULT_TILING, PairTiling(4, 528), PairTiling(16, 528), TURNS],
)
def test_joined_product(options: dict[str, Any]) -> None:
    options = dict(options)
    check(tiling=options.pop("tiling"), options=options)


@pytest.mark.parametrize(
    "groups",
    [(("index",), ("gate", "heads")), (("heads",), ("gate", "index")), (("index",), ("heads",), ("gate",))],
)
def test_parts_of_the_joined_product(groups: tuple[tuple[str, ...], ...]) -> None:
    options: dict[str, Any] = {"hidden": 40, "heads": (4, 2, 32), "gates": (True, True), "indexer": (3, 22)}
    options |= {"channels": (32, 22), "bias": True, "dtype": torch.float32}
    check(options | {"index_norms": "index" in groups[0]}, TURNS, groups)


def test_a_counter_starts_again() -> None:
    options: dict[str, Any] = {"hidden": 16, "heads": (4, 2, 32), "gates": (False, False), "indexer": (0, 24)}
    given, cache = make(**options, channels=(16, 0), bias=False, dtype=torch.float32)
    counter = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    joined.enter_row(**given, cache=cache, part=joined.Part(("heads",), restarts=counter))
    assert counter.item() == 0


@pytest.mark.parametrize("tiling", [DEFAULT_TILING, PairTiling(4, 264)], ids=str)
@pytest.mark.parametrize("marked", [pytest.param(None, marks=GPU_ONLY)])
def test_sizes_of_a_model(tiling: PairTiling, marked: None) -> None:
    sizes = {"hidden": 2048, "heads": (16, 4, 128), "indexer": (8, 64), "channels": (128, 64)}
    options = sizes | {"gates": (True, True), "bias": False, "dtype": torch.bfloat16}
    for index_norms in (False, True):
        check(options | {"index_norms": index_norms}, tiling)


def replaced(given: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    return {name: given[name]._replace(**changes)}


def test_what_it_does_not_take() -> None:
    options: dict[str, Any] = {"hidden": 32, "heads": (4, 2, 32), "gates": (True, True), "indexer": (2, 24)}
    given, cache = make(**options, channels=(32, 24), bias=False, dtype=torch.float32)
    counter = torch.zeros(1, dtype=torch.int32)
    for changes, words in [
        ({"x": torch.zeros(2, 32)}, r"x has shape \(2, 32\)"),
        ({"x": torch.zeros(1, 20)}, "x has 20 columns"),
        (replaced(given, "product", weight=torch.zeros(8, 32)), "product.weight has 8 rows"),
        (replaced(given, "product", bias=torch.zeros(8)), "product.bias"),
        (replaced(given, "product", index_norms=(torch.zeros(24), torch.zeros(8))), r"index_norms\[1\]"),
        (
            replaced(given, "product", index_norms=(torch.zeros(24, device=DEVICE),) * 2),
            "part.arrivals is None",
        ),
        (replaced(given, "sizes", index_dim=25), "head size is 25; pass an even"),
        (replaced(given, "table", channels=16), "table.values"),
        (replaced(given, "table", channels=40, index_channels=16), "table.channels is 40"),
        ({"slot": torch.tensor([1, 2])}, "slot has shape"),
        ({"cache": cache._replace(index_keys=None)}, "cache.index_keys is None with an indexer"),
        ({"cache": cache._replace(k=cache.k.bfloat16())}, "cache.k is torch.bfloat16"),
        ({"part": joined.Part(("q",))}, "part.sections is"),
        ({"part": joined.Part(())}, "part.sections is"),
        (
            {"part": joined.Part(("heads",), beside=True, restarts=counter)},
            "pass it to a part that waits first",
        ),
        ({"part": joined.Part(("heads",), waits=False)}, "part.waits is False with part.beside False"),
    ]:
        with pytest.raises(ValueError, match=words):
            joined.enter_row(**({**given, "cache": cache} | changes))
