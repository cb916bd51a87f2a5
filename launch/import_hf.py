"""Import a model of transformers: python launch/import_hf.py --hf DIR --out DIR"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.process.as_command import as_command

with as_command():
    from gsa_eval.commands.import_hf import main

if __name__ == "__main__":
    sys.exit(main())
