"""The paged caches of a layer, and the places of a step's tokens in them.

A layer has keys and values in one cache, and indexer keys in another. vLLM puts all caches into one group with one block
table, so prefix caching, chunked prefill and preemption work for both. Shapes have T tokens of the step, n tokens of one
request so far, and N tokens per page.
"""

from dataclasses import dataclass
from typing import Any

import torch
from gsa_hf import GSAConfig
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec


@dataclass
class PageMetadata(AttentionMetadata):
    starts: list[int]
    """[requests + 1], the first token of each request in the step"""
    lengths: list[int]
    """[requests], the keys of each request, including the step's"""
    block_table: torch.Tensor
    """int32 [requests, pages]"""
    slots: torch.Tensor
    """int64 [T], page * N + row"""


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PageMetadata:
        common = common_attn_metadata
        return PageMetadata(
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            common.seq_lens[: common.num_reqs].tolist(),
            common.block_table_tensor,
            common.slot_mapping[: common.num_actual_tokens],
        )


class PageBackend(AttentionBackend):
    """Caches name this backend themselves, because vLLM's choice for CPUs refuses sparse attention."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]  # noqa: RUF012 - as vLLM declares it
    supported_kv_cache_dtypes = ["auto"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "GSA"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return AttentionImplBase

    @staticmethod
    def get_builder_cls() -> type[PageMetadataBuilder]:
        return PageMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class PagedCache(nn.Module, AttentionLayerBase):
    """Rows [heads, width] of tokens in pages. vLLM finds the cache by its name, and allocates what `spec` describes."""

    def __init__(self, vllm_config: VllmConfig, name: str, spec: KVCacheSpec) -> None:
        super().__init__()
        self.name, self.spec = name, spec
        self.kv_cache = torch.empty(0)
        """[pages, heads, N, width] after vLLM has bound it"""
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PageBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec

    def metadata(self) -> PageMetadata | None:
        """Return the step's metadata, or None in a profiling run, which has no pages."""
        found = get_forward_context().attn_metadata
        return found[self.name] if isinstance(found, dict) else None

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [T, heads, width] to the slots [T]. A profiling run has no slots."""
        if len(slots):
            size = self.kv_cache.shape[2]
            self.kv_cache[slots // size, :, slots % size] = rows[: len(slots)]

    def read(self, pages: torch.Tensor, length: int) -> torch.Tensor:
        """Return the rows of one request: [heads, n, width]."""
        used = pages[: -(-length // self.kv_cache.shape[2])].long()
        return self.kv_cache[used].transpose(0, 1).flatten(1, 2)[:, :length]


def key_value_cache(vllm_config: VllmConfig, name: str, config: GSAConfig, heads: int) -> PagedCache:
    """Return the cache of keys and values, concatenated into rows [heads, 2 * head_dim]."""
    block, dtype = vllm_config.cache_config.block_size, vllm_config.model_config.dtype
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=config.head_dim, dtype=dtype)
    return PagedCache(vllm_config, name, spec)


def indexer_cache(vllm_config: VllmConfig, name: str, config: GSAConfig) -> PagedCache:
    """Return the cache of indexer keys: rows [1, index_head_dim]. vLLM's specification without values is MLA's."""
    block, dtype = vllm_config.cache_config.block_size, vllm_config.model_config.dtype
    spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=config.index_head_dim, dtype=dtype)
    return PagedCache(vllm_config, name, spec)
