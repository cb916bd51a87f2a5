"""Train a tokenizer, or tokenize shards once. After an installation the command is `gsa-prepare`.

python data/prepare.py tokenizer --shards data/sample/train --out data/sample/tokenizer.model
python data/prepare.py tokens --data data/sample/train --tokenizer data/sample/tokenizer.model --out DIR
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in (".", "kernels", "data")]

from gsa_train.process.as_command import as_command

with as_command():
    from gsa_data.prepare import main

if __name__ == "__main__":
    sys.exit(main())
