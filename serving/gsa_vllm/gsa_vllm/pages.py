"""The paged caches of a layer, and the places of a step's tokens in them.

A layer has keys and values in one cache, and indexer keys in another. vLLM puts all caches into one group with one
block table, so prefix caching, chunked prefill and preemption work for both. Shapes have T tokens of the step, t tokens
of one request in it, n keys of this request, and N tokens per page.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class Request:
    tokens: slice
    """its tokens in the step"""
    pages: torch.Tensor
    """int32 [pages]"""
    causal: torch.Tensor
    """bool [1, t, n], the causal keys of each token"""
    selection: torch.Tensor | None = None
    """bool [1, t, n], the keys that the indexer of this or an earlier layer selected"""


@dataclass
class PageMetadata(AttentionMetadata):
    requests: list[Request]
    slots: torch.Tensor
    """int64 [T], page * N + row of the step's tokens"""


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PageMetadata:
        common, requests = common_attn_metadata, []
        starts = common.query_start_loc_cpu.tolist()
        for number, length in enumerate(common.seq_lens[: common.num_reqs].tolist()):
            tokens = slice(starts[number], starts[number + 1])
            keys = torch.arange(length, device=common.slot_mapping.device)
            causal = keys <= keys[length - (tokens.stop - tokens.start) :, None]
            requests.append(Request(tokens, common.block_table_tensor[number], causal[None]))
        return PageMetadata(requests, common.slot_mapping[: common.num_actual_tokens])


class PageBackend(AttentionBackend):
    """Caches name this backend themselves, because vLLM's choice for CPUs refuses sparse attention."""

    @staticmethod
    def get_name() -> str:
        return "GSA"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return AttentionImplBase

    @staticmethod
    def get_builder_cls() -> type[PageMetadataBuilder]:
        return PageMetadataBuilder


class PagedCache(nn.Module, AttentionLayerBase):
    """Rows [heads, width] of tokens in pages. vLLM finds the cache by its name, and allocates by its specification.

    Args:
        kind: `FullAttentionSpec` for rows of a key and a value of this size, `MLAAttentionSpec` for rows of a key alone
    """

    def __init__(
        self, vllm_config: VllmConfig, name: str, kind: type[AttentionSpec], heads: int, size: int
    ) -> None:
        super().__init__()
        block_size, dtype = vllm_config.cache_config.block_size, vllm_config.model_config.dtype
        self.spec = kind(block_size=block_size, num_kv_heads=heads, head_size=size, dtype=dtype)
        self.name = name
        self.kv_cache = torch.empty(0)
        """[pages, heads, N, width] after vLLM has bound it"""
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PageBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        return self.spec

    def metadata(self) -> PageMetadata:
        """Return the step's metadata. A profiling run has no requests and no slots."""
        found = get_forward_context().attn_metadata
        return found[self.name] if isinstance(found, dict) else PageMetadata([], torch.empty(0))

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [T, heads, width] to the slots [T]."""
        if len(slots):
            size = self.kv_cache.shape[2]
            self.kv_cache[slots // size, :, slots % size] = rows[: len(slots)]

    def read(self, request: Request) -> torch.Tensor:
        """Return the rows of a request, [heads, n, width]."""
        length = request.causal.shape[-1]
        used = request.pages[: -(-length // self.kv_cache.shape[2])].long()
        return self.kv_cache[used].transpose(0, 1).flatten(1, 2)[:, :length]
