"""The whole GSA attention operation beside dense attention, on one CUDA device: what a layer pays in training.

    python kernels/bench/bench_gsa.py [--lengths 4096 8192] [--batch 1] [--json FILE]

GSA: G2, scores, variance, budget and top-k, attention over the selected keys with G1, and the sparse phase's
indexer loss with its gradients; projections are left out on both sides. Dense: torch SDPA on cuDNN. Medians, in ms.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gsa_kernels import sigmoid_gate
from gsa_kernels.attention.op import masked_attention
from gsa_kernels.attention.triton_probs import head_sum_probs_rows
from gsa_kernels.kl.op import indexer_kl_loss
from gsa_kernels.selection.op import Selection, select_keys

SHAPES = {"1.7B": (16, 4), "7B": (32, 8)}
HEAD_SIZE, INDEXER_HEADS, INDEXER_SIZE = 128, 4, 64
K_BASE, K_MIN, K_MAX = 2048, 256, 4096


@dataclass
class Row:
    """Times of one shape and length in ms."""

    shape: str
    batch: int
    length: int
    dense_forward: float
    dense_both: float
    select: float
    forward: float
    """Selection, gates and attention."""
    both_without_kl: float
    kl: float
    """Target, value and gradients of the indexer loss."""
    both: float
    ratio: float
    """both / dense_both"""
    mean_selected: float


def median(run: Callable[[], object]) -> float:
    return do_bench(run, warmup=50, rep=200, return_mode="median")


def measure(name: str, batch: int, length: int) -> Row:
    heads, kv_heads = SHAPES[name]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q, grad, g1 = (draw(batch, length, heads, HEAD_SIZE) for _ in range(3))
    k, v, g2 = (draw(batch, length, kv_heads, HEAD_SIZE) for _ in range(3))
    q_idx = draw(batch, length, INDEXER_HEADS, INDEXER_SIZE)
    k_idx, weights = draw(batch, length, INDEXER_SIZE), draw(batch, length, INDEXER_HEADS)
    biases = {"score_bias": draw(INDEXER_HEADS), "weight_bias": draw(INDEXER_HEADS)}
    leaves = [q, k, v, g1, g2]
    indexer_leaves = [q_idx, k_idx, weights, *biases.values()]
    for leaf in (*leaves, *indexer_leaves):
        leaf.requires_grad_()

    ema = torch.zeros((), device="cuda")

    def select() -> Selection:
        with torch.no_grad():
            return select_keys(
                q_idx, k_idx, weights, ema, **biases, k_base=K_BASE, k_min=K_MIN, k_max=K_MAX, mode="inverse"
            )

    ema = select().variance.mean()
    words = select().words

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        return masked_attention(q, k, sigmoid_gate(v, g2), words, output_gate_logits=g1)

    _, lse = attend()

    def kl_backward(lse: torch.Tensor) -> None:
        loss = indexer_kl_loss(
            q_idx,
            k_idx,
            weights,
            lambda start, rows: head_sum_probs_rows(q.detach(), k.detach(), lse, words, start, rows),
            **biases,
            words=words,
        )
        assert isinstance(loss, torch.Tensor)
        torch.autograd.grad(loss, indexer_leaves)

    def forward() -> None:
        select()
        attend()

    def both(with_kl: bool) -> None:
        select()
        out, row_lse = attend()
        if with_kl:
            kl_backward(row_lse)
        torch.autograd.grad(out, leaves, grad)

    dense = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    dense_grad = grad.transpose(1, 2).contiguous()

    def dense_forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)

    def dense_both() -> None:
        torch.autograd.grad(dense_forward(), dense, dense_grad)

    dense_ms, gsa_ms = median(dense_both), median(lambda: both(True))
    return Row(
        shape=name,
        batch=batch,
        length=length,
        dense_forward=median(dense_forward),
        dense_both=dense_ms,
        select=median(select),
        forward=median(forward),
        both_without_kl=median(lambda: both(False)),
        kl=median(lambda: kl_backward(lse)),
        both=gsa_ms,
        ratio=gsa_ms / dense_ms,
        mean_selected=select().budget.float().mean().item(),
    )


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    about = {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(about)
    rows = [
        measure(name, arguments.batch, length) for name in arguments.shapes for length in arguments.lengths
    ]
    for field in asdict(rows[0]):
        values = [getattr(row, field) for row in rows]
        print(f"{field:>16}", *(f"{v:>9.3f}" if isinstance(v, float) else f"{v:>9}" for v in values))
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
