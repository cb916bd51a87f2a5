"""Times operations around attention in a training step against torch, torch.compile and liger-kernel (if installed).

    python benchmarks/bench_elementwise.py [--tokens 16384]

The operations are SwiGLU, cross-entropy, RMSNorm, a sigmoid gate, and split + rotary embedding + G2, at the 1.7B
model's sizes, and SwiGLU of weighted rows at the 15B mixture's sizes. Each has one kernel forward and one backward.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial

import harness
import torch
import torch.nn.functional as F
from cases import DEVICE, normal

from gsa_kernels.fused.cross_entropy.op import vocab_parallel_cross_entropy
from gsa_kernels.fused.cross_entropy.reference import cross_entropy
from gsa_kernels.fused.gates.op import fused_sigmoid_gate
from gsa_kernels.fused.gates.reference import sigmoid_gate
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.fused.split_rotate_gate.reference import split_rotate_gate
from gsa_kernels.fused.swiglu.op import fused_swiglu
from gsa_kernels.fused.swiglu.reference import swiglu, weighted_swiglu
from gsa_kernels.fused.swiglu.weighted import fused_weighted_swiglu

WIDTH, FFN, VOCABULARY, HEADS, KV_HEADS, HEAD_SIZE = 2048, 5504, 128256, 16, 4, 128
CHOICES, EXPERT_FFN = 8, 704
"""Experts per token, and their width, in configs/*_moe_15b_a2b.yaml."""
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None

Op = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch (default: 4 x 4096)")
    args = parser.parse_args()
    harness.require_cuda()
    report = harness.Report("bench_elementwise", args)
    if not HAS_LIGER:
        print("liger-kernel is not installed: its columns are missing", flush=True)
    for name, (inputs, ops) in cases(args.tokens).items():
        expected = run_both(ops["torch"], inputs)
        runs = {}
        for version, op in ops.items():
            found = run_both(op, inputs)
            worst = max(harness.relative_error(a, b) for a, b in zip(found, expected, strict=True))
            if not worst < 0.02:
                report.fail(f"{name} by {version}: {worst:.1e} from torch's, relative")
            runs[version] = harness.capture(partial(run_both, op, inputs))
        times = harness.measure(runs, compiled=True)
        report.row(operation=name, tokens=args.tokens, **{f"{v}_ms": times[v].ms for v in times})
        del runs, expected
        torch.cuda.empty_cache()
    return report.finish()


def run_both(op: Op, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return results, and the gradients of inputs that require one, for an upstream gradient of ones."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    result = op(*leaves)
    results = list(result) if isinstance(result, tuple) else [result]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(results, wanted, [torch.ones_like(x) for x in results])
    return [*(x.detach() for x in results), *gradients]


def cases(tokens: int) -> dict[str, tuple[list[torch.Tensor], dict[str, Op]]]:
    """Map each operation to its inputs, and to its implementations by name."""
    torch.manual_seed(0)
    sizes = (HEADS + 2 * KV_HEADS) * HEAD_SIZE, (HEADS + KV_HEADS) * HEAD_SIZE
    rates = 10000.0 ** (-torch.arange(HEAD_SIZE // 2, device=DEVICE) / (HEAD_SIZE // 2))
    angles = torch.arange(tokens, device=DEVICE, dtype=torch.float32)[:, None] * rates
    tables = angles.cos(), angles.sin()
    found: dict[str, tuple[list[torch.Tensor], dict[str, Op]]] = {
        "swiglu": (
            [normal(tokens, 2 * FFN)],
            {"ours": fused_swiglu, "torch": swiglu, "compile": torch.compile(swiglu)},
        ),
        "weighted swiglu": (
            [normal(tokens * CHOICES, 2 * EXPERT_FFN), torch.rand(tokens * CHOICES, device=DEVICE)],
            {
                "ours": fused_weighted_swiglu,
                "torch": weighted_swiglu,
                "compile": torch.compile(weighted_swiglu),
            },
        ),
        "cross-entropy": (
            [normal(tokens, VOCABULARY), torch.randint(VOCABULARY, (tokens,), device=DEVICE)],
            {
                "ours": vocab_parallel_cross_entropy,
                "torch": cross_entropy,
                "compile": torch.compile(cross_entropy),
            },
        ),
        "rms norm": (
            [normal(tokens, WIDTH), normal(WIDTH)],
            {"torch": rms_norm, "compile": torch.compile(written_out_norm)},
        ),
        "sigmoid gate": (
            [normal(tokens, HEADS * HEAD_SIZE) for _ in range(2)],
            {"ours": fused_sigmoid_gate, "torch": sigmoid_gate, "compile": torch.compile(sigmoid_gate)},
        ),
        "split, rotate, gate": (
            [normal(tokens, 1, size) for size in sizes],
            {
                "ours": partial(split, fused_split_rotate_gate, tables),
                "torch": partial(split, split_rotate_gate, tables),
                "compile": torch.compile(partial(split, split_rotate_gate, tables)),
            },
        ),
    }
    if HAS_LIGER:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
        from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

        def liger_swiglu(x: torch.Tensor) -> torch.Tensor:
            gate, value = x.chunk(2, -1)
            return LigerSiLUMulFunction.apply(gate, value)

        def liger_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # The loss of each token, without a process group and without label smoothing.
            losses = LigerVocabParallelCEFunction.apply(
                logits[:, None], targets[:, None], None, -100, 0.0, "megatron", "partition"
            )
            return losses[:, 0]

        def liger_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False)

        found["swiglu"][1]["liger"] = liger_swiglu
        found["cross-entropy"][1]["liger"] = liger_cross_entropy
        found["rms norm"][1]["liger"] = liger_norm
    return found


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)


def written_out_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight


def split(
    op: Callable[..., object],
    tables: tuple[torch.Tensor, torch.Tensor],
    qkv: torch.Tensor,
    gate_logits: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    found = op(qkv, gate_logits, *tables, kv_heads=KV_HEADS, value_gate=True, output_gate=True)
    assert isinstance(found, tuple)
    return found


if __name__ == "__main__":
    sys.exit(main())
