"""Save the indexer projections of a checkpoint on real text, for `--selection FILE` of the benchmarks:

python launch/export_indexer.py RUN_DIR --seq-len-tokens 131072 --layers 0 5 11 --out FILE.pt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.config import ConfigError, load_config
from gsa_train.process.as_command import as_command


@as_command()
def main() -> int:
    parser = argparse.ArgumentParser(
        description="Save the indexer projections of a checkpoint on validation text."
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, with its config.yaml"
    )
    parser.add_argument("--seq-len-tokens", type=int, required=True, metavar="L")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="from 0 (default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the run's config")
    arguments = parser.parse_intermixed_args()
    if arguments.seq_len_tokens < 1:
        parser.error(f"--seq-len-tokens {arguments.seq_len_tokens}: give 1 or more")
    # Check the output path before the work.
    if not arguments.out.absolute().parent.is_dir() or arguments.out.is_dir():
        parser.error(f"--out {arguments.out}: give a file in a folder that exists")
    try:
        config = load_config(arguments.run_dir / "config.yaml", arguments.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # Import torch and megatron-core after the config is checked.
    from gsa_data.shards import DataFault
    from gsa_train.commands.export_indexer import export_indexer

    try:
        export_indexer(config, arguments.run_dir, arguments.seq_len_tokens, arguments.layers, arguments.out)
    except (ValueError, OSError, DataFault) as error:
        print(error, file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
