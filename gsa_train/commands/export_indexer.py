"""Export a trained model's indexer projections on real text, for benchmarks that need real selections."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gsa_data.validation import validation_blocks
from gsa_train.checkpoint.files import find_checkpoint
from gsa_train.checkpoint.load import load_weights, saved_weights, weights_to_load
from gsa_train.config import Config, ParallelConfig, PhaseConfig
from gsa_train.data.batches import open_validation_corpus, to_micro_batch
from gsa_train.data.tokenizer import load_tokenizer, reading_of
from gsa_train.distributed.parallel import Parallel, init_parallel, shutdown_parallel
from gsa_train.model.indexer import IndexerProjections
from gsa_train.model.mcore.build import Model, build_model
from gsa_train.phases import enter_phase
from gsa_train.step import evaluation_step


def export_indexer(
    config: Config, checkpoint_folder: Path, seq_len_tokens: int, layers: Sequence[int], out: Path
) -> dict[str, Any]:
    """Run the checkpoint's model on one sequence of the first validation set and save its indexers' projections.

    The sequence counts as one document, because few documents have this length.

    Args:
        config: the run's config from its folder. Its layout is ignored.
        checkpoint_folder: a step_* folder, or the run folder.
        seq_len_tokens: L, which may differ from the training length.
        layers: from 0; each must have an indexer.
        out: a .pt file: {"gsa": the config's section as a dict, "seq_len_tokens": L, "layers": {layer: tensors}}. The
            tensors are `queries` [1, L, H_I, d_I], `keys` [1, L, d_I], `weight_logits` [1, L, H_I], `score_bias` and
            `weight_bias` [H_I] or None, and `variance_ema`, 0-d.

    Raises:
        ValueError: there is no checkpoint, a layer has no indexer, the model differs from the config's model, or there
            is too little validation text.
        OSError: `out` cannot be written.
    """
    checkpoint = find_checkpoint(checkpoint_folder)
    if checkpoint is None:
        raise ValueError(
            f"{checkpoint_folder}: no complete checkpoint there; give a step_* folder or a run folder"
        )
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, seq_len_tokens=seq_len_tokens, micro_batch_size=1),
        parallel=ParallelConfig(timeout_minutes=config.parallel.timeout_minutes),
    )
    parallel = init_parallel(config.parallel, config.run.seed)
    tokenizer = load_tokenizer(config)
    blocks = validation_blocks(
        open_validation_corpus(config, next(iter(config.data.validation_folders.values()))),
        tokenizer,
        seq_len_tokens,
        1,
        reading_of(config),
    )
    model = build_model(config, parallel)
    saved, wanted = saved_weights(checkpoint), weights_to_load(checkpoint, model, parallel)
    if others := sorted(name for name, _ in saved.items() ^ wanted.items()):
        name = others[0]
        raise ValueError(
            f"{checkpoint} holds another model: {name} is {saved.get(name, 'missing')} there, "
            f"{wanted.get(name, 'missing')} here; remove overrides that change the weights, such as model.num_layers"
        )
    load_weights(checkpoint, model, parallel)
    found = capture_indexers(model, blocks, layers, tokenizer.eos_id, config, parallel)
    result = {"gsa": dataclasses.asdict(config.gsa), "seq_len_tokens": seq_len_tokens, "layers": found}
    content = io.BytesIO()  # torch's own files report neither a full disk nor their name.
    torch.save(result, content)
    temporary = out.with_name(out.name + ".tmp")
    try:
        temporary.write_bytes(content.getbuffer())
        os.replace(temporary, out)  # an existing file stays intact
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(out)) from error
    finally:
        temporary.unlink(missing_ok=True)
    shutdown_parallel()
    return result


def capture_indexers(
    model: Model, blocks: np.ndarray, layers: Sequence[int], eos_id: int, config: Config, parallel: Parallel
) -> dict[int, dict[str, torch.Tensor | None]]:
    """Run one sparse forward pass over int32 blocks [1, L + 1]. Returns the projections of `layers`, on the CPU."""
    indexers = {attention.layer: attention.indexer for attention in model.attentions}
    for layer in layers:
        if indexers.get(layer) is None:
            having = ", ".join(str(key) for key, indexer in indexers.items() if indexer is not None)
            raise ValueError(
                f"layer {layer} has no indexer; choose among {having or 'none: attention is dense'}"
            )
    found: dict[int, dict[str, torch.Tensor | None]] = {}
    handles = []
    for attention in model.attentions:
        if attention.layer not in layers:
            continue
        assert attention.indexer is not None
        assert attention.variance is not None
        own = {
            "score_bias": attention.indexer.score_bias,
            "weight_bias": attention.indexer.weight_bias,
            "variance_ema": attention.variance.ema,
        }
        found[attention.layer] = {name: _to_cpu(tensor) for name, tensor in own.items()}
        handles.append(attention.indexer.register_forward_hook(partial(_keep, found[attention.layer])))
    enter_phase(model, PhaseConfig(name="export", attention="sparse", train="all"))
    batch = to_micro_batch(torch.from_numpy(blocks).to(parallel.device), eos_id, attend_across_documents=True)
    evaluation_step(model, [batch], config, parallel)
    for handle in handles:
        handle.remove()
    return found


def _keep(kept: dict[str, torch.Tensor | None], module: Any, inputs: Any, output: IndexerProjections) -> None:
    named = zip(("queries", "keys", "weight_logits"), output, strict=True)
    kept.update({name: _to_cpu(tensor) for name, tensor in named})


def _to_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().cpu().contiguous()
