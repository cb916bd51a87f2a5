"""`python -m gsa_train --config NAME`: the same as `gsa-pretrain`, and as launch/pretrain.py of a checkout."""

import sys

from gsa_train.commands.pretrain import main

# The guard is needed: readers of text may be started as processes that import this file again.
if __name__ == "__main__":
    sys.exit(main())
