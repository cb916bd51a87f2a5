"""`fused_ranks.py OUT` runs fused kernels on two ranks, in Triton's interpreter. Each case runs twice: with tensor
parallelism, which divides the heads, and with data parallelism for comparison."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from gsa_kernels import sampling
from gsa_kernels.fused.split_rotate_gate.op import fused_split_rotate_gate
from gsa_kernels.indexer.split_op import fused_split_projection
from gsa_train.config import Config
from gsa_train.distributed.parallel import init_parallel, leave_layout, shutdown_parallel
from gsa_train.model.mcore.build import Model
from helpers.interpreter import mend_interpreter
from helpers.many_layouts import train_case
from helpers.single_rank import CONFIG, SPARSE, WARM_UP, with_sections

LENGTHS, STRETCH = {"bits": 72, "lists": 40}, 32
"""Tokens, and rows of a stretch: two or three stretches for two ranks; the last one is short."""
RECOMMENDED = {"indexer_activation": "relu", "indexer_norm": True, "indexer_rope": True}
CASES: dict[str, dict[str, Any]] = {"bits": {}, "lists": {"attention_kernel": "gathered", **RECOMMENDED}}
PHASES = {"bits": [WARM_UP, SPARSE], "lists": [SPARSE]}
"""Phases by case. A warm-up attends to all keys, so one case suffices."""


def case_config(name: str, parallel: dict[str, Any]) -> Config:
    length = LENGTHS[name]
    budgets = {"k_base": length, "k_min": length, "k_max": length}
    sections: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 1, "init_std": 0.1, "head_dim": 32},
        "gsa": {"indexer_dim": 16, "indexer_heads": 2, **budgets, **CASES[name]},
        "train": {
            "seq_len_tokens": length,
            "micro_batch_size": 1,
            "global_batch_size": 2,
            "z_loss_coeff": 0.1,
        },
        "parallel": parallel,
    }
    return with_sections(CONFIG, sections, PHASES[name])


def fuse(model: Model) -> None:
    model.mcore_config.fused_ops = True  # read by the loss; layers have read it when they were built
    for attention in model.attentions:
        attention.over_chunks.implementation = "triton"
        attention.heads_op = fused_split_rotate_gate
        attention.indexer.split_op = fused_split_projection


def main(out: Path) -> None:
    mend_interpreter()
    sampling.STRETCH_ROWS = STRETCH
    found: dict[str, dict[str, Any]] = {}
    for name in CASES:
        for layout in ("tensor", "data"):
            config = case_config(name, {"tensor": 2} if layout == "tensor" else {})
            parallel = init_parallel(config.parallel, seed=1)
            found.setdefault(name, {})[layout] = train_case(config, parallel, (1, 1), prepare=fuse)
            if parallel.rank == 0:
                out.write_text(json.dumps(found))
            leave_layout()
    shutdown_parallel()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
