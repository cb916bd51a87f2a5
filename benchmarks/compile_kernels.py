"""Compiles the kernels of the shipped configs for GPUs that need not be present, and prints what would not run there.

    python benchmarks/compile_kernels.py 80 89 90

Each argument is a compute capability without its point. The command needs Triton and no GPU. No kernel runs. The shapes
come from configs/*.yaml. The table has for each kernel the largest shared memory, registers and stack of its launches.
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compiled_for import SHARED_KIB, compile_for

from gsa_kernels import api, limits
from gsa_kernels.decode import entry, joined
from gsa_kernels.decode import entry_reference as entered
from gsa_kernels.decode.state import LayerCache, new_selection, new_workspace
from gsa_kernels.fused.adamw.op import squared_updates
from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.sums.op import add_column_sums, add_total
from gsa_kernels.fused.swiglu.op import fused_swiglu
from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu
from gsa_kernels.indexer.split_op import split_projection
from gsa_kernels.key_lists.format import KeyLists
from gsa_kernels.row_product.look_up import look_up
from gsa_kernels.row_product.op import row_product
from gsa_kernels.row_product.reference import Norm
from gsa_kernels.types import BudgetRule, FusedLoss, Geometry, Indexer, RowSample, Selection
from gsa_train.config import load_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ROWS = 256
"""Queries of a launch. They are the last queries of a sequence, so that the number of keys is the config's."""
BY_TRITON: Any = {"implementation": "triton"}


class Form(NamedTuple):
    """Holds what decides the kernels of a config."""

    heads: int
    kv_heads: int
    size: int
    sparse: bool
    indexer: tuple[int, int, str]
    """Heads, size and activation."""
    group: int
    keys: int
    rule: BudgetRule
    window: int
    fraction: float
    hidden: int
    ffn: int


def shipped_forms(configs: str) -> set[Form]:
    forms = set()
    for path in sorted(CONFIGS.glob(f"{configs}.yaml")):
        config = load_config(path)
        model, gsa = config.model, config.gsa
        forms.add(
            Form(
                model.num_heads,
                model.num_kv_heads,
                model.head_dim,
                gsa.attention == "sparse",
                (gsa.indexer_heads, gsa.indexer_dim, gsa.indexer_activation),
                gsa.key_group_size,
                config.train.seq_len_tokens,
                BudgetRule(gsa.k_base, gsa.k_min, gsa.k_max, gsa.adaptive_k, gsa.dense_below),
                gsa.local_window,
                gsa.indexer_loss_row_fraction,
                model.hidden_size,
                model.ffn_hidden_size,
            )
        )
    return forms


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def backward(*outputs: torch.Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])


def attend(form: Form) -> None:
    """Run selection, attention and the indexer loss, forward and backward, as a training step and a warm-up step do."""
    rows = min(ROWS, form.keys)
    start = form.keys - rows
    q, gate = zeros(1, rows, form.heads, form.size), zeros(1, rows, form.heads, form.size)
    k, v = zeros(1, form.keys, form.kv_heads, form.size), zeros(1, form.keys, form.kv_heads, form.size)
    documents = torch.zeros(1, rows, dtype=torch.int32)
    for starts in (None, documents):
        geometry = Geometry(starts, start, form.window, form.group)
        if form.keys <= limits.PACKED_MASK_MAX_TOKENS:
            backward(api.sparse_attention(q, k, v, None, geometry, gate, **BY_TRITON)[0])
        if form.sparse:
            attend_sparsely(form, q, k, v, gate, geometry)


def attend_sparsely(form: Form, q, k, v, gate, geometry: Geometry) -> None:
    heads, size, activation = form.indexer
    rows = q.shape[1]
    biases = (zeros(heads), zeros(heads)) if activation == "sigmoid" else (None, None)
    indexer = Indexer(
        zeros(1, rows, heads, size), zeros(1, form.keys, size), zeros(1, rows, heads), *biases, activation
    )
    selected = api.select(
        indexer,
        form.rule,
        zeros(dtype=torch.float32),
        geometry,
        **BY_TRITON,
        with_log_sum=form.group == 1 and form.keys <= limits.REGISTER_KEYS,
    )
    if selected.key_lists is not None:
        selected = Selection(None, long_lists(rows, geometry.query_start), selected.budget, selected.variance)
    sample = RowSample(form.fraction, seed=0)
    out, lse = api.sparse_attention(q, k, v, selected, geometry, gate, **BY_TRITON)
    backward(out)
    for keys in (selected, None) if selected.packed_mask is not None else (selected,):
        backward(api.indexer_loss(indexer, q, k, lse, keys, geometry, sample, **BY_TRITON)[0])
    if form.fraction == 1 and api.can_fuse_indexer_loss(q, k, selected):
        fused = FusedLoss(indexer, 1.0, lambda kl: None)
        backward(api.sparse_attention_with_loss(q, k, v, selected, geometry, fused, gate, **BY_TRITON)[0])


def long_lists(rows: int, start: int) -> KeyLists:
    """Return lists so long that several programs share a list in the backward pass."""
    tiles, count = rows // limits.TILE_QUERIES, 4 * limits.SEGMENT_KEYS
    counts = torch.full((1, tiles), count, dtype=torch.int32)
    entries = torch.zeros(2, tiles * count, dtype=torch.int32)
    return KeyLists(*entries, torch.arange(tiles)[None] * count, counts, rows, count, start, counts)


def enter(form: Form) -> None:
    """Run what surrounds attention in a training step."""
    width = form.kv_heads * form.size
    group = form.heads // form.kv_heads
    tables = [torch.zeros(ROWS, form.size // 2) for _ in range(2)]
    for gates in (True, False) if form.sparse else (False,):
        logits = zeros(ROWS, 1, width * (1 + group)) if gates else None
        found = fused_split_rotate_gate(
            zeros(ROWS, 1, width * (2 + group)),
            logits,
            *tables,
            kv_heads=form.kv_heads,
            value_gate=gates,
            output_gate=gates,
        )
        backward(*(each for each in found if each is not None))
    heads, size, _ = form.indexer
    tables = [torch.zeros(ROWS, size // 2) for _ in range(2)]
    if form.sparse:
        backward(*split_projection(zeros(ROWS, 1, (heads + 1) * size + heads), heads, size, *tables))
    backward(fused_sigmoid_gate(zeros(1, ROWS, form.heads, form.size), zeros(1, ROWS, form.heads, form.size)))
    backward(fused_swiglu(zeros(ROWS, 2 * form.ffn)))
    backward(fused_weighted_swiglu(zeros(ROWS, 2 * form.ffn), zeros(ROWS, dtype=torch.float32)))
    backward(vocab_parallel_cross_entropy(zeros(ROWS, 32768), torch.zeros(ROWS, dtype=torch.int64)))
    fp32 = torch.zeros(form.hidden)
    squared_updates([fp32], [fp32], [fp32], fp32[0], fp32[0], 0.1)
    add_total(fp32, torch.zeros((), dtype=torch.float64))
    add_column_sums(torch.zeros(ROWS, form.hidden, dtype=torch.bfloat16), fp32)


@torch.no_grad()
def decode(form: Form) -> None:
    heads, size, activation = form.indexer
    for batch in (1, 8):
        lengths = torch.ones(batch, dtype=torch.int32)
        workspace = new_workspace(
            batch, form.keys, heads=form.heads, kv_heads=form.kv_heads, head_size=form.size, device="cuda"
        )
        k, v = (zeros(batch, form.keys, form.kv_heads, form.size) for _ in range(2))
        biases = (zeros(heads), zeros(heads)) if activation == "sigmoid" else (None, None)
        indexer = Indexer(
            zeros(batch, 1, heads, size),
            zeros(batch, form.keys, size),
            zeros(batch, 1, heads),
            *biases,
            activation,
        )
        cache = LayerCache(k, v, lengths, new_selection(batch, form.rule.most_keys, device="cuda"), workspace)
        if form.sparse:
            q = zeros(batch, form.heads, form.size)
            api.decode_step(
                q,
                indexer,
                cache,
                form.rule,
                torch.zeros(()),
                Geometry(None, 0, form.window, form.group),
                q,
                **BY_TRITON,
            )
        norm = Norm(zeros(form.hidden), 1e-5)
        x, slot = zeros(batch, form.hidden), torch.zeros(1, dtype=torch.int64)
        look_up(torch.zeros(batch, dtype=torch.int64), zeros(32, form.hidden))
        row_product(x, zeros(2 * form.ffn, form.hidden), norm, gated=True)
        row_product(
            zeros(batch, form.heads * form.size), zeros(form.hidden, form.heads * form.size), residual=x
        )
        width = form.size * form.heads
        sizes = entered.EntrySizes(
            width,
            form.kv_heads * form.size,
            form.kv_heads * form.size * form.sparse,
            width * form.sparse,
            heads * form.sparse,
            form.size,
            size,
        )
        entry_cache = entered.EntryCache(
            *(each.transpose(1, 2) for each in (k, v)), indexer.keys if form.sparse else None
        )
        angles = entered.Angles(
            *(zeros(batch, form.size) for _ in range(2)),
            *(zeros(batch, size) for _ in range(2 * form.sparse)),
        )
        entry.enter_token(zeros(batch, sizes.width), sizes, angles, entry_cache, slot)
        if batch == 1:
            table = entered.AngleTable(
                zeros(9, 2 * form.size + 2 * size * form.sparse), lengths, form.size, size * form.sparse
            )
            joined.enter_row(
                x,
                entered.JoinedProduct(zeros(sizes.width, form.hidden), norm),
                sizes,
                table,
                entry_cache,
                slot,
            )


def all_forms(configs: str) -> list[Form]:
    """Return the forms of the shipped configs, and of heads of 256 and groups of keys."""
    forms = sorted(shipped_forms(configs), key=str)
    sparse = [form for form in forms if form.sparse and form.indexer == (8, 64, "relu") and form.heads == 16]
    return [
        *forms,
        *(form._replace(kv_heads=2, size=256) for form in sparse),
        *(form._replace(group=8) for form in sparse),
    ]


def launch_all(configs: str) -> None:
    for form in all_forms(configs):
        attend(form)
        enter(form)
        decode(form)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("capabilities", type=int, nargs="+", choices=SHARED_KIB)
    parser.add_argument("--configs", default="*", help="pattern for names in configs/, without .yaml")
    parser.add_argument("--json", action="store_true", help="print only {capability: {kernel: faults}}")
    options = parser.parse_args()
    found = {each: compile_for(each, lambda: launch_all(options.configs)) for each in options.capabilities}
    faults = {
        capability: {kernel.name: kernel.faults for kernel in kernels if kernel.faults}
        for capability, kernels in found.items()
    }
    if options.json:
        json.dump(faults, sys.stdout)
        return 0
    for capability, kernels in found.items():
        print(f"sm_{capability}: {len(kernels)} compiled kernels, at most {SHARED_KIB[capability]} KiB")
        print(f"{'kernel':56}{'compiled':>8}{'KiB':>7}{'registers':>10}{'stack':>6}")
        for name, group in groupby(sorted(kernels, key=str), key=lambda kernel: kernel.name):
            same = list(group)
            shared, registers, stack = (
                max(getattr(kernel, field) for kernel in same) for field in ("shared", "registers", "stack")
            )
            print(f"{name:56}{len(same):8}{shared / 1024:7.1f}{registers:10}{stack:6}")
        print(*(f"{name} cannot run: {'; '.join(why)}" for name, why in faults[capability].items()), sep="\n")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
