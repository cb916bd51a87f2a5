"""Export a checkpoint to Hugging Face's transformers: launch/export_hf.py of a checkout, `gsa-export-hf` of an
installation.

    python launch/export_hf.py --run RUN_DIR [--step N] --out DIR [--dtype bf16|fp32]
    python launch/export_hf.py --checkpoint DIR --out DIR

DIR receives the weights (safetensors), config, tokenizer, generation config, model code and a model card. The
checkpoint may have any parallel layout. Exit code 2 means incorrect usage, a damaged checkpoint, or a tokenizer that
cannot be converted.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from gsa_eval.model_options import add_source, check_step, prepare_imports, refusing

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="Export a checkpoint to Hugging Face's transformers.")
    add_source(parser, exported=False)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="of the weights (default: as they were trained)"
    )
    parser.add_argument(
        "--max-shard-size", type=size_in_bytes, default=5 * 10**9, metavar="SIZE", help="(default: 5GB)"
    )
    arguments = parser.parse_args()
    check_step(parser, arguments)
    prepare_imports()
    # Imported after the usage checks, because it loads torch.
    from gsa_eval.convert.export_hf import Exported, export_hf
    from gsa_eval.convert.read_source import read_source

    def export(checkpoint: Path, run_dir: Path | None) -> tuple[Path, Exported]:
        settings = (arguments.dtype, arguments.max_shard_size)
        return checkpoint, export_hf(checkpoint, arguments.out, run_dir, *settings)

    checkpoint, done = read_source(arguments.run, arguments.step, arguments.checkpoint, export)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote {done.folder}: {done.tensors} tensors, {done.bytes / 1e9:.3g} GB, of {checkpoint}")
    return 0


def size_in_bytes(text: str) -> int:
    """Return 5000000000 for `5GB`, as transformers writes sizes."""
    match = re.fullmatch(r"(\d+)\s*(KB|MB|GB|)", text)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 5GB or 500MB")
    return int(match[1]) * UNITS[match[2]]
