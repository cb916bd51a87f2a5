"""Measure the best retrieval of any indexer: python launch/oracle.py --hf DIR --haystack PLACE --out FILE.json"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.process.as_command import as_command

with as_command():
    from gsa_eval.commands.oracle import main

if __name__ == "__main__":
    sys.exit(main())
