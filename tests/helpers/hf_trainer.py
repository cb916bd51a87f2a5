"""Takes ten steps of transformers' Trainer on a GSA model, and computes its smoothed loss: `hf_trainer.py FOLDER`."""

from __future__ import annotations

import sys

import torch
from transformers import Trainer, TrainingArguments

from helpers.hf import distinct_tokens, tiny_model


def main(folder: str) -> None:
    model = tiny_model("window-rope-reuse", indexer_loss_coef=1.0, indexer_temperature="learned")
    average = model.model.layers[0].self_attn.indexer.variance_ema.clone()
    before = {name: value.clone() for name, value in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in distinct_tokens(16, 16)]
    options = {
        "output_dir": folder, "max_steps": 10, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    smoothed = Trainer(model, TrainingArguments(label_smoothing_factor=1e-9, **options), train_dataset=rows)
    tokens = distinct_tokens(2, 16)
    loss = smoothed.compute_loss(model, {"input_ids": tokens, "labels": tokens.clone()})
    torch.testing.assert_close(
        loss, model(tokens, labels=tokens).loss
    )  # The labels are the next tokens, not the tokens read.
    trainer = Trainer(model, TrainingArguments(**options), train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert torch.equal(model.model.layers[0].self_attn.indexer.variance_ema, average)


if __name__ == "__main__":
    main(sys.argv[1])
