"""Define the paged caches of a layer, and the places of a step's tokens in these caches.

A layer has one cache for keys and values, and another for the indexer's keys. vLLM puts all caches into one group with
one block table. Prefix caching, chunked prefill and preemption therefore work for both caches. Letters in shapes:

    T: tokens in a step of vLLM                 n: keys of one request
    t: tokens of one request in this step       N: tokens in a page
"""

import os
from dataclasses import dataclass
from functools import cached_property
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
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass
class Request:
    tokens: slice
    """its tokens in the step"""
    pages: torch.Tensor
    """int32 [pages]"""
    length: int
    """n"""
    selection: Any = None
    """keys that the indexer of this or an earlier layer selected: bool [1, t, n], or a `Selection` of the kernels"""

    @cached_property
    def causal(self) -> torch.Tensor:
        """Return bool [1, t, n], the causal keys of each token."""
        keys = torch.arange(self.length, device=self.pages.device)
        return (keys <= keys[self.length - (self.tokens.stop - self.tokens.start) :, None])[None]


@dataclass
class PageMetadata(AttentionMetadata):
    requests: list[Request]
    """all requests except the B decoding requests"""
    slots: torch.Tensor
    """int64 [T], the slot of each token of the step: page * N + row in the page"""
    lengths: torch.Tensor
    """int32 [B], number of keys of each decoding request. B is 0 without kernels."""
    block_table: torch.Tensor
    """int32 [B, pages]"""
    decoding: Any = None
    """the `LayerCache` of gsa_kernels that the layers share in decoding"""


def has_kernels(device: torch.device) -> bool:
    """Return whether attention on this device runs the kernels."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    reorder_batch_threshold = 1  # requests of one token are the first of a step

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PageMetadata:
        common, decoding, table = common_attn_metadata, 0, common_attn_metadata.block_table_tensor
        lengths = common.seq_lens
        if has_kernels(lengths.device):  # kernels never wait for the device
            decoding = split_decodes_and_prefills(common)[0]
            lengths = common.seq_lens_cpu_upper_bound
            assert lengths is not None
        starts = common.query_start_loc_cpu.tolist()
        requests = [
            Request(slice(*starts[number : number + 2]), table[number], length)
            for number, length in enumerate(lengths[: common.num_reqs].tolist())
            if number >= decoding
        ]
        used = -(-common.max_seq_len // self.kv_cache_spec.block_size)
        return PageMetadata(
            requests,
            common.slot_mapping[: common.num_actual_tokens],
            common.seq_lens[:decoding],
            table[:decoding, :used],
        )


class PageBackend(AttentionBackend):
    """The backend that `PagedCache` names. vLLM's own choice for CPUs refuses sparse attention."""

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
    """Holds a row [heads, width] for each token, in pages. vLLM finds the cache by name, and allocates its memory.

    Args:
        kind: `FullAttentionSpec` if a row is a key and a value, `MLAAttentionSpec` if a row is only a key
    """

    def __init__(
        self, vllm_config: VllmConfig, name: str, kind: type[AttentionSpec], heads: int, size: int
    ) -> None:
        super().__init__()
        block_size, dtype = vllm_config.cache_config.block_size, vllm_config.model_config.dtype
        self.spec = kind(block_size=block_size, num_kv_heads=heads, head_size=size, dtype=dtype)
        self.name = name
        self.kv_cache = torch.empty(0)
        """the cache, [pages, heads, N, width], which vLLM sets"""
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PageBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        return self.spec

    def metadata(self) -> PageMetadata:
        """Return the step's metadata. A profiling run has no requests and no slots."""
        found = get_forward_context().attn_metadata
        return found[self.name] if isinstance(found, dict) else PageMetadata([], *(torch.empty(0),) * 3)

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows [T, heads, width] to the slots [T]."""
        if len(slots):
            size = self.kv_cache.shape[2]
            self.kv_cache[slots // size, :, slots % size] = rows[: len(slots)]

    def key_and_value(self) -> tuple[torch.Tensor, ...]:
        """Return the keys and the values, [pages, N, heads, D]."""
        return self.kv_cache.transpose(1, 2).chunk(2, -1)

    def read(self, request: Request) -> torch.Tensor:
        """Return the rows of a request, [heads, n, width]."""
        length = request.length
        used = request.pages[: -(-length // self.kv_cache.shape[2])].long()
        return self.kv_cache[used].transpose(0, 1).flatten(1, 2)[:, :length]
