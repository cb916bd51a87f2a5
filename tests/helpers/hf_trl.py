"""Takes steps of TRL's trainers on a saved GSA model: `hf_trl.py FOLDER`. FOLDER has the model and its tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import gsa_hf
from gsa_eval.convert.export_hf import AUTO_MAP
from gsa_hf import GSAForCausalLM

PROMPTS = [f"{a} + {b} =" for a in range(4) for b in range(4)]
ANSWERS, OTHERS = ([f" {(each * factor) % 17} 1 {each}" for each in range(16)] for factor in (3, 5))


def save(model: GSAForCausalLM, folder: Path) -> None:
    """Write a model and a tokenizer of numbers as export does."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "+", "=", *map(str, range(19))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
    ).save_pretrained(folder)
    model.config.auto_map = AUTO_MAP
    model.save_pretrained(folder)


def trained(
    folder: str, method: str, coefficient: float, lora: bool, repeats: int = 1, **options: Any
) -> tuple[list[float], set[str]]:
    """Return the losses of two steps, and the names of the parameters that moved.

    Args:
        repeats: number of times that SFT and DPO repeat the text of an answer.
    """
    answers, others = ([repeats * each for each in texts] for texts in (ANSWERS, OTHERS))
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/out", "max_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "bf16": False,
        "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "per_device_train_batch_size": 8, "model_init_kwargs": {"indexer_loss_coef": coefficient}, **options,
    }  # fmt: skip
    shared: dict[str, Any] = {
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "peft_config": LoraConfig(target_modules="all-linear", r=4) if lora else None,
    }
    trainer: Any
    if method == "sft":
        data = Dataset.from_dict({"prompt": PROMPTS, "completion": answers})
        trainer = SFTTrainer(folder, SFTConfig(max_length=None, **settings), train_dataset=data, **shared)
    elif method == "dpo":
        data = Dataset.from_dict({"prompt": PROMPTS, "chosen": answers, "rejected": others})
        trainer = DPOTrainer(
            folder, args=DPOConfig(max_length=None, **settings), train_dataset=data, **shared
        )
    else:
        data = Dataset.from_dict({"prompt": PROMPTS})
        arguments = GRPOConfig(max_completion_length=8, num_generations=4, beta=0.1, **settings)
        trainer = GRPOTrainer(folder, rewards, arguments, train_dataset=data, **shared)
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    if method == "grpo":
        with gsa_hf.replayed_selections(trainer.model):
            trainer.train()
    else:
        trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], moved


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def main(folder: str) -> None:
    model = GSAForCausalLM.from_pretrained(folder)
    parameters = {name for name, _ in model.named_parameters()}
    linears = {
        name
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and name != "lm_head"
    }
    for method in ("sft", "dpo", "grpo"):
        for coefficient in (0.0, 0.5):
            for lora in (False, True):
                losses, moved = trained(folder, method, coefficient, lora)
                names = (
                    {f"base_model.model.{name}.lora_B.default.weight" for name in linears}
                    if lora
                    else parameters
                )
                learns = {name for name in names if coefficient > 0 or "indexer" not in name}
                found = {name for name in moved if "lora_A" not in name}
                assert found == learns, (method, coefficient, lora, found ^ learns)
                assert len(losses) == 2
    # Packed sequences have the losses of padded ones. TRL 1.16 packs only in SFT.
    padded, packed = (trained(folder, "sft", 0.5, False, padding_free=each)[0] for each in (False, True))
    torch.testing.assert_close(torch.tensor(padded), torch.tensor(packed), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(sys.argv[1])
