"""Tests conversations as a data format: which lines are skipped, and what packing and resumes preserve."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpus import Run, read_run

from gsa_data import DataFault, StreamConfig, Tokenizer
from gsa_data.chat import ChatFolder, parse_chat_line, read_conversations
from gsa_data.chat_template import ChatEncoder
from gsa_data.content import changed_files, sample_contents
from gsa_data.corpus import open_chat
from gsa_data.documents import Document
from gsa_data.faults import Reading, skipped_totals, warn_once
from gsa_data.lanes import LONG_CONVERSATIONS
from gsa_data.marks import INSIDE, TOKEN_ID, UNSCORED, mark
from gsa_data.ngram import scored_pairs
from gsa_data.pack import FILLER
from gsa_data.stream import StateMismatch
from gsa_data.validation import is_scored, read_validation_set
from helpers.chats import PLAIN, TOOLS, WITH_BLOCKS, conversation, template, write_chats

pytest.importorskip("transformers")

READING = Reading(backoff_seconds=0.0)
NUMBERS = range(60)
CONFIG = StreamConfig(seq_len_tokens=48, num_lanes=2, seed=3)
BEST_FIT = StreamConfig(seq_len_tokens=48, num_lanes=2, seed=3, packing="best_fit", packing_pool_documents=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ChatFolder:
    root = tmp_path_factory.mktemp("chats")
    for shard in range(3):
        write_chats(
            root / f"s{shard}.jsonl", (conversation(n) for n in NUMBERS[20 * shard : 20 * (shard + 1)])
        )
    return open_chat(str(root), template(WITH_BLOCKS))


@pytest.fixture(autouse=True)
def warns_again() -> None:
    warn_once.cache_clear()


# Bad lines


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
DEEP: Any = "a"
for _ in range(300):
    DEEP = {"a": DEEP}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
BAD: dict[str, tuple[Any, str]] = {
    "missing_messages": ({"text": "a"}, "no list of messages"),
    "no object": ([USER, ASSISTANT], "no object with the field messages"),
    "empty list": ({"messages": []}, "no list of messages"),
    "bad_message": ({"messages": [USER, "b"]}, "message 2 is no object"),
    "unknown role": (
        {"messages": [{"role": "human", "content": "a"}, ASSISTANT]},
        "message 1 has role 'human', none of system, developer, user, assistant, tool",
    ),
    "no role": ({"messages": [{"content": "a"}, ASSISTANT]}, "message 1 has role None"),
    "parts": (
        {"messages": [{"role": "user", "content": [{}]}, ASSISTANT]},
        "content that is no text, but list",
    ),
    "bad tools": ({"messages": [USER, ASSISTANT], "tools": "{"}, "its tools are no JSON"),
    "nested": (
        {"messages": [USER, {**ASSISTANT, "meta": DEEP}]},
        "cannot be written as JSON (Recursion limit",
    ),
    "nested tools": (
        {"messages": [USER, ASSISTANT], "tools": [DEEP]},
        "cannot be written as JSON (Recursion",
    ),
    "tools no list": ({"messages": [USER, ASSISTANT], "tools": {}}, "its tools are no list of objects"),
    "empty_text": ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "message 2 has no content"),
    "null": ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "message 1 has no content"),
    "no_assistant": ({"messages": [USER]}, "no message is the assistant's"),
    "huge_document": ({"messages": [USER, {**ASSISTANT, "content": "b" * 200}]}, "bytes, over 200"),
}
COUNTED = {
    "no object": "missing_messages",
    "empty list": "missing_messages",
    "unknown role": "bad_message",
    "no role": "bad_message",
    "parts": "bad_message",
    "bad tools": "bad_message",
    "tools no list": "bad_message",
    "nested": "bad_message",
    "nested tools": "bad_message",
    "null": "empty_text",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(name: str) -> None:
    record, reason = BAD[name]
    found = parse_chat_line(json.dumps(record).encode(), max_document_bytes=200)
    assert not isinstance(found, Document)
    assert found.fault == COUNTED.get(name, name)
    assert reason in found.reason


def test_lines_that_are_no_json() -> None:
    nested = b'{"messages": ' + b"[" * 100_000
    faults = [parse_chat_line(line) for line in (b"", b"{", b"\xff{", nested, nested + b"]" * 100_000 + b"}")]
    assert [each.fault for each in faults if not isinstance(each, Document)] == [
        "empty_text",
        "bad_json",
        "bad_utf8",
        "bad_json",
        "bad_json",
    ]


def test_good_lines() -> None:
    for record in (
        {"messages": [{**USER, "name": None}, ASSISTANT], "tools": None, "meta": {"redpajama_set_name": "A"}},
        {"messages": [USER, ASSISTANT], "tools": "[]", "meta": {"redpajama_set_name": "A"}},
    ):
        found = parse_chat_line(json.dumps(record).encode())
        assert isinstance(found, Document)
        assert found.source == "A"
        assert json.loads(found.text_utf8) == {"messages": [USER, ASSISTANT], "tools": None}
    called = {"role": "assistant", "content": None, "tool_calls": CALLS}
    line = json.dumps(
        {"messages": [USER, called, {"role": "tool", "content": "4"}], "tools": json.dumps(TOOLS)}
    )
    found = parse_chat_line(line.encode())
    assert isinstance(found, Document)
    kept = json.loads(found.text_utf8)
    assert kept["messages"][1] == {"role": "assistant", "tool_calls": CALLS}
    assert kept["tools"] == TOOLS


def test_bad_lines_are_left_out_counted_and_logged(tmp_path, chat_tokenizer, caplog):
    refuses = (
        "{%- if messages[0].content == 'a' -%}{{- raise_exception('no a') -}}{%- endif -%}" + WITH_BLOCKS
    )
    lines = [json.dumps({"messages": conversation(n)}) for n in range(20)]
    lines[7] = json.dumps(BAD["unknown role"][0])
    lines[9] = json.dumps(BAD["no_assistant"][0])
    lines[11] = json.dumps({"messages": [USER, ASSISTANT]})
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    folder = open_chat(str(tmp_path), template(refuses))
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
    (tmp_path / "tokens.json").write_text("{}")
    with pytest.raises(DataFault, match=r"holds tokens of text \(tokens\.json\)"):
        open_chat(str(tmp_path), template(PLAIN))


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary"])
def test_parquet_holds_the_same_conversations(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    made = [conversation(number) for number in range(12)]
    write_chats(tmp_path / "lines" / "s.jsonl", made)
    tools = [json.dumps(TOOLS), *[None] * 11]
    text = pa.dictionary(pa.int32(), pa.string()) if kind == "dictionary" else getattr(pa, kind)()
    messages = pa.array(made).cast(pa.list_(pa.struct([("role", pa.string()), ("content", pa.binary())])))
    if kind == "dictionary":
        fields = [
            messages.values.field(name).cast(pa.string()).dictionary_encode() for name in ("role", "content")
        ]
        messages = pa.ListArray.from_arrays(
            messages.offsets, pa.StructArray.from_arrays(fields, ["role", "content"])
        )
    else:
        messages = messages.cast(pa.list_(pa.struct([("role", text), ("content", text)])))
    table = pa.table({"messages": messages, "tools": tools, "meta.redpajama_set_name": ["A"] * 12})
    (tmp_path / "rows").mkdir()
    pq.write_table(table, tmp_path / "rows" / "s.parquet", row_group_size=5)
    found = {}
    for form, name in (("lines", "s.jsonl"), ("rows", "s.parquet")):
        manifest = open_chat(str(tmp_path / form), template(PLAIN)).manifest
        found[form] = read_conversations(manifest, name, READING, Counter())
    sources = {line.source for line in found["rows"] if isinstance(line, Document)}
    assert sources == {"A"}
    loaded = [
        [json.loads(line.text_utf8)["messages"] for line in lines if isinstance(line, Document)]
        for lines in found.values()
    ]
    assert loaded[0] == loaded[1] == made
    first = found["rows"][0]
    assert isinstance(first, Document)
    assert json.loads(first.text_utf8)["tools"] == TOOLS
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows" / "s.parquet")
    manifest = open_chat(str(tmp_path / "rows"), template(PLAIN)).manifest
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
    found = Counter(
        zip(*(each.tolist() for each in scored_pairs(blocks, chat_tokenizer.eos_id, False)), strict=True)
    )
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


@pytest.mark.parametrize(
    ("config", "num_workers"),
    [(CONFIG, 0), (BEST_FIT, 0), (BEST_FIT, 1)],
    ids=["concatenate", "best_fit", "best_fit in a worker"],
)
def test_a_resume_in_the_middle_of_a_conversation_is_exact(folder, chat_tokenizer, config, num_workers):
    config = StreamConfig(**{**vars(config), "num_workers": num_workers, "prefetch_blocks": 8})
    whole = read_run(folder, chat_tokenizer, config, steps=6, global_batch_size=4)
    first = read_run(folder, chat_tokenizer, config, steps=2, global_batch_size=4)
    state = first.state()
    cut = (
        state["cursors"]
        if config.packing == "concatenate"
        else [row for pool in state["pools"] for row in pool]
    )
    assert any(cursor[3] > 0 for cursor in cut)  # token_offset
    rest = read_run(
        folder,
        chat_tokenizer,
        config,
        world_size=2,
        steps=4,
        global_batch_size=4,
        state=json.loads(json.dumps(state)),
    )
    assert {**first.samples, **rest.samples} == whole.samples
    assert rest.state() == whole.state()
    assert whole.state()["counters"][LONG_CONVERSATIONS] > 0
    assert any(token & UNSCORED and token != FILLER for block in whole.samples.values() for token in block)


def test_long_conversations_are_counted(folder: ChatFolder, chat_tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(folder.template, chat_tokenizer)
    lengths = [len(encoder.encode(conversation(number), None)[0]) for number in NUMBERS]
    config = StreamConfig(**{**vars(CONFIG), "num_lanes": 1})
    run = Run(folder, chat_tokenizer, config)
    while (state := run.state())["cursors"][0][0] == 0:
        run.step(1)
    assert state["counters"][LONG_CONVERSATIONS] >= sum(length > 49 for length in lengths) > 0
    assert state["counters"]["documents"] - len(NUMBERS) <= 2  # of the next epoch


def test_another_template_is_other_data(folder: ChatFolder, chat_tokenizer: Tokenizer) -> None:
    state = read_run(folder, chat_tokenizer, CONFIG, steps=1, global_batch_size=2).state()
    other = ChatFolder(folder.manifest, template(PLAIN))
    with pytest.raises(StateMismatch, match="use the chat template") as caught:
        read_run(other, chat_tokenizer, CONFIG, steps=1, state=state)
    assert caught.value.other_data
    text = open_chat(folder.root, folder.template).manifest
    assert text.fingerprint != type(text)(text.root, text.shards).fingerprint


def test_a_resume_names_the_file_whose_conversations_are_others(tmp_path: Path) -> None:
    write_chats(tmp_path / "s.jsonl", (conversation(n) for n in range(3)))
    chats = open_chat(str(tmp_path), template(PLAIN))
    before = sample_contents(chats, READING)
    assert changed_files(before, sample_contents(chats, READING)) == ""
    shard = tmp_path / "s.jsonl"
    shard.write_bytes(shard.read_bytes().replace(b"e", b"a"))
    assert changed_files(before, sample_contents(chats, READING)) == "s.jsonl: its content is another"


def test_validation_counts_what_the_assistant_says(folder: ChatFolder, chat_tokenizer: Tokenizer) -> None:
    found = read_validation_set("v", folder, chat_tokenizer, 48, 10_000, READING, False, split_by_source=True)
    encoder = ChatEncoder(folder.template, chat_tokenizer)
    marked = np.concatenate([encoder.encode(conversation(number), None)[0] for number in NUMBERS])
    labels = marked[1 : len(found.text.blocks) * 48 + 1]
    counted = labels[(labels & UNSCORED) == 0]
    assert found.text.scored_tokens == len(counted) < len(labels) / 2
    assert found.text.text_bytes == chat_tokenizer.token_bytes[counted].sum()
    assert sum(text.scored_tokens for text in found.by_source.values()) == len(counted)


def test_marks() -> None:
    tokens = np.array([5, 2, 7, 2], np.int32)
    found = mark(tokens, np.array([False, True, False, True]), eos_id=2)
    assert found.tolist() == [5 | UNSCORED, 2 | INSIDE, 7 | UNSCORED, 2]
    assert FILLER & UNSCORED
