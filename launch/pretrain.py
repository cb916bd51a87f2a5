"""Train a model: torchrun --nproc_per_node=N launch/pretrain.py --config FILE [key=value ...]

`gsa_train/commands/pretrain.py` says what it does, and with which exit codes.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.commands.pretrain import main

# The guard is needed: readers of text may be started as processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
