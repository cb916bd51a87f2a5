"""Train a model: torchrun --nproc_per_node=N launch/pretrain.py --config FILE [key=value ...]"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.process.as_command import as_command

with as_command():
    from gsa_train.commands.pretrain import main

# The guard is needed, because reader processes may import this file again.
if __name__ == "__main__":
    sys.exit(main())
