"""What `gsa.indexer_activation` makes of the indexer's products, in terms of the scores of `gsa_kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Scores:
    activation: Literal["sigmoid", "relu"]
    """Of the products, and with `sigmoid` of the head weights."""
    head_weight_logit: float | None = None
    """Of all queries and heads, where the head weights are no projection."""

    @property
    def learns_head_weights(self) -> bool:
        return self.head_weight_logit is None

    @property
    def has_score_bias(self) -> bool:
        return self.activation == "sigmoid"

    @property
    def has_head_weight_bias(self) -> bool:
        return self.activation == "sigmoid" and self.learns_head_weights


def least_keys_to_choose(indexer_pool: int) -> int:
    """Keys that a query sees, if it can prefer one to another: two, or two groups before its own."""
    return 2 if indexer_pool == 1 else 2 * indexer_pool + 1


LOGIT_OF_ONE = 64.0
"""Its sigmoid is 1 to the last bit, in fp32 and in fp64; bf16 has it exactly."""

SCORES = {
    "sigmoid": Scores("sigmoid"),
    "relu": Scores("relu"),
    "plain": Scores("sigmoid", LOGIT_OF_ONE),
    "qsa": Scores("relu", 1.0),
}
"""By `gsa.indexer_activation`."""
