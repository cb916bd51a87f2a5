"""Tests all programs that generate text with a chat model. The programs must give the same tokens, and must stop at the
end of the model's turn. The model's chat template must survive an export, an import and another export."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("lm_eval")

import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from gsa_eval.commands import generate as command
from gsa_eval.convert.export_hf import export_hf
from gsa_eval.convert.import_hf import import_hf
from gsa_eval.evaluated_model import Source, load_evaluated_model
from gsa_eval.harness import EvaluatedLM
from helpers.chats import PLAIN, make_tokenizer
from helpers.runs import REPOSITORY, start
from helpers.tiers import with_nightly

pytestmark = pytest.mark.slow

ANSWERS = {"what is a gate": "sparse query key", "and a head": "value token"}
NEW_TOKENS = 40
SETTINGS = """
    model.num_layers=2 model.hidden_size=64 model.num_heads=2 model.ffn_hidden_size=64 gsa.indexer_heads=1
    gsa.indexer_dim=16 train.seq_len_tokens=64 train.micro_batch_size=8 train.global_batch_size=8 gsa.k_base=64
    gsa.k_min=64 gsa.k_max=64 phases.0.steps=60 phases.0.lr=1e-2 phases.0.warmup_steps=5
    data.packing_pool_documents=8 evaluate.every_steps=0 evaluate.ngram_baselines=false
    checkpoint.initial_weights='' checkpoint.every_steps=60 logging.every_steps=20 logging.wandb=disabled
    logging.tensorboard=false
"""


class Chat(NamedTuple):
    run: Path
    exported: Path
    turn_end: str


@pytest.fixture(scope="module", params=with_nightly(["tokenizer.json", "sentencepiece"], {"sentencepiece"}))
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """Train a tiny model that memorises two answers."""
    folder = tmp_path_factory.mktemp("chat")
    template, tokenizer, turn_end = folder / "chat_template.jinja", folder / "tokenizer.json", "<|im_end|>"
    if request.param == "tokenizer.json":
        make_tokenizer(folder)
        template.write_text(PLAIN)
        vocabulary = 384
    else:
        tokenizer = Path(shutil.copy(REPOSITORY / "data/sample/tokenizer.model", folder))
        shutil.copy(REPOSITORY / "data/sample_chat/chat_template.jinja", template)
        vocabulary, turn_end = 4096, "</s>"
    (folder / "train").mkdir()
    lines = [json.dumps({"messages": messages(question, answer)}) for question, answer in ANSWERS.items()]
    (folder / "train" / "s.jsonl").write_text("\n".join(lines * 20))
    data = {"train_dir": folder / "train", "validation_dir": folder / "train", "tokenizer": tokenizer}
    places = [f"data.{name}={place}" for name, place in {**data, "chat_template": template}.items()]
    places.append(f"model.vocab_size={vocabulary}")
    config = str(REPOSITORY / "configs/demo_sft.yaml")
    run = start(folder, *SETTINGS.split(), *places, config=config).wait()
    exported = export_hf(run.folder / "checkpoints" / "step_00000060", folder / "hf").folder
    return Chat(run.folder, exported, turn_end)


def messages(question: str, answer: str = "") -> list[dict[str, str]]:
    asked = [{"role": "user", "content": question}]
    return [*asked, {"role": "assistant", "content": answer}] if answer else asked


@pytest.mark.parametrize("question", ANSWERS)
def test_everyone_writes_the_same_and_stops_at_the_end_of_the_turn(chat, question, monkeypatch, capsys):
    answer = ANSWERS[question]
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat.exported)
    prompt = tokenizer.apply_chat_template(messages(question), tokenize=False, add_generation_prompt=True)

    pipeline: Any = transformers.pipeline("text-generation", str(chat.exported), device="cpu")
    found = pipeline(messages(question), max_new_tokens=NEW_TOKENS, do_sample=False, return_tensors=True)
    tokens = found[0]["generated_token_ids"]
    prompt_tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokens[: len(prompt_tokens)] == prompt_tokens
    new = tokens[len(prompt_tokens) :]
    assert tokenizer.decode(new[-1:]) == chat.turn_end
    written = tokenizer.decode(tokens[:-1])[len(tokenizer.decode(prompt_tokens)) :]
    assert written.strip() == answer

    checkpoint = str(chat.run / "checkpoints" / "step_00000060")
    for source in (["--run", str(chat.run)], ["--checkpoint", checkpoint], ["--hf", str(chat.exported)]):
        words = [*source, "--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS)]
        monkeypatch.setattr(sys, "argv", ["generate.py", *words])
        assert command.main() == 0
        said = capsys.readouterr().out
        assert said == f"{prompt}{written}\n"

    # DeepSpeed sets LOCAL_RANK, and accelerate would then wait for other ranks.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    theirs = HFLM(pretrained=str(chat.exported), device="cpu", batch_size=1)
    settings = {"until": [], "max_gen_toks": NEW_TOKENS, "do_sample": False}
    context = theirs.apply_chat_template(messages(question))
    assert context == prompt
    asked = [Instance("generate_until", {}, arguments=(context, settings), idx=0)]
    sources = (Source(run=chat.run), Source(hf=chat.exported))
    for model in (theirs, *(EvaluatedLM(load_evaluated_model(each), 1) for each in sources)):
        assert model.generate_until(asked)[0].strip() == answer


def test_what_says_how_to_speak_to_it_survives(chat: Chat, tmp_path: Path) -> None:
    import_hf(chat.exported, tmp_path / "weights")
    again = export_hf(tmp_path / "weights", tmp_path / "hf").folder
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (chat.exported / name).read_bytes(), name
    ends = json.loads((again / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(again)
    named = {"<|endoftext|>", chat.turn_end} if chat.turn_end == "<|im_end|>" else {chat.turn_end}
    assert {*tokenizer.convert_ids_to_tokens(ends if isinstance(ends, list) else [ends])} == named
