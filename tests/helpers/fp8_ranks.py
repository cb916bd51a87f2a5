"""Compares FP8 linear layers of two tensor-parallel ranks with one rank's: `fp8_ranks.py OUT` on two ranks.

OUT gets the largest relative difference of each result. The layers compute in fp32, so that only FP8 rounds visibly.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from gsa_train.distributed.parallel import init_parallel, leave_layout, shutdown_parallel
from gsa_train.model.mcore import config as mcore_config
from gsa_train.model.mcore.fp8_linears import Fp8ColumnLinear, Fp8RowLinear
from helpers.single_rank import CONFIG, with_sections

TOKENS, WIDTHS = 32, {"column": (48, 64), "row": (64, 48)}
CLASSES: dict[str, Any] = {"column": Fp8ColumnLinear, "row": Fp8RowLinear}


def whole(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weight, input and gradient of the output. The second rank's shards have larger magnitudes."""
    columns, rows = WIDTHS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, columns), (TOKENS, 1, columns), (TOKENS, 1, rows))
    weight, inputs, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return weight.cumsum(0).cumsum(1), inputs.cumsum(0) * torch.arange(1, columns + 1), grad.cumsum(2)


def results(name: str, config: Any, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Run forward and backward pass on this rank's shards, and return the whole output and gradients."""
    weight, inputs, grad = whole(name)
    rank, size, dim = group.rank(), group.size(), 0 if name == "column" else 1
    options = {"gather_output": False} if name == "column" else {"input_is_parallel": True}
    layer = CLASSES[name](
        *WIDTHS[name],
        config=config,
        init_method=lambda w: w,
        bias=False,
        skip_bias_add=True,
        tp_group=group,
        **options,
    )
    layer.weight.data.copy_(weight.chunk(size, dim)[rank])
    sequence = config.sequence_parallel and size > 1
    input_dim, output_dim = (0 if sequence else None, 2) if name == "column" else (2, 0 if sequence else None)
    mine, mine_grad = (
        whole if dim is None else whole.chunk(size, dim)[rank].contiguous()
        for whole, dim in ((inputs, input_dim), (grad, output_dim))
    )
    mine = mine.clone().requires_grad_()
    output, _ = layer(mine)
    output.backward(mine_grad)
    found = {
        "output": (output, output_dim),
        "input": (mine.grad, input_dim),
        "weight": (layer.weight.grad, dim),
    }
    return {key: joined(part.detach(), dim, group) for key, (part, dim) in found.items()}


def joined(part: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    if dim is None:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def main(out: Path) -> None:
    found: dict[str, float] = {}
    for sequence in (False, True):
        config = with_sections(CONFIG, {"parallel": {"tensor": 2, "sequence": sequence}})
        parallel = init_parallel(config.parallel, seed=1)
        with patch.object(mcore_config, "unsupported_by_device", lambda train, device: []):
            core = mcore_config.to_mcore_config(config, parallel)
        for name in WIDTHS:
            two, one = (results(name, core, group) for group in (parallel.groups.tp, parallel.groups.dp))
            for key, expected in one.items():
                difference = (two[key] - expected).abs().max() / expected.abs().max()
                found[f"{name}, sequence parallelism {sequence}: {key}"] = float(difference)
        if parallel.rank == 0:
            out.write_text(json.dumps(found))
        leave_layout()
    shutdown_parallel()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
