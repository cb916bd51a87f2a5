"""Import a model of Hugging Face's transformers: launch/import_hf.py of a checkout, `gsa-import-hf` of an
installation.

    python launch/import_hf.py --hf DIR --out DIR [--gates none|open] [--seq-len-tokens L]

--hf is a folder that export_hf.py wrote, or a dense model: Llama, Mistral, Qwen2 or Qwen3. --out receives the weights
for `checkpoint.initial_weights`, the tokenizer, and a config.yaml from which training can start. Exit code 2 means
incorrect usage, or a model that the config cannot represent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gsa_eval.model_options import prepare_imports, refusing


@refusing
def main() -> int:
    parser = argparse.ArgumentParser(description="Import a model of Hugging Face's transformers.")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--gates",
        choices=("none", "open"),
        default="none",
        help="of a dense model: none, or open, which do not change the output and do not learn (default: %(default)s)",
    )
    parser.add_argument("--seq-len-tokens", type=int, metavar="L", help="of the training to follow")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="(default: the folder's)")
    parser.add_argument(
        "--eos-token", metavar="TOKEN", help="that ends a document (default: the tokenizer's)"
    )
    arguments = parser.parse_args()
    if arguments.seq_len_tokens is not None and arguments.seq_len_tokens < 1:
        parser.error(f"--seq-len-tokens {arguments.seq_len_tokens}: give 1 or more")
    prepare_imports()
    # Imported after the usage checks, because it loads torch.
    from gsa_eval.convert.import_hf import TokenizerChoice, import_hf

    choice = TokenizerChoice(arguments.tokenizer, arguments.eos_token)
    import_hf(arguments.hf, arguments.out, arguments.gates, arguments.seq_len_tokens, choice)
    print(f"wrote {arguments.out}; start from {arguments.out / 'config.yaml'}")
    return 0
