"""Train a tokenizer, and tokenize shards once. A checkout has these commands in data/prepare.py.

    gsa-prepare tokenizer --shards DIR --out tokenizer.model
    gsa-prepare tokens --data DIR --tokenizer tokenizer.model --out DIR

`tokenizer` trains a sentencepiece BPE model. `tokens` tokenizes shards once, into megatron-core's .bin and .idx.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gsa_data.faults import DataFault, Reading, naming

LONGEST_LINE_BYTES = 4192
"""The default of sentencepiece's max_sentence_length. Its BPE fails on words of more than 65535 characters."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code. Bad input prints a line to stderr and gives 2."""
    try:
        return _run(_parse(arguments))
    except (KeyboardInterrupt, ImportError) as error:
        # dill, which torch imports, turns Ctrl-C into an error of its own.
        if isinstance(error, ImportError) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        print("interrupted; start the same command again", file=sys.stderr)
        return 130


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    from gsa_data import prepare_tokens  # imported here: it loads torch, and `main` catches Ctrl-C meanwhile

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tokenizer = commands.add_parser("tokenizer", help="train a sentencepiece BPE tokenizer")
    tokenizer.add_argument(
        "--shards", required=True, help="folder of the text, in any format of data.train_dir"
    )
    tokenizer.add_argument(
        "--out", type=Path, required=True, help="file of the tokenizer, such as tokenizer.model"
    )
    tokenizer.add_argument("--vocab-size", type=int, default=4096, help="tokens (default: 4096)")
    tokenizer.add_argument(
        "--text-field", default="text", help="field of a line that holds the text (default: text)"
    )
    tokenizer.set_defaults(run=_run_tokenizer)
    tokens = commands.add_parser("tokens", help="tokenize the shards of a folder once, for many runs")
    prepare_tokens.add_arguments(tokens)
    tokens.set_defaults(run=prepare_tokens.run)
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.run(options))
    except (DataFault, ValueError, OSError) as fault:  # ValueError: a bad tokenizer file or limit
        said = str(fault)
        if isinstance(fault, OSError) and _is_of(options.out, fault):
            said = f"--out {options.out}: {fault}; make room there, or give another --out"
        print(f"error: {said}", file=sys.stderr)
        return 2


def _is_of(out: Path, fault: OSError) -> bool:
    """Returns whether the error is about `out`. The error of a full disk names no file."""
    if fault.filename is None:
        return fault.errno is not None
    failed, place = Path(os.fsdecode(fault.filename)).absolute(), out.absolute()
    return failed in place.parents or str(failed).startswith(str(place))


def _run_tokenizer(options: argparse.Namespace) -> int:
    train_tokenizer(options.shards, options.out, options.vocab_size, options.text_field)
    print(f"{options.out}: a tokenizer of {options.vocab_size} tokens, from the text of {options.shards}")
    return 0


def pieces_of(line: str) -> Iterator[str]:
    """Split a line at spaces into pieces of at most LONGEST_LINE_BYTES, because sentencepiece skips longer lines."""
    if len(line.encode()) <= LONGEST_LINE_BYTES:
        if line:
            yield line
        return
    begin, most = 0, LONGEST_LINE_BYTES // 4  # characters, of up to four bytes
    while begin < len(line):
        space = line.rfind(" ", begin, begin + most) if begin + most < len(line) else -1
        end = space if space > begin else begin + most
        yield line[begin:end]
        begin = end + (end == space)  # sentencepiece puts a space before each piece


def train_tokenizer(shards: str, out: Path, vocab_size: int, text_field: str = "text") -> None:
    """Train BPE like Llama: with byte fallback, split digits, unchanged text, and unk 0, bos 1, eos 2.

    Raises:
        DataFault: `out` exists, or the shards hold too little text for a vocabulary of this size
    """
    # Imported here, because they load slowly.
    import sentencepiece

    from gsa_data.documents import Document, read_documents
    from gsa_data.shards import build_manifest

    if out.is_dir():
        raise DataFault(f"--out {out}: a folder; give the file of the tokenizer")
    if out.exists():  # checkpoints and tokens may depend on it
        raise DataFault(f"--out {out}: exists; give another file, or remove that one")
    if vocab_size < 1:
        raise DataFault(f"--vocab-size {vocab_size}: not positive; give 1 or more, such as 4096")
    reading = Reading(max_bad_line_fraction=0.0, or_skip="")  # this command cannot skip
    with naming("--shards"):
        manifest = build_manifest(shards, text_field, reading)

    def lines() -> Iterator[str]:
        for relpath, _ in manifest.shards:
            for document in read_documents(manifest, relpath, reading, Counter()):
                if isinstance(document, Document):
                    for line in document.text_utf8.decode().split("\n"):
                        yield from pieces_of(line)

    if next(lines(), None) is None:
        raise DataFault(f"--shards {shards}: no text in them to train a tokenizer on; give other shards")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=1,
        )
    except RuntimeError as error:  # sentencepiece names its source line before the reason
        reason = str(error).rpartition("] ")[2].strip() or str(error)
        raise DataFault(
            f"--vocab-size {vocab_size}: no tokenizer of this size from {shards} ({reason}); give another size, or "
            "other text"
        ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_bytes(model.getvalue())
    os.replace(temporary, out)  # a kill leaves no partial file
