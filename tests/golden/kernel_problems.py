"""Defines the golden kernel problems and their inputs, and hashes the results on a GPU. Only operations.py calls the
kernels."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from golden.training_runs import import_path

PROCESSES = 12
"""Most of the time goes into compilation, which takes one core per process."""


@dataclass(frozen=True)
class Problem:
    """Describes one call, or two that belong together, with all gradients."""

    name: str
    operation: str
    """Name of a function in operations.py."""
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    length: int = 1024
    """Queries; for decoding, the cache's capacity in tokens."""
    query_start: int = 0
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    indexer_heads: int = 4
    indexer_dim: int = 64
    documents: bool = False
    """Several documents of different lengths in each sequence."""
    ties: bool = False
    """Many keys have equal scores."""
    activation: str = "sigmoid"
    biases: bool = True
    """Whether the sigmoid indexer has biases."""
    mode: str = "inverse"
    k_base: int = 256
    k_min: int = 64
    k_max: int = 512
    window: int = 0
    """Keys of the local window."""
    lists: bool = False
    """The selection is key lists instead of a packed mask."""
    dense: bool = False
    """All causal keys instead of a selection."""
    gate: bool = True
    """G1 is fused into attention."""
    beta: float = 1.0
    row_fraction: float = 1.0
    variant: str = ""
    """Other distinctions within an operation."""

    @property
    def num_keys(self) -> int:
        return self.query_start + self.length


def _table() -> tuple[Problem, ...]:
    large = {"length": 4096, "heads": 16, "kv_heads": 4, "head_dim": 128, "k_base": 1024, "k_max": 2048}
    long = {**large, "length": 8192}
    uneven = {"length": 1000, "batch": 2}
    fp32 = {"dtype": torch.float32}
    relu = {"activation": "relu", "biases": False}
    late = {"length": 1024, "query_start": 1024}
    settings: dict[str, dict[str, dict[str, Any]]] = {
        "selection": {
            "inverse": {"length": 2048, "batch": 2},
            "direct": {"length": 2048, "mode": "direct"},
            "off": {"length": 2048, "mode": "off"},
            "relu": {"length": 2048, **relu},
            "no-biases": {"biases": False},
            "documents": {"length": 2048, "batch": 2, "documents": True},
            "query-start": late,
            "window": {"window": 100, "documents": True},
            "ties": {"ties": True},
            "ties-off-window": {"ties": True, "mode": "off", "window": 64, **relu},
            "uneven": uneven,
            "fp32": fp32,
            "log-sum": {"beta": 1.7, "variant": "log-sum"},
            "wide-indexer": {"indexer_heads": 8, "indexer_dim": 128},
            "small-indexer": {"indexer_heads": 1, "indexer_dim": 32},
            "long": long,
            "long-candidates": {**long, "variant": "candidates"},
            "lists": {"length": 2048, "lists": True, "documents": True},
            "lists-long": {**long, "lists": True},
            "lists-query-start": {**late, "lists": True},
        },
        "attention": {
            "dense": {"dense": True, "batch": 2},
            "dense-documents-no-gate": {"dense": True, "documents": True, "gate": False},
            "dense-128-long": {**long, "dense": True},
            "dense-fp32": {"dense": True, **fp32},
            "bits": {"batch": 2},
            "bits-no-gate": {"gate": False},
            "bits-128": large,
            "bits-32": {"head_dim": 32},
            "bits-uneven-documents": {**uneven, "documents": True},
            "bits-query-start": late,
            "bits-fp32": {**fp32, "length": 512},
            "bits-long": {**long, "kv_heads": 16},
            "lists": {"lists": True, "batch": 2},
            "lists-no-gate-documents": {"lists": True, "gate": False, "documents": True},
            "lists-128": {**large, "lists": True},
            "lists-query-start": {**late, "lists": True},
            "lists-fp32": {**fp32, "length": 512, "lists": True},
        },
        "indexer_loss": {
            "dense": {"dense": True, "batch": 2},
            "dense-relu-documents": {"dense": True, "documents": True, **relu},
            "dense-long": {**long, "dense": True},
            "dense-sampled": {"dense": True, "length": 2048, "row_fraction": 0.25},
            "dense-fp32": {"dense": True, **fp32, "length": 512},
            "bits": {"batch": 2, "beta": 1.7},
            "bits-log-sum": {"length": 2048, "beta": 1.7, "variant": "log-sum"},
            "bits-uneven-documents": {**uneven, "documents": True},
            "bits-sampled": {"length": 2048, "row_fraction": 0.25},
            "bits-query-start": late,
            "bits-128": large,
            "bits-fp32": {**fp32, "length": 512},
            "lists": {"lists": True, "batch": 2},
            "lists-relu-documents": {"lists": True, "documents": True, **relu},
            "lists-sampled": {"length": 2048, "lists": True, "row_fraction": 0.25},
            "lists-128": {**large, "lists": True},
        },
        "decode_step": {
            "1": {"length": 2048},
            "4-uneven": {"length": 4096, "batch": 4, "window": 64},
            "4-direct-relu": {"length": 3000, "batch": 4, "mode": "direct", **relu},
            "1-128-long": {**long, "length": 16384},
            "1-ties-no-gate": {"length": 2048, "ties": True, "gate": False},
            "2-fp32": {**fp32, "length": 1024, "batch": 2},
        },
        "prologue": {
            "both-gates": {"batch": 2},
            "value-gate": {"variant": "value"},
            "no-gates-fp32": {"variant": "none", **fp32},
            "128": {**large, "variant": "both"},
        },
        "swiglu": {"bf16": {"length": 4096}, "fp32": fp32},
        "cross_entropy": {
            "bf16": {"length": 2048},
            "overwritten": {"length": 2048, "variant": "overwrite"},
            "fp32": fp32,
        },
        "sigmoid_gate": {"bf16": {"length": 4096}, "fp32": fp32},
        "sums": {"bf16": {"length": 4096}, "fp32": fp32},
        "update_norm": {"fp32": fp32, "bf16": {}},
        "split_projection": {"bf16": {"batch": 2, "length": 2048}, "fp32": fp32},
        "statistics": {"bits": {"batch": 2}},
    }
    return tuple(
        Problem(f"{operation} {name}", operation, **{"seed": _seed(operation, name), **fields})
        for operation, problems in settings.items()
        for name, fields in problems.items()
    )


def _seed(*words: str) -> int:
    """Derive a seed from the problem's name, so that a new problem in the table changes no other."""
    return int.from_bytes(hashlib.sha256("/".join(words).encode()).digest()[:4], "big")


PROBLEMS = _table()


def inputs_of(problem: Problem) -> dict[str, torch.Tensor]:
    """Draw inputs on the CPU in fp32, the same on every machine, and then cast them."""
    p = problem
    generator = torch.Generator().manual_seed(p.seed)

    def normal(*shape: int, dtype: torch.dtype = p.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)

    batch, length, keys = p.batch, p.length, p.num_keys
    if p.operation in _SMALL_INPUTS:
        return _SMALL_INPUTS[p.operation](p, normal, generator)
    inputs = {
        "q": normal(batch, length, p.heads, p.head_dim),
        "k": normal(batch, keys, p.kv_heads, p.head_dim),
        "v": normal(batch, keys, p.kv_heads, p.head_dim),
        "gate": normal(batch, length, p.heads, p.head_dim),
        "grad": normal(batch, length, p.heads, p.head_dim),
        "q_idx": normal(batch, length, p.indexer_heads, p.indexer_dim),
        "k_idx": normal(batch, keys, p.indexer_dim),
        "weight_logits": normal(batch, length, p.indexer_heads),
        "score_bias": normal(p.indexer_heads, dtype=torch.float32) * 0.5,
        "weight_bias": normal(p.indexer_heads, dtype=torch.float32) * 0.5,
        # This is near the middle of the rows' variances, so that budgets lie between both limits.
        "variance_ema": torch.tensor(0.6 if p.activation == "relu" else 0.04),
    }
    if p.ties:
        # Only seven keys differ. Products of small integers are exact, so rounding does not separate equal scores.
        inputs["q_idx"] = inputs["q_idx"].float().round().clamp(-2, 2).to(p.dtype)
        few = inputs["k_idx"][:, :7].float().round().clamp(-2, 2).to(p.dtype)
        inputs["k_idx"] = few[:, torch.arange(keys) % 7]
    if p.documents:
        ends = torch.rand(batch, keys, generator=generator) < 5 / keys
        ends[:, keys // 3] = True
        starts = torch.where(ends, torch.arange(keys, dtype=torch.int32), 0).cummax(1).values
        inputs["document_starts"] = starts[:, p.query_start :].to(torch.int32).contiguous()
    return inputs


def _decode_inputs(p: Problem, normal: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    caches = inputs_of(replace(p, operation="attention"))
    one = {name: caches[name][:, 0].contiguous() for name in ("q", "gate", "q_idx", "weight_logits")}
    # The last sequence fills the cache; the others end at odd lengths.
    lengths = [p.length - (p.batch - 1 - number) * (p.length // 5 + 1) for number in range(p.batch)]
    return {**caches, **one, "lengths": torch.tensor(lengths, dtype=torch.int32)}


def _prologue_inputs(p: Problem, normal: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    group, shape = p.heads // p.kv_heads, (p.length, p.batch)
    gate_rows = {"none": 0, "value": 1}.get(p.variant, 1 + group)
    positions = torch.arange(p.length, dtype=torch.float64)
    # The angles have exact cosines and sines. Computed ones would depend on the machine.
    table = torch.tensor([1.0, 0.8, 0.6, 0.28, 0.0, -0.28, -0.6, -0.8, -1.0])
    index = (positions[:, None].long() + 3 * torch.arange(p.head_dim // 2)) % 9
    return {
        "qkv": normal(*shape, p.kv_heads * (group + 2) * p.head_dim),
        "gate_logits": normal(*shape, p.kv_heads * gate_rows * p.head_dim),
        "cos": table[index].contiguous(),
        "sin": table[(index + 4) % 9].contiguous(),
        "grad_q": normal(p.batch, p.length, p.heads, p.head_dim),
        "grad_k": normal(p.batch, p.length, p.kv_heads, p.head_dim),
        "grad_v": normal(p.batch, p.length, p.kv_heads, p.head_dim),
        "grad_gate": normal(p.batch, p.length, p.kv_heads, group, p.head_dim),
    }


def _pair_inputs(p: Problem, normal: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: normal(p.length, 2752) for name in ("x", "logits", "grad")} | {
        "wide": normal(p.length, 5504)
    }


def _cross_entropy_inputs(p: Problem, normal: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    targets = torch.randint(32000, (p.length,), generator=generator)
    return {
        "logits": normal(p.length, 32000),
        "targets": targets,
        "grad": normal(p.length, dtype=torch.float32),
    }


def _update_inputs(p: Problem, normal: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    sizes = {"large": (2048, 1000), "small": (77,)}
    weights = {f"weight_{name}": normal(*size) for name, size in sizes.items()}
    averages = {f"average_{name}": normal(*size, dtype=torch.float32) for name, size in sizes.items()}
    squares = {f"square_{name}": normal(*size, dtype=torch.float32).abs() for name, size in sizes.items()}
    return {**weights, **averages, **squares, "rate": torch.tensor(3e-4), "eps": torch.tensor(1e-8)}


def _projection_inputs(p: Problem, normal: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    columns = p.indexer_heads * p.indexer_dim + p.indexer_dim + p.indexer_heads
    return {
        "together": normal(p.length, p.batch, columns + 20),
        "grad_q": normal(p.batch, p.length, p.indexer_heads, p.indexer_dim),
        "grad_k": normal(p.batch, p.length, p.indexer_dim),
        "grad_w": normal(p.batch, p.length, p.indexer_heads),
    }


_SMALL_INPUTS = {
    "decode_step": _decode_inputs,
    "prologue": _prologue_inputs,
    "swiglu": _pair_inputs,
    "sigmoid_gate": _pair_inputs,
    "sums": _pair_inputs,
    "cross_entropy": _cross_entropy_inputs,
    "update_norm": _update_inputs,
    "split_projection": _projection_inputs,
}


def hash_of(tensor: torch.Tensor) -> str:
    """Hash dtype, shape and bytes in the order of the indices, whatever the strides."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype} {tuple(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def solve(problem: Problem, operations: Any, device: str) -> dict[str, str]:
    """Map each output to its hash. Two calls must agree.

    Raises:
        ValueError: two calls differ, or there is no output.
    """
    inputs = inputs_of(problem)
    function = getattr(operations, problem.operation)

    def call() -> dict[str, str]:
        on_device = {key: value.to(device, copy=True) for key, value in inputs.items()}
        return {name: hash_of(tensor) for name, tensor in function(problem, on_device).items()}

    first, second = call(), call()
    if first != second or not first:
        raise ValueError(f"two calls differ in {[name for name in first if first[name] != second.get(name)]}")
    return first


def run_problems(code: Path, operations: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, {"outputs": {output: hash}} or error) in the order of the table, computed by several processes."""
    processes = min(PROCESSES, os.cpu_count() or 1)
    # Neighbours in the table share kernels. They go to different processes, so that each process has some of each kind.
    shares = [range(first, len(PROBLEMS), processes) for first in range(processes)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([import_path(code), str(Path(__file__).resolve().parents[1])]),
        "OMP_NUM_THREADS": "1",
    }

    def one(share: range) -> dict[str, Any]:
        words = [str(code), str(operations), *map(str, share)]
        done = subprocess.run(
            [sys.executable, "-m", "golden.kernel_problems", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
        missing = {PROBLEMS[number].name for number in share} - set(found)
        error = f"its process ended with {done.returncode}: {done.stderr[-1500:]}"
        return {**found, **dict.fromkeys(missing, error)}

    with ThreadPoolExecutor(processes) as pool:
        results = {name: values for found in pool.map(one, shares) for name, values in found.items()}
    for problem in PROBLEMS:
        values = results[problem.name]
        yield problem.name, values if isinstance(values, str) else {"outputs": values}


def load_operations(code: Path, operations: Path) -> Any:
    """Load the module with the kernels of `code`.

    Raises:
        RuntimeError: another checkout's kernels were imported.
    """
    import gsa_kernels

    found = Path(str(gsa_kernels.__file__)).resolve()
    if code.resolve() not in found.parents:
        raise RuntimeError(f"gsa_kernels was imported from {found}, not from {code}")
    spec = importlib.util.spec_from_file_location("golden_operations", operations)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(code: str, operations: str, *numbers: str) -> None:
    """Solve some problems and print a line of JSON for each. An error replaces a problem's results."""
    module = load_operations(Path(code), Path(operations))
    device = os.environ.get("GOLDEN_DEVICE", "cuda")  # cpu: Triton's interpreter, to try this file
    for number in numbers:
        problem = PROBLEMS[int(number)]
        try:
            result: Any = solve(problem, module, device)
        except Exception as error:  # it must not hide the others' results; its text is the result
            result = f"{type(error).__name__}: {str(error)[:1500]}"
        print(json.dumps([problem.name, result]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
