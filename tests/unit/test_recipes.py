"""Follows each row of the table in docs/code.md in a copy of the packages, and trains with the addition."""

from __future__ import annotations

import bz2
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from helpers.runs import ENVIRONMENT, inherited

ROOT = Path(__file__).parents[2]
GATES = r"decoder.*linear_gate\.weight"

ADDITIONS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "gate on heads": {
        "gsa_train/config/gsa.py": [
            ("    gate_granularity: Literal", '    rotated_key_gate: bool = False\n    """G6."""\n')
        ],
        "gsa_train/config/gates.py": [
            ('"key", "query")', '"rotated_key", '),
            ('"query": gsa.query', '"rotated_key": gsa.rotated_key_gate * kv_heads * of_head,\n        '),
        ],
        "gsa_train/model/gates.py": [
            ("\n\ndef build_gate_projection(", "    rotated_key: torch.Tensor | None = None\n")
        ],
        "gsa_train/model/gsa_attention.py": [
            (
                "        output_gate = None if logits.output is None",
                "        if logits.rotated_key is not None:\n"
                "            k = apply_gate(k, logits.rotated_key, self.gsa)\n",
            )
        ],
    },
    "gate with its own module": {
        "gsa_train/config/gsa.py": [
            ("    gate_granularity: Literal", '    result_gate: bool = False\n    """G7."""\n')
        ],
        "gsa_train/config/gates.py": [
            ('"projection")\n"""All gates', '"result", '),
            ('"value", "output", "projection")', '"result", '),
            ('"projection": gsa', '"result": gsa.result_gate * hidden_size,\n        '),
        ],
        "gsa_train/model/gsa_attention.py": [
            (
                "        transform = self.gsa.output_transform",
                "        if self.gsa.result_gate:\n"
                "            self.result_gate = ReplicatedGate(config, pg_collection, d, for_heads=False)\n",
            ),
            (
                "        if self.linear_gate is not None:\n            gates, hid",
                "        if self.gsa.result_gate:\n            result_gate = self.result_gate(hidden_states)\n",
            ),
            (
                "        return result, None\n",
                "        if self.gsa.result_gate:\n"
                "            result = apply_gate(result, result_gate, self.gsa)\n",
            ),
        ],
    },
    "schedule": {
        "gsa_train/schedule.py": [
            (
                "SCHEDULES: dict",
                "def falling(step: int, phase: PhaseConfig) -> float:\n"
                "    return phase.lr + progress(step, phase) * (phase.min_lr - phase.lr)\n\n\n",
            ),
            ('    "constant": constant,', '    "falling": falling,\n'),
        ]
    },
    "optimizer": {
        "gsa_train/optimizer/build.py": [
            (
                "OPTIMIZERS: dict",
                "def momentum(groups, train, fused):\n"
                "    import torch\n\n"
                "    return torch.optim.SGD(groups, lr=0.0, momentum=train.adam_beta1, fused=fused)\n\n\n"
                "def momentum_change(states, group, parameters):\n"
                "    return sum((group['lr'] * s['momentum_buffer']).double().square().sum() for s in states)\n\n\n",
            ),
            (
                '    "adamw": OptimizerKind(',
                '    "momentum": OptimizerKind(momentum, momentum_change, state=("momentum_buffer",)),\n',
            ),
        ]
    },
    "precision of linear layers": {
        "gsa_train/model/mcore/linears.py": [
            (
                "LINEAR_LAYERS: dict",
                "def rounded(train: TrainConfig) -> LinearLayers:\n"
                "    def of(base):\n"
                "        class Rounded(base):\n"
                "            def forward(self, x, *args, **kwargs):\n"
                "                return super().forward(x.bfloat16().to(x.dtype), *args, **kwargs)\n\n"
                "        return Rounded\n\n"
                "    print('linear layers round their input')\n"
                "    return LinearLayers(of(megatron(train).column), of(megatron(train).row))\n\n\n",
            ),
            ('"megatron": megatron}', '"rounded": rounded, '),
        ]
    },
    "loss": {
        "gsa_train/losses.py": [
            (
                "OBJECTIVES: dict",
                "def halved(logits, labels, group, fused, train):\n"
                "    return 0.5 * cross_entropy(logits, labels, group, fused, train)\n\n\n",
            ),
            ('"cross_entropy": cross_entropy}', '"halved": halved, '),
        ]
    },
    "data format, other content": {
        "data/gsa_data/listing.py": [('".jsonl.zst", ".jsonl.gz", ".parquet")', '".txt", ')],
        "data/gsa_data/documents.py": [
            (
                "    else:\n        lines = read_lines(",
                '    elif relpath.endswith(".txt"):\n'
                "        rows = read_lines(manifest, relpath, reading, counters)\n"
                "        parsed = [parse_row(row, None, limit) for row in rows]\n",
            )
        ],
    },
    "data format, other packing": {
        "data/gsa_data/listing.py": [('".jsonl.zst", ".jsonl.gz", ".parquet")', '".jsonl.bz2", ')],
        "data/gsa_data/unpack.py": [
            ("import zlib", "import bz2\n"),
            (
                '    if relpath.endswith(".gz"):',
                '    if relpath.endswith(".bz2"):\n        return bz2.decompress(packed), ""\n',
            ),
        ],
    },
    "derived metric": {
        "gsa_train/metrics/record.py": [
            ('        "loss": reduced.loss,', '        "perplexity": math.exp(reduced.loss),\n')
        ]
    },
    "number from the device": {
        "gsa_train/step.py": [
            ('    update_norm: torch.Tensor | None\n    """0-d fp32', "    squared: torch.Tensor\n"),
            ("        update_norm,\n        computed.z_loss_sum", "        computed.grad_norm**2,\n"),
        ],
        "gsa_train/trainer.py": [("result.update_norm,", "result.squared, ")],
        "gsa_train/metrics/record.py": [
            ("    update_norm: torch.Tensor | None = None", "    squared: torch.Tensor | None = None\n"),
            ("    update_norm: float", "    squared: float | None\n"),
            ("measured.update_norm]", "measured.squared, "),
            ("update_norm) = sent()", "squared, "),
            ("            update_norm=None if", "            squared=squared,\n"),
            ('        "update_norm": reduced', '        "squared": reduced.squared,\n'),
        ],
    },
    "service": {
        "gsa_train/train.py": [
            (
                "def services_of(",
                "class Greeting(Service):\n"
                "    def on_save(self, step):\n"
                "        print('saving after', step)\n\n\n",
            ),
            ("        services.watchdog,\n        services.profiler,", "        Greeting(),\n"),
        ]
    },
}
"""Maps a row of the table and a file to (existing text, text that is inserted before it)."""


def test_a_row_names_the_files_of_its_addition() -> None:
    page = (ROOT / "docs/code.md").read_text("utf-8").partition("## Where to add a thing")[2]
    rows = dict(re.findall(r"^\| ([\w ,]+) \| (`.+?) \|", page.partition("## ")[0], re.MULTILINE))
    named = {thing: re.findall(r"`([\w./]+)`", files) for thing, files in rows.items()}
    assert named == {thing: list(files) for thing, files in ADDITIONS.items()}


@pytest.mark.slow
def test_a_run_has_all_additions(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for source in ("gsa_train", "kernels/gsa_kernels", "data/gsa_data"):
        shutil.copytree(ROOT / source, packages / Path(source).name)
    for name, edits in (pair for files in ADDITIONS.values() for pair in files.items()):
        path = packages / name.removeprefix("data/")
        text = path.read_text("utf-8")
        for anchor, added in edits:
            assert text.count(anchor) == 1, (
                f"{name} has changed; give this test another place than {anchor!r}"
            )
            text = text.replace(anchor, added + anchor)
        path.write_text(text, "utf-8")
    shards = tmp_path / "text"
    shards.mkdir()
    words = re.findall(r"\w+", "the hare and the tortoise ran a race which the tortoise won by going on")
    lines = [" ".join(words[number % 13 :] + words * 8) for number in range(200)]
    (shards / "0.txt").write_text("\n".join(lines), "utf-8")
    packed = tmp_path / "packed"
    packed.mkdir()
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (packed / "0.jsonl.bz2").write_bytes(bz2.compress(rows.encode()))

    overrides = f"""
        run.dir={tmp_path} data.train_dir={shards} data.validation_dir={packed}
        data.tokenizer={ROOT}/data/sample/tokenizer.model gsa.rotated_key_gate=true gsa.result_gate=true
        phases.0.steps=1 phases.0.warmup_steps=0 phases.1.steps=3 phases.1.warmup_steps=0
        phases.1.lr=0.4 phases.1.min_lr=0.2 phases.1.decay=falling train.optimizer=momentum
        train.weight_decay=0 train.linear_layers=rounded train.objective=halved
    """.split()
    command = [sys.executable, "-m", "gsa_train", "--config", str(ROOT / "configs/tiny.yaml"), *overrides]
    environment = {**inherited(), **ENVIRONMENT, "PYTHONPATH": str(packages)}
    done = subprocess.run(command, cwd=packages, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "tiny"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [record for record in records if "event" not in record and "loss" in record]

    assert [record["lr"] for record in steps[1:]] == pytest.approx([0.4, 0.3, 0.2])  # schedule
    assert steps[1]["loss"] == pytest.approx(math.log(4096) / 2, rel=0.1)  # loss
    assert [each["validation_loss"] > 5 for each in records if each.get("event") == "validation"] == [True]
    assert all(record["perplexity"] == math.exp(record["loss"]) for record in steps)  # metric
    assert all(record["squared"] == pytest.approx(record["grad_norm"] ** 2) for record in steps)
    for line in (
        "linear layers round their input",
        "saving after 4",
        "gates: value, output, rotated_key, result (gsa.*_gate, gsa.output_transform = none); in plain torch",
        "linear_layers = rounded, objective = halved, optimizer = momentum",
        "trains all weights, falling learning rate",
    ):
        assert line in done.stdout + done.stderr, line
    tensors = FileSystemReader(next((run / "checkpoints").glob("step_*"))).read_metadata().state_dict_metadata
    kept = {name.split(".")[2] for name in tensors if name.startswith("optimizer.state.")}
    assert "momentum_buffer" in kept <= {"momentum_buffer", "fp32_param"}
    assert any(name.endswith(".result_gate.weight") for name in tensors)
    gates = {tuple(each.size[-2:]) for name, each in tensors.items() if re.fullmatch(GATES, name)}
    assert gates == {((2 + 2 * 2) * 32, 64)}  # G1 of 2 heads; G2 and the new gate of 2 key-value heads
