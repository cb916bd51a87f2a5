"""Tests fine-tuning on conversations: which tokens a step learns from, and errors in configs and tokenizers."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsa_data.chat import ChatFolder
from gsa_data.chat_template import ChatEncoder, find_chat_template
from gsa_data.faults import Reading
from gsa_data.marks import INSIDE, UNSCORED
from gsa_data.pack import FILLER
from gsa_data.stream import StateMismatch
from gsa_data.tokenize import Tokenizer, TokenizerError
from gsa_eval.commands.evaluate import parse
from gsa_eval.convert.export_hf import export_hf
from gsa_eval.convert.import_hf import import_hf
from gsa_eval.convert.in_memory import load_checkpoint_model, load_hf_model
from gsa_eval.evaluate import run_evaluation
from gsa_train.config import ConfigError, load_config
from gsa_train.data.batches import (
    TrainBatches,
    open_training_corpus,
    read_validation_sets,
    to_micro_batch,
)
from gsa_train.data.tokenizer import load_tokenizer
from gsa_train.optimizer.mcore import build_optimizer, close_optimizer
from gsa_train.validation.perplexity import evaluate, ngram_perplexities
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
    token_losses,
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
    marked = [
        5 | UNSCORED,
        6,
        EOS | INSIDE,
        7 | UNSCORED,
        8,
        EOS,
        9 | UNSCORED,
        3,
        EOS | UNSCORED,
        FILLER,
        FILLER,
    ]
    batch = to_micro_batch(torch.tensor([marked], dtype=torch.int32), EOS, False)
    assert batch.tokens.tolist() == [[5, 6, EOS, 7, 8, EOS, 9, 3, EOS, EOS]]
    assert batch.labels.tolist() == [[6, EOS, 7, 8, EOS, 9, 3, EOS, EOS, EOS]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 0, 1, 0, 0, 0]]
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 2]]


def test_conversations_of_an_earlier_version_go_on_as_other_data_only(chats: Path) -> None:
    config = config_of(chats)
    batches = TrainBatches(config, single_rank(), load_tokenizer(config), None)
    batches.next_step()
    state = batches.state()
    del state["chat_version"]
    with pytest.raises(
        StateMismatch, match="saved with chat_version=1, but this run has chat_version=2"
    ) as refusal:
        TrainBatches(config, single_rank(), load_tokenizer(config), state)
    assert refusal.value.other_data, "--accept-new-data goes on"


@pytest.mark.parametrize("phase", [NO_KL, DENSE], ids=lambda phase: phase.name)
def test_the_loss_of_packed_conversations_matches_the_exported_model(chats, tmp_path, phase):
    """transformers pads and masks one conversation per row, with labels of -100 where the assistant does not write.
    Training adds the document's end to each conversation, which is scored. Queries leave keys out."""
    budgets = {"k_base": 24, "k_min": 8, "k_max": 48, "indexer_rope": True, "attention": phase.attention}
    config = config_of(chats)
    config = dataclasses.replace(
        config, gsa=dataclasses.replace(config.gsa, **budgets), phases=[phase],
        train=dataclasses.replace(config.train, global_batch_size=6),
    )  # fmt: skip
    tokenizer = load_tokenizer(config)
    model = tiny_model(config, variance_ema=0.02)
    optimizer = build_optimizer(model, phase, config)
    template = find_chat_template(tokenizer.path, "", Reading())
    data = {
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "chat_template_fingerprint": template.fingerprint,
    }
    checkpoint = write_checkpoint(tmp_path, 1, model, optimizer, config, data=data)
    close_optimizer(model, optimizer)
    exported = export_hf(checkpoint, tmp_path / "hf")
    folder = exported.folder
    assert not any("chat template" in line for line in exported.warnings)
    stops = [tokenizer.eos_id, tokenizer.symbol_in("<|im_end|>")]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == stops
    assert list(tokenizer.stop_ids) == stops
    for text_model in (
        load_checkpoint_model(checkpoint, torch.device("cpu"), "sdpa"),
        load_hf_model(folder, torch.device("cpu"), "sdpa"),
    ):
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
        assert batch.document_ids is not None
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

    import_hf(folder, tmp_path / "in")
    again = export_hf(tmp_path / "in", tmp_path / "again").folder
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_an_export_without_the_template_of_training_says_so(chats: Path, tmp_path: Path) -> None:
    config = config_of(chats)
    tokenizer, model = load_tokenizer(config), tiny_model(config)
    optimizer = build_optimizer(model, NO_KL, config)
    data = {"tokenizer_fingerprint": tokenizer.fingerprint, "chat_template_fingerprint": "of another one"}
    checkpoint = write_checkpoint(tmp_path, 1, model, optimizer, config, data=data)
    close_optimizer(model, optimizer)
    exported = export_hf(checkpoint, tmp_path / "hf")
    assert not (exported.folder / "chat_template.jinja").exists()
    assert any("the folder has none" in line for line in exported.warnings)
    assert "the folder has none" in (exported.folder / "README.md").read_text()
    words = ["--checkpoint", str(checkpoint), "--name", "own", "--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"validation sets are conversations.*give --data PLACE, a text"):
        run_evaluation(parse(words), words)


def test_packed_is_unpacked(chats: Path) -> None:
    """Losses and gradients of packed conversations equal those with one conversation per sequence."""
    config = config_of(chats)
    tokenizer = load_tokenizer(config)
    batches = TrainBatches(config, single_rank(), tokenizer, None)
    assert batches._stream is not None
    blocks = batches._stream.next_blocks(4)
    rows = []
    for block in blocks:
        ends = np.flatnonzero((block & ~UNSCORED) == tokenizer.eos_id) + 1
        for piece in np.split(block, ends):
            if len(piece) > 1 and piece[0] != FILLER:
                rows.append(np.append(piece, np.full(LENGTH + 1 - len(piece), FILLER, np.int32)))
    assert len(rows) > 1.5 * len(blocks)
    rows += [np.full(LENGTH + 1, FILLER, np.int32)] * (-len(rows) % 2)
    found = []
    for each in (blocks, np.stack(rows)):
        size = {"global_batch_size": len(each)}
        of_size = dataclasses.replace(config, train=dataclasses.replace(config.train, **size))
        parts = torch.from_numpy(each).split(2)
        micro_batches = [to_micro_batch(part, tokenizer.eos_id, False) for part in parts]
        found.append(step_gradients(tiny_model(config, variance_ema=0.02), NO_KL, micro_batches, of_size))
    (packed, gradients), (unpacked, others) = found
    assert packed.loss_tokens == unpacked.loss_tokens > 0
    torch.testing.assert_close(packed.loss_sum, unpacked.loss_sum, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_without_an_answer_has_a_loss_of_0() -> None:
    config = tiny_config()
    blocks = random_blocks(config).clamp(min=1) | UNSCORED
    batches = [to_micro_batch(part, EOS, False) for part in blocks.split(2)]
    result, gradients = step_gradients(tiny_model(config, variance_ema=0.02), NO_KL, batches, config)
    assert (result.loss_sum, result.grad_norm) == (0, 0)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


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


def test_validation_and_baselines_score_the_answers(chats: Path) -> None:
    config = config_of(chats)
    config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, max_blocks=5))
    tokenizer = load_tokenizer(config)
    (found,) = read_validation_sets(config, tokenizer)
    model = tiny_model(config, variance_ema=0.02)
    batch = to_micro_batch(torch.from_numpy(found.text.blocks), tokenizer.eos_id, False)
    losses = token_losses(model, batch, evaluating=True)[batch.loss_mask > 0]
    assert found.text.scored_tokens == len(losses) < batch.labels.numel() / 2
    record = evaluate(model, [found], tokenizer.eos_id, config, single_rank())
    assert record["validation_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    trained = TrainBatches(config, single_rank(), tokenizer, None)
    for _ in range(16 // config.train.global_batch_size):
        trained.next_step()
    baselines = ngram_perplexities(found.text.blocks, tokenizer, trained.state(), config)
    assert 1 < baselines["bigram_perplexity"] < baselines["unigram_perplexity"] < 384


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
    with pytest.raises(ConfigError) as caught:
        load_config(
            ROOT / "configs" / "demo_sft.yaml",
            [*initial, "data.packing=concatenate", *overrides],
            world_size=1,
        )
    assert message in str(caught.value)
    load_config(ROOT / "configs" / "demo_sft.yaml", initial)


def test_transformers_is_asked_for_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("gsa_train.config.checks.is_installed", lambda package: package != "transformers")
    with pytest.raises(ConfigError, match=r"the package transformers, .* is not installed; .*'\.\[hf\]'"):
        load_config(ROOT / "configs" / "demo_sft.yaml", ["checkpoint.initial_weights=configs"], world_size=1)


def test_a_template_that_does_not_fit_names_its_field(chats: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"data\.chat_template: chat template .* does not have as tokens"
    ):
        load_tokenizer(
            config_of(
                chats,
                tokenizer=str(ROOT / "data/sample/tokenizer.model"),
                chat_template=str(chats / "chat_template.jinja"),
            )
        )


def test_the_bundled_conversations_match_their_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sample_conversations.py", "--out", str(tmp_path)])
    script = runpy.run_path(str(ROOT / "data" / "sample_conversations.py"))
    assert script["main"]() == 0
    for split in ("train", "validation"):
        name = f"{split}/conversations.jsonl"
        assert (tmp_path / name).read_bytes() == (ROOT / "data" / "sample_chat" / name).read_bytes()
    monkeypatch.setattr(sys, "argv", ["sample_conversations.py", "--out", str(tmp_path / name)])
    assert script["main"]() == 1
    assert f"--out {tmp_path / name}: cannot be written" in capsys.readouterr().err


def test_the_config_for_1_7b_takes_the_model_of_its_pretraining() -> None:
    configs = [
        load_config(ROOT / f"configs/{name}_1.7b.yaml", world_size=8, need_data=False)
        for name in ("sft", "gsa")
    ]
    for section in ("model", "gsa", "parallel"):
        assert getattr(configs[0], section) == getattr(configs[1], section)
    assert configs[0].data.format == "chat"


def test_the_demo_takes_its_model_and_cuts_no_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    demo = load_config("configs/demo.yaml")
    config = load_config("configs/demo_sft.yaml", ["checkpoint.initial_weights=configs"])
    assert (config.model, config.gsa) == (demo.model, demo.gsa)
    tokenizer: Tokenizer = load_tokenizer(config)
    corpus = open_training_corpus(config)
    assert isinstance(corpus, ChatFolder)
    encoder = ChatEncoder(corpus.template, tokenizer)
    lines = (ROOT / "data/sample_chat/train/conversations.jsonl").read_text().splitlines()
    lengths = [len(encoder.encode(json.loads(line)["messages"], None)[0]) for line in lines]
    assert max(lengths) <= config.train.seq_len_tokens + 1
