"""Time the attention kernels beside torch's, on one CUDA device, with a verdict on their results.

    python kernels/bench/bench_attention.py [--lengths 4096 8192] [--json FILE]

masked: every query selects a random k = 2048 of its visible keys. dense: the same kernels without words.
TFLOP/s count the causal half of dense attention for all rows: 2 products forward, 7 forward and backward.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.reference import sparse_attention

CHECKED_LENGTH = 1024
TOLERANCE = 1e-2


def random_words(batch: int, length: int, selected: int) -> torch.Tensor:
    """int32 [B, L, ceil(L / 32)]: each visible key with probability selected / (t + 1), and always key 0."""
    columns = -(-length // 32)
    words = torch.empty(batch, length, columns, dtype=torch.int32, device="cuda")
    keys = torch.arange(32 * columns, device="cuda")
    for start in range(0, length, 1024):  # by rows: the mask of all of them would be large
        rows = torch.arange(start, min(start + 1024, length), device="cuda")[:, None]
        chance = (selected / (rows + 1)).clamp(max=1)
        chosen = torch.rand(batch, len(rows), len(keys), device="cuda") < chance
        chosen = (chosen | (keys == 0)) & (keys <= rows)
        packed = (chosen.unflatten(-1, (columns, 32)).long() << torch.arange(32, device="cuda")).sum(-1)
        words[:, start : start + 1024] = torch.where(packed >= 2**31, packed - 2**32, packed)
    return words


def unpack(words: torch.Tensor, length: int) -> torch.Tensor:
    """words -> bool [B, L, L]"""
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    return bits.flatten(-2)[..., :length].bool()


def random_inputs(shape: argparse.Namespace, length: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, in bf16."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    return [
        torch.randn(shape.batch, length, n, shape.head_size, device="cuda", dtype=torch.bfloat16)
        for n in heads
    ]


def relative_error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((value.double() - wanted).norm() / wanted.norm()).item()


def verdict(shape: argparse.Namespace) -> dict[str, float | bool]:
    """Largest relative error of output and gradients against fp64, at a length where fp64 is affordable."""
    worst = 0.0
    *leaves, grad = random_inputs(shape, CHECKED_LENGTH)
    for words in (random_words(shape.batch, CHECKED_LENGTH, CHECKED_LENGTH // 2), None):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, _ = masked_attention(*leaves, words)
        got = [out, *torch.autograd.grad(out, leaves, grad)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        if words is None:
            mask = torch.ones(1, CHECKED_LENGTH, CHECKED_LENGTH, dtype=torch.bool, device="cuda").tril()
        else:
            mask = unpack(words, CHECKED_LENGTH)
        out = sparse_attention(*exact, mask).out
        wanted = [out, *torch.autograd.grad(out, exact, grad.double())]
        worst = max(worst, *(relative_error(a, b) for a, b in zip(got, wanted, strict=True)))
    return {"relative_error": worst, "ok": worst < TOLERANCE}


def torch_attention(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Dense causal attention of one torch backend, [B, L, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def time_attention(
    attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], flops: float
) -> dict[str, float]:
    """Medians in ms, and TFLOP/s; `flops` are those of the two forward products."""
    *leaves, grad = inputs
    with torch.no_grad():
        forward = do_bench(lambda: attend(*leaves), warmup=25, rep=100, return_mode="median")
    leaves = [x.detach().requires_grad_() for x in leaves]
    both = do_bench(
        lambda: torch.autograd.grad(attend(*leaves), leaves, grad), warmup=25, rep=100, return_mode="median"
    )
    return {
        "forward_ms": forward,
        "forward_tflops": flops / forward / 1e9,
        "both_ms": both,
        "both_tflops": 3.5 * flops / both / 1e9,
    }


def measure(shape: argparse.Namespace, length: int) -> dict[str, dict[str, float]]:
    inputs = random_inputs(shape, length)
    words = random_words(shape.batch, length, shape.selected)
    flops = 2 * shape.batch * shape.heads * shape.head_size * float(length) ** 2
    candidates: dict[str, Callable[..., torch.Tensor]] = {
        "masked": lambda q, k, v: masked_attention(q, k, v, words)[0],
        "dense": lambda q, k, v: masked_attention(q, k, v)[0],
        "torch cuDNN": lambda q, k, v: torch_attention(SDPBackend.CUDNN_ATTENTION, q, k, v),
        "torch flash": lambda q, k, v: torch_attention(SDPBackend.FLASH_ATTENTION, q, k, v),
    }
    return {name: time_attention(attend, inputs, flops) for name, attend in candidates.items()}


def commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return run.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--selected", type=int, default=2048, help="keys per query of the masked runs")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    shape = parser.parse_args()
    torch.manual_seed(0)

    checked = verdict(shape)
    report: dict[str, object] = {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "batch": shape.batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "selected": shape.selected,
        "verdict": checked,
    }
    print(", ".join(f"{key} {value}" for key, value in report.items()))
    print(f"{'length':>7} {'':12} {'fwd ms':>8} {'TFLOP/s':>8} {'fwd+bwd ms':>11} {'TFLOP/s':>8}  result")
    results = []
    for length in shape.lengths:
        for name, row in measure(shape, length).items():
            ours = ("ok" if checked["ok"] else "WRONG") if name in ("masked", "dense") else "-"
            print(
                f"{length:7} {name:12} {row['forward_ms']:8.3f} {row['forward_tflops']:8.0f} "
                f"{row['both_ms']:11.3f} {row['both_tflops']:8.0f}  {ours}",
                flush=True,
            )
            results.append({"length": length, "name": name, **row})
    if shape.json:
        shape.json.write_text(json.dumps({**report, "results": results}, indent=2) + "\n", encoding="utf-8")
    if not checked["ok"]:
        sys.exit("the kernels' results are wrong")


if __name__ == "__main__":
    main()
