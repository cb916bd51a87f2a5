"""Statistics of the attention layers, kept on the device and reduced once per logged step."""

from __future__ import annotations

import torch
import torch.distributed as dist

MEANS = (
    "indexer_kl",
    "recall",
    "random_recall",
    "k_mean",
    "selected_keys",
    "value_gate_mean",
    "value_gate_low",
    "value_gate_high",
    "output_gate_mean",
    "output_gate_low",
    "output_gate_high",
    "indexer_saturated",
    "first_token_attention",
    "adjacent_overlap",
    "union_ratio_32",
    "union_density",
    "variance",
    "variance_ema",
)
"""Averages over tokens (and heads): sums and counts are added over all ranks.

Those of k_t, of the scores' variance and of the indexer's KL are over all tokens; those of the gates, and
`indexer_saturated` with the keys it sees, over every 16th position of the sample. The others are over a sample of the
queries (query_sample.py): all of sequences of up to 512 tokens, else 8 runs of 64 neighbours. `adjacent_overlap` is
over the pairs of neighbours within its runs, and `union_ratio_32` over their groups of 32, as far as one rank holds
them: context-parallel ranks leave out pairs and groups across the borders of their chunks of a sequence. No run lies
across one where 64 divides a chunk of a sequence of more than 512 tokens."""

EXTREMES = ("k_max", "k_min", "max_activation", "max_attention_logit")
"""Largest values over all ranks; `k_min` is kept negated. `max_attention_logit` sees what `indexer_saturated` does."""


class LayerStats:
    """Sums, counts and extremes per layer of the whole model; a rank fills the rows of its own layers."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._sums = torch.zeros(len(MEANS), num_layers, dtype=torch.float64, device=device)
        self._counts = torch.zeros(self._sums.shape, dtype=torch.float64)  # known without the device
        self._extremes = torch.full(
            (len(EXTREMES), num_layers), -torch.inf, dtype=torch.float64, device=device
        )

    @property
    def device(self) -> torch.device:
        return self._sums.device

    def add(self, name: str, layer: int, values: torch.Tensor) -> None:
        """Add all elements of `values` to the average `name` of layer `layer` (from 0)."""
        row = MEANS.index(name)
        # A sum in another type than its terms' is a copy of all of them first. A GPU adds up fp32 as a tree: 1e-7.
        exact = torch.float32 if values.is_cuda else torch.float64
        self._sums[row, layer].add_(values.detach().sum(dtype=exact))
        self._counts[row, layer] += values.numel()

    def maximum(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Keep the largest of the 0-d `value` and what is there."""
        cell = self._extremes[EXTREMES.index(name), layer]
        torch.maximum(cell, value.detach().to(cell), out=cell)

    def reset(self) -> None:
        self._sums.zero_()
        self._counts.zero_()
        self._extremes.fill_(-torch.inf)

    def copy(self) -> tuple[torch.Tensor, ...]:
        """What was recorded so far, for `restore`."""
        return self._sums.clone(), self._counts.clone(), self._extremes.clone()

    def restore(self, copy: tuple[torch.Tensor, ...]) -> None:
        """Forget what was recorded since."""
        for recorded, saved in zip((self._sums, self._counts, self._extremes), copy, strict=True):
            recorded.copy_(saved)

    def reduce(
        self, extra_sums: torch.Tensor, extra_maxima: torch.Tensor
    ) -> tuple[dict[str, list[float]], list[float], list[float]]:
        """Values per layer over all ranks, with two collectives that also carry the caller's own numbers.

        Tensor-parallel copies enter numerator and denominator alike. Call it on every rank, for logged steps
        only: it reads the device.

        Args:
            extra_sums: fp64 [n], added over the ranks.
            extra_maxima: fp64 [m], the largest over the ranks.

        Returns:
            name -> value per layer (a name that no layer recorded is left out; NaN for a layer that did not),
            and the reduced extras.
        """
        sums = torch.cat([self._sums.flatten(), self._counts.flatten().to(self.device), extra_sums])
        maxima = torch.cat([self._extremes.flatten(), extra_maxima])
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        sums, maxima = sums.cpu(), maxima.cpu()
        size = self._sums.numel()
        totals = sums[:size].view(self._sums.shape)
        counts = sums[size : 2 * size].view(self._sums.shape)
        extremes = maxima[: self._extremes.numel()].view(self._extremes.shape)
        values: dict[str, list[float]] = {}
        for row, name in enumerate(MEANS):
            if (counts[row] > 0).any():
                values[name] = (totals[row] / counts[row]).tolist()  # 0 / 0 is NaN: nothing recorded
        for row, name in enumerate(EXTREMES):
            recorded = extremes[row] > -torch.inf
            if recorded.any():
                sign = -1.0 if name == "k_min" else 1.0
                values[name] = torch.where(recorded, sign * extremes[row], torch.nan).tolist()
        return values, sums[2 * size :].tolist(), maxima[self._extremes.numel() :].tolist()
