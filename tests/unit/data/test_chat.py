"""Tests conversations as a data format: which lines are skipped, and what packing and resumes preserve."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_corpus import Run, read_run

from gsa_data.chat import ChatFolder, parse_chat_line, read_conversations
from gsa_data.chat_template import ChatEncoder
from gsa_data.corpus import open_chat
from gsa_data.documents import Document
from gsa_data.faults import DataFault, Reading, skipped_totals
from gsa_data.lanes import LONG_CONVERSATIONS
from gsa_data.marks import TOKEN_ID, UNSCORED
from gsa_data.ngram import scored_pairs
from gsa_data.pack import FILLER
from gsa_data.stream import StateMismatch
from gsa_data.stream_config import StreamConfig
from gsa_data.tokenize import Tokenizer
from gsa_data.validation import is_scored, read_validation_set
from helpers.chats import PLAIN, TOOLS, WITH_BLOCKS, conversation, template, write_chats

pytest.importorskip("transformers")

READING = Reading(backoff_seconds=0.0)
NUMBERS = range(60)
CONFIG = StreamConfig(seq_len_tokens=48, num_lanes=2, seed=3)
BEST_FIT = replace(CONFIG, packing="best_fit", packing_pool_documents=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ChatFolder:
    root = tmp_path_factory.mktemp("chats")
    for shard in range(3):
        write_chats(root / f"s{shard}.jsonl", map(conversation, NUMBERS[20 * shard : 20 * (shard + 1)]))
    return open_chat(str(root), template(WITH_BLOCKS))


# Bad lines


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
DEEP = b'{"a": ' * 300 + b"1" + b"}" * 300


def asked(*messages: object, **more: object) -> bytes:
    return json.dumps({"messages": [*messages], **more}).encode()


@pytest.mark.parametrize(
    ("text", "fault", "reason"),
    [
        (b"", "empty_text", ""),
        (b"{", "bad_json", ""),
        (b"\xff{", "bad_utf8", ""),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad_json", ""),
        (b'{"text": "a"}', "missing_messages", "no list of messages"),
        (b"[]", "missing_messages", "not an object with the field messages"),
        (asked(), "missing_messages", "no list of messages"),
        (asked(USER, "b"), "bad_message", "message 2 is not an object"),
        (asked({**USER, "role": "human"}, ASSISTANT), "bad_message", "message 1 has role 'human', none of"),
        (asked({"content": "a"}, ASSISTANT), "bad_message", "message 1 has role None"),
        (asked({**USER, "content": [{}]}, ASSISTANT), "bad_message", "content that is not text, but list"),
        (asked(USER, ASSISTANT, tools="{"), "bad_message", "its tools are not JSON"),
        (asked(USER, ASSISTANT, tools={}), "bad_message", "its tools are not a list of objects"),
        (asked(USER, {**ASSISTANT, "meta": 1}).replace(b"1", DEEP), "bad_message", "as JSON (Recursion"),
        (asked(USER, ASSISTANT, tools=[1]).replace(b"1", DEEP), "bad_message", "as JSON (Recursion"),
        (asked(USER, {"role": "assistant", "content": " \n"}), "empty_text", "message 2 has no content"),
        (asked({"role": "user", "content": None}, ASSISTANT), "empty_text", "message 1 has no content"),
        (asked(USER), "no_assistant", "no message is the assistant's"),
        (asked(USER, {**ASSISTANT, "content": "b" * 2000}), "huge_document", "bytes, over 2000"),
    ],
)
def test_a_bad_line_is_named(text: bytes, fault: str, reason: str) -> None:
    found = parse_chat_line(text, max_document_bytes=2000)
    assert not isinstance(found, Document)
    assert found.fault == fault
    assert reason in found.reason


def test_good_lines() -> None:
    kept = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    called = {**kept, "content": None}
    meta = {"redpajama_set_name": "A"}
    for line, messages, tools in (
        (asked({**USER, "name": None}, ASSISTANT, tools=None, meta=meta), [USER, ASSISTANT], None),
        (asked(USER, ASSISTANT, tools="[]", meta=meta), [USER, ASSISTANT], None),
        (asked(USER, called, tools=json.dumps(TOOLS), meta=meta), [USER, kept], TOOLS),
    ):
        found = parse_chat_line(line)
        assert isinstance(found, Document)
        assert found.source == "A"
        assert json.loads(found.text_utf8) == {"messages": messages, "tools": tools}


def test_bad_lines_are_left_out_counted_and_logged(tmp_path, chat_tokenizer, caplog):
    refusal = "{%- if messages[0].content == 'a' -%}{{- raise_exception('no a') -}}{%- endif -%}"
    lines = [asked(*conversation(n)) for n in range(20)]
    lines[7], lines[9], lines[11] = asked({"role": "human"}, ASSISTANT), asked(USER), asked(USER, ASSISTANT)
    (tmp_path / "s.jsonl").write_bytes(b"\n".join(lines))
    folder = open_chat(str(tmp_path), template(refusal + WITH_BLOCKS))
    config = StreamConfig(48, 1, 0, reading=Reading(max_bad_line_fraction=0.05), num_workers=0)
    run = Run(folder, chat_tokenizer, config)
    while run.state()["cursors"][0][0] == 0:
        run.step(1)
    counters = run.state()["counters"]
    assert (counters["bad_message"], counters["no_assistant"], counters["template_refused"]) == (1, 1, 1)
    assert skipped_totals(counters)["data_skipped_documents"] == 3
    assert "s.jsonl, line 8: left out, as message 1 has role 'human'" in caplog.text
    assert "s.jsonl, line 10: left out, as no message is the assistant's" in caplog.text
    assert "s.jsonl, line 12: left out, as chat template chat.jinja refuses it (no a)" in caplog.text
    assert "2 of 20 lines are left out (bad_message 1, no_assistant 1)" in caplog.text
    with pytest.raises(DataFault, match=r"1 bad lines of 20 \(bad_message 1, no_assistant 1\), more than"):
        read_conversations(folder.manifest, "s.jsonl", READING, Counter())


def test_text_is_no_chat(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"text": "a"}\n')
    manifest = open_chat(str(tmp_path), template(PLAIN)).manifest
    with pytest.raises(DataFault, match=r"1 bad lines of 1 \(missing_messages 1\)"):
        read_conversations(manifest, "s.jsonl", READING, Counter())


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_parquet_holds_the_same_conversations(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    made = [conversation(number) for number in range(12)]
    fields = {}
    for name in ("role", "content"):
        text = pa.array([message[name] for messages in made for message in messages])
        fields[name] = text.dictionary_encode() if kind == "dictionary" else text.cast(getattr(pa, kind)())
    ends = pa.array(np.cumsum([0, *map(len, made)]), pa.int32())
    messages = pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([*fields.values()], [*fields]))
    tools = [json.dumps(TOOLS), *[None] * 11]
    table = pa.table({"messages": messages, "tools": tools, "meta.redpajama_set_name": ["A"] * 12})
    pq.write_table(table, tmp_path / "s.parquet", row_group_size=5)
    manifest = open_chat(str(tmp_path), template(PLAIN)).manifest
    lines = read_conversations(manifest, "s.parquet", READING, Counter())
    found = [line for line in lines if isinstance(line, Document)]
    assert {line.source for line in found} == {"A"}
    read = [json.loads(line.text_utf8) for line in found]
    assert [each["messages"] for each in read] == made
    assert [each["tools"] for each in read] == [TOOLS, *[None] * 11]
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "s.parquet")
    manifest = open_chat(str(tmp_path), template(PLAIN)).manifest
    with pytest.raises(DataFault, match="has not one column 'messages'"):
        read_conversations(manifest, "s.parquet", READING, Counter())


# Streams


@pytest.mark.parametrize("config", [CONFIG, BEST_FIT], ids=["concatenate", "best_fit"])
def test_no_mark_is_lost_by_packing(folder, chat_tokenizer, config):
    """In the first epoch each scored label occurs once, after its preceding token."""
    run = Run(folder, chat_tokenizer, config)
    while min(cursor[0] for cursor in run.state()["cursors"]) < 2:
        run.step(8)
    blocks = np.array(list(run.samples.values()), np.int32)
    inputs, labels = scored_pairs(blocks, chat_tokenizer.eos_id, False)
    found = Counter(zip(inputs.tolist(), labels.tolist(), strict=True))
    encoder = ChatEncoder(folder.template, chat_tokenizer)
    epoch: Counter[tuple[int, int]] = Counter()
    for number in NUMBERS:
        marked = encoder.encode(conversation(number), None)[0]
        pairs = zip((marked & TOKEN_ID)[:-1].tolist(), marked[1:].tolist(), strict=True)
        epoch.update(pair for pair in pairs if pair[1] & UNSCORED == 0)
    # A part of the third epoch was read, too, and some documents wait in pools.
    assert all(found[pair] >= count for pair, count in epoch.items())
    assert found.keys() <= epoch.keys()
    assert all(found[pair] <= 3 * count for pair, count in epoch.items())
    counted = is_scored(blocks, np.full(len(blocks), 48), chat_tokenizer.eos_id, False)
    assert counted.sum() == found.total()


@pytest.mark.parametrize(("config", "num_workers"), [(CONFIG, 0), (BEST_FIT, 1)])
def test_a_resume_in_the_middle_of_a_conversation_is_exact(folder, chat_tokenizer, config, num_workers):
    config = replace(config, num_workers=num_workers, prefetch_blocks=8)
    whole = read_run(folder, chat_tokenizer, config, steps=6, global_batch_size=4)
    first = read_run(folder, chat_tokenizer, config, steps=2, global_batch_size=4)
    state = json.loads(json.dumps(first.state()))
    cut = (
        state["cursors"]
        if config.packing == "concatenate"
        else [row for pool in state["pools"] for row in pool]
    )
    assert any(cursor[3] > 0 for cursor in cut)  # token_offset
    rest = read_run(folder, chat_tokenizer, config, 2, steps=4, global_batch_size=4, state=state)
    assert {**first.samples, **rest.samples} == whole.samples
    assert rest.state() == whole.state()
    assert whole.state()["counters"][LONG_CONVERSATIONS] > 0
    assert any(token & UNSCORED and token != FILLER for block in whole.samples.values() for token in block)


def test_another_template_is_other_data(folder: ChatFolder, chat_tokenizer: Tokenizer) -> None:
    state = read_run(folder, chat_tokenizer, CONFIG, steps=1, global_batch_size=2).state()
    other = ChatFolder(folder.manifest, template(PLAIN))
    with pytest.raises(StateMismatch, match="use the chat template") as caught:
        read_run(other, chat_tokenizer, CONFIG, steps=1, state=state)
    assert caught.value.other_data
    text = open_chat(folder.root, folder.template).manifest
    assert text.fingerprint != type(text)(text.root, text.shards).fingerprint


def test_validation_counts_what_the_assistant_says(folder: ChatFolder, chat_tokenizer: Tokenizer) -> None:
    found = read_validation_set("v", folder, chat_tokenizer, 48, 10_000, READING, False, split_by_source=True)
    encoder = ChatEncoder(folder.template, chat_tokenizer)
    marked = np.concatenate([encoder.encode(conversation(number), None)[0] for number in NUMBERS])
    labels = marked[1 : len(found.text.blocks) * 48 + 1]
    counted = labels[(labels & UNSCORED) == 0]
    assert found.text.scored_tokens == len(counted) < len(labels) / 2
    assert found.text.text_bytes == chat_tokenizer.token_bytes[counted].sum()
    assert sum(text.scored_tokens for text in found.by_source.values()) == len(counted)
