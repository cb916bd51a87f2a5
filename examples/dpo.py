"""Teach an exported model preferences between pairs of answers (DPO, by TRL).

    pip install '.[hf,rl]'
    python launch/export_hf.py --run runs/demo --out demo_hf
    python examples/dpo.py demo_hf --out demo_dpo

Each pair has a prompt, a preferred answer and a rejected answer. Without `--pairs`, the pairs come from the bundled
conversations, and the rejected answer comes from another conversation. With the demo's model, training takes about a
minute on two CPU cores.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer

import gsa_hf  # noqa: F401 - registers the model

CHATS = Path(__file__).resolve().parents[1] / "data/sample_chat"


def bundled_pairs(split: str) -> Dataset:
    rows = []
    for line in (CHATS / split / "conversations.jsonl").read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        rows.append([each["content"] for each in messages if each["role"] != "system"][:2])
    answers = [answer for _, answer in rows]
    return Dataset.from_list(
        [
            {
                "prompt": f"User: {asked}\nAssistant:",
                "chosen": f" {answer}",
                "rejected": f" {random.choice([other for other in answers if other != answer])}",
            }
            for asked, answer in rows
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of export_hf.py")
    parser.add_argument("--out", required=True, help="folder for the trained model")
    parser.add_argument("--pairs", help="*.jsonl with prompt, chosen and rejected; a tenth is held out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", help="attn_implementation (default: of the folder)")
    options = parser.parse_args()
    set_seed(options.seed)
    if options.pairs is None:
        train, held_out = bundled_pairs("train"), bundled_pairs("validation")
    else:
        parts = Dataset.from_json(options.pairs).train_test_split(0.1, seed=options.seed)
        train, held_out = parts["train"], parts["test"]
    cuda = torch.cuda.is_available()
    settings: dict[str, Any] = {"use_cpu": not cuda, "bf16": cuda, "report_to": [], "disable_tqdm": True}
    arguments = DPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        learning_rate=options.lr,
        per_device_train_batch_size=16,
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 3),
        logging_steps=10,
        save_strategy="no",
        seed=options.seed,
        **settings,
    )
    # indexer_loss_coef=0, the default, freezes the indexers. The reference model is read from the same folder.
    chosen = {} if options.attention is None else {"attn_implementation": options.attention}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **chosen)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    trainer = DPOTrainer(
        model, None, arguments, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(options.out)
    measured = [each for each in trainer.state.log_history if "eval_rewards/accuracies" in each]
    for each in measured:
        accuracy, margin = each["eval_rewards/accuracies"], each["eval_rewards/margins"]
        print(f"step {each['step']}: held-out margin > 0: {accuracy:.2f}, mean margin {margin:.3f}")


if __name__ == "__main__":
    main()
