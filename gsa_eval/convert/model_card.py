"""Write README.md of an exported model: its architecture, its training, and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gsa_eval.run_records import events_of, records_of
from gsa_train.checkpoint.load import RunState
from gsa_train.config import Config, ModelConfig
from gsa_train.config.batch_ramp import batch_in_words
from gsa_train.config.moe import layers_with_experts
from gsa_train.metrics.progress import compact
from gsa_train.metrics.record_format import Record
from gsa_train.model.flops import count_parameters
from gsa_train.run_folder.starts import read_starts

MOST_EVENTS = 20

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- gated-sparse-attention
---
"""
LOAD = """## Use

The folder holds the code of the architecture, which needs torch and transformers 5.17 or later:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

Where gsa-train's package `gsa_hf` is installed, `import gsa_hf` registers the architecture, and no remote code is
needed; `attn_implementation="gsa"` then runs on the kernels of `gsa_kernels` (GPU). Training put no token in front of a
text; the end of a document is `eos_token`.
"""


def model_card(
    name: str, config: Config, state: RunState, run_dir: Path | None, dtype: str, warnings: Sequence[str]
) -> str:
    """
    Args:
        run_dir: folder of the run that trained it; None for imported weights.
    """
    run = run_dir if run_dir is not None and (run_dir / "metrics.jsonl").is_file() else None
    parts = [HEAD, f"# {name}\n", _table(_facts(config, dtype))]
    if state.step == 0:
        parts.append(
            "## Training\n\nWeights imported from another architecture or folder, not trained here.\n"
        )
    else:
        parts.append("## Training\n")
        parts.append(_table(_training(config, state, run)))
    if run is not None:
        records = records_of(run)
        parts += [_validation(records, state.step), _events(run, records, state.step)]
    if warnings:
        parts.append("## Warnings\n\n" + "".join(f"- {line}\n" for line in warnings))
    parts.append(LOAD.format(folder=name))
    return "\n".join(part for part in parts if part)


def _facts(config: Config, dtype: str) -> dict[str, Any]:
    model, gsa = config.model, config.gsa
    count = count_parameters(model, gsa, config.moe)
    gates = [label for label, on in (("G2 (values)", gsa.value_gate), ("G1 (output)", gsa.output_gate)) if on]
    facts = {
        "architecture": "Gated Sparse Attention (arXiv 2601.15305)",
        "parameters": f"{count.total:,}" + (f", {count.active:,} of them active" if count.idle else ""),
        "weights": dtype,
        "layers, hidden size, heads, key-value heads, head size": f"{model.num_layers}, {model.hidden_size}, "
        f"{model.num_heads}, {model.num_kv_heads}, {model.head_dim}",
        **({"experts": _experts(config)} if config.moe.experts else {}),
        "rotary embedding": _rotary(model),
        "gates": ", ".join(gates) or "none",
        "attention": gsa.attention,
    }
    if gsa.attention == "sparse":
        few = f"; all of fewer than {gsa.dense_below}" if gsa.dense_below else ""
        facts["keys per query"] = (
            f"{gsa.k_base} ({gsa.k_min} to {gsa.k_max}, adaptive_k: {gsa.adaptive_k}){few}"
        )
    return facts | {"trained length": f"{config.train.seq_len_tokens} tokens"}


def _experts(config: Config) -> str:
    moe, layers = config.moe, config.model.num_layers
    mixtures = len(layers_with_experts(moe, layers))
    shared = moe.shared_expert_ffn_hidden_size
    return (
        f"{moe.experts} of width {moe.expert_ffn_hidden_size} in {mixtures} of {layers} layers; each token goes to "
        f"{moe.top_k}{f', and a shared one of {shared}' if shared else ''}; {moe.router_score} router"
    )


def _rotary(model: ModelConfig) -> str:
    scaling = model.rope_scaling
    yarn = f", YaRN: {scaling.factor:g} times {scaling.original_max_position_embeddings} tokens"
    return f"base {model.rope_base:g}{yarn if scaling.rope_type == 'yarn' else ''}"


def _training(config: Config, state: RunState, run: Path | None) -> dict[str, Any]:
    known = read_starts(run, needed=("step", "layout", "host")) if run is not None else []
    starts = [start for start in known if start["step"] < state.step]
    commits = dict.fromkeys(start.get("commit") or "unknown" for start in starts)
    phases = [
        f"{each.name} ({each.attention}, trains {each.train}): {each.steps} steps" for each in config.phases
    ]
    tensor, pipeline, data, context = state.layout
    parallel = config.parallel
    experts = (
        f", expert {parallel.expert}, expert tensor {parallel.expert_tensor}" if config.moe.experts else ""
    )
    return {
        "run": config.run.name,
        "step": f"{state.step}, in phase {state.phase_name}",
        "tokens seen": f"{state.tokens:,} ({compact(state.tokens)})",
        "phases": "; ".join(phases),
        "sequences per step": batch_in_words(config.train),
        "layout": f"tensor {tensor}, pipeline {pipeline}, data {data}, context {context}{experts}",
        "gsa-train commit": ", ".join(commits) or "unknown",
        "training text": config.data.train_dir,
    }


def _validation(records: list[Record], step: int) -> str:
    newest: dict[str, Any] = {}
    for record in records:
        if record.get("event") == "validation" and record["step"] <= step:
            newest[record.get("validation_set", "validation")] = record
    rows = [
        f"| {name} | {record['step']} | {record['validation_loss']:.4f} | {record['validation_perplexity']:.2f} |\n"
        for name, record in newest.items()
        if record.get("validation_loss") is not None
    ]
    if not rows:
        return ""
    return (
        "## Validation\n\n| set | step | loss (nats per token) | perplexity |\n|---|---|---|---|\n"
        + "".join(rows)
    )


def _events(run: Path, records: list[Record], step: int) -> str:
    found = [
        f"- step {event.step}: {event.kind}: {' '.join(event.text.split())}\n"
        for event in events_of(run, records)
        if event.step <= step
    ]
    if not found:
        return ""
    more = f"- and {len(found) - MOST_EVENTS} more\n" if len(found) > MOST_EVENTS else ""
    return "## Events of the run\n\n" + "".join(found[:MOST_EVENTS]) + more


def _table(rows: dict[str, Any]) -> str:
    return "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows.items())
