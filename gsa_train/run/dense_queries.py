"""Says at a start when most queries see no more keys than they may select: for them GSA is dense attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gsa_train.config import Config
from gsa_train.data.batches import MicroBatch

LEAST_SHARE = 0.5
"""Of the queries; below it GSA is hardly what is trained."""


def dense_queries_warning(config: Config, micro_batches: Sequence[MicroBatch]) -> str | None:
    """What to say of a start's first text, cut and packed as the run reads it; None where enough queries can leave
    keys out, or the run selects none. Waits for the device."""
    if config.gsa.attention == "dense" or all(phase.attention == "dense" for phase in config.phases):
        return None
    visible = torch.cat([batch.causal_keys() for batch in micro_batches])
    counted = visible >= 2  # filler is no text
    limit = max(config.gsa.k_base, config.gsa.dense_below - 1)
    share = float((visible > limit).sum() / counted.sum().clamp(min=1))
    if share >= LEAST_SHARE:
        return None
    isolated = "" if config.data.attend_across_documents else " of its document"
    advice = "" if config.data.attend_across_documents else "set data.attend_across_documents=true, "
    field = f"gsa.k_base = {limit}" if limit == config.gsa.k_base else f"{limit} (gsa.dense_below)"
    return (
        f"only {share:.0%} of the queries see more than {field} keys{isolated} (of "
        f"{counted.sum().item():,} in the first text): for the others GSA is dense attention. If that is not what you "
        f"want, {advice}train on longer documents, or take a smaller gsa.k_base or a larger train.seq_len_tokens"
    )
