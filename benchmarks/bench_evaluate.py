"""Times the perplexity of text with a whole 1.7B model, as in `launch/evaluate.py`, against its forward pass alone.

    python benchmarks/bench_evaluate.py [--tokens 10000000] [--model GSA]

The model of configs/gsa_1.7b.yaml has random weights in bf16. The text is the bundled one, repeated as needed.
`evaluation_s` covers reading, tokenisation, the forward passes and the evaluation of the logits. `forward_s` is only
the model's forward pass, including logits. It is measured on every tenth batch of the same sequences and scaled to all
tokens.
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
import torch
import yaml
import zstandard
from bench_generate import make_model, model_config

from gsa_data.tokenize import Tokenizer
from gsa_eval.perplexity import score_text
from gsa_eval.text import Piece, Text, TextOptions, read_text
from gsa_hf import GSAForCausalLM

MOST = 1.15
"""Largest allowed ratio of the evaluation's time to the forward pass's time."""
SAMPLE = harness.ROOT / "data" / "sample"


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--model", default="GSA", choices=("standard", "GSA"))
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences at once")
    parser.add_argument("--every", type=int, default=10, help="one batch in this number is timed by itself")
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)
    report = harness.Report("bench_evaluate", arguments)
    shapes = yaml.safe_load((harness.ROOT / "configs" / "gsa_1.7b.yaml").read_text(encoding="utf-8"))
    config = model_config(arguments.model, shapes["model"]["num_layers"], arguments.length, shapes)
    model = make_model(config, "cuda")
    tokenizer = Tokenizer(str(SAMPLE / "tokenizer.model"), None)
    options = TextOptions(arguments.length, None, arguments.tokens, attend_across_documents=True)
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        copy_sample(Path(folder), arguments.tokens)
        copied_s = time.perf_counter() - begin
        warm = Text(text_of(folder, tokenizer, options).pieces[: 2 * arguments.batch], 0)
        score_text(model, warm, arguments.batch)
        begin = time.perf_counter()
        text = read_text(folder, tokenizer, options)
        read_s = time.perf_counter() - begin
        found = score_text(model, text, arguments.batch)
        evaluation_s = time.perf_counter() - begin
    forward_s = time_forward(model, text.pieces, arguments.batch, arguments.every)
    if not 0 < found["loss"] < 100:
        report.fail(f"loss {found['loss']}")
    report.row(
        model=arguments.model,
        tokens=found["forward_tokens"],
        read_s=read_s,
        score_s=found["seconds"],
        evaluation_s=evaluation_s,
        forward_s=forward_s,
        ratio=evaluation_s / forward_s,
        loss=found["loss"],
        copied_s=copied_s,
    )
    report.bar(
        f"perplexity of {arguments.tokens} tokens / forward pass", evaluation_s / forward_s, at_most=MOST
    )
    return report.finish()


def text_of(folder: str, tokenizer: Tokenizer, options: TextOptions) -> Text:
    few = TextOptions(options.context_length, None, 64 * options.context_length, attend_across_documents=True)
    return read_text(folder, tokenizer, few)


def copy_sample(folder: Path, tokens: int) -> None:
    """Repeat the bundled training text until it has 5 bytes per token, more than the tokenizer needs."""
    files = sorted((SAMPLE / "train").rglob("*.jsonl.zst"))
    texts = [zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read() for path in files]
    written, number = 0, 0
    while written < 5 * tokens:
        for text in texts:  # each file must differ
            first = json.dumps({"text": f"copy {number}"}).encode() + b"\n"
            (folder / f"{number:05d}.jsonl").write_bytes(first + text)
            written, number = written + len(text), number + 1


def time_forward(model: GSAForCausalLM, pieces: list[Piece], batch: int, every: int) -> float:
    """Return the seconds for all pieces, measured on one batch in `every`."""
    batches = [pieces[first : first + batch] for first in range(0, len(pieces) - batch + 1, batch)][::every]
    inputs = [
        torch.stack([torch.from_numpy(piece.tokens[:-1]).long() for piece in each]).cuda() for each in batches
    ]
    with torch.no_grad():
        model(inputs[0], use_cache=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for tokens in inputs:
            model(tokens, use_cache=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    return seconds * sum(len(piece.scored) for piece in pieces) / sum(tokens.numel() for tokens in inputs)


if __name__ == "__main__":
    sys.exit(main())
