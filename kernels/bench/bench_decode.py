"""GSA decoding beside dense decoding: one token per sequence, each side in a CUDA graph, on one CUDA device.

    python kernels/bench/bench_decode.py [--length 131072] [--batches 1 16] [--json FILE]

A graph runs the attention of several layers in a row, each with its own caches, so that nothing is found in the
second-level cache; times are medians in microseconds per layer. Dense: every torch SDPA backend that takes the
case, and a split-key Triton kernel of the same structure as GSA's. step: scores, selection and attention. block:
one selection for 32 tokens, so attention + (step - attention) / 32. bound: the bytes that must be read at the
bandwidth that a device copy reaches. Shapes: 32 query heads, 8 key-value heads of 128, 4 indexer heads of 64, bf16.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gsa_kernels import decode_attention, select_top_k
from gsa_kernels.decode.op import decode_attend, decode_step
from gsa_kernels.decode.state import DecodeSelection, DecodeWorkspace, new_selection, new_workspace

HEADS, KV_HEADS, HEAD_SIZE, INDEXER_HEADS, INDEXER_SIZE = 32, 8, 128, 4, 64
BLOCK = 32
REPLAYS = 15
CACHE_BYTES = 10e9  # of all layers of a graph together
MAX_LAYERS = 16
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@dataclass
class Layer:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    q_idx: torch.Tensor
    k_idx: torch.Tensor
    weights: torch.Tensor
    biases: dict[str, torch.Tensor]
    selection: DecodeSelection
    out: torch.Tensor


def make_layer(batch: int, length: int, k_max: int) -> Layer:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return Layer(
        q=draw(batch, HEADS, HEAD_SIZE),
        k=draw(batch, length, KV_HEADS, HEAD_SIZE),
        v=draw(batch, length, KV_HEADS, HEAD_SIZE),
        gate=draw(batch, HEADS, HEAD_SIZE),
        q_idx=draw(batch, INDEXER_HEADS, INDEXER_SIZE),
        k_idx=draw(batch, length, INDEXER_SIZE),
        weights=draw(batch, INDEXER_HEADS),
        biases={"score_bias": draw(INDEXER_HEADS), "weight_bias": draw(INDEXER_HEADS)},
        selection=new_selection(batch, k_max, device="cuda"),
        out=torch.empty(batch, HEADS, HEAD_SIZE, device="cuda", dtype=torch.bfloat16),
    )


def median_us(run: Callable[[Layer], object], layers: list[Layer]) -> float:
    """Time of one layer in a graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and plans; a capture must not
        run(layers[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            run(layer)
    times = []
    for _ in range(3 + REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(layers))
    return statistics.median(times[3:])


def sdpa(backend: SDPBackend, layer: Layer) -> torch.Tensor:
    q, k, v = layer.q[:, :, None], layer.k.transpose(1, 2), layer.v.transpose(1, 2)
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]


@triton.jit
def _dense_part_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    partial_ptr,
    stats_ptr,
    length,
    scale_log2,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One part of the keys of one key-value head: all tensors contiguous, length a multiple of SPLITS * KEYS."""
    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    rows, dims = tl.arange(0, 16), tl.arange(0, D)
    head_slot = batch * heads + head
    row_ok = (rows < GROUP)[:, None]
    q = tl.load(q_ptr + (head_slot * GROUP + rows[:, None]) * D + dims[None, :], mask=row_ok, other=0.0)
    first = (batch * length + split * (length // SPLITS)) * heads + head
    offsets = tl.arange(0, KEYS)[:, None] * (heads * D) + dims[None, :]
    maximum = tl.full([16], -1.0e20, tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    k_ptrs = k_ptr + first * D + offsets
    v_ptrs = v_ptr + first * D + offsets
    for _ in range(0, length // SPLITS, KEYS):
        logits = tl.dot(q, tl.trans(tl.load(k_ptrs)))
        new_maximum = tl.maximum(maximum, tl.max(logits, 1) * scale_log2)
        probs = tl.exp2(logits * scale_log2 - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(tl.bfloat16), tl.load(v_ptrs), acc * rescale[:, None])
        maximum = new_maximum
        k_ptrs += KEYS * heads * D
        v_ptrs += KEYS * heads * D
    slot = (head_slot * GROUP + rows) * SPLITS + split
    tl.store(partial_ptr + slot[:, None] * D + dims[None, :], acc / total[:, None], mask=row_ok)
    tl.store(stats_ptr + slot, maximum + tl.log2(total), mask=rows < GROUP)


@triton.jit
def _dense_join_kernel(partial_ptr, stats_ptr, out_ptr, D: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, D)
    lse = tl.load(stats_ptr + head * SPLITS + splits)
    shares = tl.exp2(lse - tl.max(lse))
    parts = tl.load(partial_ptr + (head * SPLITS + splits[:, None]) * D + dims[None, :])
    out = tl.sum(parts * shares[:, None], 0) / tl.sum(shares)
    tl.store(out_ptr + head * D + dims, out.to(out_ptr.dtype.element_ty))


def dense_decode(layer: Layer, partial: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """The dense counterpart, without gate. partial fp32 [B, H, splits, D], stats fp32 [B, H, splits]."""
    batch, length = layer.k.shape[:2]
    splits = partial.shape[2]
    _dense_part_kernel[(splits, KV_HEADS, batch)](
        layer.q,
        layer.k,
        layer.v,
        partial,
        stats,
        length,
        HEAD_SIZE**-0.5 * 1.4426950408889634,
        GROUP=HEADS // KV_HEADS,
        D=HEAD_SIZE,
        KEYS=64,
        SPLITS=splits,
        num_warps=4,
        num_stages=3,
    )
    _dense_join_kernel[(batch * HEADS,)](partial, stats, layer.out, D=HEAD_SIZE, SPLITS=splits)
    return layer.out


def error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((value.double() - wanted).norm() / wanted.norm()).item()


def verdict(layer: Layer, workspace: DecodeWorkspace, run: Callable[[Layer], object], k: int) -> None:
    """Exact selection given the kernel's scores; output to bf16's rounding. Sequence 0, in fp64."""
    run(layer)
    length = layer.k.shape[1]
    every = torch.ones(1, 1, length, dtype=torch.bool, device="cuda")
    budget = torch.full((1, 1), k, device="cuda")
    wanted = select_top_k(workspace.scores[:1, None, :length], every, budget)[0, 0]
    assert torch.equal(wanted.nonzero()[:, 0].int(), layer.selection.indices[0, :k]), "wrong selection"
    lengths = torch.full((1,), k, device="cuda")
    exact = decode_attention(
        layer.q[:1].double(),
        layer.k[:1, wanted].double(),
        layer.v[:1, wanted].double(),
        lengths,
        torch.ones(1, k, dtype=torch.bool, device="cuda"),
        output_gate_logits=layer.gate[:1].double(),
    )
    assert error(layer.out[:1], exact) < 1e-2, "wrong output"


def bandwidth() -> float:
    """Bytes per microsecond of a device copy, read and written."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), warmup=10, rep=60, return_mode="median")
    return 2 * source.nbytes / (ms * 1e3)


def measure(batch: int, length: int, k: int, bytes_per_us: float) -> dict[str, float]:
    per_layer = batch * length * 2 * (2 * KV_HEADS * HEAD_SIZE + INDEXER_SIZE)
    layers = [
        make_layer(batch, length, k) for _ in range(max(2, min(MAX_LAYERS, int(CACHE_BYTES / per_layer))))
    ]
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    ema = torch.zeros((), device="cuda")
    workspace = new_workspace(
        batch, length, heads=HEADS, kv_heads=KV_HEADS, head_size=HEAD_SIZE, device="cuda"
    )

    def step(x: Layer) -> None:
        decode_step(
            x.q,
            x.k,
            x.v,
            x.q_idx,
            x.k_idx,
            x.weights,
            lengths,
            ema,
            x.selection,
            workspace,
            **x.biases,
            k_base=k,
            k_min=min(256, k),
            k_max=k,
            mode="inverse",
            output_gate_logits=x.gate,
            out=x.out,
        )

    def attend(x: Layer) -> None:
        decode_attend(
            x.q,
            x.k,
            x.v,
            lengths,
            x.selection,
            workspace,
            local_window=BLOCK,
            output_gate_logits=x.gate,
            out=x.out,
        )

    verdict(layers[0], workspace, step, k)
    row = {"batch": batch, "step": median_us(step, layers), "attend": median_us(attend, layers)}
    row["block"] = row["attend"] + (row["step"] - row["attend"]) / BLOCK

    dense: dict[str, float] = {}
    exact = decode_attention(
        layers[0].q[:1].float(),
        layers[0].k[:1].float(),
        layers[0].v[:1].float(),
        lengths[:1],
        torch.ones(1, length, dtype=torch.bool, device="cuda"),
    )
    for splits in (16, 64) if batch == 1 else (4, 16):
        partial = torch.empty(batch, HEADS, splits, HEAD_SIZE, device="cuda")
        stats = torch.empty(batch, HEADS, splits, device="cuda")

        def run(x: Layer, partial: torch.Tensor = partial, stats: torch.Tensor = stats) -> torch.Tensor:
            return dense_decode(x, partial, stats)

        assert error(run(layers[0])[:1], exact) < 1e-2, "wrong dense output"
        dense[f"Triton x{splits}"] = median_us(run, layers)
    for backend in BACKENDS:
        if backend == SDPBackend.MATH and batch > 1:
            continue  # copies the cache several times over
        try:
            sdpa(backend, layers[0])
        except RuntimeError as refusal:
            print(f"  SDPA {backend.name}: {str(refusal).splitlines()[0][:80]}")
            continue
        some = layers[: 1 if backend == SDPBackend.MATH else 2]
        dense[f"SDPA {backend.name}"] = median_us(lambda x, b=backend: sdpa(b, x), some)
    name = min(dense, key=lambda key: dense[key])
    row |= dense
    row["dense bound"] = batch * length * 4 * KV_HEADS * HEAD_SIZE / bytes_per_us
    attended = batch * k * 4 * KV_HEADS * HEAD_SIZE
    row["step bound"] = (batch * length * 2 * INDEXER_SIZE + attended) / bytes_per_us
    row["attend bound"] = attended / bytes_per_us
    row["dense / step"] = dense[name] / row["step"]
    row["dense / block"] = dense[name] / row["block"]
    print(f"batch {batch}, {length} tokens, k {k}, {len(layers)} layers; fastest dense: {name}")
    for key, value in row.items():
        print(f"  {key:28} {value:10.2f}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=131072, help="tokens; a multiple of 4096")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--selected", type=int, default=2048, help="k")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    bytes_per_us = bandwidth()
    about = {
        "commit": revision.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_per_s": round(bytes_per_us / 1e6, 2),
    }
    print(about)
    rows = [measure(batch, arguments.length, arguments.selected, bytes_per_us) for batch in arguments.batches]
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
