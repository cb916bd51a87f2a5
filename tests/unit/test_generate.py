"""Tests gsa-generate: a run, a checkpoint and an exported folder give the same text; errors have one line."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from gsa_data.tokenize import Tokenizer, text_after
from gsa_eval.commands.generate import main
from gsa_eval.convert.import_hf import import_hf
from gsa_eval.convert.in_memory import load_hf_model
from gsa_eval.convert.tokenizer import write_tokenizer
from gsa_hf import GSAConfig, GSAForCausalLM

SAMPLE = Path(__file__).parents[2] / "data" / "sample" / "tokenizer.model"
RATES = r"prefill (\d+) tokens, \d+ tokens/s; decode (\d+) steps of (\d+), \d+ tokens/s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create `hf`, an exported model; `run`, with its checkpoint of step 0; `dense`, of another architecture."""
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = Tokenizer(str(SAMPLE))
    torch.manual_seed(3)
    model = GSAForCausalLM(
        GSAConfig(
            vocab_size=tokenizer.vocab_size + 64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=48,
            initializer_range=0.3,
            index_n_heads=2,
            index_head_dim=8,
            index_topk=6,
            k_min=2,
            k_max=9,
            eos_token_id=tokenizer.eos_id,
        )
    )
    model.save_pretrained(folder / "hf")
    write_tokenizer(tokenizer, folder / "hf", 48)
    import_hf(folder / "hf", folder / "imported")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "imported").rename(folder / "run" / "checkpoints" / "step_00000000")
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text("One line\n\n")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
    try:
        return main()
    except SystemExit as end:
        return int(end.code or 0)


def test_every_source_gives_the_same_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["--prompt", "Once upon a time", "--prompt", "The", "--max-new-tokens", 12]
    checkpoint = folder / "run" / "checkpoints" / "step_00000000"
    sources = [
        ["--run", folder / "run"],
        ["--run", folder / "run", "--step", 0],
        ["--checkpoint", checkpoint],
    ]
    texts = []
    for source in [*sources, ["--hf", folder / "hf"]]:
        assert call(monkeypatch, *source, *prompts) == 0
        said = capsys.readouterr()
        texts.append(said.out)
        rates = re.search(RATES, said.err)
        assert rates is not None
        assert rates.groups()[1:] == ("11", "2")
    assert texts[1:] == texts[:-1]
    assert texts[0].startswith("--- 1\nOnce upon a time")
    assert "\n--- 2\nThe" in texts[0]


def test_the_text_matches_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--run", folder / "run", "--prompt", "The man", "--max-new-tokens", 9) == 0
    tokenizer = Tokenizer(str(SAMPLE))
    model = load_hf_model(folder / "hf", torch.device("cpu"), "eager").model
    prompt = tokenizer.encode("The man").tolist()
    for _ in range(9):
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        prompt.append(int(logits[: tokenizer.vocab_size].argmax()))  # only tokens that the tokenizer has
        assert prompt[-1] != tokenizer.eos_id
    assert capsys.readouterr().out.strip() == tokenizer.decode(prompt)


def test_the_last_ids_of_a_vocabulary_with_gaps_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    """The tokenizer has fewer tokens than its largest id, which is often the EOS."""
    shutil.copytree(folder / "hf", tmp_path / "gaps")
    content = json.loads((tmp_path / "gaps" / "tokenizer.json").read_text())
    last = Tokenizer(str(SAMPLE)).vocab_size + 20
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": last, "content": "<|last|>", "special": True}
    )
    model = content["model"]
    model["vocab"] = (
        {**model["vocab"], "<|last|>": last} if isinstance(model["vocab"], dict) else model["vocab"]
    )
    (tmp_path / "gaps" / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_hf_model(tmp_path / "gaps", torch.device("cpu"), "sdpa")
    assert loaded.encode("<|last|>") == [last]
    assert loaded.vocab_size == last + 1


def test_ctrl_c_leaves_the_session(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed() -> Iterator[str]:
        yield "The\n"
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", typed())
    words = ["--hf", folder / "hf", "--interactive", "--max-new-tokens", 2]
    assert call(monkeypatch, *words) == 130
    said = capsys.readouterr()
    assert said.out.startswith("The")
    assert said.err.endswith("tokens/s\nstopped by Ctrl-C\n")


def test_lines_of_the_input_and_sampling(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The\n\n" + "word " * 60 + "\nThe\n"))
    options = ["--max-new-tokens", 6, "--temperature", 2.0, "--top-k", 50, "--top-p", 0.9, "--seed"]
    assert call(monkeypatch, "--hf", folder / "hf", "--interactive", *options, 4) == 0
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert first == second  # each line begins with the seed
    assert "more than the model's context of 48" in said.err
    assert call(monkeypatch, "--hf", folder / "hf", "--prompt", "The", *options, 5) == 0
    assert capsys.readouterr().out.splitlines() != [first]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", '{"half": ', "{}"])
def test_a_damaged_tokenizer_is_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
) -> None:
    copy = shutil.copytree(folder / "hf", tmp_path / "hf")
    (copy / name).write_text(content)
    code = call(monkeypatch, "--hf", copy, "--prompt", "The", "--max-new-tokens", 2)
    if (name, content) == ("tokenizer_config.json", "{}"):
        assert code == 0  # these are all defaults
    else:
        assert code == 2
        assert (
            f"--hf {copy}: its tokenizer's files cannot be read (" in capsys.readouterr().err.splitlines()[-1]
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--run {}/none --prompt a", "none: no such folder; give a run's folder, <run.dir>/<run.name>"),
        ("--run {}/empty --prompt a", "empty: no complete checkpoint there; steps that have one: none"),
        (
            "--run {}/run --step 3 --prompt a",
            "--step 3: no complete checkpoint there; steps that have one: 0",
        ),
        ("--checkpoint {}/empty --prompt a", "no complete checkpoint there; give a step_"),
        ("--checkpoint {}/empty --step 3 --prompt a", "--step is of a run"),
        ("--hf {}/none --prompt a", "none: no such folder"),
        ("--run {}/run --prompt a --prompt=", "--prompt: an empty prompt; give a text"),
        ("--run {}/run --prompts {}/blank.txt", "blank.txt, line 2: an empty prompt"),
        (
            "--run {}/run --prompts {}/none.txt",
            "none.txt: cannot be read (No such file or directory); give a file",
        ),
        ("--run {}/run --prompts {}/latin.txt", "latin.txt: not UTF-8 text"),
        ("--run {}/run --prompt caf\udce9", "--prompt: character 4 is no UTF-8"),
        (f"--run {{}}/run --prompt a --temperature 1 --seed {2**64}", "seed is 18446744073709551616"),
        (
            "--run {}/run --prompt a --max-new-tokens 48",
            "with 48 new ones more than the model's context of 48",
        ),
        ("--run {}/run --prompt a --max-new-tokens 0", "--max-new-tokens 0: below 1; give 1 or more"),
        ("--run {}/run --prompt a --temperature 0", "temperature is 0.0"),
        ("--run {}/run --prompt a --seed 3", "--seed is of sampling"),
        (
            "--run {}/run --prompt a --max-new-tokens 2 --attention gsa",
            "attn_implementation is 'gsa' with the model on cpu",
        ),
        ("--run {}/run", "one of the arguments --prompt --prompts --interactive is required"),
        ("--prompt a", "one of the arguments --run --checkpoint --hf is required"),
    ],
)
def test_what_is_refused(
    words: str,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert call(monkeypatch, *words.replace("{}", str(folder)).split()) == 2
    shown = capsys.readouterr()
    assert said in shown.err.splitlines()[-1]
    assert shown.out == ""


def test_lines_end_with_newlines_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A form feed or U+2028 is part of a prompt."""
    prompts = ["The\x0cman", "one\u2028two"]
    (folder / "breaks.txt").write_text("\r\n".join(prompts) + "\r\n", encoding="utf-8")
    words = ["--run", folder / "run", "--prompts", folder / "breaks.txt", "--max-new-tokens", 1]
    assert call(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert re.findall(r"--- (\d)", said) == ["1", "2"]
    (folder / "breaks.txt").write_text(
        "\r\n".join(prompts) + "\r\n", encoding="utf-8-sig"
    )  # As Windows writes.
    assert call(monkeypatch, *words) == 0
    assert capsys.readouterr().out == said


def test_a_text_goes_on_where_the_prompt_ends() -> None:
    tokenizer = Tokenizer(str(SAMPLE))
    whole = tokenizer.encode("Once upon a time").tolist()
    assert text_after(tokenizer.decode, whole[:-1], whole[-1:]) == " time"
    assert text_after(tokenizer.decode, whole, []) == ""
    assert text_after(lambda tokens: "�" if len(tokens) == 1 else "é", [1], [2]) == "�"
