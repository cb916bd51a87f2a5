"""Compares the kernel between the joined projection and attention with its reference."""

from typing import Any

import pytest
import torch
from covering import covered

pytest.importorskip("triton")

from gsa_kernels.decode import entry
from gsa_kernels.decode import entry_reference as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, HKV, ROOM = 4, 2, 7


def make(
    batch: int,
    gates: tuple[bool, bool],
    index_heads: int,
    channels: int,
    index_channels: int,
    norms: bool,
    index_norms: bool,
    dtype: torch.dtype,
    size: int = 32,
    index_dim: int = 24,
) -> tuple[dict[str, Any], reference.EntryCache]:
    """Return the arguments without the cache, and the cache."""
    generator = torch.Generator().manual_seed(channels + batch)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE, dtype)

    value_gate, gate = gates
    sizes = reference.EntrySizes(
        H * size, HKV * size, value_gate * HKV * size, gate * H * size, index_heads, size, index_dim, eps=1e-5
    )
    count = 2 if index_channels else 0
    turned = [normal(batch, index_channels) for _ in range(count)]
    given = {
        "projected": normal(batch, sizes.width + 5),
        "sizes": sizes,
        "angles": reference.Angles(normal(batch, channels), normal(batch, channels), *turned),
        "slot": torch.tensor([3], device=DEVICE),
        "norms": (normal(size), normal(size)) if norms else None,
        "index_norms": (normal(index_dim), normal(index_dim)) if index_norms and index_heads else None,
    }
    index_keys = normal(batch, ROOM, index_dim) if index_heads else None
    return given, reference.EntryCache(*(normal(batch, HKV, ROOM, size) for _ in range(2)), index_keys)


@covered(
    "options",
    batch=[1, 3],
    gates=[(False, False), (True, False), (True, True)],
    index_heads=[0, 1, 3, 8],
    channels=[16, 32],
    index_channels=[0, 8, 24],
    norms=[False, True],
    index_norms=[False, True],
    dtype=[torch.float32, torch.bfloat16],
    size=[32, 256],
    index_dim=[24, 128],
)
def test_entry(options: dict[str, Any]) -> None:
    """The kernel writes only its slot of the cache."""
    given, cache = make(**options)
    copy = reference.EntryCache(*(None if each is None else each.clone() for each in cache))
    found = entry.enter_token(**given, cache=cache)
    wanted = reference.enter_token(**given, cache=copy)
    # The reference rounds to bf16 after each of up to three operations.
    rtol = 1e-5 if options["dtype"] == torch.float32 else 3 * 2**-8
    for one, other in zip((*found, *cache), (*wanted, *copy), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rtol, atol=2 * rtol)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"projected": torch.zeros(1, 64)}, "pass at least"),
        ({"slot": torch.tensor([1, 2])}, "slot has shape"),
        ({"cache": None}, "cache.index_keys is None with an indexer"),
        ({"norms": (torch.zeros(8), torch.zeros(8))}, r"norms\[0\] has shape"),
        ({"index_norms": (torch.zeros(24), torch.zeros(8))}, r"index_norms\[1\] has shape"),
        ({"angles": reference.Angles(torch.zeros(1, 40), torch.zeros(1, 40))}, "40 channels turn"),
    ],
)
def test_what_it_does_not_take(changes: dict[str, Any], words: str) -> None:
    given, cache = make(1, (True, True), 2, 32, 0, True, True, torch.float32)
    if "cache" in changes:
        changes = {"cache": cache._replace(index_keys=None)}
    on_device = {
        name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in changes.items()
    }
    with pytest.raises(ValueError, match=words):
        entry.enter_token(**({**given, "cache": cache} | on_device))
