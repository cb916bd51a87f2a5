"""Compares GSA decoding with dense decoding, one token per sequence in a CUDA graph, on one CUDA device.

    python benchmarks/bench_decode.py [--length 131072] [--batches 1 16] [--page-sizes 16 64 128]

A CUDA graph runs the attention of several layers. Each layer has its own KV cache, so that the L2 cache does not hold a
layer's keys and values from the previous run. The shapes come from configs/gsa_7b.yaml, in bf16. A time is the median
over runs, divided by the number of layers, in microseconds.
- Dense rows time the supported SDPA backends of torch, and a Triton kernel that divides the keys among programs, as the
  GSA kernel does.
- `GSA token` times scores, selection and attention. `GSA attention` times only attention.
- `bound_us` is the bytes that the row must read, divided by the bandwidth of a device copy.
- `speedup` is the time of the fastest dense row divided by the time of this row.

With `--page-sizes`, the bench instead compares GSA on a paged cache, whose pages are in random order, with GSA on a
contiguous cache. The shapes come from configs/gsa_1.7b.yaml, and the budget is fixed.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import cases
import harness
import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from gsa_kernels.decode.op import decode_attend, decode_step
from gsa_kernels.decode.state import DecodeSelection, LayerCache, new_selection, new_workspace
from gsa_kernels.reference import decode_attention, select_top_k
from gsa_kernels.types import BudgetRule, Geometry, Indexer

HEADS, KV_HEADS, HEAD_SIZE, INDEXER_HEADS, INDEXER_SIZE = 32, 8, 128, 8, 64
CACHE_BYTES = 10e9
"""Total size of the caches of all layers in a graph."""
MAX_LAYERS = 16
TOLERANCE = 1e-2
SELECTED = 2048
"""Keys per query."""
PROMISED_LENGTH = 131072
PROMISE = 5.0
"""Promised speed of `GSA token` relative to the fastest dense decoding."""
PROMISED_SLOWDOWN = 1.15
"""Largest promised ratio of the time over pages to the time over a contiguous cache."""


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    rule: BudgetRule
    geometry: Geometry


LARGE = Shape(HEADS, KV_HEADS, BudgetRule(k_base=SELECTED, k_min=256, k_max=SELECTED), Geometry())
PAGED = Shape(
    16, 4, BudgetRule(k_base=1024, k_min=256, k_max=1024, adaptive_k="off"), Geometry(local_window=64)
)

Decode = Callable[["Layer"], torch.Tensor]


@dataclass
class Layer:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    indexer: Indexer
    selection: DecodeSelection
    out: torch.Tensor
    block_table: torch.Tensor | None = None


def make_layer(batch: int, length: int, shape: Shape = LARGE) -> Layer:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return Layer(
        q=draw(batch, shape.heads, HEAD_SIZE),
        k=draw(batch, length, shape.kv_heads, HEAD_SIZE),
        v=draw(batch, length, shape.kv_heads, HEAD_SIZE),
        gate=draw(batch, shape.heads, HEAD_SIZE),
        indexer=Indexer(
            draw(batch, 1, INDEXER_HEADS, INDEXER_SIZE),
            draw(batch, length, INDEXER_SIZE),
            draw(batch, 1, INDEXER_HEADS),
            activation="relu",
        ),
        selection=new_selection(batch, shape.rule.k_max, device="cuda"),
        out=torch.empty(batch, shape.heads, HEAD_SIZE, device="cuda", dtype=torch.bfloat16),
    )


def in_pages(layer: Layer, size: int) -> Layer:
    """Copy the caches to randomly ordered pages of `size` tokens. One row of a page has the key and the value of a
    token."""
    batch, length = layer.k.shape[:2]
    table = torch.randperm(batch * length // size, device="cuda").view(batch, -1)

    def moved(rows: torch.Tensor) -> torch.Tensor:
        """Return [pages, heads, size, width] for [B, L, heads, width]."""
        pages = rows.new_empty(table.numel(), rows.shape[2], size, rows.shape[3])
        pages[table] = rows.unflatten(1, (-1, size)).transpose(2, 3)
        return pages

    k, v = moved(torch.cat((layer.k, layer.v), -1)).transpose(1, 2).chunk(2, -1)
    indexer = replace(layer.indexer, keys=moved(layer.indexer.keys[:, :, None])[:, 0])
    out = torch.empty_like(layer.out)
    return replace(layer, k=k, v=v, indexer=indexer, out=out, block_table=table.int())


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
    """One program attends to one part of the keys of one key-value head. `length` is a multiple of SPLITS * KEYS."""
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


def dense_decode(layer: Layer, partial_out: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    """Run the dense kernels without a gate. partial_out fp32 [B, H, splits, D], stats fp32 [B, H, splits]."""
    batch, length = layer.k.shape[:2]
    splits = partial_out.shape[2]
    _dense_part_kernel[(splits, KV_HEADS, batch)](
        layer.q,
        layer.k,
        layer.v,
        partial_out,
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
    _dense_join_kernel[(batch * HEADS,)](partial_out, stats, layer.out, D=HEAD_SIZE, SPLITS=splits)
    return layer.out


class Gsa:
    """Runs decoding steps of GSA, all with one workspace."""

    def __init__(self, batch: int, length: int, shape: Shape = LARGE) -> None:
        self.shape = shape
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        self.ema = torch.zeros((), device="cuda")
        self.workspace = new_workspace(
            batch, length, heads=shape.heads, kv_heads=shape.kv_heads, head_size=HEAD_SIZE, device="cuda"
        )

    def cache(self, x: Layer) -> LayerCache:
        return LayerCache(x.k, x.v, self.lengths, x.selection, self.workspace, block_table=x.block_table)

    def step(self, x: Layer) -> torch.Tensor:
        rule, geometry = self.shape.rule, self.shape.geometry
        return decode_step(x.q, x.indexer, self.cache(x), rule, self.ema, geometry, x.gate, x.out)

    def attend(self, x: Layer) -> torch.Tensor:
        """Attend to the keys that `step` selected."""
        return decode_attend(x.q, self.cache(x), 0, x.gate, x.out)


def check_step(report: harness.Report, gsa: Gsa, layer: Layer) -> None:
    """Check the first sequence: the selection is exact for the kernel's scores, and the output agrees with fp64."""
    output = gsa.step(layer)
    length, k = layer.k.shape[1], SELECTED
    every = torch.ones(1, 1, length, dtype=torch.bool, device="cuda")
    budget = torch.full((1, 1), k, device="cuda")
    chosen = select_top_k(gsa.workspace.scores[:1, None, :length], every, budget)[0, 0]
    if not torch.equal(chosen.nonzero()[:, 0].int(), layer.selection.indices[0, :k]):
        report.fail(f"batch {len(layer.q)}: the selection is not the top {k} of its scores")
    wanted = decode_attention(
        layer.q[:1].double(),
        layer.k[:1, chosen].double(),
        layer.v[:1, chosen].double(),
        torch.full((1,), k, device="cuda"),
        torch.ones(1, k, dtype=torch.bool, device="cuda"),
        output_gate_logits=layer.gate[:1].double(),
    )
    check_output(report, f"batch {len(layer.q)}, GSA", output, wanted)


def check_output(report: harness.Report, what: str, output: torch.Tensor, wanted: torch.Tensor) -> None:
    error = harness.relative_error(output[:1], wanted)
    if not error < TOLERANCE:
        report.fail(f"{what}: relative error {error:.1e}")


def dense_decoders(batch: int, layer: Layer) -> dict[str, Decode]:
    """Return the decoders that support the case, and print which do not."""
    found: dict[str, Decode] = {}
    for splits in (16, 64) if batch == 1 else (4, 16):
        partial_out = torch.empty(batch, HEADS, splits, HEAD_SIZE, device="cuda")
        stats = torch.empty(batch, HEADS, splits, device="cuda")
        found[f"Triton x{splits}"] = partial(dense_decode, partial_out=partial_out, stats=stats)
    for backend in cases.BACKENDS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each unused backend would print a line
                sdpa(backend, layer)
        except RuntimeError as refusal:
            print(f"batch {batch}, SDPA {backend.name}: {str(refusal).splitlines()[0]}")
            continue
        found[f"SDPA {backend.name}"] = partial(sdpa, backend)
    return found


def check_dense(report: harness.Report, decoders: dict[str, Decode], layer: Layer) -> None:
    length = layer.k.shape[1]
    wanted = decode_attention(
        layer.q[:1].float(),
        layer.k[:1].float(),
        layer.v[:1].float(),
        torch.full((1,), length, device="cuda"),
        torch.ones(1, length, dtype=torch.bool, device="cuda"),
    )
    for name, decode in decoders.items():
        check_output(report, f"batch {len(layer.q)}, {name}", decode(layer), wanted)


def count_layers(batch: int, length: int, kv_heads: int) -> int:
    per_layer = batch * length * 2 * (2 * kv_heads * HEAD_SIZE + INDEXER_SIZE)
    return max(2, min(MAX_LAYERS, int(CACHE_BYTES / per_layer)))


def decode_all(decode: Decode, layers: list[Layer]) -> None:
    for layer in layers:
        decode(layer)


def measure_pages(report: harness.Report, batch: int, length: int, sizes: list[int]) -> None:
    gsa, count = Gsa(batch, length, PAGED), count_layers(batch, length, PAGED.kv_heads)
    layers = {"contiguous": [make_layer(batch, length, PAGED) for _ in range(count)]}
    layers |= {f"pages of {size}": [in_pages(each, size) for each in layers["contiguous"]] for size in sizes}
    wanted = gsa.step(layers["contiguous"][0])
    for name, each in layers.items():
        if not torch.equal(gsa.step(each[0]), wanted):
            report.fail(f"batch {batch}, {name}: the output differs from the contiguous cache's")
    graphs = {name: harness.capture(partial(decode_all, gsa.step, each)) for name, each in layers.items()}
    us = {name: ms * 1e3 / count for name, ms in harness.measure(graphs, flush_l2=False).items()}
    for name in graphs:
        ratio = us[name] / us["contiguous"]
        report.row(batch=batch, length=length, layers=count, cache=name, us=us[name], ratio=ratio)
        if name != "contiguous" and length == PROMISED_LENGTH:
            report.bar(f"{name} / contiguous, batch {batch} at {length}", ratio, at_most=PROMISED_SLOWDOWN)


def measure(report: harness.Report, batch: int, length: int, bytes_per_us: float) -> None:
    count = count_layers(batch, length, KV_HEADS)
    layers = [make_layer(batch, length) for _ in range(count)]
    gsa, dense = Gsa(batch, length), dense_decoders(batch, layers[0])
    check_step(report, gsa, layers[0])
    check_dense(report, dense, layers[0])

    decoders = {"GSA token": gsa.step, "GSA attention": gsa.attend, **dense}
    graphs = {name: harness.capture(partial(decode_all, each, layers)) for name, each in decoders.items()}
    us = {name: ms * 1e3 / count for name, ms in harness.measure(graphs, flush_l2=False).items()}

    token_bytes = 4 * KV_HEADS * HEAD_SIZE
    attended, indexed = batch * SELECTED * token_bytes, batch * length * 2 * INDEXER_SIZE
    read: dict[str, float] = dict.fromkeys(dense, batch * length * token_bytes)
    read |= {"GSA token": indexed + attended, "GSA attention": attended}
    fastest = min(us[name] for name in dense)
    for name in read:
        report.row(
            batch=batch,
            length=length,
            selected=SELECTED,
            layers=count,
            decoding=name,
            us=us[name],
            bound_us=read[name] / bytes_per_us,
            speedup=fastest / us[name],
        )
    if length == PROMISED_LENGTH:
        what = f"fastest dense decoding / GSA token, batch {batch} at {length}"
        report.bar(what, fastest / us["GSA token"], at_least=PROMISE)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--length", type=int, default=PROMISED_LENGTH, help="tokens; a multiple of 4096")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--page-sizes", type=int, nargs="+", help="tokens per page; divisors of the length")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)
    report = harness.Report("bench_decode", arguments)
    if arguments.page_sizes:
        for batch in arguments.batches:
            measure_pages(report, batch, arguments.length, arguments.page_sizes)
        return report.finish()
    bytes_per_us = harness.bandwidth() / 1e3
    print(f"a copy moves {bytes_per_us / 1e6:.2f} TB/s")
    for batch in arguments.batches:
        measure(report, batch, arguments.length, bytes_per_us)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
