"""Muon (Keller Jordan): update each matrix of the hidden layers by its orthogonalized momentum.

    momentum <- beta momentum + (1 - beta) gradient
    direction = beta momentum + (1 - beta) gradient            (Nesterov)
    W <- W - lr (0.2 sqrt(max(rows, columns)) orthogonalize(direction) + weight_decay W)

The factor 0.2 sqrt(max(rows, columns)) scales an update so that its root mean square matches the root mean square of
AdamW's updates (Moonlight, arXiv 2502.16982: `match_rms_adamw`). The learning rate and weight decay of AdamW can
therefore be used for Muon. AdamW updates all other parameters.

Sharding follows Moonlight's distributed Muon. The momentum is sharded like any optimizer state. A rank with a shard of
a weight matrix gathers the whole matrix's update direction, first over the data-parallel and then over the
tensor-parallel ranks. The rank orthogonalizes this direction and updates its shard.

A data-parallel rank's shard is a contiguous range of a buffer. If a matrix lies in the range of one rank, that rank
already has the whole direction. If a matrix spans several ranges, the ranks exchange their parts of the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist

from gsa_train.config import TrainConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, by Keller Jordan."""


@torch.no_grad()
def orthogonalize(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Move the singular values of [..., rows, columns] near 1: fp32, computed in `dtype`."""
    a, b, c = COEFFICIENTS
    x = (matrix / (torch.linalg.matrix_norm(matrix, keepdim=True) + 1e-7)).to(dtype)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


def orthogonalize_all(matrices: list[torch.Tensor], steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Orthogonalize matrices of any shape. Matrices of equal shape run as one batch, because a kernel launch takes
    longer than a product of small matrices."""
    by_shape: dict[torch.Size, list[int]] = {}
    for at, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(at)
    results = list(matrices)
    for places in by_shape.values():
        batch = orthogonalize(torch.stack([matrices[at] for at in places]), steps, dtype)
        for at, result in zip(places, batch.unbind(), strict=True):
            results[at] = result
    return results


BATCH_ELEMENTS = 2**26
"""Elements of the whole matrices that are orthogonalized together. The update takes about 20 bytes of temporary memory
per element."""


@dataclass(frozen=True)
class MatrixShard:
    """Describes this rank's shard of a parameter that holds matrices."""

    number: int
    """Place of the parameter in the model."""
    shape: tuple[int, ...]
    """Shape of the parameter on this tensor-parallel rank: [rows, columns] or [experts, rows, columns]."""
    rows: tuple[int, ...]
    """Rows of each matrix in a group of rows (gsa_train.model.mcore.matrices)."""
    parts: Sequence[tuple[int, int]]
    """First element and length of each data-parallel rank's shard of the flat parameter."""
    tensor_group: dist.ProcessGroup | None
    """Ranks that share the parameter by tensor parallelism."""
    tensor_dim: int
    """Dimension that they share: -2 or -1."""
    dtype: torch.dtype
    """Precision of the orthogonalization: the model's."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def whole_numel(self) -> int:
        """Elements on all tensor-parallel ranks."""
        return self.numel * (1 if self.tensor_group is None else self.tensor_group.size())

    def whole_matrices(self, direction: torch.Tensor) -> list[torch.Tensor]:
        """Gather the direction of each whole matrix: [rows, columns] or [experts, rows, columns]. Collective over the
        tensor-parallel ranks.

        `direction` is the flat direction of this rank's part of the parameter, already gathered over the data-parallel
        ranks.
        """
        shares = [direction]
        if self.tensor_group is not None:
            shares = [torch.empty_like(direction) for _ in range(self.tensor_group.size())]
            dist.all_gather(shares, direction, group=self.tensor_group)
        of_ranks = [self._matrices(share.view(self.shape)) for share in shares]
        return [torch.cat(parts, self.tensor_dim) for parts in zip(*of_ranks, strict=True)]

    def own_part(self, matrices: list[torch.Tensor]) -> torch.Tensor:
        """Return this tensor-parallel rank's part of whole matrices, flat, in the order of the parameter."""
        if self.tensor_group is not None:
            size, rank = self.tensor_group.size(), self.tensor_group.rank()
            matrices = [matrix.chunk(size, self.tensor_dim)[rank] for matrix in matrices]
        groups = [each.unflatten(-2, (-1, rows)) for each, rows in zip(matrices, self.rows, strict=True)]
        return torch.cat(groups, -2).flatten()

    def _matrices(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        groups = parameter.unflatten(-2, (-1, sum(self.rows)))
        return [matrix.flatten(-3, -2) for matrix in groups.split(self.rows, -2)]


@dataclass(frozen=True)
class Matrices:
    """Describes the shards of a parameter group, in its order."""

    shards: list[MatrixShard]
    data_group: dist.ProcessGroup | None
    """Ranks over which the optimizer state is sharded; None: this rank has all of it."""
    device: torch.device

    @property
    def rank(self) -> int:
        return 0 if self.data_group is None else self.data_group.rank()

    @property
    def shared(self) -> list[int]:
        """Returns the indices of the shards that are not whole, in the order of the model."""
        found = [at for at, each in enumerate(self.shards) if each.parts[self.rank][1] < each.numel]
        return sorted(found, key=lambda at: self.shards[at].number)

    def batches(self) -> Iterator[list[int]]:
        """Yield the indices of the shards in order, in batches of at most BATCH_ELEMENTS elements. A larger parameter
        is a batch of its own."""
        batch: list[int] = []
        elements = 0
        for at, shard in enumerate(self.shards):
            if batch and elements + shard.whole_numel > BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(at)
            elements += shard.whole_numel
        if batch:
            yield batch

    def gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gather the shards of all data-parallel ranks, and return the whole tensors. Collective over `data_group`,
        even if `shared` is empty on this rank.

        `tensors` has this rank's shard for each parameter in `shared`. All tensors are flat.
        """
        if self.data_group is None or self.data_group.size() == 1:
            return tensors
        ranks = range(self.data_group.size())
        parts = [self.shards[at].parts for at in self.shared]
        lengths = [[each[other][1] * (other != self.rank) for each in parts] for other in ranks]
        wanted = [[bool(length) for length in of_rank] for of_rank in lengths]
        sent = [
            [tensor for tensor, is_wanted in zip(tensors, each, strict=True) if is_wanted] for each in wanted
        ]
        received = [sum(of_rank) for of_rank in lengths]
        arrived = torch.empty(sum(received), device=self.device)
        dist.all_to_all_single(
            arrived,
            torch.cat([arrived[:0], *(tensor for to_rank in sent for tensor in to_rank)]),
            received,
            [sum(tensor.numel() for tensor in to_rank) for to_rank in sent],
            group=self.data_group,
        )
        pairs = zip(arrived.split(received), lengths, strict=True)
        by_rank = [part.split(of_rank) for part, of_rank in pairs]
        # A later rank holds a later range of the flat parameter.
        return [
            torch.cat([own if other == self.rank else by_rank[other][index] for other in ranks])
            for index, own in enumerate(tensors)
        ]


class Muon(torch.optim.Optimizer):
    """Updates groups with the key `matrices` (a `Matrices`) by Muon, and passes the other groups to AdamW."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        train: TrainConfig,
        fused: bool,
        adamw: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        super().__init__(groups, {})
        self.beta, self.steps, self.rms = train.muon_momentum, train.muon_num_ns_steps, train.muon_update_rms
        others = [group for group in self.param_groups if "matrices" not in group]
        self.adamw = adamw(others) if others else None
        if self.adamw is not None:
            self.adamw.state = self.state
        # The interface of torch's fused optimizers: the gradients' divisor, and 1 to skip the update (mcore.py).
        self._step_supports_amp_scaling = fused
        self.grad_scale: torch.Tensor | None = None
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        if self.adamw is not None:
            if self._step_supports_amp_scaling:
                # torch declares neither attribute.
                self.adamw.grad_scale, self.adamw.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
            self.adamw.step()
        for group in self.param_groups:
            if "matrices" in group:
                self._update_matrices(group)

    def _update_matrices(self, group: dict[str, Any]) -> None:
        matrices: Matrices = group["matrices"]
        applied: Any = 1.0 if self.found_inf is None else 1 - self.found_inf
        shared = matrices.shared
        own = [self._direction(group["params"][at], applied) for at in shared]
        directions = dict(zip(shared, matrices.gather(own), strict=True))
        for batch in matrices.batches():
            wholes = []
            for at in batch:
                parameter = group["params"][at]
                direction = directions.pop(at) if at in directions else self._direction(parameter, applied)
                wholes.append(matrices.shards[at].whole_matrices(direction))
            every = [matrix for of_parameter in wholes for matrix in of_parameter]
            updates = iter(orthogonalize_all(every, self.steps, matrices.shards[batch[0]].dtype))
            for at, whole in zip(batch, wholes, strict=True):
                parameter, shard = group["params"][at], matrices.shards[at]
                scaled = [next(updates) * (self.rms * sqrt(max(matrix.shape[-2:]))) for matrix in whole]
                start, length = shard.parts[matrices.rank]
                update = shard.own_part(scaled)[start : start + length]
                weight = parameter.view(-1)
                change = (update + group["weight_decay"] * weight) * (group["lr"] * applied)
                weight.sub_(change)
                norm = torch.linalg.vector_norm(change, dtype=torch.float64)
                self.state[parameter]["squared_change"] = norm**2

    def _direction(self, parameter: torch.Tensor, applied: Any) -> torch.Tensor:
        """Update the momentum, and return the flat shard of the direction."""
        assert parameter.grad is not None
        gradient = parameter.grad.view(-1)
        if self.grad_scale is not None and self.found_inf is not None:
            gradient = torch.where(self.found_inf > 0, 0.0, gradient / self.grad_scale)
        momentum = self.state[parameter]["momentum_buffer"].view(-1)
        momentum.lerp_(gradient, (1 - self.beta) * applied)
        return gradient.lerp(momentum, self.beta)
