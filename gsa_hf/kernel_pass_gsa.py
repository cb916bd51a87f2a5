"""Prepare a forward pass for the kernels of gsa_kernels: the tokens' places, and state that stays between passes.

Shapes have B sequences and L tokens of this forward pass. A slot is a place in the cache.
"""

import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from transformers.cache_utils import Cache


class KernelMemory:
    """Keeps memory that the kernels use again in later layers and steps. This memory is separate from the cache of
    transformers, and is not saved with the model."""

    def __init__(self) -> None:
        self._workspaces: dict[tuple[Any, ...], Any] = {}
        self._selections: dict[tuple[Any, ...], Any] = {}
        self.right_padded: WeakSet[Cache] = WeakSet()
        """Caches with padding after a sequence. The next token would follow the padding, so it is refused."""

    def workspace(self, batch: int, length: int, heads: int, kv_heads: int, size: int, device: Any) -> Any:
        """Return scratch memory to decode one token of `batch` sequences of up to `length`. All layers share it."""
        key = (batch, heads, kv_heads, size, device)
        held = self._workspaces.get(key)
        if held is None or held.scores.shape[1] < length:
            room = 1 << (length - 1).bit_length()  # a growing cache asks again
            made = kernel_module("decode.state").new_workspace(
                batch, room, heads=heads, kv_heads=kv_heads, head_size=size, device=device
            )
            self._workspaces[key] = held = made
        return held

    def selection(self, batch: int, keys: int, device: Any) -> Any:
        """Return memory for a selection that is used only in this step."""
        key = (batch, device)
        held = self._selections.get(key)
        if held is None or held.indices.shape[1] < keys:
            self._selections[key] = held = kernel_module("decode.state").new_selection(
                batch, keys, device=device
            )
        return held

    def __deepcopy__(self, _: Any) -> "KernelMemory":
        return KernelMemory()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return KernelMemory, ()


@dataclass
class KernelPass:
    """Holds the cache slots of one forward pass's tokens, for all layers."""

    memory: KernelMemory
    length: int
    past: int
    """Number of slots filled before this pass, or -1 in decoding, because a static cache has the number only on the
    device"""
    lengths: torch.Tensor
    """int32 [B], number of tokens of each sequence, with the new tokens and without padding"""
    starts: torch.Tensor | None = None
    """int32 [B], number of padding tokens on the left of each sequence"""
    decodes: bool = False
    """Whether the pass has one token of each sequence, for the decoding kernels"""
    order: torch.Tensor | None = None
    """int64 [B, L], the slots with left padding moved to the end, so that each sequence starts at 0"""
    document_starts: torch.Tensor | None = None
    """int32 [B, L], where the document of each slot starts in `order`, for the kernels' `Geometry`"""
    counted: torch.Tensor | float = 0.0
    """Number of queries that count in the indexer loss"""

    def filled(self, slots: int) -> torch.Tensor:
        """Return which slots hold tokens, bool [B, slots]."""
        places = torch.arange(slots, device=self.lengths.device)
        starts = torch.zeros_like(self.lengths) if self.starts is None else self.starts
        return (places >= starts[:, None]) & (places < (starts + self.lengths)[:, None])

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, L, ...] in the order `order`."""
        return x if self.order is None else _take(x, self.order)

    def restored(self, x: torch.Tensor) -> torch.Tensor:
        """Return x in the original order."""
        return x if self.order is None else _take(x, self.order.argsort(1))


def make_kernel_pass(
    config: Any,
    inputs: torch.Tensor,
    padding: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: Cache | None,
    memory: KernelMemory,
) -> KernelPass:
    """Return the cache slots of the tokens in `inputs` [B, L, d]. In decoding (one token per sequence, with a cache),
    this function does not synchronize with the host.

    Args:
        padding: [B, slots], 0 at padding on the left or right; or None
        position_ids: the caller's positions; a document begins where they restart

    Raises:
        ValueError: the kernels cannot run this pass; the error names an alternative
    """
    if not inputs.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"attn_implementation is 'gsa' with the model on {inputs.device}; move it to a CUDA device, or pass 'sdpa'"
        )
    if padding is not None and padding.ndim != 2:
        raise ValueError(
            f"attention_mask has {padding.ndim} dimensions with attn_implementation 'gsa'; pass one of [batch, "
            "tokens], or 'sdpa'"
        )
    batch, length = inputs.shape[:2]
    past: int | torch.Tensor = 0 if cache is None else cache.get_seq_length()
    if cache is not None and length == 1:
        if cache in memory.right_padded:
            raise ValueError(
                "one token follows padding after a sequence with attn_implementation 'gsa'; pad in front, or pass "
                "'sdpa'"
            )
        return _decoding(padding, past, batch, inputs.device, memory)
    past = int(past)
    lengths = torch.full((batch,), past + length, dtype=torch.int32, device=inputs.device)
    found = KernelPass(memory, length, past, lengths)
    if cache is not None:
        memory.right_padded.discard(cache)
    if padding is not None:
        padding = padding.bool()
        starts, real = padding.int().argmax(1), padding.sum(1)
        found.starts, found.lengths = starts.int(), real.int()
        if not bool((padding == found.filled(padding.shape[1])).all()):
            raise ValueError("attention_mask has gaps with attn_implementation 'gsa'; pass 'sdpa'")
        if found.past and bool(starts.any()):
            raise ValueError(
                f"{length} tokens follow {found.past} in a cache with padding in front and attn_implementation 'gsa'; "
                "pass one token at a time, or 'sdpa'"
            )
        if cache is not None and bool((starts + real < found.past + length).any()):
            memory.right_padded.add(cache)
        if not found.past:
            _place(found, starts, real)
    elif position_ids is not None and cache is None:
        _place_documents(found, position_ids.expand(batch, -1))
        if found.document_starts is not None:
            slots = torch.arange(length, device=inputs.device)
            found.counted = (found.document_starts < slots).sum().float()
            return found
    found.counted = (found.lengths - 1).clamp(min=0).sum().clamp(min=1).float()
    return found


def _place(found: KernelPass, starts: torch.Tensor, real: torch.Tensor) -> None:
    """Move left padding to the end. Each padding token becomes a document of its own, which adds no loss."""
    slots = torch.arange(found.length, device=starts.device)
    if bool(starts.any()):
        found.order = (slots + starts[:, None]) % found.length
    if bool((real < found.length).any()):
        found.document_starts = torch.where(slots < real[:, None], 0, slots).int()


def _place_documents(found: KernelPass, position_ids: torch.Tensor) -> None:
    """Find packed documents, which begin where positions restart."""
    begins = position_ids.diff(dim=1) != 1
    if not bool(begins.any()):
        return
    slots = torch.arange(1, found.length, device=position_ids.device)
    starts = torch.where(begins, slots, 0).cummax(1).values
    found.document_starts = torch.nn.functional.pad(starts, (1, 0)).int()


def _decoding(
    padding: torch.Tensor | None,
    past: int | torch.Tensor,
    batch: int,
    device: torch.device,
    memory: KernelMemory,
) -> KernelPass:
    if isinstance(past, torch.Tensor):
        lengths = (past.to(device) + 1).int().expand(batch).contiguous()
    else:
        lengths = torch.full((batch,), past + 1, dtype=torch.int32, device=device)
    starts = None
    if padding is not None:
        starts = padding.int().argmax(1).int()
        lengths = lengths - starts
    return KernelPass(memory, 1, -1, lengths, starts, decodes=True)


def _take(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.take_along_dim(x, order.view(*order.shape, *[1] * (x.ndim - 2)), 1)


def kernel_module(name: str) -> Any:
    """Import a module of gsa_kernels when a forward pass needs it. Models with "sdpa" run without gsa_kernels."""
    try:
        return import_module(f"gsa_kernels.{name}")
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"attn_implementation is 'gsa', which needs the package {missing.name}; run `pip install "
            "'.[gpu]'` in gsa_train's checkout, or pass 'sdpa'"
        ) from missing
