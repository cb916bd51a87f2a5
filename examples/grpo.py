"""Teach an exported model sums by reinforcement learning with a checked reward (GRPO, by TRL).

    pip install '.[hf,rl]'
    python launch/export_hf.py --run runs/demo --out demo_hf
    python examples/grpo.py demo_hf --out demo_grpo

Supervised fine-tuning runs first. About half of its training answers are wrong, so it teaches only the form of an
answer. GRPO then samples several answers to each sum, and rewards the right ones. Training the demo's model takes about
a minute on two CPU cores.

A model with a chat template gets each sum as a user message, after `--shots` solved sums. For example, with an instruct
model on a GPU:

    python examples/grpo.py sparse_135m --out grpo_135m --attention gsa --sft-steps 0 --steps 100 --lr 6e-5 \
        --largest 9 --shots 48

The last line of the output is JSON with the mean reward in the first and last steps, the speed, and the memory. Its
field `log_prob_changes` has the mean and largest change of a token's log-probability between generation and scoring.
In the entry `replayed`, scoring uses the keys that generation selected. In `not_replayed`, scoring selects keys again.
"""

import argparse
import json
import random
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from gsa_hf import replayed_selections


class Sums:
    """Writes sums of two numbers from 0 to `largest` as prompts."""

    def __init__(self, tokenizer: Any, largest: int, shots: int) -> None:
        self.pairs = [(a, b) for a in range(largest + 1) for b in range(largest + 1)]
        self.tokenizer, self.largest = tokenizer, largest
        self.solved = random.choices(self.pairs, k=shots) if shots else []

    def prompt(self, a: int, b: int) -> str:
        if self.tokenizer.chat_template is None:
            return f"{a} + {b} ="
        messages = []
        for x, y in self.solved:
            messages.append({"role": "user", "content": f"{x} + {y}"})
            messages.append({"role": "assistant", "content": str(x + y)})
        messages.append({"role": "user", "content": f"{a} + {b}"})
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def noisy_answers(self, count: int, share_right: float = 0.5) -> Dataset:
        """Return `count` sums with answers. An answer is right with probability `share_right`, otherwise random."""
        rows = []
        for a, b in random.choices(self.pairs, k=count):
            right = random.random() < share_right
            answer = a + b if right else random.randrange(2 * self.largest + 1)
            rows.append({"prompt": self.prompt(a, b), "completion": f" {answer}"})
        return Dataset.from_list(rows)


def is_right(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """Return the reward of each completion: 1 if it is the right number and nothing else, otherwise 0."""
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer, strict=True)]


def log_prob_changes(model: Any, tokenizer: Any, prompts: list[str], new: int = 64) -> dict[str, list[float]]:
    """Generate `new` tokens after each prompt, and score them. Return the mean and largest change in token
    log-probability between generation and scoring. For the entry `replayed`, scoring uses the keys that generation
    selected. For `not_replayed`, scoring selects keys again."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    options: dict[str, Any] = {"do_sample": True, "min_new_tokens": new, "max_new_tokens": new}
    model.eval()
    changes = {}
    with torch.no_grad():
        with replayed_selections(model):
            made = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
            decoded = _log_probs(torch.stack(made.logits, 1), made.sequences)
            given = {
                "input_ids": made.sequences,
                "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1),
                "use_cache": False,
                "logits_to_keep": new + 1,
            }
            scored = {"replayed": _log_probs(model(**given).logits[:, :-1], made.sequences)}
        scored["not_replayed"] = _log_probs(model(**given).logits[:, :-1], made.sequences)
    for name, found in scored.items():
        change = (found - decoded).abs()
        changes[name] = [float(f"{each:.3g}") for each in (change.mean(), change.max())]
    return changes


def _log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the last tokens, [B, new], for logits [B, new, vocab]."""
    return logits.float().log_softmax(-1).gather(-1, tokens[:, -logits.shape[1] :, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of export_hf.py")
    parser.add_argument("--out", required=True, help="folder for the trained model")
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=3e-3, help="for SFT; GRPO takes a third")
    parser.add_argument("--batch", type=int, default=64, help="answers per step, 8 for each sum")
    parser.add_argument("--largest", type=int, default=5, help="largest number of a sum")
    parser.add_argument("--shots", type=int, default=0, help="solved sums in a prompt of the chat template")
    parser.add_argument("--attention", help="attn_implementation (default: of the folder)")
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
        "per_device_train_batch_size": options.batch,
    }
    # indexer_loss_coef=0, the default, freezes the indexers.
    chosen = {} if options.attention is None else {"attn_implementation": options.attention}
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, **chosen)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    sums = Sums(tokenizer, options.largest, options.shots)
    if options.sft_steps:
        data = sums.noisy_answers(options.batch * options.sft_steps)
        arguments = SFTConfig(max_steps=options.sft_steps, learning_rate=options.lr, **common)
        SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()

    prompts = [{"prompt": sums.prompt(a, b), "answer": a + b} for a, b in sums.pairs]
    arguments = GRPOConfig(
        max_steps=options.steps,
        learning_rate=options.lr / 3,
        num_generations=8,
        max_completion_length=6,
        **common,
    )
    trainer = GRPOTrainer(model, is_right, arguments, Dataset.from_list(prompts), processing_class=tokenizer)
    generate, generating = model.generate, 0.0

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        nonlocal generating
        begun = time.perf_counter()
        made = generate(*args, **kwargs)
        if cuda:
            torch.cuda.synchronize()
        generating += time.perf_counter() - begun
        return made

    model.generate = timed_generate
    begun = time.perf_counter()
    with replayed_selections(model):  # scoring uses the keys that generation selected
        trainer.train()
    training = time.perf_counter() - begun - generating
    model.generate = generate
    trainer.save_model(options.out)
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    lengths = [entry["completions/mean_length"] for entry in history]
    generated = sum(lengths) / len(lengths) * options.batch * options.steps
    result = {
        "reward_first": round(history[0]["reward"], 3),
        "reward_last": round(history[-1]["reward"], 3),
        "generated_tokens_per_s": round(generated / generating),
        "trained_tokens_per_s": round(history[-1]["num_tokens"] / training),
        "generation_s": round(generating, 1),
        "training_s": round(training, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "log_prob_changes": log_prob_changes(
            model, tokenizer, [sums.prompt(*pair) for pair in sums.pairs[: options.batch]]
        ),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
