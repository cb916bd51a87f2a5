"""Defines the attention of released packages that bench_peers.py times, and the selections that it is given.

Each peer is a function that takes inputs and a selection, builds what its kernels read (masks, block lists), and
returns the attention to run. Tensors are [B, L, heads, D] with B = 1, and L is a multiple of 128. Only these functions
import the peers' packages.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cases
import torch
from cases import AttentionInputs, Dense, Shape

from gsa_kernels.attention.gathered import gathered_attention
from gsa_kernels.selection.causal_packed_mask import causal_packed_mask
from gsa_kernels.selection.lists_op import key_lists_from_packed_mask
from gsa_kernels.selection.op import select_keys
from gsa_kernels.types import BudgetRule, Indexer

LIKENESS = 0.96
"""Similarity of neighbouring queries' scores, as in a trained model (whole_steps/planted_indexer.py)."""
INDEXER_HEADS = 8
BLOCK, NSA_BLOCK = 128, 64
"""Keys per block for block-sparse peers and for NSA."""

FLASH = "flash-attn-4==4.0.0b36 nvidia-cutlass-dsl[cu13]==4.8.1", "flash_attn.cute.interface"
CUDNN = "nvidia-cudnn-frontend[cutedsl]==1.32.0", "cudnn"
FLA = "fla-core==0.6.0", "fla"
"""What to install, and the module that it has then."""
SHAPE = cases.SHAPES["1.7B"]
GROUPED = Shape("16 heads per KV head", 16, 1)

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Selected:
    """Holds which keys each query attends to."""

    words: torch.Tensor
    """Packed mask, int32 [1, L, L / 32]."""
    keys: int
    """Keys that a query selects, if it has as many causal keys."""
    blocks: torch.Tensor | None = None
    """The blocks of keys, if blocks are selected: bool [L / 128, L / 128], or for NSA int64 [1, L, 1, keys / 64] with
    -1 in unused entries."""

    @property
    def length(self) -> int:
        return self.words.shape[1]


@dataclass(frozen=True)
class Runs:
    """Runs one attention forward, or forward and backward."""

    inputs: AttentionInputs
    attention: Attention

    def forward(self) -> torch.Tensor:
        return self.attention(self.inputs.q, self.inputs.k, self.inputs.v)

    def both(self) -> tuple[torch.Tensor, ...]:
        """Return output and gradients of q, k and v."""
        out = self.forward()
        return out, *torch.autograd.grad(out, self.inputs.leaves[:3], self.inputs.grad)


# --- selections ----------------------------------------------------------------------------------------


def relu_indexer(length: int) -> Indexer:
    """Return the recommended indexer with random inputs that are alike for neighbouring queries."""
    return cases.without_biases(cases.random_indexer(length, LIKENESS, INDEXER_HEADS), "relu")


def select_tokens(length: int, keys: int) -> Selected:
    """Let each query select its own keys by the indexer's scores."""
    rule = BudgetRule(keys, keys, keys, "off")
    words = select_keys(relu_indexer(length), rule, torch.ones((), device=cases.DEVICE)).packed_mask
    assert words is not None
    return Selected(words, keys)


def select_blocks(length: int, keys: int) -> Selected:
    """Let 128 neighbouring queries select their own block of 128 keys and random earlier ones."""
    count = length // BLOCK
    scores = torch.rand(count, count, device=cases.DEVICE)
    chosen = _best(scores, torch.arange(count, device=cases.DEVICE), keys // BLOCK)[0]
    groups = chosen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK // 32, 1)
    return Selected(causal_words(groups), keys, chosen)


def select_nsa_blocks(length: int, keys: int) -> Selected:
    """Let each query select its own block of 64 keys and earlier ones, alike for neighbouring queries."""
    count = length // NSA_BLOCK
    shared = torch.randn(length // 32, count, device=cases.DEVICE).repeat_interleave(32, 0)
    scores = LIKENESS**0.5 * shared + (1 - LIKENESS) ** 0.5 * torch.randn_like(shared)
    own = torch.arange(length, device=cases.DEVICE) // NSA_BLOCK
    chosen, indices = _best(scores, own, keys // NSA_BLOCK)
    groups = chosen.repeat_interleave(NSA_BLOCK // 32, 1)
    return Selected(causal_words(groups), keys, indices[None, :, None])


def _best(scores: torch.Tensor, own: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's own column and the earlier columns with the highest scores.

    Args:
        scores: [rows, columns]
        own: int64 [rows], each row's own column

    Returns:
        chosen: bool [rows, columns]
        indices: int64 [rows, most], ascending, with -1 at the end of rows that have fewer
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    ranked = scores.masked_fill(columns > own[:, None], -torch.inf)
    ranked = ranked.masked_fill(columns == own[:, None], torch.inf)
    values, indices = ranked.topk(min(most, scores.shape[1]))
    indices = indices.masked_fill(values == -torch.inf, scores.shape[1]).sort(-1).values
    padded = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
    chosen = padded.scatter_(1, indices, True)[:, :-1]
    return chosen, indices.masked_fill(indices == scores.shape[1], -1)


def causal_words(groups: torch.Tensor) -> torch.Tensor:
    """Return a packed mask, int32 [1, L, L / 32], of the causal keys in the chosen groups of 32 keys.

    Args:
        groups: bool [L, L / 32]
    """
    return causal_packed_mask(torch.arange(len(groups), device=groups.device), len(groups)) * groups


# --- ours, and the dense baseline ----------------------------------------------------------------------


def ours(inputs: AttentionInputs, selected: Selected) -> Runs:
    lists = key_lists_from_packed_mask(selected.words, selected.length)
    return Runs(inputs, lambda q, k, v: gathered_attention(q, k, v, lists)[0])


def dense(inputs: AttentionInputs, selected: Selected) -> Dense:
    return cases.cudnn(inputs)


# --- flash attention 4 ---------------------------------------------------------------------------------


def flash_bits(inputs: AttentionInputs, selected: Selected) -> Runs:
    """Read our packed mask, which is small enough for 128K tokens."""
    return _flash(inputs, _block_kinds(selected.words), flash_masks()["bits"], [selected.words])


def flash_blocks(inputs: AttentionInputs, selected: Selected) -> Runs:
    """Attend to whole blocks, with a causal mask only in the diagonal ones."""
    assert selected.blocks is not None
    kinds = 2 * selected.blocks.int() - torch.eye(len(selected.blocks), device=cases.DEVICE).int()
    return _flash(inputs, kinds, flash_masks()["causal"], None)


def flash_masks() -> dict[str, Any]:
    """Return functions that CuTe compiles into the kernels. They read one element of the mask per pair."""
    cutlass, cute = importlib.import_module("cutlass"), importlib.import_module("cutlass.cute")
    utils = importlib.import_module("flash_attn.cute.utils")

    @cute.jit
    def of_bits(batch, head, query, key, lengths, tensors):  # type: ignore[no-untyped-def]
        word = tensors[0][batch[0], query[0], key[0] >> 5]
        chosen = ((word >> (key[0] & 31)) & 1) != 0
        return utils.scalar_to_ssa(chosen, cutlass.Boolean)

    @cute.jit
    def causal(batch, head, query, key, lengths, tensors):  # type: ignore[no-untyped-def]
        return utils.scalar_to_ssa(key[0] <= query[0], cutlass.Boolean)

    return {"bits": of_bits, "causal": causal}


def _block_kinds(words: torch.Tensor) -> torch.Tensor:
    """Return int32 [L / 128, L / 128], for blocks of 128 queries and keys: 0 if no pair is selected, 2 if all are, else
    1."""
    parts = words[0].unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK // 32))
    return (parts != 0).any(3).any(1).int() + (parts == -1).all(3).all(1).int()


def _flash(inputs: AttentionInputs, kinds: torch.Tensor, mask: Any, tensors: Any) -> Runs:
    interface = importlib.import_module("flash_attn.cute.interface")
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")

    def blocks(kinds: torch.Tensor) -> Any:
        columns = torch.arange(kinds.shape[1], device=kinds.device, dtype=torch.int32)
        found = []
        for kind in (1, 2):
            hits = kinds == kind
            found.append(hits.sum(1, dtype=torch.int32)[None, None].contiguous())
            packed = torch.where(hits, columns, kinds.shape[1]).sort(1).values
            found.append(packed.int()[None, None].contiguous())
        return sparsity.BlockSparseTensorsTorch(*found, block_size=(BLOCK, BLOCK))

    options = {
        "pack_gqa": False,
        "mask_mod": mask,
        "aux_tensors": tensors,
        "block_sparse_tensors": blocks(kinds),
        "block_sparse_tensors_bwd": blocks(kinds.T),
    }
    return Runs(inputs, lambda q, k, v: interface.flash_attn_func(q, k, v, **options)[0])


# --- other packages ------------------------------------------------------------------------------------


def cudnn_blocks(inputs: AttentionInputs, selected: Selected) -> Runs:
    """Attend to whole blocks, even to keys after the query, as cuDNN's block-sparse attention has no causal mask."""
    cudnn = importlib.import_module("cudnn")
    assert selected.blocks is not None
    count, heads = len(selected.blocks), inputs.q.shape[2]
    columns = torch.arange(count, device=cases.DEVICE, dtype=torch.int32)
    packed = torch.where(selected.blocks, columns, count).sort(1).values[:, : selected.keys // BLOCK]
    packed = packed.masked_fill(packed == count, 0).int()
    options = {
        "q2k_block_index": packed.expand(1, heads, -1, -1).contiguous(),
        "q2k_block_nums": selected.blocks.sum(1, dtype=torch.int32).expand(1, heads, -1).contiguous(),
        "sparse_block_size": BLOCK,
        "layout": "bshd",
    }
    return Runs(inputs, lambda *qkv: cudnn.block_sparse_attention_forward(*qkv, **options)["o_tensor"])


def nsa(inputs: AttentionInputs, selected: Selected) -> Runs:
    parallel_nsa = importlib.import_module("fla.ops.nsa").parallel_nsa
    assert selected.blocks is not None
    options = {
        "block_indices": selected.blocks,
        "block_counts": selected.keys // NSA_BLOCK,
        "block_size": NSA_BLOCK,
    }
    return Runs(inputs, lambda q, k, v: parallel_nsa(q, k, v, **options))


@dataclass(frozen=True)
class Peer:
    computes: str
    run: Callable[[AttentionInputs, Selected], Runs | Dense]
    select: Callable[[int, int], Selected] = select_tokens
    shape: Shape = SHAPE
    needs: tuple[str, str] = ("torch", "torch")
    backward: bool = True
    mask: str = "selected"
    """The mask that a correct result has: `selected`, `causal`, or `whole blocks`."""


PEERS = {
    "dense cuDNN": Peer("all causal keys, torch SDPA", dense, mask="causal"),
    "FA4 bit mask": Peer("keys per query, our packed mask", flash_bits, needs=FLASH),
    "FA4 blocks": Peer(
        "another model: 128 queries share blocks of 128 keys", flash_blocks, select_blocks, needs=FLASH
    ),
    "cuDNN blocks": Peer(
        "as FA4 blocks, own block not causal; ours is causal",
        cudnn_blocks,
        select_blocks,
        needs=CUDNN,
        backward=False,
        mask="whole blocks",
    ),
    "fla NSA": Peer(
        "another model: blocks of 64 keys per query, 16 heads per KV head",
        nsa,
        select_nsa_blocks,
        GROUPED,
        FLA,
    ),
}
