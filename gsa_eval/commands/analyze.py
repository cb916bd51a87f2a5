"""Draw a model's attention on a text: launch/analyze.py of a checkout, `gsa-analyze` of an installation.

    python launch/analyze.py --run RUN_DIR [--step N] --name NAME [--layer N] [--head N] [--text TEXT | --file FILE]
    python launch/analyze.py --checkpoint DIR | --hf DIR --name NAME --out DIR --text TEXT [key=value ...]

Pictures and numbers go to RUN_DIR/analysis/NAME, or to DIR/NAME with --out. No other file of the run is changed.
key=value works as in evaluate.py. Exit code 2 means wrong use, or an unreadable model or text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gsa_eval.model_options import add_source, check_step, require_packages
from gsa_train.distributed.megatron_import import quiet_libraries
from gsa_train.process.as_command import as_command


@as_command()
def main() -> int:
    arguments = parse(sys.argv[1:])
    require_packages()
    quiet_libraries()
    # Imported after the usage checks, because it loads torch.
    from gsa_data.faults import DataFault
    from gsa_eval.analyze import run_analysis

    try:
        folder = run_analysis(arguments, sys.argv[1:])
    except (ValueError, OSError, DataFault) as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path}" for path in sorted(folder.iterdir())))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw what a model's attention does on a text.")
    add_source(parser)
    parser.add_argument("--name", required=True, help="of the analysis: a new one")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of analyses (default: in the run's)")
    parser.add_argument("--layer", type=int, default=0, metavar="N", help="of the maps, from 0 (default: 0)")
    parser.add_argument("--head", type=int, default=0, metavar="N", help="of the maps, from 0 (default: 0)")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", metavar="TEXT", help="(default: a document of the run's validation text)")
    text.add_argument("--file", type=Path, metavar="FILE", help="a text file")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="number of tokens from the text's beginning, at most 4096 (default: 512)",
    )
    parser.add_argument("--device", default="", help="(default: cuda where there is one, else cpu)")
    parser.add_argument(
        "--dtype", default="", choices=("", "bf16", "fp32"), help="(default: as the weights are)"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="such as gsa.k_base=512")
    arguments = parser.parse_intermixed_args(words)
    check_step(parser, arguments)
    return arguments
