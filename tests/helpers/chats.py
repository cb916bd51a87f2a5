"""Defines small conversations, a tokenizer with the tokens of a chat, and templates."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gsa_data.chat_template import ChatTemplate

WORDS = ["gate", "sparse", "query", "key", "value", "head", "token", "lane", "shard", "weather", "é", "漢"]

WITH_BLOCKS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if tools -%}{{- tools | tojson -}}{%- endif -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
PLAIN = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
FORGETS = PLAIN.replace("message.content", "(message.content if loop.last else '...')")
"""A template that writes a message differently if another one follows."""

TOOLS = [{"type": "function", "function": {"name": "é", "parameters": {}}}]


def make_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer.json that ends documents with <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "user assistant system"] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def conversation(number: int) -> list[dict[str, Any]]:
    """Create one to three turns that begin with their number; every third conversation has a system message."""
    draw = random.Random(number)

    def text() -> str:
        return f"{number} " + " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 14)))

    messages = [{"role": "system", "content": text()}] * (number % 3 == 0)
    for _ in range(draw.randrange(1, 4)):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return messages


def write_chats(path: Path, conversations: Iterable[Sequence[dict[str, Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in conversations), encoding="utf-8"
    )


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, "chat.jinja", special_tokens)
