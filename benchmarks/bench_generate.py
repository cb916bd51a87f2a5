"""Measures tokens per second of decoding and prefill in a whole 1.7B model: GSA and standard.

    python benchmarks/bench_generate.py [--lengths 32768 131072] [--batches 1 16] [--prefill 32768 ...]

The script compares the standard model (dense, no gates, no indexer) with GSA. The models have the sizes in
configs/gsa_1.7b.yaml, in bf16, with random weights and cache contents. In all models,
`gsa_hf.decoding.FusedDecoder` joins the projections of a layer, and a CUDA graph runs each step. If memory holds all
models together, their runs alternate.

- `standard` computes its matrix products with torch.compile, and its attention with the fastest of torch's SDPA
  backends. A static cache normally has empty slots, which a mask must exclude. Here random values fill all slots, so
  the script also tries each backend without a mask.
- `standard, our products` is the standard model with our kernels for the matrix products.
- In GSA models, the batch size decides which kernels compute the matrix products (column `products`).

A decoding step advances the decoder's token counters. Outside of the measured time, the script resets them before each
step, so that all steps run at the same position.

`bound` is the number of bytes that a step must read (weights, attended keys and values, indexer keys), divided by the
bandwidth of a device copy. If a model does not fit in memory, the script times only as many layers as fit (column
`layers`), and scales their time to all layers. It times the output layer separately, without scaling.
"""

import argparse
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import cases
import harness
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

from gsa_eval.convert.hf_config import to_hf_config
from gsa_hf import GSAConfig, GSAForCausalLM
from gsa_hf.decoding import FusedDecoder
from gsa_hf.generation import DecodingGraph
from gsa_train.config import Config
from gsa_train.config.load import Problems, build

STANDARD, OUR_STANDARD, GSA = "standard", "standard, our products", "GSA"
PROMISED, PROMISED_LENGTH = 2.0, 131072
"""Promised tokens per second divided by the standard model's, for one sequence."""
SPARE_BYTES = 8e9
"""Memory not used for weights and caches: it is left for workspaces, logits, torch.compile and graphs."""
CUDNN_WITHIN = 1.03
"""cuDNN is used if one layer's attention takes at most this multiple of the fastest backend's time. cuDNN may be slower
in one layer and still faster in the whole step."""
TOLERANCE = 2e-2
ROOM_TOKENS = 64
"""Slots after the filled ones. Steps write into the first one."""


@dataclass(frozen=True)
class Sdpa:
    """Describes how dense layers attend to one token."""

    backend: SDPBackend
    masked: bool

    def __str__(self) -> str:
        return f"{self.backend.name} {'masked' if self.masked else 'unmasked'}"


def model_config(name: str, layers: int, length: int, shapes: dict[str, Any]) -> GSAConfig:
    """Return the config of a model: STANDARD, OUR_STANDARD or GSA."""
    sparse = name not in (STANDARD, OUR_STANDARD)
    gates = dict.fromkeys(("value_gate", "output_gate"), sparse)
    sections = {
        "model": {**shapes["model"], "num_layers": layers},
        "gsa": {**shapes["gsa"], **gates, "attention": "sparse" if sparse else "dense"},
        "train": {"seq_len_tokens": length},
    }
    return to_hf_config(build(Config, sections, Problems(Config)))


def make_model(config: GSAConfig, device: str) -> GSAForCausalLM:
    """Build a model with random weights, in bf16 on a GPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = GSAForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation("gsa")
    return model.requires_grad_(False)


def fill(decoder: FusedDecoder) -> None:
    """Fill all slots with random keys, values and indexer keys."""
    for buffers in decoder.buffers:
        for each in buffers:
            if each is not None:
                for row in each:  # row by row, because randn for all would double the memory
                    row.normal_()


def set_averages(decoder: FusedDecoder) -> None:
    """Set each layer's V̄ to the current variance of its scores, so that k_t is near k_base."""
    filled = int(decoder.slot)
    decoder.step()
    for place, selection in decoder._selections.items():
        decoder.model.model.layers[place].self_attn.indexer.variance_ema.copy_(selection.variance.mean())
    decoder.place(filled, decoder.starts.clone())


def selected(decoder: FusedDecoder) -> int:
    """Return the mean number of selected keys per sequence and layer."""
    if not decoder._selections:
        return int(decoder.slot)
    counts = [selection.counts.float().mean().item() for selection in decoder._selections.values()]
    return round(sum(counts) / len(counts))


def needed_bytes(config: GSAConfig, batch: int, room: int, layers: int) -> int:
    """Return the bytes of weights and caches in bf16. The model and its joined projections both hold the weights."""
    hidden, heads = config.hidden_size, config.num_attention_heads + config.num_key_value_heads
    row = 0 if config.indexer_layer(0) is None else config.index_head_dim
    weights = 2 * hidden * (3 * config.intermediate_size + 4 * heads * config.head_dim)
    cache = batch * room * (2 * config.num_key_value_heads * config.head_dim + row)
    return 2 * (layers * (weights + cache) + 2 * config.vocab_size * hidden)


def fitting_layers(needed: Callable[[int], int], most: int) -> int:
    """Return the largest number of layers, up to `most`, that fits in free memory."""
    free = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    return max((count for count in range(1, most + 1) if needed(count) <= free), default=0)


def fastest_sdpa(config: GSAConfig, batch: int, filled: int, room: int) -> tuple[Sdpa, dict[str, float]]:
    """Choose the fastest backend for the attention of one layer. If cuDNN without a mask is about as fast, choose
    cuDNN. Also return the time in microseconds of every backend that supports this attention."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q = torch.randn(batch, heads, 1, size, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, kv_heads, room, size, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(room, device="cuda") <= filled).expand(batch, 1, 1, room)
    runs: dict[Sdpa, Callable[[], object]] = {}
    for backend in cases.BACKENDS:
        for masked in (False, True):

            def run(backend: SDPBackend = backend, visible: Any = mask if masked else None) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)

            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # each unused backend would print a line
                    run()
            except RuntimeError as refusal:
                print(f"SDPA {Sdpa(backend, masked)}: {str(refusal).splitlines()[0]}")
                continue
            runs[Sdpa(backend, masked)] = harness.capture(run)
    times = harness.measure({str(each): run for each, run in runs.items()}, budget_ms=20, compiled=True)
    us = {name: ms * 1e3 for name, ms in times.items()}
    fastest, cudnn = min(runs, key=lambda each: us[str(each)]), str(Sdpa(SDPBackend.CUDNN_ATTENTION, False))
    if us.get(cudnn, math.inf) <= CUDNN_WITHIN * us[str(fastest)]:
        fastest = Sdpa(SDPBackend.CUDNN_ATTENTION, False)
    return fastest, us


def open_decoder(
    name: str,
    batch: int,
    filled: int,
    layers: int,
    arguments: argparse.Namespace,
    device: str,
) -> FusedDecoder:
    """Return a model with full caches. The next token goes to slot `filled`, and `ROOM_TOKENS` slots follow it."""
    config = model_config(name, layers, filled + ROOM_TOKENS, arguments.shapes)
    products = {STANDARD: "torch", OUR_STANDARD: "rows"}.get(name, "auto")
    decoder = FusedDecoder(make_model(config, device), True, products)
    decoder.open(batch, filled + ROOM_TOKENS)
    fill(decoder)
    decoder.tokens.random_(0, config.vocab_size)
    decoder.place(filled, decoder.starts.clone())
    if decoder._selections:
        set_averages(decoder)
    return decoder


def capture(
    report: harness.Report,
    what: str,
    decoder: FusedDecoder,
    attends: Callable[[], AbstractContextManager[Any]],
) -> tuple[harness.Run, harness.Run]:
    """Capture the step at the decoder's position. Return the graph, and a function that resets the token counters."""
    filled = int(decoder.slot)
    with attends():
        wanted = decoder.step().clone()
        decoder.place(filled, decoder.starts.clone())
        graph = DecodingGraph(decoder)
    check(report, what, wanted, graph.step())

    def go_back() -> None:
        decoder.slot.fill_(filled)
        decoder.lengths.fill_(filled + 1)

    return graph.step, go_back


def check(report: harness.Report, what: str, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """Compare the logits of an eager step with those from the graph."""
    harness.require_finite(what, [wanted])
    error = harness.relative_error(found, wanted)
    if not error < TOLERANCE:
        report.fail(f"{what}: logits of the graph have relative error {error:.1e}")


def measure(
    report: harness.Report, batch: int, length: int, names: Sequence[str], arguments: argparse.Namespace
) -> None:
    """Measure all models at one batch size and length. If memory holds all models, their runs alternate. Otherwise
    each model finishes before the next loads."""
    shapes, filled = arguments.shapes, length
    room, all_layers = filled + ROOM_TOKENS, shapes["model"]["num_layers"]
    configs = {name: model_config(name, all_layers, room, shapes) for name in names}
    sdpa = None
    if not {STANDARD, OUR_STANDARD}.isdisjoint(names):
        sdpa, us = fastest_sdpa(model_config(STANDARD, all_layers, room, shapes), batch, filled, room)
        listed = ", ".join(f"{name} {value:.0f}" for name, value in us.items())
        print(f"batch {batch}, {length} tokens: one layer's dense attention in us: {listed}")
        torch.cuda.empty_cache()

    def needed(together: bool, layers: int) -> int:
        each = [needed_bytes(config, batch, room, layers) for config in configs.values()]
        return sum(each) if together else max(each)

    layers = fitting_layers(partial(needed, False), arguments.layers or all_layers)
    if layers == 0:
        print(f"batch {batch}, {length} tokens: left out, not one layer fits")
        return
    fit_together = fitting_layers(partial(needed, True), layers) == layers
    groups = [list(names)] if fit_together else [[name] for name in names]
    times: dict[str, float] = {}
    facts: dict[str, dict[str, Any]] = {}
    for group in groups:
        decoders: dict[str, FusedDecoder] = {}
        steps: dict[str, harness.Run] = {}
        back: dict[str, harness.Run] = {}
        for name in group:
            started = time.perf_counter()
            decoder = open_decoder(name, batch, filled, layers, arguments, "cuda")
            attends: Callable[[], AbstractContextManager[Any]] = nullcontext
            if name in (STANDARD, OUR_STANDARD):
                assert sdpa is not None
                decoder.visible_from_mask = sdpa.masked
                attends = partial(sdpa_kernel, sdpa.backend)
            what = f"{name}, batch {batch} at {length}"
            steps[name], back[name] = capture(report, what, decoder, attends)
            decoders[name] = decoder
            head = decoder.model.lm_head.weight
            hidden = head.new_zeros(batch, head.shape[1])
            steps[f"{name} head"] = harness.capture(partial(torch.nn.functional.linear, hidden, head))
            print(f"{name}: ready in {time.perf_counter() - started:.1f} s, {layers} layers", flush=True)
        limits: dict[str, Any] = {"budget_ms": 400.0, "flush_l2": False, "compiled": True}
        times |= harness.measure(steps, before=back, **limits)
        for name, decoder in decoders.items():
            facts[name] = {"products": decoder.products}
            facts[name] |= {"keys": selected(decoder), "bytes": read_bytes(decoder, batch, filled)}
        del decoders, steps, back, decoder, head, hidden
        gc.collect()
        torch.cuda.empty_cache()
    scale = all_layers / layers
    head_bytes = 2 * shapes["model"]["vocab_size"] * shapes["model"]["hidden_size"]
    head_ms = {name: times[f"{name} head"] for name in names}
    per_token = {name: head_ms[name] + (times[name] - head_ms[name]) * scale for name in names}
    for name in names:
        bound_ms = (head_bytes + (facts[name]["bytes"] - head_bytes) * scale) / arguments.bytes_per_ms
        report.row(
            batch=batch,
            length=length,
            model=name,
            attention="kernels" if name == GSA else str(sdpa),
            products=facts[name]["products"],
            layers=layers,
            keys=facts[name]["keys"],
            step_ms=per_token[name],
            bound_ms=bound_ms,
            tokens_per_s=batch * 1e3 / per_token[name],
            bound_per_s=batch * 1e3 / bound_ms,
            speedup=per_token["standard"] / per_token[name] if "standard" in names else None,
        )
    if batch == 1 and length == PROMISED_LENGTH and {STANDARD, GSA} <= {*names}:
        what = f"GSA / standard tokens per second, batch 1 at {length}"
        report.bar(what, per_token[STANDARD] / per_token[GSA], at_least=PROMISED)


def read_bytes(decoder: FusedDecoder, batch: int, filled: int) -> float:
    """Return the bytes that a step must read: weights, attended keys and values, and indexer keys."""
    config = decoder.config
    token = 4 * config.num_key_value_heads * config.head_dim
    per_layer = float(batch * filled * token)
    if decoder._selections:
        indexed = batch * filled * 2 * config.index_head_dim
        per_layer = batch * (selected(decoder) + config.local_window) * token + indexed
    weights = sum(x.nbytes for weights, _ in decoder.layers for x in weights if x is not None)
    return weights + decoder.model.lm_head.weight.nbytes + config.num_hidden_layers * per_layer


def measure_prefill(report: harness.Report, length: int, arguments: argparse.Namespace) -> None:
    """Prefill one sequence's cache with the model's forward pass. Dense layers use the kernels' dense attention."""
    shapes = arguments.shapes
    layers = arguments.layers or shapes["model"]["num_layers"]
    for name in (STANDARD, GSA):
        config = model_config(name, layers, length + ROOM_TOKENS, shapes)
        decoder = FusedDecoder(make_model(config, "cuda"))
        decoder.open(1, length + ROOM_TOKENS)
        tokens = torch.randint(0, config.vocab_size, (1, length), device="cuda")
        mask = torch.ones_like(tokens)
        # All moving averages are 0, as in a new model, so every budget is k_base.
        run = partial(decoder.prefill, tokens, mask)
        harness.require_finite(f"prefill of {name}", [run().float()])
        ms = harness.measure({name: run}, budget_ms=1, min_runs=2, rounds=1, compiled=True)[name]
        more, logits = harness.peak_bytes(run)
        peak = (torch.cuda.memory_allocated() + more) / 2**30  # weights, cache, and the memory of the pass
        rate = length * 1e3 / ms
        report.row(prefill=length, model=name, layers=layers, ms=ms, tokens_per_s=rate, peak_gib=peak)
        del decoder, run, logits
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[PROMISED_LENGTH, 32768], help="tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--models", nargs="+", default=[STANDARD, OUR_STANDARD, GSA])
    parser.add_argument("--layers", type=int, help="fewer than the model has, scaled to all of them")
    parser.add_argument("--prefill", type=int, nargs="+", default=[32768], help="tokens; 0: leave it out")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    config = harness.ROOT / "configs" / "gsa_1.7b.yaml"
    arguments.shapes = yaml.safe_load(config.read_text(encoding="utf-8"))
    report = harness.Report("bench_generate", arguments)
    arguments.bytes_per_ms = harness.bandwidth()
    print(f"a copy moves {arguments.bytes_per_ms / 1e9:.2f} TB/s")
    torch.cuda.empty_cache()
    for batch in arguments.batches:
        torch._dynamo.reset()  # each batch size is compiled separately
        for length in arguments.lengths:
            try:
                measure(report, batch, length, arguments.models, arguments)
            except torch.cuda.OutOfMemoryError as error:
                report.fail(f"batch {batch} at {length}: {str(error).splitlines()[0]}")
            gc.collect()
            torch.cuda.empty_cache()
    for length in filter(None, arguments.prefill):
        measure_prefill(report, length, arguments)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
