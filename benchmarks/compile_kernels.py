"""Compiles the kernels of the shipped configs for GPUs that need not be present, and prints what would not run there.

    python benchmarks/compile_kernels.py 80 89 90

Each argument is a compute capability without its point, such as 89 for 8.9. No kernel runs, so the command needs Triton
but no GPU. The shapes come from configs/*.yaml. The table shows the largest shared memory, the most registers and the
largest stack among the compiled versions of each kernel.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import harness
import torch
from compiled_for import SHARED_KIB, compile_for
from torch.autograd.graph import _engine_run_backward

from gsa_kernels import api, limits
from gsa_kernels.decode import entry, joined
from gsa_kernels.decode import entry_reference as entered
from gsa_kernels.decode.state import LayerCache, new_selection, new_workspace
from gsa_kernels.devices import shared_memory
from gsa_kernels.fused.adamw.op import squared_updates
from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy
from gsa_kernels.fused.fp8.op import fused_magnitudes, fused_quantize
from gsa_kernels.fused.fp8.reference import E4M3, E5M2
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.sums.op import add_column_sums, add_total
from gsa_kernels.fused.swiglu.op import fused_swiglu
from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu
from gsa_kernels.indexer.split_op import fused_split_projection
from gsa_kernels.key_lists.format import HostCounts, KeyLists
from gsa_kernels.row_product.look_up import look_up
from gsa_kernels.row_product.op import row_product
from gsa_kernels.row_product.reference import Norm
from gsa_kernels.types import BudgetRule, Geometry, Indexer, RowSample, Selection
from gsa_train.config import load_config
from gsa_train.config.gsa import SCORES
from gsa_train.config.sections import Config
from gsa_train.model.mcore.linears import FP8_CAPABILITY

CONFIGS = harness.ROOT / "configs"
BY_TRITON: Any = {"implementation": "triton"}
ROWS = 256
"""Queries of a launch. They are the last queries of a sequence, so that the number of keys is the config's."""


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


def backward(*outputs: torch.Tensor | None) -> None:
    given = tuple(each for each in outputs if each is not None)
    grads = tuple(torch.zeros_like(each) for each in given)
    # `torch.autograd.backward` would leave the mode that makes tensors pass for CUDA tensors.
    _engine_run_backward(given, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def new_indexer(config: Config, batch: int, rows: int) -> Indexer:
    heads, size = config.gsa.indexer_heads, config.gsa.indexer_dim
    score = SCORES[config.gsa.indexer_activation]
    bias = zeros(heads) if score.activation == "sigmoid" else None
    keys = zeros(batch, config.train.seq_len_tokens, size)
    queries, weights = zeros(batch, rows, heads, size), zeros(batch, rows, heads)
    return Indexer(queries, keys, weights, bias, bias, score.activation)


def budget_rule(config: Config) -> BudgetRule:
    gsa = config.gsa
    return BudgetRule(gsa.k_base, gsa.k_min, gsa.k_max, gsa.adaptive_k, gsa.dense_below)


def attend(config: Config, documents: torch.Tensor | None) -> None:
    """Run selection, attention and the indexer loss, forward and backward, as a training step and a warm-up step do."""
    model, gsa, keys = config.model, config.gsa, config.train.seq_len_tokens
    rows = min(ROWS, keys)
    starts = None if documents is None else documents[:, :rows]
    geometry = Geometry(starts, keys - rows, gsa.local_window)
    q, gate = zeros(1, rows, model.num_heads, model.head_dim), zeros(1, rows, model.num_heads, model.head_dim)
    k, v = (zeros(1, keys, model.num_kv_heads, model.head_dim) for _ in range(2))
    backward(api.sparse_attention(q, k, v, None, geometry, gate, **BY_TRITON)[0])
    if gsa.attention == "dense":
        return
    indexer = new_indexer(config, 1, rows)
    with_log_sum = keys <= limits.REGISTER_KEYS
    ema = torch.zeros(())
    selected = api.select(indexer, budget_rule(config), ema, geometry, with_log_sum=with_log_sum, **BY_TRITON)
    if selected.key_lists is not None:
        lists = long_lists(rows, geometry.query_start)
        selected = Selection(None, lists, selected.budget, selected.variance)
    out, lse = api.sparse_attention(q, k, v, selected, geometry, gate, **BY_TRITON)
    backward(out)
    sample = RowSample(gsa.indexer_loss_row_fraction, draw=0)
    for attended in (selected, None):
        backward(api.indexer_loss(indexer, q, k, lse, attended, geometry, sample, **BY_TRITON)[0])


def long_lists(rows: int, start: int) -> KeyLists:
    """Return lists so long that several programs share a list in the backward pass."""
    tiles, count = rows // limits.TILE_QUERIES, 4 * limits.SEGMENT_KEYS
    counts = torch.full((1, tiles), count, dtype=torch.int32)
    entries, starts = torch.zeros(tiles * count, dtype=torch.int32), torch.arange(tiles)[None] * count
    return KeyLists(entries, entries, starts, counts, rows, HostCounts(counts), start)


def run_fused(config: Config) -> None:
    """Run the fused operators around attention, forward and backward."""
    model, gsa = config.model, config.gsa
    width, group = model.num_kv_heads * model.head_dim, model.num_heads // model.num_kv_heads
    logits = zeros(ROWS, 1, width * (gsa.value_gate + group * gsa.output_gate))
    backward(
        *fused_split_rotate_gate(
            zeros(ROWS, 1, width * (2 + group)),
            logits if logits.numel() else None,
            *torch.zeros(2, ROWS, model.head_dim // 2),
            kv_heads=model.num_kv_heads,
            value_gate=gsa.value_gate,
            output_gate=gsa.output_gate,
        )
    )
    heads, size = gsa.indexer_heads, gsa.indexer_dim
    has_weights = SCORES[gsa.indexer_activation].learns_head_weights
    backward(
        *fused_split_projection(
            zeros(ROWS, 1, (heads + 1) * size + heads * has_weights),
            heads,
            size,
            has_weights=has_weights,
            norms=(zeros(size), zeros(size)) if gsa.indexer_norm else None,
            tables=(torch.zeros(ROWS, size // 2),) * 2 if gsa.indexer_rope else None,
        )
    )
    backward(fused_sigmoid_gate(zeros(ROWS, width), zeros(ROWS, width)))
    backward(fused_swiglu(zeros(ROWS, 2 * model.ffn_hidden_size)))
    backward(fused_weighted_swiglu(zeros(ROWS, 2 * model.ffn_hidden_size), torch.zeros(ROWS)))
    backward(vocab_parallel_cross_entropy(zeros(ROWS, 32768), torch.zeros(ROWS, dtype=torch.int64)))
    fp32 = torch.zeros(model.hidden_size)
    squared_updates([fp32], [fp32], [fp32], fp32[0], fp32[0], 0.1)
    add_total(fp32, torch.zeros((), dtype=torch.float64))
    add_column_sums(zeros(ROWS, model.hidden_size), fp32)


def quantize(config: Config) -> None:
    """Quantize to FP8 what linear layers multiply: input and weight, and a gradient. SwiGLU finds magnitudes."""
    backward(fused_swiglu(zeros(ROWS, 2 * config.model.ffn_hidden_size), for_fp8=True))
    x, w = zeros(ROWS, config.model.hidden_size), zeros(ROWS, config.model.hidden_size)
    fused_quantize([x, w], fused_magnitudes(x, w), E4M3, (True, True))
    fused_quantize([x], fused_magnitudes(x), E5M2, (True,))


@torch.no_grad()
def decode(config: Config, batch: int) -> None:
    """Run the kernels that decode one token per sequence."""
    model, gsa, keys = config.model, config.gsa, config.train.seq_len_tokens
    heads, kv_heads, head_size = model.num_heads, model.num_kv_heads, model.head_dim
    indexer, rule, sparse = new_indexer(config, batch, 1), budget_rule(config), gsa.attention == "sparse"
    lengths, slot = torch.ones(batch, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    sizes_of_cache: Any = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "device": "cuda"}
    workspace = new_workspace(batch, keys, **sizes_of_cache)
    k, v = (zeros(batch, keys, kv_heads, head_size) for _ in range(2))
    if sparse:
        q, geometry = zeros(batch, heads, head_size), Geometry(None, 0, gsa.local_window)
        cache = LayerCache(k, v, lengths, new_selection(batch, rule.most_keys, device="cuda"), workspace)
        api.decode_step(q, indexer, cache, rule, torch.zeros(()), geometry, q, **BY_TRITON)
    x, norm = zeros(batch, model.hidden_size), Norm(zeros(model.hidden_size), 1e-5)
    q_width, kv_width, index_heads = heads * head_size, kv_heads * head_size, gsa.indexer_heads * sparse
    look_up(torch.zeros(batch, dtype=torch.int64), zeros(32, model.hidden_size))
    row_product(x, zeros(2 * model.ffn_hidden_size, model.hidden_size), norm, gated=True)
    row_product(zeros(batch, q_width), zeros(model.hidden_size, q_width), residual=x)
    gates = (kv_width * gsa.value_gate, q_width * gsa.output_gate)
    sizes = entered.EntrySizes(q_width, kv_width, *gates, index_heads, head_size, gsa.indexer_dim)
    index_keys, turned = indexer.keys if sparse else None, gsa.indexer_dim * gsa.indexer_rope * sparse
    cached = entered.EntryCache(k.transpose(1, 2), v.transpose(1, 2), index_keys)
    table = entered.AngleTable(zeros(9, 2 * (head_size + turned)), lengths, head_size, turned)
    entry.enter_token(zeros(batch, sizes.width), sizes, table.angles(), cached, slot)
    if batch == 1:
        product = entered.JoinedProduct(zeros(sizes.width, model.hidden_size), norm)
        joined.enter_row(x, product, sizes, table, cached, slot)


def variants(pattern: str, heads_of_256: bool) -> Iterator[Config]:
    """Yield the shipped configs, and some of them with heads of 256 where these fit."""
    for path in sorted(CONFIGS.glob(f"{pattern}.yaml")):
        config = load_config(path)
        yield config
        if heads_of_256 and path.stem.startswith("gsa_1.7b"):
            yield replace(config, model=replace(config.model, head_dim=256, num_kv_heads=2))


def launch_all(pattern: str) -> None:
    heads_of_256 = shared_memory(torch.device("cuda")) >= limits.HOPPER_SHARED_BYTES
    for config in variants(pattern, heads_of_256):
        for documents in (None, torch.zeros(1, ROWS, dtype=torch.int32)):
            attend(config, documents)
        run_fused(config)
        if torch.cuda.get_device_capability() >= FP8_CAPABILITY:
            quantize(config)
        for batch in (1, 8):
            decode(config, batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capabilities", type=int, nargs="+", choices=SHARED_KIB)
    parser.add_argument("--configs", default="*", help="pattern for names in configs/, without .yaml")
    options = parser.parse_args()
    found = {each: compile_for(each, lambda: launch_all(options.configs)) for each in options.capabilities}
    for capability, kernels in found.items():
        print(f"sm_{capability}: {len(kernels)} compiled kernels, at most {SHARED_KIB[capability]} KiB")
        print(f"{'kernel':56}{'compiled':>8}{'KiB':>7}{'registers':>10}{'stack':>6}")
        for name, group in groupby(sorted(kernels, key=str), key=lambda kernel: kernel.name):
            sizes = [(kernel.shared, kernel.registers, kernel.stack) for kernel in group]
            shared, registers, stack = map(max, zip(*sizes, strict=True))
            print(f"{name:56}{len(sizes):8}{shared / 1024:7.1f}{registers:10}{stack:6}")
    faults = [(kernel, fault) for kernels in found.values() for kernel in kernels for fault in kernel.faults]
    for kernel, fault in faults:
        print(f"{kernel.name} cannot run: {fault}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
