"""Check what the fused kernels can run. Only this part of a config's checks knows their limits."""

from __future__ import annotations

from collections.abc import Iterator

from gsa_kernels import limits
from gsa_train.config.gsa import SCORES
from gsa_train.config.sections import Config


def check_kernels(config: Config) -> Iterator[str]:
    if config.gsa.attention_impl == "triton":
        for reason in unsupported_by_kernels(config):
            wrong = f"cannot run {reason}"
            yield config.problem("gsa.attention_impl", wrong, "change that, or use reference")
    yield from _check_attention_kernel(config)
    yield from _check_dense_attention(config)


def unsupported_by_kernels(config: Config) -> list[str]:
    """Return why the fused kernels cannot run this config, as `field = value: reason`, or an empty list."""
    model, gsa, reasons = config.model, config.gsa, []
    if model.head_dim not in limits.HEAD_SIZES:
        reasons.append(f"model.head_dim = {model.head_dim}: the kernels have {_listed(limits.HEAD_SIZES)}")
    if gsa.attention == "dense":
        return reasons
    if SCORES[gsa.indexer_activation].activation not in limits.INDEXER_ACTIVATIONS:
        known = " and ".join(limits.INDEXER_ACTIVATIONS)
        reasons.append(f"gsa.indexer_activation = {gsa.indexer_activation}: the kernels have {known}")
    for field, has, known in (
        ("indexer_heads", limits.INDEXER_HEADS, _range(limits.INDEXER_HEADS)),
        ("indexer_dim", limits.INDEXER_HEAD_SIZES, _range(limits.INDEXER_HEAD_SIZES)),
    ):
        if getattr(gsa, field) not in has:
            reasons.append(f"gsa.{field} = {getattr(gsa, field)}: the kernels have {known}")
    return reasons


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _range(numbers: range) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def _check_attention_kernel(config: Config) -> Iterator[str]:
    field, name, length = "gsa.attention_kernel", config.gsa.attention_kernel, config.train.seq_len_tokens
    if name != "auto" and config.gsa.attention_impl == "reference":
        wrong = "is one of the fused kernels, but gsa.attention_impl = reference"
        yield config.problem(field, wrong, "leave it at auto, or change gsa.attention_impl")
    elif name == "masked" and length > limits.PACKED_MASK_MAX_TOKENS:
        wrong = f"ends at {limits.PACKED_MASK_MAX_TOKENS} tokens, and train.seq_len_tokens = {length}"
        yield config.problem(field, wrong, "set it to auto")


def _check_dense_attention(config: Config) -> Iterator[str]:
    field, name, context = "gsa.dense_attention", config.gsa.dense_attention, config.parallel.context
    if name == "auto":
        return
    if config.gsa.attention_impl == "reference":
        wrong = "goes with the fused kernels, but gsa.attention_impl = reference"
        yield config.problem(field, wrong, "leave it at auto, or change gsa.attention_impl")
    elif name != "triton" and context > 1:
        wrong = f"takes queries from position 0 on, and parallel.context = {context} gives it others"
        yield config.problem(field, wrong, "set it to auto")
    elif name != "triton" and not config.data.attend_across_documents:
        wrong = "cannot stop at a document's start, and data.attend_across_documents = false"
        yield config.problem(field, wrong, "set it to auto, or data.attend_across_documents to true")
