"""Conversations as a data format: what is the assistant's, what is refused, and what packing and resumes keep."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_corpus import Run, read_run

from gsa_data import DataFault, StreamConfig, Tokenizer
from gsa_data.chat import ChatFolder, ChatReader, parse_chat_line, read_conversations
from gsa_data.chat_template import ChatEncoder, ChatTemplate, find_chat_template
from gsa_data.corpus import open_chat
from gsa_data.documents import Document
from gsa_data.faults import Reading, skipped_totals, warn_once
from gsa_data.lanes import LONG_CONVERSATIONS
from gsa_data.marks import INSIDE, TOKEN_ID, UNSCORED, mark
from gsa_data.ngram import scored_pairs
from gsa_data.pack import FILLER
from gsa_data.stream import StateMismatch
from gsa_data.tokenize import TokenizerError
from gsa_data.validation import is_scored, read_validation_set
from helpers.chats import FORGETS, PLAIN, WITH_BLOCKS, conversation, make_tokenizer, write_chats

transformers = pytest.importorskip("transformers")

READING = Reading(backoff_seconds=0.0)
SAMPLE = Path(__file__).parents[3] / "data"
NUMBERS = range(60)
CONFIG = StreamConfig(seq_len_tokens=48, num_lanes=2, seed=3)
BEST_FIT = StreamConfig(seq_len_tokens=48, num_lanes=2, seed=3, packing="best_fit", packing_pool_documents=6)


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, "chat.jinja", special_tokens)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat_tokenizer"))


@pytest.fixture(scope="module")
def chat_tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(str(tokenizer_file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ChatFolder:
    root = tmp_path_factory.mktemp("chats")
    for shard in range(3):
        write_chats(
            root / f"s{shard}.jsonl", (conversation(n) for n in NUMBERS[20 * shard : 20 * (shard + 1)])
        )
    return open_chat(str(root), template(WITH_BLOCKS))


@pytest.fixture(autouse=True)
def warns_anew() -> None:
    warn_once.cache_clear()


def scored(tokenizer: Tokenizer, marked: np.ndarray) -> str:
    return tokenizer.decode((marked & TOKEN_ID)[(marked & UNSCORED) == 0])


# What is the assistant's


HARD = [
    {"role": "system", "content": "é <|endoftext|>"},
    {"role": "user", "content": "hello <|im_end|> 漢"},
    {"role": "assistant", "content": "\n world 🎉\n\n"},
    {"role": "user", "content": " "},
    {"role": "assistant", "content": "weather"},
]
TOOLS = [{"type": "function", "function": {"name": "é", "parameters": {}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [HARD, *map(conversation, range(4))])
def test_tokens_and_masks_are_those_of_transformers(
    chat_tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=chat_tokenizer.path)
    expected = theirs.apply_chat_template(
        messages,
        tools=tools,
        chat_template=WITH_BLOCKS,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    marked, text_bytes = ChatEncoder(template(WITH_BLOCKS), chat_tokenizer).encode(messages, tools)
    assert 0 < sum(expected["assistant_masks"]) < len(expected["input_ids"])
    assert (marked & TOKEN_ID).tolist() == [*expected["input_ids"], chat_tokenizer.eos_id]
    assert ((marked & UNSCORED) == 0).tolist() == [*map(bool, expected["assistant_masks"]), False]
    inside = np.flatnonzero(marked & INSIDE)
    assert inside.tolist() == [n for n, t in enumerate(expected["input_ids"]) if t == chat_tokenizer.eos_id]
    text = theirs.apply_chat_template(messages, tools=tools, chat_template=WITH_BLOCKS, tokenize=False)
    assert text_bytes == len(text.encode())


def test_without_blocks_the_assistant_says_what_its_message_adds(chat_tokenizer: Tokenizer) -> None:
    """That is what a block around the message and its end would hold, and the newline behind it."""
    by_prefix = ChatEncoder(template(PLAIN), chat_tokenizer)
    by_block = ChatEncoder(
        template(WITH_BLOCKS.replace("<|im_end|>' -}}{%- endg", "<|im_end|>\n' -}}{%- endg")), chat_tokenizer
    )
    for number in range(6):
        messages = conversation(number)
        found = by_prefix.encode(messages, None)[0]
        answers = [each["content"] + "<|im_end|>\n" for each in messages if each["role"] == "assistant"]
        assert scored(chat_tokenizer, found) == "".join(answers)
        expected = by_block.encode(messages, None)[0]
        text = scored(chat_tokenizer, expected)
        assert text == "".join(answers)


def test_sentencepiece_writes_control_symbols_and_an_eos_that_ends_a_turn_ends_no_document() -> None:
    tokenizer = Tokenizer(str(SAMPLE / "sample" / "tokenizer.model"))
    found = find_chat_template(tokenizer.path, str(SAMPLE / "sample_chat" / "chat_template.jinja"), READING)
    encoder = ChatEncoder(found, tokenizer)
    messages = conversation(3)[:5]
    marked = encoder.encode(messages, None)[0]
    tokens = marked & TOKEN_ID
    assert np.flatnonzero(tokens == tokenizer.eos_id).tolist() == [
        int(np.flatnonzero(marked & INSIDE)[0]),
        len(tokens) - 1,
    ]
    assert marked[-1] == tokenizer.eos_id  # of the last turn, to be predicted; none is put behind it
    answers = [np.append(tokenizer.encode(messages[n]["content"]), tokenizer.eos_id) for n in (2, 4)]
    assert tokens[(marked & UNSCORED) == 0].tolist() == np.concatenate(answers).tolist()
    prompt = encoder._render(messages[:2], None, prompts=True)[0]
    assert tokens[: len(tokenizer.encode(prompt))].tolist() == tokenizer.encode(prompt).tolist()


# Templates that are refused


def test_where_a_template_is_found(tmp_path: Path, tokenizer_file: Path, chat_tokenizer: Tokenizer) -> None:
    copy = tmp_path / "tokenizer.json"
    copy.write_bytes(tokenizer_file.read_bytes())
    with pytest.raises(TokenizerError, match=r"no chat template beside it .* name a Jinja file"):
        find_chat_template(str(copy), "", READING)
    config = {"chat_template": PLAIN, "bos_token": {"content": "<|im_start|>"}, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
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
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": PLAIN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with pytest.raises(TokenizerError, match=r"several chat templates \(default, tool_use\); write the one"):
        find_chat_template(str(copy), "", READING)
    with pytest.raises(TokenizerError, match="chat template 'gone' does not exist; give a Jinja file"):
        find_chat_template(str(copy), "gone", READING)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is no JSON"):
        find_chat_template(str(copy), "", READING)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", r"cannot write a conversation .*Expected"),
        ("{{ raise_exception('no ' + messages[0].role) }}", r"cannot write a conversation .*\(no user\)"),
        ("{{ messages[0].content + 1 }}", r"cannot write a conversation"),
        ("{{ eos_token + bos_token }}" + PLAIN, r"uses bos_token, which tokenizer .* does not name"),
        (PLAIN.replace("im_end", "eot_id"), r"writes '<\|eot_id\|>', which tokenizer .* does not have"),
        (FORGETS, r"writes message \d or those before it otherwise .* put \{% generation %\}"),
        (
            WITH_BLOCKS.replace("{%- if message.role == 'assistant'", "{%- if loop.last"),
            r"blocks do not hold all that the assistant says",
        ),
    ],
)
def test_templates_that_cannot_be_used(chat_tokenizer: Tokenizer, source: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=rf"chat template chat\.jinja.*{message}"):
        ChatEncoder(template(source), chat_tokenizer)


def test_a_sentencepiece_model_lacks_the_tokens_of_chatml() -> None:
    tokenizer = Tokenizer(str(SAMPLE / "sample" / "tokenizer.model"))
    with pytest.raises(TokenizerError, match=r"'<\|im_end\|>', '<\|im_start\|>', which tokenizer"):
        ChatEncoder(template(PLAIN), tokenizer)


def test_a_block_without_the_end_of_its_turn_is_warned_of(
    chat_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    source = WITH_BLOCKS.replace("'<|im_end|>' -}}{%- endgeneration -%}", "'' -}}{%- endgeneration -%}")
    ChatEncoder(template(source), chat_tokenizer)
    assert "does not learn to stop" in caplog.text
    caplog.clear()
    ChatEncoder(template(WITH_BLOCKS), chat_tokenizer)
    assert caplog.text == ""


def test_a_conversation_that_is_written_otherwise_later_names_its_line(
    tmp_path: Path, chat_tokenizer: Tokenizer
) -> None:
    forgets_thoughts = PLAIN.replace(
        "message.content", "(message.content if loop.last else message.content.split('~')[-1])"
    )
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "thought~b"}
    write_chats(tmp_path / "s.jsonl", [[user, answer], [user, answer, user, answer]])
    reader = ChatReader(open_chat(str(tmp_path), template(forgets_thoughts)), chat_tokenizer, READING)
    lines = reader.open("s.jsonl", 0, 1, Counter())
    assert not isinstance(lines[0], str)
    with pytest.raises(DataFault, match=r"s\.jsonl, line 2: chat template chat\.jinja writes message 2"):
        lines[1]


# Bad lines


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
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
    faults = [parse_chat_line(line) for line in (b"", b"{", b"\xff{")]
    assert [each.fault for each in faults if not isinstance(each, Document)] == [
        "empty_text",
        "bad_json",
        "bad_utf8",
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


def test_bad_lines_are_left_out_counted_and_logged(
    tmp_path: Path, chat_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_parquet_holds_the_same_conversations(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    made = [conversation(number) for number in range(12)]
    write_chats(tmp_path / "lines" / "s.jsonl", made)
    tools = [json.dumps(TOOLS), *[None] * 11]
    table = pa.table({"messages": made, "tools": tools, "meta.redpajama_set_name": ["A"] * 12})
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
    for column, wrong in (("text", "has not one column 'messages'"),):
        pq.write_table(pa.table({column: ["a"]}), tmp_path / "rows" / "s.parquet")
        manifest = open_chat(str(tmp_path / "rows"), template(PLAIN)).manifest
        with pytest.raises(DataFault, match=wrong):
            read_conversations(manifest, "s.parquet", READING, Counter())


# Streams


@pytest.mark.parametrize("config", [CONFIG, BEST_FIT], ids=["concatenate", "best_fit"])
def test_no_mark_is_lost_by_packing(
    folder: ChatFolder, chat_tokenizer: Tokenizer, config: StreamConfig
) -> None:
    """In the first epoch each label that counts comes once, behind the token that precedes it."""
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
    # Some of the third epoch was read, too, and some waits in pools.
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
def test_a_resume_in_the_middle_of_a_conversation_is_exact(
    folder: ChatFolder, chat_tokenizer: Tokenizer, config: StreamConfig, num_workers: int
) -> None:
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
