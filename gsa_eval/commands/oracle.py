"""Measure the best retrieval that any indexer could reach: launch/oracle.py of a checkout.

    python launch/oracle.py --hf DIR --haystack PLACE --lengths 4096,8192 --out FILE.json

A transformers decoder with plain attention answers RULER's needle tasks. Each query attends only to the latest 64 keys
and to the keys with the highest attention probabilities. --forms sets how many neighbouring queries share a selection,
and how many neighbouring keys are selected together. Exit code 2 means incorrect usage, or an unreadable model or text.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

from gsa_data.faults import DEFAULT_READING
from gsa_eval.commands.evaluate import lengths, samples
from gsa_eval.model_options import prepare_imports, refusing

TASKS = "niah_single_1,niah_single_2,niah_multikey_1"
FORMS = "q1k1,q1k16,q1k64,q2k1,q4k1,q32k1"
SELECTED = 16
"""The length divided by this number is the number of selected keys."""


@refusing
def main() -> int:
    arguments = parse(sys.argv[1:])
    prepare_imports()
    # Imported after the usage checks, because it loads torch.
    from gsa_eval import ruler
    from gsa_eval.convert.export_hf import DTYPES
    from gsa_eval.convert.tokenizer import folder_tokenizer
    from gsa_eval.evaluated_model import device_of
    from gsa_eval.oracle import Budget, Form, OracleAttention, load_decoder, retrieve
    from gsa_eval.text import words_of
    from gsa_hf import GSAConfig
    from gsa_train.files import write_atomically

    if arguments.out.exists() or not arguments.out.parent.is_dir():
        wrong = "exists already" if arguments.out.exists() else "its folder does not exist"
        raise ValueError(f"--out {arguments.out}: {wrong}; give a new file in a folder that is there")
    forms = [Form.parse(each) for each in arguments.forms.split(",") if each]
    device = device_of(arguments.device)
    model = load_decoder(arguments.hf, dtype=DTYPES[arguments.dtype], attn_implementation=arguments.attention)
    if forms and model.config.model_type == GSAConfig.model_type:
        raise ValueError(f"--forms {arguments.forms}: a GSA model has its own selections; give --forms ''")
    model = model.to(device).eval()
    tokenizer = folder_tokenizer(arguments.hf, model.config)
    essay = words_of(arguments.haystack, tokenizer, max(arguments.lengths), "text", DEFAULT_READING)
    # Wrong tasks and forms are refused before the model answers anything.
    for task in arguments.tasks.split(","):
        ruler.check_task(task, min(arguments.lengths), tokenizer, essay)
    for length, each in product(arguments.lengths, forms):
        OracleAttention(each, Budget(length // SELECTED))
    options, rows = {k: str(v) for k, v in vars(arguments).items()}, []
    for length in arguments.lengths:
        budget = Budget(length // SELECTED)
        for task in arguments.tasks.split(","):
            made = ruler.samples(task, length, arguments.samples, 0, tokenizer, essay)
            prompts = [
                (tokenizer.encode(each.prompt).tolist(), tokenizer.encode(f" {each.answers[0]}").tolist())
                for each in made
            ]
            for form in (None, *forms):
                found = retrieve(model, prompts, None if form is None else OracleAttention(form, budget))
                rows.append({"tokens": length, "task": task, "form": str(form or "own"), **asdict(found)})
                kept = "" if found.kept_mass is None else f", {found.kept_mass:.3f} of the attention kept"
                print(
                    f"{length} tokens, {task}, {rows[-1]['form']}: {found.exact:.0f}% exact, "
                    f"{found.log_probability:.3f} nats a token{kept}",
                    flush=True,
                )
                # After each row, so that a long call that is stopped keeps its rows.
                write_atomically(arguments.out, json.dumps({"options": options, "rows": rows}, indent=1))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a selection of keys retrieves at best.")
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="a folder of transformers")
    parser.add_argument("--haystack", required=True, metavar="PLACE", help="text that hides needles")
    parser.add_argument("--lengths", type=lengths, default=(4096, 8192), metavar="TOKENS[,TOKENS...]")
    parser.add_argument("--tasks", default=TASKS, metavar="TASK[,TASK...]", help=f"(default: {TASKS})")
    parser.add_argument(
        "--forms",
        default=FORMS,
        metavar="FORM[,FORM...]",
        help="q<queries that share a selection>k<keys selected as one>, hkv after it for a selection a key-value head; "
        f"'': the model's own attention alone (default: {FORMS})",
    )
    parser.add_argument(
        "--samples", type=samples, default=100, metavar="N", help="of each task (default: 100)"
    )
    parser.add_argument("--dtype", default="fp32", choices=("bf16", "fp32"), help="(default: fp32)")
    parser.add_argument(
        "--attention",
        default="sdpa",
        choices=("sdpa", "gsa"),
        help="of the model's own selections: plain torch, or our kernels on CUDA (default: sdpa)",
    )
    parser.add_argument("--device", default="", help="(default: cuda where there is one, else cpu)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="the numbers")
    return parser.parse_args(words)
