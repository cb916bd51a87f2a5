"""Teach an exported model sums by reinforcement learning with a checked reward (GRPO, by TRL).

    pip install '.[hf,rl]'
    python launch/export_hf.py --run runs/demo --out demo_hf
    python examples/grpo.py demo_hf --out demo_grpo

Supervised fine-tuning first teaches the form of an answer, with half of the answers wrong. GRPO then samples answers to
each sum and rewards the right ones. The demo's model takes about a minute on two CPU cores.
"""

import argparse
import random
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from gsa_hf import replayed_selections

SUMS = [(a, b) for a in range(6) for b in range(6)]


def question(a: int, b: int) -> str:
    return f"{a} + {b} ="


def noisy_answers(count: int, share_right: float = 0.5) -> Dataset:
    """Return sums with answers. About `share_right` of the answers are right."""
    rows = []
    for a, b in random.choices(SUMS, k=count):
        right = random.random() < share_right
        rows.append({"prompt": question(a, b), "completion": f" {a + b if right else random.randrange(11)}"})
    return Dataset.from_list(rows)


def is_right(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """Return the reward of each completion: 1 for the right number and nothing else."""
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of export_hf.py")
    parser.add_argument("--out", required=True, help="folder for the trained model")
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3, help="for SFT; GRPO takes a third")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_seed(options.seed)
    cuda = torch.cuda.is_available()
    common: dict[str, Any] = {
        "output_dir": options.out,
        "use_cpu": not cuda,
        "bf16": cuda,
        "seed": options.seed,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 5,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 64,
    }
    # indexer_loss_coef=0, the default, freezes the indexers.
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = noisy_answers(64 * options.sft_steps)
    arguments = SFTConfig(max_steps=options.sft_steps, learning_rate=options.lr, **common)
    SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()

    prompts = [{"prompt": question(a, b), "answer": a + b} for a, b in SUMS]
    arguments = GRPOConfig(
        max_steps=options.steps,
        learning_rate=options.lr / 3,
        num_generations=8,
        max_completion_length=6,
        **common,
    )
    trainer = GRPOTrainer(model, is_right, arguments, Dataset.from_list(prompts), processing_class=tokenizer)
    with replayed_selections(model):  # the keys that generation selected, also where the tokens are scored
        trainer.train()
    trainer.save_model(options.out)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"mean reward {rewards[0]:.3f} in the first steps, {rewards[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
