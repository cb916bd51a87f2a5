"""Tests gsa-generate: a run, a checkpoint and an exported folder give the same text; errors have one line."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from gsa_data.tokenize import Tokenizer, text_after
from gsa_eval.commands.generate import main
from gsa_eval.convert.import_hf import import_hf
from gsa_eval.convert.tokenizer import write_tokenizer
from gsa_eval.evaluated_model import Source
from gsa_eval.text_model import load_text_model
from gsa_hf import GSAConfig, GSAForCausalLM

SAMPLE = Path(__file__).parents[2] / "data" / "sample" / "tokenizer.model"
Call = Callable[..., tuple[int, str, str]]
RATES = r"prefill (\d+) tokens, \d+ tokens/s; decode (\d+) steps of (\d+), \d+ tokens/s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `hf`, an exported model; `run`, with its checkpoint of step 0; `dense`, of another architecture."""
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = Tokenizer(str(SAMPLE))
    torch.manual_seed(3)
    config = GSAConfig(
        vocab_size=tokenizer.vocab_size + 64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=48, initializer_range=0.3,
        index_n_heads=2, index_head_dim=8, index_topk=6, k_min=2, k_max=9, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    model = GSAForCausalLM(config)
    model.save_pretrained(folder / "hf")
    write_tokenizer(tokenizer, folder / "hf", 48)
    import_hf(folder / "hf", folder / "imported")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "imported").rename(folder / "run" / "checkpoints" / "step_00000000")
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text("One line\n\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command with these words; return its exit code and what it wrote to stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
        try:
            code = main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def test_every_source_gives_the_same_text(folder: Path, call: Call) -> None:
    prompts = ["--prompt", "Once upon a time", "--prompt", "The", "--max-new-tokens", 12]
    run, checkpoint = folder / "run", folder / "run" / "checkpoints" / "step_00000000"
    sources = [("--run", run), ("--run", run, "--step", 0), ("--checkpoint", checkpoint)]
    sources.append(("--hf", folder / "hf"))
    texts = []
    for source in sources:
        code, text, said = call(*source, *prompts)
        rates = re.search(RATES, said)
        assert (code, *rates.groups()[1:]) == (0, "11", "2")
        texts.append(text)
    assert texts[1:] == texts[:-1]
    assert texts[0].startswith("--- 1\nOnce upon a time")
    assert "\n--- 2\nThe" in texts[0]


def test_the_text_matches_the_model(folder: Path, call: Call) -> None:
    code, text, _ = call("--run", folder / "run", "--prompt", "The man", "--max-new-tokens", 9)
    tokenizer = Tokenizer(str(SAMPLE))
    model = load_text_model(Source(hf=folder / "hf"), "eager").model
    prompt = tokenizer.encode("The man").tolist()
    for _ in range(9):
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        prompt.append(int(logits[: tokenizer.vocab_size].argmax()))  # only tokens that the tokenizer has
        assert prompt[-1] != tokenizer.eos_id
    assert (code, text.strip()) == (0, tokenizer.decode(prompt))


def test_the_last_ids_of_a_vocabulary_with_gaps_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    """The tokenizer has fewer tokens than its largest id, which is often the EOS."""
    shutil.copytree(folder / "hf", tmp_path / "gaps")
    content = json.loads((tmp_path / "gaps" / "tokenizer.json").read_text())
    last = Tokenizer(str(SAMPLE)).vocab_size + 20
    token = {"id": last, "content": "<|last|>", "special": True}
    content["added_tokens"].append({**content["added_tokens"][0], **token})
    if isinstance(content["model"]["vocab"], dict):
        content["model"]["vocab"]["<|last|>"] = last
    (tmp_path / "gaps" / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_text_model(Source(hf=tmp_path / "gaps"), "sdpa")
    assert loaded.encode("<|last|>") == [last]
    assert loaded.vocab_size == last + 1


def test_ctrl_c_leaves_the_session(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def typed() -> Iterator[str]:
        yield "The\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", typed())
    code, text, said = call("--hf", folder / "hf", "--interactive", "--max-new-tokens", 2)
    assert (code, text[:3]) == (130, "The")
    assert said.endswith("tokens/s\nstopped by Ctrl-C\n")


def test_lines_of_the_input_and_sampling(folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\n\n" + "word " * 60 + "\nThe\n"))
    options = ["--max-new-tokens", 6, "--temperature", 2.0, "--top-k", 50, "--top-p", 0.9, "--seed"]
    code, text, said = call("--hf", folder / "hf", "--interactive", *options, 4)
    first, second = text.splitlines()
    assert code == 0
    assert first == second  # each line begins with the seed
    assert "more than the model's context of 48" in said
    assert call("--hf", folder / "hf", "--prompt", "The", *options, 5)[:2] != (0, text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"half": ', "{}", '{"model_max_length": "x"}'])
def test_a_damaged_tokenizer_is_named(folder, tmp_path, call, name, content):
    copy = shutil.copytree(folder / "hf", tmp_path / "hf")
    (copy / name).write_text(content)
    code, _, said = call("--hf", copy, "--prompt", "The", "--max-new-tokens", 2)
    if (name, content) == ("tokenizer_config.json", "{}"):
        assert code == 0  # these are all defaults
    else:
        assert code == 2
        is_ours = name == "tokenizer_config.json" and "max" not in content
        reason = f"{name} is damaged: " if is_ours else "tokenizer's files cannot be read ("
        assert str(copy) in said.splitlines()[-1]
        assert reason in said.splitlines()[-1]


REFUSED = """
--run {}/run --step 3 --prompt a -> --step 3: no complete checkpoint there; steps that have one: 0
--checkpoint {}/empty --step 3 --prompt a -> --step is of a run
--hf {}/none --prompt a -> none: no config.json there
--run {}/run --prompt a --prompt= -> --prompt: an empty prompt; give a text
--run {}/run --prompts {}/blank.txt -> blank.txt, line 2: an empty prompt
--run {}/run --prompts {}/none.txt -> none.txt: cannot be read (No such file or directory); give a file
--run {}/run --prompts {}/latin.txt -> latin.txt: not UTF-8 text
--run {}/run --prompt caf\udce9 -> --prompt: character 4 is not UTF-8
--run {}/run --prompt a --temperature 1 --seed 18446744073709551616 -> seed is 18446744073709551616
--run {}/run --prompt a --max-new-tokens 48 -> with 48 new ones more than the model's context of 48
--run {}/run --prompt a --max-new-tokens 0 -> --max-new-tokens 0: below 1; give 1 or more
--run {}/run --prompt a --temperature 0 -> temperature is 0.0
--run {}/run --prompt a --temperature 1 --top-k -1 -> top_k is -1
--run {}/run --prompt a --temperature 1 --top-p 0 -> top_p is 0.0
--run {}/run --prompt a --seed 3 -> --seed is of sampling
--run {}/run --prompt a --max-new-tokens 2 --attention gsa -> attn_implementation is 'gsa' with the model on cpu
--run {}/run -> one of the arguments --prompt --prompts --interactive is required
--prompt a -> one of the arguments --run --checkpoint --hf is required
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_what_is_refused(row: str, folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words, _, expected = row.partition(" -> ")
    code, text, said = call(*words.replace("{}", str(folder)).split())
    assert (code, text) == (2, "")
    assert expected in said.splitlines()[-1]


def test_lines_end_with_newlines_alone(folder: Path, call: Call) -> None:
    """A form feed or U+2028 is part of a prompt. Windows writes a byte-order mark and \\r\\n."""
    words = ["--run", folder / "run", "--prompts", folder / "breaks.txt", "--max-new-tokens", 1]
    texts = []
    for encoding in ("utf-8", "utf-8-sig"):
        (folder / "breaks.txt").write_text("The\x0cman\r\none\u2028two\r\n", encoding)
        code, text, _ = call(*words)
        assert code == 0
        texts.append(text)
    assert re.findall(r"--- (\d)", texts[0]) == ["1", "2"]
    assert texts[0] == texts[1]
    (folder / "breaks.txt").write_bytes("The\x0cman\none\u2028two\n".encode())
    assert call(*words)[1] == texts[0]


def test_a_text_goes_on_where_the_prompt_ends() -> None:
    tokenizer = Tokenizer(str(SAMPLE))
    whole = tokenizer.encode("Once upon a time").tolist()
    assert text_after(tokenizer.decode, whole[:-1], whole[-1:]) == " time"
    assert text_after(tokenizer.decode, whole, []) == ""
    assert text_after(lambda tokens: "�" if len(tokens) == 1 else "é", [1], [2]) == "�"
