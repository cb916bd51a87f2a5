"""Steps whose kernels are launched early, in all their orders: replays of a graph give the bits of kernels that are
launched one by one, each when the one before has ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_generate
from step_state import HeldState, hold, same_bits, walk
from step_variants import Way, applied

from gsa_hf.decoding import FusedDecoder
from gsa_hf.generation import DecodingGraphs
from gsa_hf.row_layers import Order
from gsa_kernels.decode.triton_attend import Tile
from gsa_kernels.devices import can_chain
from gsa_kernels.row_product.tiling import Tiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {
    "model": {
        "vocab_size": 1024,
        "hidden_size": 2048,
        "ffn_hidden_size": 5504,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 128,
    },
    "gsa": {"indexer_heads": 4, "indexer_dim": 64, "k_base": 1500, "k_min": 64, "k_max": 3000},
}
FILLED, LAYERS, REPLAYS = 8192, 4, 30
WAYS = {
    "as it is": Way(),
    "heads beside scores": Way(order=Order("scores", "heads")),
    "heads beside bin": Way(order=Order("bin", "heads")),
    "gate beside attention": Way(order=Order("front", "attention"), kept_release="end"),
    "gate beside attention, released at the wait": Way(
        order=Order("bin", "attention"), release="wait", kept_release="wait"
    ),
    "released at the start": Way(release="start", kept_release="start"),
    "old keys ahead": Way(reads_ahead=True),
    "all of it": Way(
        order=Order("scores", "attention"), release="wait", kept_release="wait", reads_ahead=True
    ),
    "other tilings": Way(
        release="start",
        reads_ahead=True,
        joined=Tiling(2, 4, 264),
        products={"gate_up": Tiling(4, 8, 264), "down": Tiling(2, 4), "out": Tiling(16, 8)},
        eviction="evict_first",
        parts=16,
        kept_parts=32,
        long_tile=Tile(128, 8, 1),
    ),
}


@pytest.fixture(scope="module", params=list(bench_generate.PROMISES))
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[FusedDecoder, HeldState]]:
    torch.manual_seed(0)
    with torch.no_grad():
        config = bench_generate.model_config(request.param, LAYERS, FILLED + 64, SHAPES)
        decoder = FusedDecoder(bench_generate.make_model(config, "cuda"), products="rows")
        decoder.open(1, FILLED + 64)
        bench_generate.fill(decoder)
        decoder.place(FILLED, decoder.starts.clone())
        bench_generate.set_averages(decoder)
        yield decoder, hold(decoder)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Each Triton kernel begins when all before it has ended, and ends before the host goes on."""
    run = JITFunction.run

    def waiting(self: Any, *args: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        launched = run(self, *args, **options)
        torch.cuda.synchronize()
        return launched

    with mock.patch.object(JITFunction, "run", waiting):
        yield


@pytest.mark.parametrize("name", list(WAYS))
def test_graphs_give_the_bits_of_single_launches(subject: tuple[FusedDecoder, HeldState], name: str) -> None:
    decoder, state = subject
    assert can_chain(decoder.tokens) or name == "as it is", "this device launches no kernel early"
    with applied(WAYS[name], decoder):
        with one_by_one():
            wanted = walk(state, decoder.step)
        state.put_back()
        graphs = DecodingGraphs(decoder)
        for _ in range(REPLAYS):  # inside: the graphs hold no reference to a workspace of other parts
            assert same_bits(walk(state, graphs.step), wanted)
