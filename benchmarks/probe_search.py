"""Would a search that looks at blocks of keys first find what the indexer selects? Asked of a trained model's layers.

    python benchmarks/probe_search.py FILE [--block 32] [--budgets 64 256] [--widths 2 4 8]

FILE is what launch/export_indexer.py wrote. Plain torch, on any device; queries of the last quarter of the sequence.

kept: share of the visible blocks that bounds of their keys cannot rule out. An exact search scores at least these.
    The bound of a block is its box's or its ball's, whichever is less, head by head.
holding: share of the visible blocks with a selected key: what the best of bounds would keep.
found: share of the selected keys in the blocks whose mean key scores best, as many blocks as hold `width` times the
    budget. A search in two levels scores these blocks' keys alone.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch

SAMPLED_EVERY = 16


@dataclass(frozen=True)
class Queries:
    """Some queries of a layer's indexer."""

    positions: torch.Tensor
    """int64 [R]"""
    queries: torch.Tensor
    """[R, HI, DI]"""
    gates: torch.Tensor
    """[R, HI], the head weights as they are multiplied."""
    score_bias: torch.Tensor
    """[HI]"""
    sigmoid: bool

    def scores(self, products: torch.Tensor) -> torch.Tensor:
        """q . k [R, HI, N] -> I [R, N]. Never falls where a product rises, if no gate is negative."""
        logits = products / math.sqrt(self.queries.shape[-1]) + self.score_bias[:, None]
        values = logits.sigmoid() if self.sigmoid else logits.relu()
        return torch.einsum("rh,rhn->rn", self.gates, values)

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """[N, DI] -> I [R, N]."""
        return self.scores(torch.einsum("rhd,nd->rhn", self.queries, keys))

    def bounds(self, blocks: torch.Tensor) -> torch.Tensor:
        """[N, block, DI] -> what no key of the block exceeds: [R, N]. Head by head; a negative gate takes the least."""
        low, high = blocks.amin(1), blocks.amax(1)
        centre = blocks.mean(1)
        radius = (blocks - centre[:, None]).norm(dim=-1).amax(1)
        up, down = self.queries.clamp(min=0), self.queries.clamp(max=0)
        reach = self.queries.norm(dim=-1)[..., None] * radius
        middle = torch.einsum("rhd,nd->rhn", self.queries, centre)

        def product(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
            return torch.einsum("rhd,nd->rhn", up, positive) + torch.einsum("rhd,nd->rhn", down, negative)

        most = torch.minimum(product(high, low), middle + reach)
        least = torch.maximum(product(low, high), middle - reach)
        return self.scores(torch.where(self.gates[..., None] < 0, least, most))


def read(content: dict[str, Any], layer: int, device: str) -> tuple[Queries, torch.Tensor]:
    """Sampled queries of a layer, and its keys [L, DI]; fp32."""
    x, gsa = content["layers"][layer], content["gsa"]
    tensors: dict[str, Any] = {
        name: None if value is None else value.float().to(device) for name, value in x.items()
    }
    keys, logits = tensors["keys"][0], tensors["weight_logits"][0]
    positions = torch.arange(len(keys) * 3 // 4, len(keys), SAMPLED_EVERY, device=device)
    sigmoid = gsa["indexer_activation"] in ("sigmoid", "plain")
    gates = logits[positions]
    if gsa["indexer_activation"] == "sigmoid":
        gates = (gates + (0 if tensors["weight_bias"] is None else tensors["weight_bias"])).sigmoid()
    elif gsa["indexer_activation"] in ("plain", "qsa"):
        gates = torch.ones_like(gates)
    bias = tensors["score_bias"]
    if bias is None:
        bias = torch.zeros_like(gates[0])
    return Queries(positions, tensors["queries"][0, positions], gates, bias, sigmoid), keys


@dataclass(frozen=True)
class Found:
    kept: float
    holding: float
    found: dict[int, float]
    """By width."""


def search(layer: Queries, keys: torch.Tensor, block: int, budget: int, widths: list[int]) -> Found:
    """Of a budget that is the same for all queries."""
    keys = keys[: len(keys) // block * block]
    blocks = keys.unflatten(0, (-1, block))
    seen = torch.arange(len(keys), device=keys.device) <= layer.positions[:, None]
    scores = layer.of_keys(keys).masked_fill(~seen, -torch.inf)
    least = scores.topk(budget).values[:, -1:]
    selected = scores >= least
    visible = seen.unflatten(1, (-1, block)).any(-1)
    kept = (layer.bounds(blocks) >= least) & visible
    holding = selected.unflatten(1, (-1, block)).any(-1)
    means = layer.of_keys(blocks.mean(1)).masked_fill(~visible, -torch.inf)
    found = {}
    for width in widths:
        best = means.topk(min(-(-width * budget // block), len(blocks))).indices
        inside = torch.zeros_like(visible).scatter_(1, best, True).repeat_interleave(block, 1)
        found[width] = ((inside & selected).sum() / selected.sum()).item()
    return Found((kept.sum() / visible.sum()).item(), (holding.sum() / visible.sum()).item(), found)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 8])
    arguments = parser.parse_args()
    content = torch.load(arguments.file, map_location="cpu", weights_only=True)
    gsa, length = content["gsa"], content["seq_len_tokens"]
    if gsa["selection_block"] > 1 or gsa["indexer_pool"] > 1:
        parser.error(
            "FILE: its queries or keys select in groups; give an export of a run that selects singly"
        )
    if max(arguments.budgets) > length * 3 // 4:
        parser.error(f"--budgets: at most {length * 3 // 4} keys, which all queries of the sample see")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = harness.Report("probe_search", arguments)
    for number in content["layers"]:
        layer, keys = read(content, number, device)
        for budget in arguments.budgets:
            result = search(layer, keys, arguments.block, budget, arguments.widths)
            row = {"layer": number, "budget": budget, "kept": result.kept, "holding": result.holding}
            report.row(**row, **{f"found_{width}": share for width, share in result.found.items()})
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
