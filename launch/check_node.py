"""Check the GPUs of this node: python launch/check_node.py. Start it by torchrun to check the GPUs' links, too.

`gsa_train/commands/check_node.py` describes the command and its options.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.commands.check_node import main

if __name__ == "__main__":
    sys.exit(main())
