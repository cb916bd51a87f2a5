"""Draw a model's attention on a text: python launch/analyze.py --run RUN_DIR --name NAME [--text TEXT]

`gsa_eval/commands/analyze.py` describes the command.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_eval.commands.analyze import main

if __name__ == "__main__":
    sys.exit(main())
