"""Tests that bench_peers.py reports peers that are missing or wrong, and the selections that it makes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import bench_peers
import cases
import harness
import peer_attention
import pytest
import torch
from peer_attention import PEERS, Peer, Runs, Selected, select_blocks, select_nsa_blocks

from gsa_kernels.packed_mask import unpack_mask

LENGTH, KEYS = 512, 256


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float32}.items():
        monkeypatch.setattr(cases, name, value)
    monkeypatch.setattr(harness, "require_cuda", lambda: None)
    monkeypatch.setattr(bench_peers, "CHECKED_LENGTH", LENGTH)


def test_a_missing_peer_has_a_row_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*(name for name, peer in PEERS.items() if peer.needs[0] != "torch"), bench_peers.TOP_K]
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--out", str(tmp_path), "--only", *names])
    assert bench_peers.main() == 0
    rows = json.loads((tmp_path / "bench_peers.json").read_text())["rows"]
    assert [row["peer"] for row in rows] == names
    assert all("not installed: pip install" in row["note"] and row["forward_ms"] is None for row in rows)


@pytest.mark.parametrize("wrong", ["", "output", "gradient", "NaN"])
def test_the_check_finds_a_wrong_result(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--out", str(tmp_path)])
    report = harness.Report("some", harness.parser(None).parse_args())

    def plain(inputs: cases.AttentionInputs, selected: Selected) -> Runs:
        mask = unpack_mask(selected.words[0], selected.length)

        def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            logits = torch.einsum("blhd,bsd->bhls", q, k[:, :, 0]) * q.shape[3] ** -0.5
            probs = logits.masked_fill(~mask, -torch.inf).softmax(-1)
            return torch.einsum("bhls,bsd->blhd", probs, v[:, :, 0])

        return Runs(inputs, attention)

    def peer(inputs: cases.AttentionInputs, selected: Selected) -> Runs:
        right = plain(inputs, selected).attention
        changes = {
            "": right,
            "output": lambda q, k, v: right(q, k, v.roll(1, 1)),
            "gradient": lambda q, k, v: right(q, k.detach() + 0 * k, v),
            "NaN": lambda q, k, v: right(q, k, v * torch.nan),
        }
        return Runs(inputs, changes[wrong])

    tested = Peer("", peer, select_blocks, cases.Shape("tiny", 2, 1, 16))
    monkeypatch.setattr(peer_attention, "ours", plain)
    found = bench_peers.attempt(bench_peers.check, report, "peer", tested, KEYS)
    assert report.failures == []
    assert ("wrong result" in found) if wrong else found is None


@pytest.mark.parametrize("select", [select_blocks, select_nsa_blocks])
def test_selected_blocks_are_causal_and_as_many_as_asked(select: Callable[[int, int], Selected]) -> None:
    mask = unpack_mask(select(LENGTH, KEYS).words[0], LENGTH)
    assert not mask.triu(1).any()
    assert mask.diagonal().all()
    counts, visible = mask.sum(1), torch.arange(1, LENGTH + 1)
    assert (counts[:KEYS] == visible[:KEYS]).all()
    assert ((counts > KEYS // 2) & (counts <= KEYS))[KEYS:].all()
