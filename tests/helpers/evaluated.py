"""Creates small models to evaluate, as checkpoints of a run that never took place."""

import json
from pathlib import Path
from typing import Any

import torch

from gsa_data.tokenize import Tokenizer
from gsa_train.config import Config
from gsa_train.model.mcore.build import Model
from gsa_train.phases import enter_phase
from helpers.checkpoints import write_checkpoint
from helpers.runs import REPOSITORY
from helpers.single_rank import SPARSE, tiny_config, tiny_model

SAMPLE = REPOSITORY / "data" / "sample"
TOKENIZER = str(SAMPLE / "tokenizer.model")
LENGTH = 32


def evaluated_config(**sections: dict[str, Any]) -> Config:
    sections["train"] = {"seq_len_tokens": LENGTH, **sections.get("train", {})}
    sections["model"] = {"vocab_size": 4096, "head_dim": 8, "init_std": 0.1, **sections.get("model", {})}
    # Without RoPE two keys of one token have equal scores in the first layer, and rounding decides which is selected.
    sections["gsa"] = {"indexer_rope": True, **sections.get("gsa", {})}
    sections["data"] = {
        "tokenizer": TOKENIZER,
        "validation_dir": str(SAMPLE / "validation"),
        **sections.get("data", {}),
    }
    sections["logging"] = {"wandb": "disabled", **sections.get("logging", {})}
    return tiny_config([SPARSE], **sections)


def evaluated_model(config: Config) -> Model:
    """Create a model whose parameters all differ from their initial values, so that a missing one is noticed."""
    model = tiny_model(config, variance_ema=0.02)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.gpt.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))
        for router in model.routers:  # large enough to change the routing
            if router.expert_bias is not None:
                router.expert_bias.copy_(0.3 * torch.randn(router.expert_bias.shape, generator=generator))
    enter_phase(model, config.phases[0])
    return model


@torch.no_grad()
def log_likelihood(model: Any, tokens: list[int], first: int = 0) -> float:
    """Sum the log-probabilities of one sequence's labels from a position on, in nats."""
    logits = model(torch.tensor([tokens[:-1]])).logits[0].double().log_softmax(-1)
    return sum(float(logits[place, tokens[place + 1]]) for place in range(first, len(tokens) - 1))


def save_run(model: Model, config: Config, folder: Path) -> Path:
    tokenizer = Tokenizer(config.data.tokenizer)
    data = {"tokenizer_fingerprint": tokenizer.fingerprint}
    write_checkpoint(folder / "checkpoints", 3, model, None, config, tokenizer, data=data)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "phase": "sparse", "loss": 7.5}) + "\n")
    (folder / "summary.json").write_text("{}")
    return folder


def files_of_run(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return content and time of each file of a run, except files of evaluations."""
    own = [path for path in folder.rglob("*") if "evaluations" not in path.parts]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in own if path.is_file()}
