"""Send tokens to the ranks of their experts, and the experts' outputs back.

A choice is a (token, expert) pair. If a rank has T tokens, and each token has k experts, the rank has T k choices. For
each choice, the rank sends the token's hidden state as one row. The choices are sorted by expert, so the rows for each
rank are contiguous. One all-to-all sends the rows to the experts, and another returns the experts' outputs.

With expert tensor parallelism, each expert is split over several ranks. Each of these ranks gets a copy of the rows and
returns a partial output. The rank that sent the rows sums the partial outputs.

Data moves in permutations whose backward passes are gathers, without atomic additions. Results are therefore bitwise
reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gsa_train.model.moe.routing import expert_counts


@dataclass(frozen=True)
class ExpertRanks:
    group: dist.ProcessGroup
    """Ranks that exchange tokens, ordered by expert-parallel rank, then by expert-tensor-parallel rank."""
    expert_rank: int
    expert_size: int
    copies: int
    """Number of expert-tensor-parallel ranks, which each have a shard of every expert's width."""


@dataclass(frozen=True)
class _Rows:
    """Describes N rows of this rank's choices, in sending order."""

    choices: torch.Tensor
    """int64 [N]: the choice that each row sends, numbered token * k + j for the token's j-th expert."""
    of_choice: torch.Tensor
    """int64 [T k, copies]: numbers of the rows that send each choice; N if the choice is dropped."""
    dropped: bool
    """Whether choices may be dropped."""


@dataclass(frozen=True)
class Exchange:
    """Plans one layer's token exchange for one micro-batch."""

    ranks: ExpertRanks
    top_k: int
    rows: _Rows
    tokens_per_expert: torch.Tensor
    """int64 [E / expert ranks]: number of rows that each of this rank's experts receives."""
    sent: list[int] | None
    """Number of rows sent to each rank of the group. `sent`, `received`, `by_expert` and `by_rank` are None if the
    group has one rank."""
    received: list[int] | None
    by_expert: torch.Tensor | None
    """int64: permutation that sorts the received rows by expert."""
    by_rank: torch.Tensor | None
    """The inverse of `by_expert`."""

    def to_experts(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens [T, d], and the weights [T, k] of their experts, to the ranks of these experts. Collective.

        Returns the M rows that this rank's experts receive, [M, d], sorted by expert, and the weight of each row, [M].
        """
        rows = self.rows
        hidden = _GatherRows.apply(
            tokens, rows.choices // self.top_k, rows.of_choice.view(len(tokens), -1), rows.dropped
        )
        scales = _GatherRows.apply(weights.reshape(-1, 1), rows.choices, rows.of_choice, rows.dropped)
        return self._there(hidden), self._there(scales).squeeze(1)

    def to_tokens(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [M, d] and sum them per token, [T, d]. Collective."""
        rows, home = self.rows, self._back(outputs)
        result: torch.Tensor = _SumRows.apply(
            home,
            rows.choices // self.top_k,
            rows.of_choice.view(-1, self.top_k * self.ranks.copies),
            rows.dropped,
        )
        return result

    def _there(self, rows: torch.Tensor) -> torch.Tensor:
        if self.by_expert is None or self.by_rank is None:
            return rows
        arrived = _AllToAll.apply(rows, self.sent, self.received, self.ranks.group)
        result: torch.Tensor = _GatherRows.apply(arrived, self.by_expert, self.by_rank[:, None], False)
        return result

    def _back(self, rows: torch.Tensor) -> torch.Tensor:
        if self.by_expert is None or self.by_rank is None:
            return rows
        sorted_by_rank = _GatherRows.apply(rows, self.by_rank, self.by_expert[:, None], False)
        result: torch.Tensor = _AllToAll.apply(sorted_by_rank, self.received, self.sent, self.ranks.group)
        return result


@torch.no_grad()
def plan_exchange(
    experts: torch.Tensor, kept: torch.Tensor | None, num_experts: int, ranks: ExpertRanks
) -> Exchange:
    """Plan the exchange. Collective. On one rank without a capacity the host does not wait for the device.

    Args:
        experts: int64 [T, k], the chosen experts.
        kept: bool [T, k]; None: keep all.
    """
    flat = experts.flatten()
    dropped = kept is not None
    if kept is not None:
        flat = torch.where(kept.flatten(), flat, num_experts)  # sorted after all others
    order = flat.argsort(stable=True)
    counts = expert_counts(flat, num_experts + dropped)[:num_experts]
    if ranks.group.size() == 1:
        choices = order[: int(counts.sum())] if dropped else order
        rows = _Rows(choices, _inverse(choices, len(flat))[:, None], dropped)
        return Exchange(ranks, experts.shape[1], rows, counts, None, None, None, None)
    every = counts.new_empty(ranks.group.size(), num_experts)
    dist.all_gather_into_tensor(every, counts[None], group=ranks.group)
    of_ranks = every.view(-1, ranks.expert_size, num_experts // ranks.expert_size)
    mine = of_ranks[:, ranks.expert_rank]  # [ranks of the group, experts of this rank]
    to_expert_ranks, received = torch.stack(
        [of_ranks[ranks.group.rank()].sum(-1).repeat_interleave(ranks.copies), mine.sum(-1)]
    ).tolist()
    by_expert = _by_expert(mine, sum(received))
    return Exchange(
        ranks=ranks,
        top_k=experts.shape[1],
        rows=_rows_to_send(order, to_expert_ranks, ranks.copies, dropped),
        tokens_per_expert=mine.sum(0),
        sent=to_expert_ranks,
        received=received,
        by_expert=by_expert,
        by_rank=_inverse(by_expert, len(by_expert)),
    )


def _rows_to_send(order: torch.Tensor, sent: list[int], copies: int, dropped: bool) -> _Rows:
    """
    Args:
        order: (token, expert) choices sorted by expert, dropped ones last.
        sent: number of choices for each rank of the group, equal for all copies of an expert.
    """
    kept = order[: sum(sent[::copies])]
    pieces = [piece for piece in kept.split(sent[::copies]) for _ in range(copies)]
    choices = torch.cat(pieces)
    of_copies = torch.cat([torch.full_like(piece, number % copies) for number, piece in enumerate(pieces)])
    places = choices * copies + of_copies
    return _Rows(choices, _inverse(places, len(order) * copies).view(-1, copies), dropped)


def _by_expert(received: torch.Tensor, total: int) -> torch.Tensor:
    """Return the permutation from rows sorted by (rank, expert) to the order (expert, rank): int64 [total].

    Args:
        received: int64 [ranks, experts], number of rows.
    """
    numbers = torch.arange(received.shape[1], device=received.device).repeat(received.shape[0])
    return numbers.repeat_interleave(received.flatten(), output_size=total).argsort(stable=True)


def _inverse(places: torch.Tensor, length: int) -> torch.Tensor:
    """Return each number's index in `places`, or len(places) if absent, for numbers below `length`: int64 [length]."""
    inverse = torch.full((length,), len(places), dtype=torch.int64, device=places.device)
    return inverse.scatter_(0, places, torch.arange(len(places), device=places.device))


def _take(rows: torch.Tensor, places: torch.Tensor, dropped: bool) -> torch.Tensor:
    """Take rows [N, d] at places [T, c] and sum them to [T, d].

    Args:
        dropped: places may contain N, which stands for a row of zeros.
    """
    if dropped:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    taken = rows.index_select(0, places.flatten()).view(*places.shape, rows.shape[1])
    return taken[:, 0] if places.shape[1] == 1 else taken.sum(1)


class _GatherRows(torch.autograd.Function):
    """Gathers rows [N, d] from `tokens` [T, d]. Row i is a copy of token `places[i]`. `rows_of` [T, c] lists each
    token's copies, whose gradients the backward pass gathers and sums."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, places: torch.Tensor, rows_of: torch.Tensor, dropped: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_of)
        ctx.dropped = dropped
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows_of,) = ctx.saved_tensors
        return _take(grad, rows_of, ctx.dropped), None, None, None


class _SumRows(torch.autograd.Function):
    """Sums each token's rows, [N, d] to [T, d]: the transpose of `_GatherRows`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, rows_of: torch.Tensor, dropped: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return _take(rows, rows_of, dropped)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


class _AllToAll(torch.autograd.Function):
    """Exchanges contiguous rows per rank. The backward pass returns the gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
