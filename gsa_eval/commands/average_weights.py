"""Average the weights of a run's checkpoints: launch/average_weights.py of a checkout, `gsa-average-weights` of an
installation.

    python launch/average_weights.py --run RUN_DIR --steps N N ... --out DIR            mean over these steps
    python launch/average_weights.py --run RUN_DIR --steps N --moving --out DIR         moving average at step N

DIR receives a weights-only checkpoint, which can be evaluated and exported. New runs can start from this checkpoint.
Exit code 2 means incorrect usage or a damaged checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gsa_eval.model_options import prepare_imports, refusing


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="Average the weights of a run's checkpoints.")
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--steps", type=int, nargs="+", required=True, metavar="N", help="of its checkpoints")
    parser.add_argument(
        "--moving", action="store_true", help="average the moving averages (train.weight_average_decay)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    arguments = parser.parse_args()
    steps = sorted(set(arguments.steps))
    if len(steps) < 2 and not arguments.moving:
        parser.error(f"--steps {steps[0]}: give two or more steps, or --moving")
    prepare_imports()
    # Imported after the usage checks, because it loads torch.
    from gsa_eval.convert.average_weights import average_weights
    from gsa_eval.convert.export_hf import find_source

    checkpoints = [find_source(arguments.run, step, None)[0] for step in steps]
    average_weights(checkpoints, arguments.out, arguments.moving)
    print(f"wrote {arguments.out}: the average of {', '.join(each.name for each in checkpoints)}")
    return 0
