"""Which layers each pipeline stage holds. Plain arithmetic on a config, for its checks, the dry run and the model."""

from __future__ import annotations

from gsa_train.config.sections import Config


def chunk_layers(config: Config) -> list[int]:
    """Layers of each model chunk, in the order of the model; empty if the sizes do not fit (layout_checks.py says why).

    Chunk i is on stage i % pipeline, as the (i // pipeline)-th of its virtual_pipeline chunks (interleaved 1F1B).
    """
    parallel, layers = config.parallel, config.model.num_layers
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if min(layers, parallel.pipeline, parallel.virtual_pipeline) < 1:
        return []
    given = parallel.pipeline_layers
    if given:
        fits = len(given) == chunks and min(given) > 0 and sum(given) == layers
        return list(given) if fits else []
    return [layers // chunks] * chunks if layers % chunks == 0 else []


def stage_chunks(config: Config, stage: int) -> list[range]:
    """The layers (from 0) of each chunk that a stage holds."""
    counts = chunk_layers(config)
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return spans[stage :: config.parallel.pipeline]


def stage_layers(config: Config, stage: int) -> list[int]:
    """All layers (from 0) that a stage holds."""
    return [layer for chunk in stage_chunks(config, stage) for layer in chunk]
