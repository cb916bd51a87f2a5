"""Implement a mixture-of-experts layer: router, token exchange, routed and shared experts."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP

from gsa_train.config import Config
from gsa_train.distributed.context_sharding import ContextSharding
from gsa_train.distributed.parallel import Parallel
from gsa_train.model.context_parallel import gather_tokens, local_part
from gsa_train.model.mcore.config import GSATransformerConfig
from gsa_train.model.mcore.expert_mark import mark_as_expert
from gsa_train.model.mcore.grouped_experts import GroupedExperts
from gsa_train.model.moe.router import Router, RouterContext
from gsa_train.model.moe.token_exchange import ExpertRanks, plan_exchange
from gsa_train.model.runtime import AttentionRuntime
from gsa_train.profiling.trace_spans import trace_span


class OneByOne(SequentialMLP):
    """Runs megatron-core's experts without the empty `_extra_state` for Transformer Engine. Checkpoints then have the
    format of `GroupedExperts`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_load_state_dict_post_hook(_forget_extra_state)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        entries = super().sharded_state_dict(*args, **kwargs)
        return {name: entry for name, entry in entries.items() if not name.endswith("_extra_state")}


def _forget_extra_state(module: torch.nn.Module, found: Any) -> None:
    """Ignore missing `_extra_state`, as a `load_state_dict` hook."""
    found.missing_keys[:] = [
        key for key in found.missing_keys if not (".local_experts." in key and key.endswith("._extra_state"))
    ]


class MixtureOfExperts(MegatronModule):
    """Sums the outputs of a token's chosen experts, weighted by the router, then adds the shared expert's output. Each
    rank routes its own tokens."""

    def __init__(
        self,
        config: GSATransformerConfig,
        context: RouterContext,
        groups: ProcessGroupCollection,
        feed_forward: MLPSubmodules,
    ) -> None:
        """
        Args:
            feed_forward: modules of a dense layer, used for the shared expert.
        """
        super().__init__(config)
        moe = config.moe
        self.router = Router(
            moe,
            config.hidden_size,
            context,
            config.sequence_parallel,
            dtype=config.params_dtype,
            device="cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        )
        copies = groups.expt_tp.size()
        self.ranks = ExpertRanks(groups.tp_ep, groups.ep.rank(), groups.ep.size(), copies)
        assert groups.tp_ep.rank() == groups.ep.rank() * copies + groups.expt_tp.rank()
        local = moe.experts // groups.ep.size()
        self.experts = (
            GroupedExperts(local, config, groups)
            if moe.experts_impl == "grouped"
            else OneByOne(local, config, feed_forward, groups)
        )
        for parameter in self.experts.parameters():
            mark_as_expert(parameter)
        width, self.shared_experts = moe.shared_expert_ffn_hidden_size, None
        if width > 0:
            of_shared = copy(config)
            of_shared.ffn_hidden_size = width  # MLP's second layer reads this value from the config.
            self.shared_experts = MLP(of_shared, feed_forward, ffn_hidden_size=width, tp_group=groups.tp)

    def set_layer_number(self, number: int) -> None:
        """Set the layer's number. megatron-core counts layers from 1."""
        self.router.layer = number - 1

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Return the output of this rank's [L, B, d], in the same shape, and no bias."""
        with trace_span("router"):
            routing = self.router(hidden)
        with trace_span("exchange"):
            exchange = plan_exchange(routing.experts, routing.kept, self.router.moe.experts, self.ranks)
            rows, weights = exchange.to_experts(hidden.flatten(0, 1), routing.weights)
        with trace_span("experts"):
            outputs, _ = self.experts(rows, exchange.tokens_per_expert, weights)
        with trace_span("exchange"):
            output = exchange.to_tokens(outputs).view_as(hidden)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden)[0]
        return output, None


def mixture_class(context: RouterContext, groups: ProcessGroupCollection, parts: MLPSubmodules) -> type:
    """Return a layer class with bound arguments. A `ModuleSpec` with arguments would make megatron-core warn about an
    unknown MLP type."""

    class Mixture(MixtureOfExperts):
        def __init__(self, config: GSATransformerConfig, **_: Any) -> None:
            super().__init__(config, context, groups, parts)

    return Mixture


def router_context(config: Config, runtime: AttentionRuntime, parallel: Parallel) -> RouterContext:
    groups = parallel.groups
    tokens = config.train.global_batch_size * config.train.seq_len_tokens
    cut = ContextSharding(parallel.context_rank, parallel.context_size, config.parallel.context_chunks)
    return RouterContext(
        runtime=runtime,
        loss_scale=groups.dp_cp.size() / tokens,
        earlier_choices=partial(earlier_choices, cut=cut, groups=groups),
        ranks_of_sequence=parallel.tensor_size * parallel.context_size,
    )


@torch.no_grad()
def earlier_choices(
    chosen: torch.Tensor, cut: ContextSharding, groups: ProcessGroupCollection
) -> torch.Tensor:
    """Implement `RouterContext.earlier_choices`."""
    tensor = groups.tp.size()
    held = chosen.to(torch.uint8).contiguous()
    every = held.new_empty(tensor * held.shape[0], *held.shape[1:])
    dist.all_gather_into_tensor(every, held, group=groups.tp)
    whole = gather_tokens(every.transpose(0, 1), cut, groups.cp)  # [B, L, E]
    before = whole.cumsum(1, dtype=torch.int64) - whole
    return local_part(before, cut).transpose(0, 1).chunk(tensor)[groups.tp.rank()]
