"""The loop's look at the gradient norms, which it leaves on the device between two logged steps."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from gsa_train.trainer import NonFiniteError, _check_norms


def run_at(step: int, saved_step: int | None) -> Any:
    return Mock(step=step, saver=Mock(durable_step=saved_step, ended=Mock(return_value=[])))


def test_the_last_norm_is_the_logged_one() -> None:
    assert _check_norms(run_at(7, None), [torch.tensor(2.0), torch.tensor(0.1)]) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_the_first_step_that_is_not_finite_is_named(bad: str) -> None:
    norms = [torch.tensor(1.0), torch.tensor(float(bad)), torch.tensor(float("nan"))]
    with pytest.raises(NonFiniteError, match=f"step 19: the gradient norm is {bad}. .* after step 10"):
        _check_norms(run_at(20, 10), norms)
