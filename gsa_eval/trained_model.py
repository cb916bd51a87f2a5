"""Load a checkpoint as the model that training builds, on one rank, for features that `gsa_hf` lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from gsa_train.checkpoint.load import load_weights
from gsa_train.config import Config, ParallelConfig, PhaseConfig
from gsa_train.config.checks import check_config
from gsa_train.distributed.parallel import init_parallel
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.phases import enter_phase
from gsa_train.step import evaluating

PRECISIONS: dict[torch.dtype, Literal["bf16", "fp32"]] = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class TrainedModel:
    """Runs training's model in evaluation mode, without a KV cache."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._gpt = model.gpt
        self._gpt.post_process = False  # its forward pass returns hidden states

    @property
    def device(self) -> torch.device:
        return self._model.parallel.device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._model.mcore_config.params_dtype
        return dtype

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self._gpt.parameters()

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Returns the states after the last norm, [B, L, d].

        Args:
            tokens: int64 [B, L]
            positions: int64 [B, L]; a document begins where they do not increase by one. None: each row is one
                document.
        """
        documents = None
        if positions is not None:
            begins = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0))
            documents = begins.cumsum(1).int()
        counted = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with evaluating(self._model, measures=False):
            hidden: torch.Tensor = self._gpt(tokens, counted, documents)
        return hidden.transpose(0, 1)

    @torch.no_grad()
    def lm_head(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns logits [N, V] of hidden states [N, d]."""
        tied = self._gpt.share_embeddings_and_output_weights
        weight = self._gpt.shared_embedding_or_output_weight() if tied else None
        logits: torch.Tensor = self._gpt.output_layer(rows[:, None], weight=weight)[0]
        return logits[:, 0]


def load_trained_model(
    checkpoint: Path, config: Config, dense: bool, kernels: bool, device: torch.device, dtype: torch.dtype
) -> TrainedModel:
    """
    Args:
        config: the checkpoint's config, perhaps with other budgets.
        dense: attend to all keys.
        kernels: run attention with the fused kernels if they support it; else in plain torch.

    Raises:
        ValueError: the model cannot run with these arguments or on this device.
    """
    config = dataclasses.replace(
        config,
        gsa=dataclasses.replace(
            config.gsa,
            attention_impl="auto" if kernels else "reference",
            attention_kernel="auto",
            dense_attention="auto",
        ),
        train=dataclasses.replace(
            config.train, precision=PRECISIONS[dtype], cuda_graphs=False, recompute="none"
        ),
        parallel=ParallelConfig(timeout_minutes=config.parallel.timeout_minutes),
    )
    if problems := check_config(config, world_size=1):
        raise ValueError("; ".join(problems))
    parallel = init_parallel(config.parallel, config.run.seed)
    if parallel.device.type != device.type or device.index not in (None, parallel.device.index):
        raise ValueError(
            f"--device {device}: a model that gsa_hf does not have runs on {parallel.device}; leave it out"
        )
    model = build_model(config, parallel)
    load_weights(checkpoint, model, parallel)
    attention: Literal["dense", "sparse"] = "dense" if dense else config.gsa.attention
    enter_phase(model, PhaseConfig(name="evaluation", attention=attention, train="base"))
    return TrainedModel(model)
