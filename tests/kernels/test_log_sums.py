"""Tests log-sum-exps of few queries: the kernel must visit the right keys."""

import pytest
import torch

from gsa_kernels import api
from gsa_kernels.packed_mask import pack_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("num_keys", [1100, 70])
def test_log_sums_over_keys_of_few_tiles(num_keys: int) -> None:
    """For each tile of 32 queries, the kernel visits only the keys from the first to the last key that a query of the
    tile selects. A query without keys has a log-sum-exp below -1e19."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 192, 2, 32, generator=generator).to(DEVICE)
    k = torch.randn(1, num_keys, 1, 32, generator=generator).to(DEVICE)
    seen = torch.zeros(1, 192, num_keys, dtype=torch.bool, device=DEVICE)
    seen[:, :32, 0] = True
    seen[:, 32:64, 33:40] = True
    seen[:, 64:96, num_keys - 1] = True
    seen[:, 96:128, 40 : num_keys - 5 : 7] = True
    seen[:, 100, :] = True
    seen[:, 160:192:2, num_keys // 2 :] = True  # queries between these and 128 to 159 have no keys
    ours = api.sampled_lse(q, k, pack_mask(seen), implementation="triton")
    logits = torch.einsum("bshd,bkxd->bhsk", q, k) * 32**-0.5
    wanted = logits.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
    empty = ~seen.any(-1)
    torch.testing.assert_close(ours[:, :, ~empty[0]], wanted[:, :, ~empty[0]])
    assert (ours[:, :, empty[0]] < -1e19).all()
