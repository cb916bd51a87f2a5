"""Write the small conversation set for configs/demo_sft.yaml, which always has the same lines.

    python data/sample_conversations.py --out data/sample_chat

A few patterns make conversations about Python. A model can learn from them only the form and the end of an answer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

TYPES = {
    "list": ("a sequence that can grow and change", "[1, 2, 3]"),
    "tuple": ("a sequence that cannot change", "(1, 2, 3)"),
    "dict": ("a table from keys to values", '{"a": 1}'),
    "set": ("a collection without order in which each item stands once", "{1, 2, 3}"),
    "str": ("text, a sequence of characters", '"abc"'),
    "int": ("a whole number of any size", "42"),
    "float": ("a number with a fraction, in double precision", "0.5"),
    "bool": ("a truth value, True or False", "True"),
    "bytes": ("a sequence of bytes that cannot change", 'b"abc"'),
}
FUNCTIONS = {
    "len": ("returns the number of items of an object", "len([4, 5, 6])", "3"),
    "sum": ("adds the items of an iterable", "sum([1, 2, 3])", "6"),
    "max": ("returns the largest item", "max([3, 9, 4])", "9"),
    "min": ("returns the smallest item", "min([3, 9, 4])", "3"),
    "sorted": ("returns a new list of the items in order", "sorted([3, 1, 2])", "[1, 2, 3]"),
    "abs": ("returns the absolute value of a number", "abs(-7)", "7"),
    "round": ("rounds a number", "round(2.6)", "3"),
    "any": ("tells whether at least one item is true", "any([False, True])", "True"),
    "all": ("tells whether every item is true", "all([False, True])", "False"),
    "ord": ("returns the code point of a character", 'ord("A")', "65"),
    "chr": ("returns the character of a code point", "chr(65)", "'A'"),
    "bin": ("writes a whole number in base two", "bin(5)", "'0b101'"),
    "divmod": ("returns quotient and remainder", "divmod(7, 2)", "(3, 1)"),
}
METHODS = {
    "str.upper": ("returns the text in upper case", '"abc".upper()', "'ABC'"),
    "str.split": ("cuts a text into a list of words", '"a b".split()', "['a', 'b']"),
    "str.strip": ("removes white space from both ends", '" a ".strip()', "'a'"),
    "str.replace": ("returns the text with one part replaced by another", '"aba".replace("a", "c")', "'cbc'"),
    "list.append": ("adds one item at the end of a list", "x = [1]; x.append(2); x", "[1, 2]"),
    "list.pop": ("removes the last item of a list and returns it", "[1, 2].pop()", "2"),
    "dict.get": ("returns the value of a key, or None without an error", '{"a": 1}.get("b")', "None"),
    "dict.keys": ("returns the keys of a table", 'list({"a": 1}.keys())', "['a']"),
}
MODULES = {
    "os": "files, folders and the environment of the process",
    "sys": "the interpreter itself, its arguments and its path",
    "re": "regular expressions",
    "json": "reading and writing JSON",
    "math": "mathematical functions",
    "random": "random numbers",
    "pathlib": "paths of files as objects",
    "datetime": "dates and times",
    "itertools": "iterators for loops",
    "collections": "containers such as Counter and deque",
    "subprocess": "running other programs",
    "threading": "threads and locks",
}
SYSTEM = "You answer questions about Python in one or two sentences."
VALIDATION_SHARE = 0.12


def conversations() -> list[list[tuple[str, str]]]:
    """Returns conversations as lists of (role, content), in a fixed order."""
    made: list[list[tuple[str, str]]] = []

    def add(*turns: str) -> None:
        roles = ("user", "assistant") * (len(turns) // 2)
        made.append(list(zip(roles, turns, strict=True)))

    for name, (meaning, example) in TYPES.items():
        add(f"What is a {name} in Python?", f"A {name} is {meaning}.")
        add(f"Show me a {name}.", f"Here is one: {example}")
        add(
            f"What is a {name}?",
            f"A {name} is {meaning}.",
            "Can you give an example?",
            f"Yes: {example} is a {name}.",
        )
    for name, (meaning, call, result) in {**FUNCTIONS, **METHODS}.items():
        kind = "method" if "." in name else "function"
        add(f"What does {name} do?", f"The {kind} {name} {meaning}.")
        add(f"What is the result of {call}?", f"It is {result}, because {name} {meaning}.")
        add(f"Which {kind} {meaning}?", f"That is {name}. For example, {call} is {result}.")
        add(
            f"Explain {name} to me.",
            f"It {meaning}.",
            "How do I call it?",
            f"Like this: {call}. The result is {result}.",
        )
    for name, meaning in MODULES.items():
        add(f"What is the module {name} for?", f"The module {name} is for {meaning}.")
        add(f"Which module is for {meaning}?", f"Import {name}.")
        add(
            f"I need {meaning}.",
            f"Use the module {name}.",
            "How do I get it?",
            f"With the line: import {name}",
        )
    draw = random.Random(0)
    for _ in range(60):
        a, b = draw.randrange(2, 20), draw.randrange(2, 20)
        add(f"What is {a} + {b}?", f"{a} + {b} = {a + b}")
        add(f"What does print({a} * {b}) show?", f"It shows {a * b}.")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the bundled conversation set.")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    try:
        write(out)
    except OSError as error:
        print(f"error: --out {out}: cannot be written ({error}); give another folder", file=sys.stderr)
        return 1
    return 0


def write(out: Path) -> None:
    draw = random.Random(1)
    made = conversations()
    draw.shuffle(made)
    held_out = round(VALIDATION_SHARE * len(made))
    for split, chosen in (("validation", made[:held_out]), ("train", made[held_out:])):
        lines = []
        for number, turns in enumerate(chosen):
            messages = [{"role": role, "content": content} for role, content in turns]
            if number % 4 == 0:
                messages.insert(0, {"role": "system", "content": SYSTEM})
            lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        folder = out / split
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "conversations.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
