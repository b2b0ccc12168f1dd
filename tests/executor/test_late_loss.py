"""The loss of a round that is waited for later: here on a CPU, where it is known at once."""

from __future__ import annotations

import torch

from manyhands.executor.late_loss import LateLoss, sum_of


def test_the_sum_is_formed_in_float64() -> None:
    losses = [torch.tensor(1.0), torch.tensor(1e-9)]
    assert float(sum_of(losses)) == 1.0 + float(torch.tensor(1e-9))
    assert LateLoss(losses).wait() == float(sum_of(losses))
    assert LateLoss(losses[:1]).wait() == 1.0
