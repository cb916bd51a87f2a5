"""Times the indexer KL (value and all gradients) on a GPU, with a correctness verdict beside each time.

    python kernels/bench/bench_kl.py --lengths 4096 16384 --json kl.json
    python kernels/bench/bench_kl.py --lengths 4096 --blocks 64,64,4,32,4,256,2,2 --blocks 128,...

The target stands ready in memory: the kernel that makes it belongs to the attention. The verdict compares
value and gradients with the torch reference in fp64, chunk of rows by chunk of rows.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from gsa_kernels import indexer_kl, indexer_scores, renormalise_target
from gsa_kernels.kl.op import indexer_kl_loss
from gsa_kernels.kl.triton_launch import (
    Blocks,
    Inputs,
    choose_blocks,
    chunk_launches,
    new_outputs,
    score_kind,
)
from gsa_kernels.sampling import RowSample

NAMES = ("q_idx", "k_idx", "weight_logits", "score_bias", "weight_bias", "inverse_temperature")

# Two limits of an H200: bf16 products as measured there, and special functions (16 per clock and SM).
FLOP_PER_SECOND = 798e12
MUFU_PER_SECOND = 132 * 16 * 1.755e9


def make_inputs(length: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda").to(dtype).requires_grad_()

    return {
        "q_idx": normal(1, length, heads, dim),
        "k_idx": normal(1, length, dim),
        "weight_logits": normal(1, length, heads),
        "score_bias": normal(heads, dtype=torch.float32),
        "weight_bias": normal(heads, dtype=torch.float32),
        "inverse_temperature": torch.tensor(2.0, device="cuda", requires_grad=True),
    }


def make_target(length: int) -> torch.Tensor:
    """fp32 [1, L, L]: what 16 heads of a peaked softmax sum up to; NaN where no query sees the key."""
    target = torch.empty(1, length, length, device="cuda")
    rng = torch.Generator("cuda").manual_seed(1)
    for start in range(0, length, 1024):
        rows = torch.arange(start, min(start + 1024, length), device="cuda")
        hidden = torch.arange(length, device="cuda") > rows[:, None]
        logits = 2 * torch.randn(len(rows), length, device="cuda", generator=rng)
        target[0, rows] = 16 * logits.masked_fill(hidden, float("-inf")).softmax(-1)
        target[0, rows] = target[0, rows].masked_fill(hidden, float("nan"))
    return target


def make_words(length: int, share: float) -> torch.Tensor:
    """A random support: every visible key with probability `share`."""
    words = torch.empty(1, length, -(-length // 32), device="cuda", dtype=torch.int32)
    shifts = torch.arange(32, device="cuda")
    for start in range(0, length, 1024):
        rows = torch.arange(start, min(start + 1024, length), device="cuda")
        chosen = torch.rand(len(rows), words.shape[2] * 32, device="cuda") < share
        columns = torch.arange(chosen.shape[1], device="cuda")
        chosen = (chosen | (columns == rows[:, None])) & (columns <= rows[:, None])
        words[0, rows] = (chosen.unflatten(1, (-1, 32)).long() << shifts).sum(-1).to(torch.int32)
    return words


def errors(
    inputs: dict[str, torch.Tensor], target: torch.Tensor, words: torch.Tensor | None, got: torch.Tensor
) -> dict[str, float]:
    """Relative errors of the value `got` and of the gradients in `inputs` against fp64."""
    leaves = {n: t.detach().double().requires_grad_() for n, t in inputs.items()}
    length = target.shape[1]
    value = 0.0
    columns = torch.arange(length, device="cuda")
    for start in range(0, length, 512):
        part = slice(start, min(start + 512, length))
        support = (columns <= columns[part, None])[None]
        if words is not None:
            bits = words[:, part].long()[..., None] >> torch.arange(32, device="cuda")
            support = support & ((bits & 1) == 1).flatten(2)[..., :length]
        scores = indexer_scores(
            leaves["q_idx"][:, part],
            leaves["k_idx"],
            leaves["weight_logits"][:, part],
            score_bias=leaves["score_bias"],
            weight_bias=leaves["weight_bias"],
        )
        p = renormalise_target(target[:, part].double(), support)
        loss = indexer_kl(scores, p, support, leaves["inverse_temperature"]).sum()
        loss.backward()
        value += loss.item()
    found = {"value": abs(got.item() - value) / value}
    for name, leaf in leaves.items():
        want, have = leaf.grad, inputs[name].grad
        assert want is not None
        assert have is not None
        found[name] = float((have.double() - want).norm() / want.norm())
    return found


def measure(
    length: int, args: argparse.Namespace, dtype: torch.dtype, blocks: Blocks | None, sparse: bool
) -> dict[str, Any]:
    """Times in ms, the verdict, and the floor of the launch."""
    inputs = make_inputs(length, args.heads, args.dim, dtype)
    target = make_target(length)
    words = make_words(length, min(1.0, 2048 / length)) if sparse else None

    def forward() -> torch.Tensor:
        loss = indexer_kl_loss(
            inputs["q_idx"],
            inputs["k_idx"],
            inputs["weight_logits"],
            lambda rows: target[:, rows.start : rows.start + rows.count],
            **{name: inputs[name] for name in NAMES[3:]},
            words=words,
            blocks=blocks,
        )
        assert isinstance(loss, torch.Tensor)
        return loss

    loss = forward()
    loss.backward()
    result: dict[str, Any] = {"length": length, "dtype": str(dtype), "support": "sparse" if sparse else "all"}
    if length <= args.check_up_to:
        result["errors"] = errors(inputs, target, words, loss)
        limits = {"value": 1e-4, "inverse_temperature": 1e-3}
        result["ok"] = all(error < limits.get(name, 5e-3) for name, error in result["errors"].items())
    # The parts before the whole: the whole then runs last, on a warm chip.
    detached = {name: tensor.detach() for name, tensor in inputs.items()}
    kernel_inputs = Inputs(
        detached["q_idx"],
        detached["k_idx"],
        detached["weight_logits"],
        detached["score_bias"],
        detached["weight_bias"],
        detached["inverse_temperature"].reshape(1),
        words,
        None,
        score_kind(dtype, "sigmoid", target.device),
    )
    outputs = new_outputs(kernel_inputs, with_gradients=True, sampled=False, one_chunk=False)
    chosen = blocks or choose_blocks(kernel_inputs)
    result["blocks"] = vars(chosen)
    chunk = min(length, 256 * 2**20 // (4 * length))
    launches = chunk_launches(
        kernel_inputs, outputs, target[:, None, length - chunk :], RowSample(length - chunk, chunk), chosen
    )
    result["last_chunk_rows"] = chunk
    for name, launch in launches.items():
        result[name] = time(launch)
    result["total"] = time(forward)
    # Without the host's share, which shows while a launch takes longer than a kernel.
    result["graph"] = float(triton.testing.do_bench_cudagraph(forward, rep=40, return_mode="median"))
    with torch.no_grad():
        result["value_only"] = time(forward)
    pairs = length * (length + 1) / 2
    result["floor_ms"] = {
        "products": 1e3 * pairs * 4 * 2 * args.heads * args.dim / FLOP_PER_SECOND,
        "special_functions": 1e3 * pairs * (3 * args.heads + 2) / MUFU_PER_SECOND,
    }
    return result


def time(function: Any) -> float:
    """Median in ms."""
    return float(triton.testing.do_bench(function, warmup=20, rep=80, return_mode="median"))


def environment() -> dict[str, str]:
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def line(result: dict[str, Any]) -> str:
    verdict = {True: "ok", False: "WRONG"}.get(result.get("ok"), "unchecked")  # type: ignore[arg-type]
    parts = " ".join(
        f"{name.replace(' ', '-')} {result[name]:.4f}" for name in ("stats", "gradients", "reduce")
    )
    floor = sum(result["floor_ms"].values())
    return (
        f"L={result['length']} {result['support']} {result['dtype'][6:]} total {result['total']:.4f} ms "
        f"(in a graph {result['graph']:.4f}, floor {floor:.4f}, value only {result['value_only']:.4f}) "
        f"{verdict} | last chunk: {parts} | " + ",".join(str(value) for value in result["blocks"].values())
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192, 16384])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--support", choices=["all", "sparse", "both"], default="both")
    parser.add_argument("--blocks", action="append", help="the fields of Blocks, separated by commas")
    parser.add_argument("--check-up-to", type=int, default=8192, help="compare with fp64 up to this length")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kl: no CUDA device")

    dtype = getattr(torch, args.dtype)
    variants = [Blocks(*map(int, text.split(","))) for text in args.blocks] if args.blocks else [None]
    report: dict[str, Any] = {"environment": environment(), "results": []}
    print(report["environment"])
    for length in args.lengths:
        for sparse in {"all": [False], "sparse": [True], "both": [False, True]}[args.support]:
            for blocks in variants:
                result = measure(length, args, dtype, blocks, sparse)
                report["results"].append(result)
                print(line(result), flush=True)
                if "errors" in result:
                    print("   ", {name: f"{error:.1e}" for name, error in result["errors"].items()})
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
