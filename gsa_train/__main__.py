"""Run `python -m gsa_train --config NAME`, which does the same as `gsa-pretrain`."""

import sys

from gsa_train.commands.pretrain import main

# Processes that read text import this file again; the guard keeps them from training.
if __name__ == "__main__":
    sys.exit(main())
