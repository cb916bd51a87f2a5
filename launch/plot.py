"""Write the report of finished, running or killed runs: python launch/plot.py RUN_DIR [RUN_DIR ...]

`gsa_eval/commands/plot.py` describes the command.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_eval.commands.plot import main

if __name__ == "__main__":
    sys.exit(main())
