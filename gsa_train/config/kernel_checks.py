"""Check what the fused kernels can run. Only this part of a config's checks knows their limits."""

from __future__ import annotations

from gsa_kernels import limits
from gsa_train.config.gsa import SCORES
from gsa_train.config.load import problem_line
from gsa_train.config.sections import Config


def check_kernels(config: Config) -> list[str]:
    """Return mistakes in the fields that name kernels, a line each."""
    return [
        *_check_implementation(config),
        *_check_attention_kernel(config),
        *_check_dense_attention(config),
    ]


def unsupported_by_kernels(config: Config) -> list[str]:
    """Return why the fused kernels cannot run this config, as `field = value: reason`, or an empty list."""
    reasons = []
    if config.model.head_dim not in limits.HEAD_SIZES:
        reasons.append(
            f"model.head_dim = {config.model.head_dim}: the kernels have {_listed(limits.HEAD_SIZES)}"
        )
    gsa = config.gsa
    if gsa.attention == "dense":
        return reasons
    if SCORES[gsa.indexer_activation].activation not in limits.INDEXER_ACTIVATIONS:
        reasons.append(
            f"gsa.indexer_activation = {gsa.indexer_activation}: the kernels have "
            f"{' and '.join(limits.INDEXER_ACTIVATIONS)}"
        )
    if gsa.key_group_size not in limits.KEY_GROUP_SIZES:
        reasons.append(
            f"gsa.key_group_size = {gsa.key_group_size}: the kernels have {_listed(limits.KEY_GROUP_SIZES)}"
        )
    if gsa.indexer_heads not in limits.INDEXER_HEADS:
        reasons.append(
            f"gsa.indexer_heads = {gsa.indexer_heads}: the kernels have {_range(limits.INDEXER_HEADS)}"
        )
    if gsa.indexer_dim not in limits.INDEXER_HEAD_SIZES:
        reasons.append(
            f"gsa.indexer_dim = {gsa.indexer_dim}: the kernels have {_range(limits.INDEXER_HEAD_SIZES)}"
        )
    return reasons


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _range(numbers: range) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def _check_implementation(config: Config) -> list[str]:
    if config.gsa.attention_impl != "triton":
        return []
    return [
        problem_line("gsa.attention_impl", "triton", f"cannot run {reason}", "change that, or use reference")
        for reason in unsupported_by_kernels(config)
    ]


def _check_attention_kernel(config: Config) -> list[str]:
    field, name = "gsa.attention_kernel", config.gsa.attention_kernel
    if name == "auto":
        return []
    if config.gsa.attention_impl == "reference":
        wrong = "is one of the fused kernels, but gsa.attention_impl = reference"
        return [problem_line(field, name, wrong, "leave it at auto, or change gsa.attention_impl")]
    if name == "masked" and config.train.seq_len_tokens > limits.PACKED_MASK_MAX_TOKENS:
        most, length = limits.PACKED_MASK_MAX_TOKENS, config.train.seq_len_tokens
        wrong = f"ends at {most} tokens, and train.seq_len_tokens = {length}"
        return [problem_line(field, name, wrong, "set it to auto")]
    return []


def _check_dense_attention(config: Config) -> list[str]:
    field, name = "gsa.dense_attention", config.gsa.dense_attention
    if name == "auto":
        return []
    if config.gsa.attention_impl == "reference":
        wrong = "goes with the fused kernels, but gsa.attention_impl = reference"
        return [problem_line(field, name, wrong, "leave it at auto, or change gsa.attention_impl")]
    if name == "triton":
        return []
    if config.parallel.context > 1:
        wrong = f"takes queries from position 0 on, and parallel.context = {config.parallel.context} gives it others"
        return [problem_line(field, name, wrong, "set it to auto")]
    if config.data.attend_across_documents:
        return []
    wrong = "cannot stop at a document's start, and data.attend_across_documents = false"
    return [problem_line(field, name, wrong, "set it to auto, or data.attend_across_documents to true")]
