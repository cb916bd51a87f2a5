"""Lists the layouts that are compared, and their models, for many_layouts.py and other helpers."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gsa_train.config import Config, PhaseConfig, RopeScalingConfig
from helpers.single_rank import CONFIG, DENSE, SPARSE, WARM_UP, with_sections

WORLD, LENGTH, SEQUENCES = 4, 32, 4
STEPS = (1, 2)
"""Numbers of steps of the warm-up and of the sparse phase. They suffice, because a wrong step changes its own numbers
or the numbers of the next step, also across phases. More steps would only accumulate rounding."""
MORE_STEPS = (2, 2)
"""Steps of one layout of megatron-core's optimizer, of one layout of DeepSpeed, and of `SELECTED`'s text."""
ALL_KEYS = {"gsa": {"k_base": LENGTH, "k_min": LENGTH, "k_max": LENGTH}}
"""Every query selects all its causal keys, so that rounding cannot change a selection."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"], "indexer_rope": True, "local_window": 4, "selection_reuse": 2,
        "indexer_temperature": "learned",
    },
    "model": {
        "qk_norm": True, "tie_embeddings": True, "qkv_bias": True, "rotary_percent": 0.5,
        "rope_scaling": RopeScalingConfig("yarn", 4.0, 8),
    },
    "train": {"z_loss_coeff": 0.1},
}  # fmt: skip
SELECTED: dict[str, dict[str, Any]] = {"model": {"vocab_size": 64, "init_std": 0.4}, "data": {"seed": 4}}
"""Config in which queries select only some of their causal keys. With this seed no two scores are nearly equal, so
that rounding cannot change a selection. No token occurs twice in a sequence (`blocks`), and test_many_layouts measures
margins.
"""
GATES_OF_HEADS: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"], "key_gate": True, "query_gate": True, "gate_granularity": "headwise",
        "gate_form": "additive", "gate_activation": "silu", "selection_reuse": 2, "indexer_norm": True,
        "indexer_rope": True, "indexer_activation": "plain",
    },
    "model": {"sandwich_norm": True},
}  # fmt: skip
SHARED_GATES: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"], "key_gate": True, "query_gate": True, "gate_sharing": "head_shared",
        "indexer_activation": "qsa", "local_window": 4,
    },
}  # fmt: skip
FREE_GATES: dict[str, dict[str, Any]] = {
    "gsa": {
        **ALL_KEYS["gsa"], "output_gate": False, "output_transform": "rms_norm", "projection_gate": True,
        "key_gate": True, "gate_input": "input_independent", "gate_activation": "ns_sigmoid",
    },
}  # fmt: skip
G5: dict[str, dict[str, Any]] = {"gsa": {**ALL_KEYS["gsa"], "projection_gate": True, "query_gate": True}}
"""Adds gates that tensor-parallel ranks shard, or replicate for other heads or tokens."""
TIED: dict[str, dict[str, Any]] = {
    **ALL_KEYS,
    "model": {"tie_embeddings": True},
    "train": {"z_loss_coeff": 0.1},
}
CLIPS: dict[str, dict[str, Any]] = {"model": {"init_std": 0.5}, "train": {"qk_clip": 12.0}}
"""Clips some heads of these weights, and not others."""
MUON: dict[str, dict[str, Any]] = {**ALL_KEYS, **CLIPS, "train": {"optimizer": "muon", "qk_clip": 12.0}}
"""With OVERLAP the buckets are small, so that data-parallel ranks share most matrices."""
BASELINE = {"gsa": {"attention": "dense"}, **CLIPS}
PAIRS = {"micro_batch_size": 2}
"""Two sequences per micro-batch, which halve the passes of one rank. `context` and pipelines have several."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
INSTANCES = {"optimizer_instances": 2}
REPLICATED = {"distributed_optimizer": False}
ZERO_1 = {"strategy": "deepspeed", "zero_stage": 1}
ZERO_2 = {"strategy": "deepspeed", "zero_stage": 2}
ZERO_3 = {"strategy": "deepspeed", "zero_stage": 3}


SAMPLE = {"STRETCH": 4, "STRETCHES": 4, "GROUP": 2}
"""Settings of gsa_train.model.probes.query_sample, which samples queries of a long sequence for the statistics. With
these settings it samples half of the 32 queries. With four context-parallel ranks it takes all queries of every second
chunk."""


@dataclass(frozen=True)
class Case:
    parallel: dict[str, Any]
    sections: dict[str, dict[str, Any]] = field(default_factory=lambda: ALL_KEYS)
    train: dict[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = STEPS
    nightly: bool = False
    """Combines or extends other cases, or is an arm of a study."""
    replays: bool = False
    """Micro-batches run as with `train.cuda_graphs`, see called_again.py."""

    @property
    def layers(self) -> int:
        """Return the number of layers: 4 for pipeline stages and for `SELECTED`'s text, else 2."""
        return 4 if "pipeline" in self.parallel or self.sections is SELECTED else 2

    def config(self, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
        """Return the config; `parallel` replaces the case's layout."""
        dense = self.sections is BASELINE
        sections = {
            **self.sections,
            "model": {"num_layers": self.layers, "init_std": 0.1, **self.sections.get("model", {})},
            "train": {
                "seq_len_tokens": LENGTH,
                "micro_batch_size": 1,
                "global_batch_size": SEQUENCES,
                "grad_clip": 1.0,
                **self.sections.get("train", {}),
                **train,
            },
            "parallel": self.parallel if parallel is None else parallel,
        }
        return with_sections(CONFIG, sections, [DENSE] if dense else [WARM_UP, SPARSE])


# three_way_layouts.py combines tensor, context, data and plain pipeline parallelism with selected keys.
CASES = {
    "context": Case({"context": 2}),
    "context on all ranks": Case({"context": 4}, train=PAIRS, steps=MORE_STEPS, nightly=True),
    "context, gates of heads": Case({"context": 2}, GATES_OF_HEADS, PAIRS, nightly=True),
    "context, recomputed layers": Case({"context": 2}, train={"recompute": "full", **PAIRS}, nightly=True),
    "context, replicated optimizer": Case(
        {"context": 2, "distributed_optimizer": False}, train=PAIRS, nightly=True
    ),
    "context x pipeline, options": Case(
        {"context": 2, "pipeline": 2}, OPTIONS, {"recompute": "selective", **PAIRS}
    ),
    "context, dense baseline": Case({"context": 2}, BASELINE, PAIRS),
    "context in small chunks": Case({"context": 2, "context_chunks": 4}, OPTIONS, PAIRS),
    "context x interleaved": Case({"context": 2, **INTERLEAVED}, train=PAIRS, nightly=True),
    "data": Case({}),
    "tensor without sequence": Case({"tensor": 2, "sequence": False}, train=PAIRS),
    "tensor without sequence, overlapped": Case({"tensor": 2, "sequence": False, **OVERLAP}, train=PAIRS),
    "tensor without sequence, overlapped, replayed": Case(
        {"tensor": 2, "sequence": False, "overlap_grad_reduce": True}, replays=True
    ),
    "tensor, dense baseline": Case({"tensor": 2}, BASELINE, PAIRS, nightly=True),
    "tensor x pipeline, options": Case({"tensor": 2, "pipeline": 2}, OPTIONS, PAIRS, nightly=True),
    "tensor, gates of heads": Case({"tensor": 2}, GATES_OF_HEADS, PAIRS, nightly=True),
    "tensor, shared gates": Case({"tensor": 2}, SHARED_GATES, PAIRS, nightly=True),
    "tensor without sequence, shared gates": Case(
        {"tensor": 2, "sequence": False}, SHARED_GATES, PAIRS, nightly=True
    ),
    "tensor, free gates": Case({"tensor": 2}, FREE_GATES, PAIRS, nightly=True),
    "deepspeed 1 x tensor, G5": Case({"tensor": 2, **ZERO_1}, G5, PAIRS, nightly=True),
    "pipeline": Case({"pipeline": 2}),
    "pipeline, recomputed layers": Case({"pipeline": 2}, train={"recompute": "full"}),
    "tensor and sequence on all ranks": Case(
        {"tensor": 4}, {**ALL_KEYS, "model": {"num_kv_heads": 4}}, PAIRS, nightly=True
    ),
    "pipeline on all ranks": Case({"pipeline": 4}, nightly=True),
    "pipeline on all ranks, interleaved": Case(
        {"pipeline": 4, "virtual_pipeline": 2}, {**ALL_KEYS, "model": {"num_layers": 8}}, nightly=True
    ),
    "interleaved": Case(INTERLEAVED, nightly=True),
    "interleaved, selected keys": Case(INTERLEAVED, SELECTED, steps=MORE_STEPS),
    "interleaved x tensor, tied": Case({"tensor": 2, **INTERLEAVED}, TIED, PAIRS),
    "interleaved, overlapped": Case({**INTERLEAVED, **OVERLAP}, nightly=True),
    "uneven": Case({"pipeline": 2, "pipeline_layers": [1, 3]}),
    "two optimizer instances, overlapped": Case({**INSTANCES, **OVERLAP}),
    "muon": Case(OVERLAP, MUON, steps=MORE_STEPS),
    "muon, tensor": Case({"tensor": 2, **OVERLAP}, MUON, PAIRS, MORE_STEPS),
    "muon, tensor, replicated optimizer": Case(
        {"tensor": 4, **REPLICATED},
        {**MUON, "model": {**CLIPS["model"], "num_kv_heads": 4}},
        PAIRS,
        MORE_STEPS,
        nightly=True,
    ),
    "muon, pipeline": Case({"pipeline": 2}, MUON, steps=MORE_STEPS),
    "muon, two optimizer instances": Case({**INSTANCES, **OVERLAP}, MUON, steps=MORE_STEPS, nightly=True),
    "deepspeed 1 x tensor, options": Case({"tensor": 2, "sequence": False, **ZERO_1}, OPTIONS, nightly=True),
    "deepspeed 2 in host memory, recomputed layers": Case(
        {"tensor": 2, **ZERO_2, "offload_optimizer": True}, train={"recompute": "full"}, nightly=True
    ),
    "deepspeed 3 x tensor, tied": Case({"tensor": 2, **ZERO_3}, TIED, steps=MORE_STEPS),
}


EQUAL = {
    "tensor without sequence, overlapped": "tensor without sequence",
    "interleaved, overlapped": "interleaved",
    "pipeline, recomputed layers": "pipeline",
}
"""Maps each layout to a layout that must give the same bits. Both have two data-parallel replicas, because gloo sums
the buffers of more ranks in another order."""

ONE_SMALL_INDEXER = {
    **ALL_KEYS,
    "gsa": {**ALL_KEYS["gsa"], "indexer_heads": 1, "indexer_dim": 2, "indexer_activation": "relu"},
    "model": {"num_layers": 1},
}


@dataclass(frozen=True)
class Reshard:
    """Says which layout writes a checkpoint (`writer`) and which layouts continue from the checkpoint (`readers`). The
    writer also continues training, and all readers must get the writer's numbers. A reader in the writer's layout must
    get identical bits. The first reader tries to load a damaged copy before it loads the good checkpoint."""

    writer: dict[str, Any]
    readers: list[dict[str, Any]]
    sections: dict[str, dict[str, Any]] = field(default_factory=lambda: ALL_KEYS)
    phase: PhaseConfig = SPARSE
    nightly: bool = False

    @property
    def layers(self) -> int:
        return 4 if any("pipeline" in layout for layout in (self.writer, *self.readers)) else 2


RESHARDED = {
    "interleaved": Reshard(
        INTERLEAVED,
        [{"pipeline": 2, "pipeline_layers": [3, 1], **REPLICATED}, {}, {"context": 2, "tensor": 2}],
    ),
    # Each copy of the embedding has its own bucket. The readers have more tensor- than data-parallel ranks.
    "pipeline, tied": Reshard(
        {"pipeline": 2, "pipeline_layers": [3, 1]},
        [{"tensor": 4, **ZERO_3}, {"tensor": 2, **INTERLEAVED}],
        {**TIED, "model": {**TIED["model"], "num_kv_heads": 4}},
        nightly=True,
    ),
    "context": Reshard(
        {"context": 2}, [{"tensor": 2, **ZERO_2}, {"context": 4}, {"pipeline": 4}], nightly=True
    ),
    "two optimizer instances": Reshard({**INSTANCES, **OVERLAP}, [{**INSTANCES, **OVERLAP}]),
    "free gates": Reshard(
        {"tensor": 2, **REPLICATED},
        [{"tensor": 4, "sequence": False}, REPLICATED],
        {"gsa": FREE_GATES["gsa"], "model": {"num_kv_heads": 4}},
        nightly=True,
    ),
    "deepspeed": Reshard({"tensor": 2, **ZERO_3}, [ZERO_1, {"tensor": 2, **ZERO_3}], nightly=True),
    "muon": Reshard({"tensor": 2}, [{"tensor": 2}, {}, {"context": 2, "pipeline": 2, **REPLICATED}], MUON),
    # Three small matrices are divided over four ranks, each with 64 elements of the buffer.
    "a rank without a parameter": Reshard({}, [{}, ZERO_1], ONE_SMALL_INDEXER, WARM_UP, nightly=True),
}


def pairs(layout: dict[str, Any]) -> dict[str, int]:
    """Return PAIRS for layouts with context or tensor parallelism, which leave few replicas for the sequences."""
    return PAIRS if {"context", "tensor"} & layout.keys() else {}


BOUNDARIES = {
    "sharded": {},
    "two optimizer instances": {**INSTANCES, **OVERLAP},
    "deepspeed 3 x tensor": {"tensor": 2, **ZERO_3},
}
"""Layouts in bf16, where the optimizers of two phases divide fp32 weights differently."""
NIGHTLY_BOUNDARIES = {"two optimizer instances", "deepspeed 3 x tensor"}
BASE = dataclasses.replace(SPARSE, train="base")
