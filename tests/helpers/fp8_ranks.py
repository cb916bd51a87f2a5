"""Compares FP8 linear layers of two tensor-parallel ranks with one rank's: `fp8_ranks.py OUT` on two ranks.

OUT gets the largest relative difference of each result. Layers compute in fp32, so FP8 causes all visible rounding.
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

CLASSES: dict[str, Any] = {"column": Fp8ColumnLinear, "row": Fp8RowLinear}
WIDTHS = {"column": (48, 64), "row": (64, 48)}


def results(name: str, core: Any, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Run the forward and backward passes on this rank's shards, and return the whole output and gradients. Values grow
    from rank to rank, so shards have different scales."""
    columns, rows = WIDTHS[name]
    generator = torch.Generator().manual_seed(0)
    weight, inputs, grad = (
        torch.randn(shape, generator=generator).cumsum(0).cumsum(-1)
        for shape in ((rows, columns), (32, 1, columns), (32, 1, rows))
    )
    tokens = 0 if core.sequence_parallel else None
    dims = (0, tokens, 2) if name == "column" else (1, 2, tokens)  # of weight, input and output

    def shard(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
        return whole if dim is None else whole.chunk(group.size(), dim)[group.rank()].contiguous()

    def joined(part: torch.Tensor, dim: int | None) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return part if dim is None else torch.cat(parts, dim)

    of_kind = {"gather_output": False} if name == "column" else {"input_is_parallel": True}
    options = {"config": core, "init_method": lambda w: w, "bias": False, "skip_bias_add": True, **of_kind}
    layer = CLASSES[name](columns, rows, tp_group=group, **options)
    layer.weight.data.copy_(shard(weight, dims[0]))
    mine = shard(inputs, dims[1]).clone().requires_grad_()
    output, _ = layer(mine)
    output.backward(shard(grad, dims[2]))
    parts = zip((layer.weight.grad, mine.grad, output.detach()), dims, strict=True)
    return {
        key: joined(part, dim) for key, (part, dim) in zip(("weight", "input", "output"), parts, strict=True)
    }


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
