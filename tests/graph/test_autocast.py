"""Regions of a module with rules of their own: autocast, checkpointing, and operators that write to their `out`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from manyhands.graph.capture import capture


class Regions(nn.Module):
    def __init__(self, enabled: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.enabled, self.checkpointed = (
            nn.Linear(8, 8),
            nn.Linear(8, 3),
            enabled,
            checkpointed,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            x = checkpoint(lambda value: torch.relu(self.first(value)), x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y = F.softmax(self.first(x), -1) + self.first(x)
        return self.second(y.to(self.second.weight.dtype))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(("enabled", "checkpointed"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_region_gives_the_modules_own_gradients(enabled: bool, checkpointed: bool) -> None:
    torch.manual_seed(0)
    graph = capture(
        Regions(enabled, checkpointed), torch.randn(4, 8), loss=F.cross_entropy, target=torch.randint(0, 3, (4,)),
        verify=True,
    )  # fmt: skip
    types = {spec.dtype for node in graph.nodes for spec in node.outputs}
    assert ("bfloat16" in types) == enabled


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrised_weight_gives_the_modules_own_gradients(parametrize: object) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(parametrize(nn.Linear(8, 8)), nn.ReLU()).double()  # type: ignore[operator]
    x = torch.randn(4, 8, dtype=torch.float64)
    capture(module, x, loss=F.mse_loss, target=torch.zeros_like(x), verify=True)
