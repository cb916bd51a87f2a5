"""Times the perplexity of text with a whole 1.7B model, as in `launch/evaluate.py`, against its forward pass alone.

    python benchmarks/bench_evaluate.py [--tokens 10000000]

The model of configs/gsa_1.7b.yaml has random weights in bf16. The text is the bundled one, repeated as needed.
`evaluation_s` covers reading, tokenisation, the forward passes and the evaluation of the logits. `forward_s` covers
only the forward passes, including logits. It is measured on every tenth batch and scaled to all tokens.
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
LENGTH, BATCH = 4096, 8
"""Tokens of a sequence, and sequences at once."""
EVERY = 10
"""The forward pass of every EVERY-th batch is timed separately."""
SAMPLE = harness.ROOT / "data" / "sample"


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    arguments = parser.parse_args()
    harness.require_cuda()
    torch.manual_seed(0)
    report = harness.Report("bench_evaluate", arguments)
    shapes = yaml.safe_load((harness.ROOT / "configs" / "gsa_1.7b.yaml").read_text(encoding="utf-8"))
    config = model_config("GSA", shapes["model"]["num_layers"], LENGTH, shapes)
    model = make_model(config, "cuda")
    tokenizer = Tokenizer(str(SAMPLE / "tokenizer.model"), None)
    options = TextOptions(LENGTH, None, arguments.tokens, attend_across_documents=True)
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        copy_sample(Path(folder), arguments.tokens)
        copied_s = time.perf_counter() - begin
        few = TextOptions(LENGTH, None, 64 * LENGTH, attend_across_documents=True)
        warm = Text(read_text(folder, tokenizer, few).pieces[: 2 * BATCH], 0)
        score_text(model, warm, BATCH)
        begin = time.perf_counter()
        text = read_text(folder, tokenizer, options)
        read_s = time.perf_counter() - begin
        found = score_text(model, text, BATCH)
        evaluation_s = time.perf_counter() - begin
    forward_s = time_forward(model, text.pieces)
    if not 0 < found["loss"] < 100:
        report.fail(f"loss {found['loss']}")
    report.row(
        model="GSA",
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


def time_forward(model: GSAForCausalLM, pieces: list[Piece]) -> float:
    """Return the seconds for all pieces, estimated from every EVERY-th batch."""
    batches = [pieces[first : first + BATCH] for first in range(0, len(pieces) - BATCH + 1, BATCH)][::EVERY]
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
