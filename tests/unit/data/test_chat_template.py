"""Tests chat templates: which tokens belong to the assistant, where a template is found, and which are rejected."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gsa_data import chat_template
from gsa_data.chat import ChatReader
from gsa_data.chat_template import ChatEncoder, find_chat_template
from gsa_data.companions import Companions
from gsa_data.corpus import open_chat
from gsa_data.faults import DataFault, Reading
from gsa_data.marks import INSIDE, TOKEN_ID, UNSCORED
from gsa_data.tokenize import Tokenizer, TokenizerError
from helpers.chats import FORGETS, PLAIN, TOOLS, WITH_BLOCKS, conversation, template, write_chats

transformers = pytest.importorskip("transformers")

READING = Reading(backoff_seconds=0.0)
SAMPLE = Path(__file__).parents[3] / "data"
LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
"""A template that would take centuries."""


# What is the assistant's


HARD = [
    {"role": "system", "content": "é <|endoftext|>"},
    {"role": "user", "content": "hello <|im_end|> 漢"},
    {"role": "assistant", "content": "\n world 🎉\n\n"},
    {"role": "user", "content": " "},
    {"role": "assistant", "content": "weather"},
]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [(HARD, None), (HARD, TOOLS), *((conversation(number), TOOLS) for number in range(3))],
)
def test_tokens_and_masks_match_transformers(chat_tokenizer, messages, tools):
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=chat_tokenizer.path)
    asked = {"tools": tools, "chat_template": WITH_BLOCKS}
    masked = {"return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs.apply_chat_template(messages, **asked, **masked)
    marked, text_bytes = ChatEncoder(template(WITH_BLOCKS), chat_tokenizer).encode(messages, tools)
    assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])
    assert (marked & TOKEN_ID).tolist() == [*expected["input_ids"], chat_tokenizer.eos_id]
    # The appended end of the document counts, too, because a model stops there.
    assert ((marked & UNSCORED) == 0).tolist() == [*map(bool, expected["assistant_masks"]), True]
    inside = np.flatnonzero(marked & INSIDE)
    assert inside.tolist() == [n for n, t in enumerate(expected["input_ids"]) if t == chat_tokenizer.eos_id]
    text = theirs.apply_chat_template(messages, **asked, tokenize=False)
    assert text_bytes == len(text.encode())


def test_without_blocks_the_assistant_says_what_its_message_adds(chat_tokenizer: Tokenizer) -> None:
    """The tokens equal a block around the message and its end, plus the newline after it."""
    newline = WITH_BLOCKS.replace("<|im_end|>' -}}{%- endg", "<|im_end|>\n' -}}{%- endg")
    for source, number in itertools.product((PLAIN, newline), range(6)):
        messages = conversation(number)
        marked = ChatEncoder(template(source), chat_tokenizer).encode(messages, None)[0]
        scored = chat_tokenizer.decode((marked & TOKEN_ID)[(marked & UNSCORED) == 0])
        answers = [each["content"] + "<|im_end|>\n" for each in messages if each["role"] == "assistant"]
        assert scored == "".join(answers) + "<|endoftext|>"


def test_the_end_of_a_document_counts_where_the_assistant_has_the_last_word(chat_tokenizer):
    encoder = ChatEncoder(template(WITH_BLOCKS), chat_tokenizer)
    messages = conversation(1)
    for asked, counts in ((messages, True), ([*messages, {"role": "user", "content": "more"}], False)):
        marked = encoder.encode(asked, None)[0]
        assert marked[-1] & TOKEN_ID == chat_tokenizer.eos_id
        assert ((marked[-1] & UNSCORED) == 0) == counts


def test_sentencepiece_encodes_conversations_as_transformers_does(tmp_path: Path) -> None:
    """The test covers all turns, an end of turn that ends no document, and bytes of a character."""
    from gsa_eval.convert.tokenizer import write_tokenizer  # needs transformers

    tokenizer = Tokenizer(str(SAMPLE / "sample" / "tokenizer.model"))
    found = find_chat_template(tokenizer.path, str(SAMPLE / "sample_chat" / "chat_template.jinja"), READING)
    write_tokenizer(tokenizer, tmp_path, 64, Companions(found, found.special_tokens))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    joined = template(found.source.replace('" " + message.content', "message.content"))  # into one piece
    for each in (found, joined):
        encoder = ChatEncoder(each, tokenizer)
        for messages in (HARD, *map(conversation, range(12))):
            expected = theirs.apply_chat_template(
                messages, chat_template=each.source, return_dict=True, return_assistant_tokens_mask=True
            )
            marked = encoder.encode(messages, None)[0]
            assert (marked & TOKEN_ID).tolist() == expected["input_ids"]  # they end with the EOS
            assert ((marked & UNSCORED) == 0).tolist() == [*map(bool, expected["assistant_masks"])]
            ends = np.flatnonzero((marked & TOKEN_ID) == tokenizer.eos_id)
            assert [bool(marked[end] & INSIDE) for end in ends] == [*[True] * (len(ends) - 1), False]
    prompt = theirs.apply_chat_template(HARD[:2], add_generation_prompt=True, return_dict=False)
    whole = ChatEncoder(found, tokenizer).encode(HARD, None)[0] & TOKEN_ID
    assert whole[: len(prompt)].tolist() == prompt


# Templates that are refused


def test_where_a_template_is_found(tmp_path: Path, tokenizer_file: Path, chat_tokenizer: Tokenizer) -> None:
    copy, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    with pytest.raises(TokenizerError, match=r"no chat template beside it .* name a Jinja file"):
        find_chat_template(str(copy), "", READING)
    named = {"bos_token": {"content": "<|im_start|>"}, "pad_token": None}
    config.write_text(json.dumps({"chat_template": PLAIN, **named}))
    found = find_chat_template(str(copy), "", READING)
    assert (found.source, found.special_tokens) == (PLAIN, {"bos_token": "<|im_start|>"})
    (tmp_path / "chat_template.jinja").write_text(WITH_BLOCKS)
    beside = find_chat_template(str(copy), "", READING)
    assert beside.source == WITH_BLOCKS
    assert beside.fingerprint != found.fingerprint
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}" + PLAIN)
    mine = find_chat_template(str(copy), str(tmp_path / "mine.jinja"), READING)
    text = ChatEncoder(mine, chat_tokenizer).render(conversation(1), None)[0]
    assert text.startswith("<|im_start|><|im_start|>user")


NAMED = [{"name": name, "template": PLAIN} for name in ("default", "tool_use")]
SEVERAL = json.dumps({"chat_template": NAMED})


@pytest.mark.parametrize(
    ("config", "template", "message"),
    [
        (SEVERAL, "", r"several chat templates \(default, tool_use\); write the one"),
        (SEVERAL, "gone", "chat template 'gone' does not exist; give a Jinja file"),
        ("{", "", r"tokenizer_config\.json is not JSON"),
        ("[" * 10_000 + "]" * 10_000, "", r"config\.json is not JSON .*nested more than 64 levels deep"),
        (None, "", r"tokenizer_config\.json: is a pipe"),
    ],
)
def test_templates_that_are_not_found(config, template, message, tmp_path, tokenizer_file):
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    if config is None:
        os.mkfifo(tmp_path / "tokenizer_config.json")
    else:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=message):
        find_chat_template(str(copy), template, READING)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOOPS + PLAIN, r"a conversation of 4 messages within 0\.2 s .*; correct its loops, or"),
        ("{{ 1 / 0 }}" + PLAIN, r"cannot write a conversation .*\(division by zero\)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"cannot write a conversation .*recursion"),
        ("{% for %}", r"cannot write a conversation .*Expected"),
        ("{{ raise_exception('no ' + messages[0].role) }}", r"cannot write a conversation .*\(no user\)"),
        ("{{ messages[0].content + 1 }}", r"cannot write a conversation"),
        ("{{ eos_token + bos_token }}" + PLAIN, r"uses bos_token, which tokenizer .* does not name"),
        (PLAIN.replace("im_end", "eot_id"), r"writes '<\|eot_id\|>', which tokenizer .* does not have"),
        ("{{ strftime_now('%d') }}" + PLAIN, r"writes the day of the run"),
        (FORGETS, r"writes message \d or those before it otherwise .* put \{% generation %\}"),
        (
            WITH_BLOCKS.replace("if message.role == 'assistant'", "if loop.last"),
            r"blocks do not hold all that the assistant",
        ),
    ],
)
def test_templates_that_cannot_be_used(chat_tokenizer, source, message, monkeypatch):
    if source.startswith(LOOPS):
        monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    with pytest.raises(TokenizerError, match=rf"chat template chat\.jinja.*{message}"):
        ChatEncoder(template(source), chat_tokenizer)


def test_a_sentencepiece_model_lacks_the_tokens_of_chatml() -> None:
    tokenizer = Tokenizer(str(SAMPLE / "sample" / "tokenizer.model"))
    with pytest.raises(TokenizerError, match=r"'<\|im_end\|>', '<\|im_start\|>', which tokenizer"):
        ChatEncoder(template(PLAIN), tokenizer)


def test_a_block_without_the_end_of_its_turn_is_warned_of(chat_tokenizer, caplog):
    source = WITH_BLOCKS.replace("'<|im_end|>' -}}{%- endgeneration -%}", "'' -}}{%- endgeneration -%}")
    ChatEncoder(template(source), chat_tokenizer)
    assert "does not learn to stop" in caplog.text
    caplog.clear()
    ChatEncoder(template(WITH_BLOCKS), chat_tokenizer)
    assert caplog.text == ""


def lines_of(folder: Path, source: str, tokenizer: Tokenizer, *chats: list[dict[str, str]]) -> Any:
    write_chats(folder / "s.jsonl", chats)
    reader = ChatReader(open_chat(str(folder), template(source)), tokenizer, READING)
    return reader.open("s.jsonl", 0, 1, Counter())


def said(user: str, assistant: str = "b") -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def test_a_conversation_that_takes_for_ever_names_its_line(tmp_path, chat_tokenizer, monkeypatch):
    loops = "{% if messages[0].content == 'long' %}" + LOOPS + "{% endif %}"
    lines = lines_of(tmp_path, loops + WITH_BLOCKS, chat_tokenizer, said("a"), said("long"))
    assert not isinstance(lines[0], str)
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    with pytest.raises(DataFault, match=r"s\.jsonl, line 2: chat template chat\.jinja did not write"):
        lines[1]


@pytest.mark.parametrize("wrong", ["{{ 7 / 0 }}", "{{ 'a' * 10**15 }}", "{{ f() }}", "{{ 10.0 ** 999 }}"])
def test_any_error_of_a_template_leaves_out_the_conversation(tmp_path, chat_tokenizer, caplog, wrong):
    recursive = "{% macro f() %}{{ f() }}{% endmacro %}{% if messages[0].content == 'x' %}"
    source = recursive + wrong + "{% endif %}" + PLAIN
    lines = lines_of(tmp_path, source, chat_tokenizer, said("a"), said("x"))
    assert not isinstance(lines[0], str)
    assert lines[1] == "template_refused"
    assert "s.jsonl, line 2: left out, as chat template chat.jinja refuses it (" in caplog.text


def test_a_conversation_that_is_written_otherwise_later_names_its_line(tmp_path, chat_tokenizer):
    kept = "(message.content if loop.last else message.content.split('~')[-1])"
    chats = said("a", "thought~b"), said("a", "thought~b") * 2
    lines = lines_of(tmp_path, PLAIN.replace("message.content", kept), chat_tokenizer, *chats)
    assert not isinstance(lines[0], str)
    with pytest.raises(DataFault, match=r"s\.jsonl, line 2: chat template chat\.jinja writes message 2"):
        lines[1]
