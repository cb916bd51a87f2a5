"""Tests CUDA graphs in which a kernel may start before the previous one has ended. Such a graph must give the same bits
as kernels that run one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

import bench_generate
import harness
import yaml
from triton.runtime.jit import JITFunction

from gsa_hf.decoding import FusedDecoder
from gsa_hf.generation import DecodingGraph

SHAPES = yaml.safe_load((harness.ROOT / "configs" / "gsa_1.7b.yaml").read_text(encoding="utf-8"))
FILLED, LAYERS = 8192, 4
REPLAYS = 30
"""Number of replays. There are many, because a kernel that reads too early may sometimes read the right values."""


@contextmanager
def one_by_one() -> Iterator[None]:
    """Run Triton kernels one after the other, and make the host wait for each."""
    run = JITFunction.run

    def waiting(self: Any, *args: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        launched = run(self, *args, **options)
        torch.cuda.synchronize()
        return launched

    with mock.patch.object(JITFunction, "run", waiting):
        yield


def hold(decoder: FusedDecoder) -> Callable[[], None]:
    """Copy the state that decoding steps change. Return a function that restores this state, and also sets the counters
    in the kernels' workspace to 0. The rest of the workspace needs no copy, because each step overwrites it."""
    filled = int(decoder.slot)
    written = [decoder.tokens, decoder.lengths, decoder.starts, decoder.slot]
    for buffers in decoder.buffers:
        written += [buffers.k[:, :, filled:], buffers.v[:, :, filled:]]
        if buffers.rows is not None:
            written.append(buffers.rows[:, filled:])
    for selection in decoder._selections.values():
        written += [selection.indices, selection.counts, selection.variance]
    copies = [each.clone() for each in written]
    workspace = decoder._workspace
    zeros = [] if workspace is None else [workspace.histogram, workspace.arrivals]

    def put_back() -> None:
        for each, copy in zip(written, copies, strict=True):
            each.copy_(copy)
        for each in zeros:
            each.zero_()

    return put_back


def walk(step: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    return [step().clone() for _ in range(4)]


@pytest.mark.parametrize("indexer_norm", [False, True])
@torch.no_grad()
def test_graphs_give_the_bits_of_single_launches(indexer_norm: bool) -> None:
    """Every second layer selects. The layer after it takes the selection."""
    torch.manual_seed(0)
    config = bench_generate.model_config(bench_generate.GSA, LAYERS, FILLED + 64, SHAPES)
    config.update({"vocab_size": 1024, "index_topk_freq": 2, "indexer_norm": indexer_norm})
    decoder = FusedDecoder(bench_generate.make_model(config, "cuda"), products="rows")
    decoder.open(1, FILLED + 64)
    bench_generate.fill(decoder)
    decoder.place(FILLED, decoder.starts.clone())
    bench_generate.set_averages(decoder)
    put_back = hold(decoder)
    with one_by_one():
        wanted = walk(decoder.step)
    assert all(torch.isfinite(each).all() for each in wanted)
    assert not torch.equal(wanted[0], wanted[1])
    put_back()
    graph = DecodingGraph(decoder)
    for _ in range(REPLAYS):
        put_back()
        for found, expected in zip(walk(graph.step), wanted, strict=True):
            assert torch.equal(found, expected)
