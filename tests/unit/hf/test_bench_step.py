"""What `bench_row_product.py --step` compares ways by, on tiny models: a state put back gives the same logits, and a
wrong way is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import bench_generate
import bench_row_product
import step_state
from step_state import hold, walk
from step_variants import Way, applied, groups

from gsa_hf import row_layers
from gsa_hf.decoding import FusedDecoder
from helpers.generation_models import make_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, where kernels are interpreted")


def opened(name: str) -> bench_row_product.Subject:
    model = make_model(name, max_position_embeddings=64)
    model.set_attn_implementation("gsa")
    decoder = FusedDecoder(model.requires_grad_(False), products="rows")
    decoder.open(1, 40)
    bench_generate.fill(decoder)
    decoder.tokens.fill_(5)
    decoder.place(32, decoder.starts.clone())
    return bench_row_product.Subject(name, decoder, hold(decoder))


@pytest.fixture(scope="module")
def subject() -> Iterator[bench_row_product.Subject]:
    """A step that selects and one that does not are a walk."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(step_state, "KEPT_STEPS", 1)
        found = opened("blocks")
        assert bench_row_product.first_walk(found) is None
        yield found


def test_steps_move_on(subject: bench_row_product.Subject) -> None:
    """Each of a walk's steps stands elsewhere, and at its end so does the decoder."""
    with torch.no_grad():
        logits = walk(subject.state, subject.decoder.step)
    assert int(subject.decoder.slot) == subject.state.filled + len(logits)
    assert all(not torch.equal(one, other) for one, other in pairwise(logits))


def test_a_decoder_that_stands_elsewhere_is_put_back(subject: bench_row_product.Subject) -> None:
    """Also with another token, other averages, and counters that a broken kernel has left."""
    decoder = subject.decoder
    with torch.no_grad():
        decoder.place(35, decoder.starts.clone())
        decoder.tokens.fill_(9)
        decoder._workspace.histogram.fill_(3)
        for layer in decoder.model.model.layers:
            layer.self_attn.indexer.variance_ema.fill_(7.0)
        decoder.buffers[0].k[:, :, 33] = 2.0
        assert bench_row_product.obstacle(subject, [walk(subject.state, decoder.step)]) == (0.0, None)
        assert subject.state.moved(decoder) == []


def test_what_moved_is_named(subject: bench_row_product.Subject) -> None:
    key = subject.decoder.buffers[1].k[0, 0, 3]
    before = key.clone()
    key.mul_(2)
    assert subject.state.moved(subject.decoder) == ["cache k of layer 1"]
    key.copy_(before)


@pytest.mark.parametrize("name", ["heads beside scores", "heads beside bin, gate beside attention"])
def test_another_order_is_right(subject: bench_row_product.Subject, name: str) -> None:
    way = groups()["order"][name](Way())
    with torch.no_grad(), applied(way, subject.decoder):
        found = walk(subject.state, subject.decoder.step)
    error, wrong = bench_row_product.obstacle(subject, [found])
    assert wrong is None
    assert error < 1e-5  # fp32


def test_a_wrong_way_is_found(subject: bench_row_product.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate is left out of one layer; and a graph that gives a bit else."""
    leave = row_layers.leave

    def ungated(h: torch.Tensor, attended: Any, *rest: Any) -> torch.Tensor:
        out = attended.out if isinstance(attended, row_layers.Attended) else attended
        return leave(h, out, *rest)

    monkeypatch.setattr(row_layers, "leave", ungated)
    way = groups()["order"]["gate beside attention"](Way())
    with torch.no_grad(), applied(way, subject.decoder):
        found = walk(subject.state, subject.decoder.step)
    assert "relative error" in str(bench_row_product.obstacle(subject, [found])[1])
    other = [each * (1 + 1e-6) for each in subject.wanted]
    assert "read too early" in str(bench_row_product.obstacle(subject, [subject.wanted, other])[1])
    nothing = [each * float("nan") for each in subject.wanted]
    assert "relative error" in str(bench_row_product.obstacle(subject, [subject.wanted, nothing])[1])


def test_ways_say_what_differs() -> None:
    assert Way().differences() == []
    for changes in groups().values():
        for change in changes.values():
            assert change(Way()).differences()
