"""Generate text from a checkpoint: launch/generate.py of a checkout, `gsa-generate` of an installation.

    python launch/generate.py --run RUN_DIR [--step N] --prompt TEXT [--prompt TEXT ...] --max-new-tokens N
    python launch/generate.py --checkpoint DIR | --hf DIR  --prompts FILE | --interactive ...

The checkpoint may have any parallel layout. Decoding is greedy by default. Any of --temperature, --top-k and --top-p
turns on sampling. --seed fixes the random numbers. Texts go to standard output, the speed to standard error.

On CUDA, attention uses the Triton kernels. Elsewhere, it uses plain torch, which is slow for long texts. --attention
selects another implementation. Exit code 2 means incorrect usage, a missing checkpoint, an empty prompt, or a prompt
that, with the new tokens, exceeds the model's context. Exit code 130 means Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gsa_data.tokenize import check_text, text_after
from gsa_eval.model_options import add_source, check_step, prepare_imports, refusing
from gsa_train.files import read_named

if TYPE_CHECKING:
    from gsa_eval.text_model import TextModel
    from gsa_hf.generation import Generator, Sampling


@refusing
def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    check_step(parser, arguments)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens {arguments.max_new_tokens}: below 1; give 1 or more")
    samples = [arguments.temperature, arguments.top_k, arguments.top_p]
    if arguments.seed is not None and all(each is None for each in samples):
        parser.error("--seed is of sampling; give --temperature, --top-k or --top-p, too")
    prepare_imports()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # Imported after the usage checks, because it loads torch.
    from gsa_eval.evaluated_model import Source
    from gsa_eval.text_model import load_text_model
    from gsa_hf.generation import Generator

    prompts = read_prompts(arguments)
    sampling = sampling_of(arguments)
    source = Source(arguments.run, arguments.checkpoint, arguments.hf, arguments.step)
    text_model = load_text_model(source, arguments.attention or "")
    generator = Generator(text_model.model, arguments.compile, text_model.vocab_size)
    answer = partial(write, generator, text_model, arguments.max_new_tokens, sampling)
    if arguments.interactive:
        interact(answer)
    else:
        answer(prompts)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Generate text from a checkpoint.", allow_abbrev=False)
    add_source(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", action="append", metavar="TEXT", help="repeat it for a batch")
    text.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt in each line")
    text.add_argument(
        "--interactive", action="store_true", help="each line of the standard input is a prompt by itself"
    )
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample; 1: as the model says")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from this share of the probability")
    parser.add_argument("--seed", type=int, metavar="S", help="of sampling (default: 0)")
    parser.add_argument(
        "--attention",
        choices=("gsa", "sdpa"),
        help="the kernels, or plain torch (default: gsa on a CUDA device, else sdpa)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="on a CUDA device, also fuse what is between matrix products, which takes a minute at first",
    )
    return parser


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """
    Raises:
        ValueError: a prompt is empty or not UTF-8, there is no prompt, or the file is missing.
    """
    if arguments.interactive:
        return []
    named = [("--prompt", prompt) for prompt in arguments.prompt or ()]
    if arguments.prompts is not None:
        text = read_named("--prompts", arguments.prompts)
        # Windows ends lines with \r\n. A prompt may hold other breaks.
        lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
        named = [(f"{arguments.prompts}, line {number}", line) for number, line in enumerate(lines, start=1)]
        if not lines:
            raise ValueError(f"--prompts {arguments.prompts}: empty; write a prompt in each line")
    for place, prompt in named:
        if not prompt.strip():
            raise ValueError(f"{place}: an empty prompt; give a text")
    return [check_text(prompt, place) for place, prompt in named]


def sampling_of(arguments: argparse.Namespace) -> Sampling | None:
    from gsa_hf.generation import Sampling

    given = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
    given = {name: value for name, value in given.items() if value is not None}
    return Sampling(**given, seed=arguments.seed or 0) if given else None


def write(
    generator: Generator,
    text_model: TextModel,
    max_new_tokens: int,
    sampling: Sampling | None,
    prompts: Sequence[str],
) -> None:
    encoded = [text_model.encode(prompt) for prompt in prompts]
    made = generator.generate(encoded, max_new_tokens, sampling)
    for number, (prompt, tokens, new) in enumerate(zip(prompts, encoded, made.tokens, strict=True), start=1):
        if len(prompts) > 1:
            print(f"--- {number}")
        ended = new[-1] in generator.eos_ids
        print(f"{prompt}{text_after(text_model.decode, tokens, new[:-1] if ended else new)}", flush=True)
    prepared = f"; CUDA graphs in {made.prepare_seconds:.1f} s" if made.prepare_seconds > 0.05 else ""
    print(
        f"prefill {made.prompt_tokens} tokens, {made.prefill_rate:.0f} tokens/s{prepared}; decode "
        f"{made.decode_steps} steps of {len(prompts)}, {made.decode_rate:.0f} tokens/s",
        file=sys.stderr,
    )


def interact(answer: Callable[[Sequence[str]], None]) -> None:
    """Answer each line of the standard input. If the model cannot continue a line, print the error and go on."""
    for line in sys.stdin:
        prompt = line.rstrip("\n")
        if not prompt.strip():
            continue
        try:
            answer([check_text(prompt, "the line")])
        except ValueError as error:
            print(error, file=sys.stderr)
