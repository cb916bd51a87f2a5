"""Tests fine-tuning on conversations: which tokens a step learns from, and errors in configs and tokenizers."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa_data.chat import ChatFolder
from gsa_data.chat_template import ChatEncoder
from gsa_data.marks import INSIDE, UNSCORED
from gsa_data.pack import FILLER
from gsa_data.stream import StateMismatch
from gsa_data.tokenize import Tokenizer, TokenizerError
from gsa_eval.convert.export_hf import export_hf
from gsa_eval.evaluated_model import Source
from gsa_eval.text_model import load_text_model
from gsa_train.config import ConfigError, load_config
from gsa_train.data.batches import TrainBatches, open_training_corpus, to_micro_batch
from gsa_train.data.tokenizer import load_tokenizer
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from helpers.chats import WITH_BLOCKS, conversation, make_tokenizer, write_chats
from helpers.checkpoints import write_checkpoint
from helpers.single_rank import (
    DENSE,
    EOS,
    SPARSE,
    WARM_UP,
    random_blocks,
    single_rank,
    step_gradients,
    tiny_config,
    tiny_model,
)

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
LENGTH = 192
NUMBERS = range(40)
NO_KL = dataclasses.replace(SPARSE, kl_coeff=0.0)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fine_tuning")
    make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(WITH_BLOCKS)
    write_chats(folder / "train" / "s.jsonl", map(conversation, NUMBERS))
    return folder


def config_of(chats: Path, **data: Any) -> Any:
    """Let every query select all its causal keys, so that rounding cannot change a selection."""
    folders = {"train_dir": str(chats / "train"), "validation_dir": str(chats / "train")}
    return tiny_config(
        [NO_KL],
        model={"vocab_size": 384, "init_std": 0.2},
        gsa={"k_base": LENGTH, "k_min": LENGTH, "k_max": LENGTH},
        train={"seq_len_tokens": LENGTH},
        data={
            **folders, "format": "chat", "tokenizer": str(chats / "tokenizer.json"), "num_lanes": 2,
            "packing": "best_fit", "packing_pool_documents": 8, **data,
        },
    )  # fmt: skip


def test_marks_become_the_loss_mask() -> None:
    marked = [5 | UNSCORED, 6, EOS | INSIDE, 7 | UNSCORED, 8, EOS]
    marked += [9 | UNSCORED, 3, EOS | UNSCORED, FILLER, FILLER]
    batch = to_micro_batch(torch.tensor([marked], dtype=torch.int32), EOS, False)
    assert batch.tokens.tolist() == [[5, 6, EOS, 7, 8, EOS, 9, 3, EOS, EOS]]
    assert batch.labels.tolist() == [[6, EOS, 7, 8, EOS, 9, 3, EOS, EOS, EOS]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 1, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 2]]


def test_conversations_of_an_earlier_version_go_on_as_other_data_only(chats: Path) -> None:
    config = config_of(chats)
    batches = TrainBatches(config, single_rank(), load_tokenizer(config), None)
    batches.next_step()
    state = batches.state()
    state["chat_version"] = 1
    with pytest.raises(StateMismatch, match="saved with chat_version=1, but this run has chat") as refusal:
        TrainBatches(config, single_rank(), load_tokenizer(config), state)
    assert refusal.value.other_data, "--accept-new-data goes on"


@pytest.mark.parametrize("phase", [NO_KL, DENSE], ids=lambda phase: phase.name)
def test_the_loss_of_packed_conversations_matches_the_exported_model(chats, tmp_path, phase):
    """transformers gets one conversation per row, with padding. Labels outside the assistant's tokens are -100. As in
    training, each conversation ends with a scored EOS. Queries select only some of their keys."""
    budgets = {"k_base": 24, "k_min": 8, "k_max": 48, "indexer_rope": True, "attention": phase.attention}
    config = config_of(chats)
    config = dataclasses.replace(
        config, gsa=dataclasses.replace(config.gsa, **budgets), phases=[phase],
        train=dataclasses.replace(config.train, global_batch_size=6),
    )  # fmt: skip
    tokenizer = load_tokenizer(config)
    model = tiny_model(config, variance_ema=0.02)
    optimizer = build_optimizer(model, phase, config)
    data = {"tokenizer_fingerprint": tokenizer.fingerprint}
    checkpoint = write_checkpoint(tmp_path, 1, model, optimizer, config, tokenizer, data=data)
    close_optimizer(model, optimizer)
    exported = export_hf(checkpoint, tmp_path / "hf")
    folder = exported.folder
    stops = [tokenizer.eos_id, tokenizer.symbol_in("<|im_end|>")]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == stops
    assert list(tokenizer.stop_ids) == stops
    for source in (Source(checkpoint=checkpoint), Source(hf=folder)):
        text_model = load_text_model(source, "sdpa")
        assert text_model.model.generation_config.eos_token_id == stops
        written = "<|im_start|>user\nkey<|im_end|>\n<|im_start|>assistant\n"
        assert text_model.encode(written) == tokenizer.encode_chat(written, [])[0].tolist()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    writer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = {}
    for messages in map(conversation, NUMBERS):
        settings = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = writer.apply_chat_template(messages, **settings)
        encoded[(*found["input_ids"], tokenizer.eos_id)] = [*found["assistant_masks"], 1]

    batches = TrainBatches(config, single_rank(), tokenizer, None).next_step()
    rows: list[tuple[int, ...]] = []
    for batch in batches:
        for tokens, ids in zip(batch.tokens, batch.document_ids, strict=True):
            pieces = [tuple(tokens[ids == number].tolist()) for number in ids.unique()]
            pieces = [piece for piece in pieces if set(piece) != {tokenizer.eos_id}]
            # The end of a sequence's last conversation is only a label.
            rows += [
                piece if piece[-1] == tokenizer.eos_id else (*piece, tokenizer.eos_id) for piece in pieces
            ]
    assert len(rows) > 2 * 6
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
        written = torch.tensor(encoded[row]).bool()
        labels[number, : len(row)][written] = tokens[number, : len(row)][written]
    with torch.no_grad():
        loss = theirs(input_ids=tokens, attention_mask=mask, labels=labels).loss
        everything = theirs(input_ids=tokens, attention_mask=mask, labels=tokens.where(mask > 0, -100)).loss

    result, _ = step_gradients(model, phase, batches, config)
    assert result.loss_tokens == int((labels >= 0).sum())
    assert result.loss_sum.item() / result.loss_tokens == pytest.approx(loss.item(), rel=1e-6)
    assert everything.item() != pytest.approx(loss.item(), rel=1e-5)  # the masked tokens would change it


def test_the_indexer_loss_counts_all_tokens() -> None:
    config = tiny_config()
    blocks = random_blocks(config)
    found = []
    for each in (blocks, blocks.masked_fill(blocks != EOS, 0) + (blocks | UNSCORED) * (blocks != EOS)):
        batches = [to_micro_batch(part, EOS, False) for part in each.split(2)]
        found.append(step_gradients(tiny_model(config, variance_ema=0.02), WARM_UP, batches, config))
    assert found[1][0].loss_tokens < found[0][0].loss_tokens
    assert any("indexer" in name for name in found[0][1])
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name]), name


def test_long_conversations_are_told_at_a_save(chats: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(chats)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, seq_len_tokens=16))
    batches = TrainBatches(config, single_rank(), load_tokenizer(config), None)
    batches.next_step()
    batches.state()
    assert "have more tokens than train.seq_len_tokens = 16 and are cut" in caplog.text
    caplog.clear()
    batches.state()
    assert "are cut" not in caplog.text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.attend_across_documents=true"], "an answer would see other conversations; set it to false"),
        (["data.text_field=chat"], "data.text_field = chat: data.format = chat reads the field messages"),
        (["data.format=text"], "data.format = text reads none; set data.format=chat"),
        (["data.chat_template=gone.jinja"], "data.chat_template = gone.jinja: not in the current folder"),
        (["data.format=chats"], "data.format"),
    ],
)
def test_configs_that_are_refused(overrides, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    initial = ["checkpoint.initial_weights=configs"]  # any folder
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("configs/demo_sft.yaml", [*initial, "data.packing=concatenate", *overrides], world_size=1)
    load_config(ROOT / "configs" / "demo_sft.yaml", initial)


def test_transformers_is_asked_for_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("gsa_train.config.checks.is_installed", lambda package: package != "transformers")
    with pytest.raises(ConfigError, match=r"the package transformers, .* is not installed; .*'\.\[hf\]'"):
        load_config(ROOT / "configs" / "demo_sft.yaml", ["checkpoint.initial_weights=configs"], world_size=1)


def test_a_template_that_does_not_fit_names_its_field(chats: Path) -> None:
    tokenizer, template = str(ROOT / "data/sample/tokenizer.model"), str(chats / "chat_template.jinja")
    with pytest.raises(TokenizerError, match=r"data\.chat_template: chat template .* does not have as"):
        load_tokenizer(config_of(chats, tokenizer=tokenizer, chat_template=template))


def test_shipped_configs_match_their_pretraining_and_cut_no_conversation(monkeypatch):
    monkeypatch.chdir(ROOT)
    demo = load_config("configs/demo.yaml")
    config = load_config("configs/demo_sft.yaml", ["checkpoint.initial_weights=configs"])
    assert (config.model, config.gsa) == (demo.model, demo.gsa)
    large, pretrained = (load_config(f"configs/{name}_1.7b.yaml", need_data=False) for name in ("sft", "gsa"))
    assert (large.model, large.gsa, large.data.format) == (pretrained.model, pretrained.gsa, "chat")
    tokenizer: Tokenizer = load_tokenizer(config)
    corpus = open_training_corpus(config)
    assert isinstance(corpus, ChatFolder)
    encoder = ChatEncoder(corpus.template, tokenizer)
    lines = (ROOT / "data/sample_chat/train/conversations.jsonl").read_text().splitlines()
    lengths = [len(encoder.encode(json.loads(line)["messages"], None)[0]) for line in lines]
    assert max(lengths) <= config.train.seq_len_tokens + 1
