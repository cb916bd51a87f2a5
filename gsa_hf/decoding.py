"""Decode one token of each sequence for `Generator`, by the model's forward pass or by fused steps.

`FusedDecoder` joins all projections that have the same input: it concatenates their weights into one joined weight, so
that one product computes all of them. The products run in torch or, for few sequences, in special kernels
(row_layers.py). The decoder writes into a static cache and never synchronizes with the host, so a CUDA graph can
capture a step.

Shapes have B sequences, H query heads and Hkv key-value heads of size D, hidden size d, and Lk cache slots.
"""

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from . import joined_layers, row_layers
from .attention_gsa import GSAAttention, GSARMSNorm, GSARotaryEmbedding
from .gates_gsa import BESIDE, FORM
from .indexer_gsa import GSAIndexer
from .joined_layers import Buffers, Projected, join_layer
from .kernel_pass_gsa import kernel_module
from .kernels_gsa import applied_indexer, gated, kernel_rule
from .modeling_gsa import CACHE_ARGUMENT, GSAMLP, GSADecoderLayer, GSAForCausalLM, GSAModel

logger = logging.getLogger(__name__)

PRODUCTS = ("auto", "torch", "rows")


class ModelDecoder:
    """Decodes by the model's forward pass with a growing cache, on any device and `attn_implementation`."""

    def __init__(self, model: GSAForCausalLM) -> None:
        self.model = model

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits [B, vocab] after the prompts `tokens`, int64 [B, L]. `mask` [B, L] is 0 at padding, which is
        on the left."""
        self.mask = mask
        self.cache = DynamicCache(config=self.model.config)
        return last_logits(self.model, tokens, mask, self.cache)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, vocab] after `tokens`, int64 [B]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], 1)
        return last_logits(self.model, tokens[:, None], self.mask, self.cache)


def last_logits(
    model: GSAForCausalLM, tokens: torch.Tensor, mask: torch.Tensor, cache: Cache
) -> torch.Tensor:
    held: dict[str, Any] = {CACHE_ARGUMENT: cache}
    return model(tokens, attention_mask=mask, use_cache=True, logits_to_keep=1, **held).logits[:, -1]


_FUSED = (
    *(GSAModel, GSADecoderLayer, GSAAttention, GSAIndexer, GSAMLP, GSARMSNorm, GSARotaryEmbedding),
    *(nn.Linear, nn.Embedding, nn.RMSNorm, nn.ModuleList, nn.Identity, type(ACT2FN["silu"])),
)
"""Fused steps read the weights of modules of exactly these classes, and do not call the modules. Other classes, such as
the modules of adapters and quantisation, compute something else and are refused."""


def not_fused(model: GSAForCausalLM) -> str | None:
    """Return a feature of the model that fused steps lack, as `field is value`, or None."""
    config: Any = model.config
    for name, value in {"num_experts": 0, "sandwich_norm": False, **FORM, **BESIDE}.items():
        if getattr(config, name) != value:
            return f"{name} is {getattr(config, name)!r}"
    for name, module in model.named_modules():
        if module is not model and type(module) not in _FUSED:
            return f"{name} is {_class_of(module)}"
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter:  # torchao's quantised weights of linear layers, DTensor
            return f"{name} is {_class_of(parameter)}"
    devices = sorted({str(each.device) for each in model.parameters()})
    return f"the weights are on {' and '.join(devices)}" if len(devices) > 1 else None


def _class_of(found: object) -> str:
    """Return the class name with its module, because peft's classes are also called `Linear`."""
    return f"{type(found).__module__}.{type(found).__qualname__}"


class FusedDecoder:
    """Decodes with joined projections and, in sparse layers, with the kernels of gsa_kernels."""

    def __init__(self, model: GSAForCausalLM, compile: bool = False, products: str = "auto") -> None:
        """Copy the projections of the model. Later changes of the model's weights have no effect on the copy.

        Args:
            model: has `attn_implementation` "gsa", or only dense layers
            compile: fuse the operations between torch's products by torch.compile; the first step takes longer
            products: "torch", "rows" (kernels for few sequences), or "auto" (`open` takes the faster). `open` writes
                its choice into the attribute `products` and into the log.

        Raises:
            ValueError: `products` is unknown, sparse layers have another `attn_implementation`, or fused steps lack a
                feature of the model
        """
        if products not in PRODUCTS:
            raise ValueError(f"products is {products!r}; pass one of {PRODUCTS}")
        sparse = any(layer.self_attn.is_sparse for layer in model.model.layers)
        implementation = model.config._attn_implementation
        if sparse and implementation != "gsa":
            raise ValueError(
                f"attn_implementation is {implementation!r} with sparse layers; pass 'gsa', or decode by the model"
            )
        if (obstacle := not_fused(model)) is not None:
            raise ValueError(f"{obstacle}; decode by the model, or merge adapters first")
        self.model, self.config = model, model.config
        self.layers = [join_layer(layer, self.config) for layer in model.model.layers]
        self._compile, self._wanted_products = compile, products
        self.products = products
        self.visible_from_mask = True
        """If False, dense layers treat all slots of the cache as filled, for benchmarks."""

    def open(self, batch: int, room: int) -> None:
        """Allocate an empty cache of `room` slots for each of `batch` sequences.

        Raises:
            ValueError: products is "rows", but the kernels do not support this model or batch
        """
        self._choose_products(batch)
        config, weight = self.config, self.model.model.embed_tokens.weight
        self.batch, self.room = batch, room
        self.cache = StaticCache(config=config, max_cache_len=room)
        self.buffers = []
        empty = weight.new_zeros(batch, config.num_key_value_heads, 0, config.head_dim)
        layers: list[Any] = self.cache.layers
        for layer, (_, sizes) in zip(layers, self.layers, strict=True):
            layer.lazy_initialization(empty, empty)
            rows = None
            if sizes.row:
                layer.lazy_initialization_indexer(weight.new_zeros(batch, 0, sizes.row))
                rows = layer.indexer_keys
            # transformers marks a layer's cache tensors as constants of a compiled graph. Here all layers share one
            # graph, so take unmarked views of the tensors.
            self.buffers.append(Buffers(layer.keys[:], layer.values[:], None if rows is None else rows[:]))
            for buffer, dim in zip(self.buffers[-1], (2, 2, 1), strict=True):
                if buffer is not None:
                    torch._dynamo.maybe_mark_dynamic(buffer, dim)  # one graph for caches of all sizes
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        self.starts = torch.zeros_like(self.lengths)
        self.slot = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._table = self._angle_table()
        self._selections: dict[int, Any] = {}
        self._workspace = None
        if any(sizes.row for _, sizes in self.layers):
            state = kernel_module("decode.state")
            self._workspace = state.new_workspace(
                batch,
                room,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_size=config.head_dim,
                device=weight.device,
            )
            kept = state.most_selected(kernel_rule(config), room)
            for place, (_, each) in enumerate(self.layers):
                if each.row:
                    self._selections[place] = state.new_selection(batch, kept, device=weight.device)

    def _choose_products(self, batch: int) -> None:
        weight = self.model.lm_head.weight
        obstacle = row_layers.why_not(self.layers, weight.dtype, batch)
        if self._wanted_products == "rows" and obstacle is not None:
            raise ValueError(f"products is 'rows', which do not take {obstacle}; pass 'auto' or 'torch'")
        rows = self._wanted_products == "rows"
        if self._wanted_products == "auto":
            faster = batch <= kernel_module("limits").ROW_PRODUCT_FASTER_ROWS
            # On Hopper these kernels are faster, because a kernel can start before the previous kernel ends.
            measured = kernel_module("devices").can_chain(weight) and weight.dtype == torch.bfloat16
            rows = obstacle is None and faster and measured
        self.products = "rows" if rows else "torch"
        self._takes_table = rows and row_layers.enters_at_once(self.layers, batch)
        logger.info("decoding %d sequences, products by %s", batch, self.products)
        self._enter: Callable[..., Any] = row_layers.enter
        self._pass_on: Callable[..., tuple[torch.Tensor, Any]] = row_layers.pass_on
        self._finish: Callable[..., torch.Tensor] = row_layers.finish
        if not rows:
            fuse = (
                partial(torch.compile, fullgraph=True, dynamic=False) if self._compile else lambda each: each
            )
            self._enter, self._pass_on, self._finish = (
                fuse(each) for each in (joined_layers.enter, joined_layers.pass_on, joined_layers.finish)
            )

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits like `ModelDecoder.prefill`, and discard the cache's old content. `open` must come first."""
        self.cache.reset()
        logits = last_logits(self.model, tokens, mask, self.cache)
        self.place(tokens.shape[1], mask.int().argmax(1).int())
        return logits

    def place(self, filled: int, starts: torch.Tensor) -> None:
        """Set the next slot to `filled`."""
        self.slot.fill_(filled)
        self.starts.copy_(starts)
        self.lengths.copy_(filled + 1 - self.starts)

    def step(self) -> torch.Tensor:
        """Decode `tokens` at the next slot, return logits [B, vocab], and advance `slot` and `lengths`."""
        model, layers = self.model.model, self.layers
        by_rows = self.products == "rows"
        # While `look_up` runs, the first layer's product prefetches its weights.
        embed = kernel_module("row_product.look_up").look_up if by_rows else nn.functional.embedding
        h = embed(self.tokens, model.embed_tokens.weight)
        visible = self._visible() if self.visible_from_mask else None
        place = (self.slot, self._rotary(h))
        projected = self._enter(h, *layers[0], self.buffers[0], *place)
        for index, attention in enumerate(model.layers):
            module = attention.self_attn
            if isinstance(projected, partial) and not module.is_sparse:
                projected = projected()
            if module.is_sparse:
                attended = self._attend(index, module, projected)
            else:
                attended = self._attend_dense(index, projected, visible)
            if index + 1 < len(layers):
                following = (layers[index + 1], self.buffers[index + 1])
                h, projected = self._pass_on(h, attended, layers[index], *following, *place)
        last = (h, attended, layers[-1], model.norm.weight, self.model.lm_head.weight)
        counters = self.slot, self.lengths
        if by_rows and self.batch == 1:
            return self._finish(*last, advances=counters)
        logits = self._finish(*last)
        for counter in counters:
            counter.add_(1)
        return logits

    def _angle_table(self) -> Any:
        """Return the rotary angles of all positions, or None if the angles depend on the longest sequence."""
        model = self.model.model
        if model.rotary_emb.rope_type in ("dynamic", "longrope"):
            return None
        weight = model.embed_tokens.weight
        found = self._angles_of(torch.arange(-1, self.room, device=weight.device)[None], weight)
        angles = [x[0] for x in found]
        channels, index_channels = angles[0].shape[1], angles[-1].shape[1] if len(angles) > 2 else 0
        formats = kernel_module("decode.entry_reference")
        values = torch.cat(angles, -1)
        return formats.AngleTable(values, self.lengths, channels, index_channels)

    def _rotary(self, h: torch.Tensor) -> Any:
        """Return the rotary cosines and sines at the tokens' positions, [B, channels], for the heads and for the
        indexer. If a kernel looks up the angles itself, return the table of all positions instead."""
        if self._table is not None:
            return self._table if self._takes_table else self._table.angles()
        found = self._angles_of((self.lengths - 1)[:, None], h)
        return kernel_module("decode.entry_reference").Angles(*(x[:, 0] for x in found))

    def _angles_of(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model = self.model.model
        angles = model.rotary_emb(like, position_ids=positions)
        if model.indexer_rotary_emb is None:
            return angles
        return *angles, *model.indexer_rotary_emb(like, position_ids=positions)

    def _attend(self, place: int, module: Any, projected: Any) -> Any:
        config = self.config
        leader = config.indexer_layer(place)
        assert leader is not None
        selects = leader == place
        k, v = (x.transpose(1, 2) for x in self.buffers[place][:2])
        state = (self.lengths, self._selections[leader], self._workspace, self.starts)
        held = kernel_module("decode.state").LayerCache(k, v, *state, selects, self.products == "rows")
        if not isinstance(projected, partial):
            return self._attend_projected(place, module, projected, held, selects)
        # The next kernel needs only the first part of the product. The gate G1 can come last, because only the product
        # with W_O needs it.
        joined, launch, has_gate = (
            kernel_module("decode.joined"),
            projected,
            self.layers[place][1].parts[4] > 0,
        )
        counter = held.workspace.written if has_gate else None
        arrivals = held.workspace.arrivals.view(-1)[:1]
        front = ("index",) if selects else ("heads",)
        entered = launch(part=joined.Part(front, restarts=counter, arrivals=arrivals))
        if selects:
            part = joined.Part(("heads",), entered, beside=True)
            held = dataclasses.replace(held, beside=partial(launch, part=part))
        if not has_gate:
            return self._attend_projected(place, module, entered, held, selects)
        held = dataclasses.replace(held, counted=True)
        attended = self._attend_projected(place, module, entered._replace(gate=None), held, selects)
        launch(part=joined.Part(("gate",), entered, beside=True, waits=False))
        heads = self.batch * config.num_key_value_heads
        awaited = kernel_module("row_product.triton_product").Awaited(counter, heads)
        return row_layers.Attended(attended, entered.gate, awaited)

    def _attend_projected(
        self, place: int, module: Any, projected: Any, held: Any, selects: bool
    ) -> torch.Tensor:
        config = self.config
        decode = kernel_module("decode.op")
        if not selects:
            return decode.decode_attend(projected.q, held, config.local_window, projected.gate)
        rows = self.buffers[place].rows
        assert rows is not None
        applied = applied_indexer(module.indexer, projected.index_queries, rows, projected.index_weights)
        geometry = kernel_module("types").Geometry(local_window=config.local_window)
        rule, ema = kernel_rule(config), module.indexer.variance_ema
        return decode.decode_step(projected.q, applied, held, rule, ema, geometry, projected.gate)

    def _attend_dense(self, place: int, projected: Projected, visible: torch.Tensor | None) -> torch.Tensor:
        buffers = self.buffers[place]
        q = projected.q[:, :, None]
        out = nn.functional.scaled_dot_product_attention(q, buffers.k, buffers.v, visible, enable_gqa=True)
        return gated(out[:, :, 0], projected.gate)

    def _visible(self) -> torch.Tensor | None:
        """Return the mask of filled slots, bool [B, 1, 1, Lk], or None if no layer is dense."""
        if all(layer.self_attn.is_sparse for layer in self.model.model.layers):
            return None
        slots = torch.arange(self.room, device=self.slot.device)
        return ((slots >= self.starts[:, None]) & (slots <= self.slot))[:, None, None]
