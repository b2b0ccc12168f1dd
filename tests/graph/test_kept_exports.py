"""An export that a test process has kept is used again for the same network only, with the weights of the one given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kept_exports import KeptExports, key_of
from manyhands.graph import capture as capturing
from manyhands.graph.capture import capture

EXAMPLE = torch.ones(4, 6)


class Network(nn.Module):
    def __init__(self, width: int = 5, scale: Any = 2.0, momentum: float = 0.1, *, is_tied: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(6, width),
            nn.BatchNorm1d(width, momentum=momentum),
            nn.Linear(6, width),
        )
        self.scale = scale
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)) * self.scale + self.last(x)


def at_rest(network: Network) -> Network:
    network.norm.eval()
    return network


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptExports:
    kept = KeptExports()
    if isinstance(kept.export, KeptExports):
        kept.export = kept.export.export
    monkeypatch.setattr(capturing, "export_module", kept)
    return kept


@pytest.mark.slow
def test_the_same_network_is_exported_once_and_keeps_weights_apart(kept: KeptExports) -> None:
    one, other = Network(), Network()
    first, second = capture(one, EXAMPLE), capture(other, EXAMPLE)
    assert kept.reused == 1
    assert first.nodes == second.nodes
    for module, graph in ((one, first), (other, second)):
        for name, tensor in module.state_dict().items():
            if name in graph.state:
                assert graph.state[name].data_ptr() == tensor.data_ptr(), name
        assert "first.weight" in graph.state


@pytest.mark.quick(every=9)
@pytest.mark.parametrize(
    "other",
    [
        Network(width=7), Network(scale=3.0), Network(scale=torch.tensor(2.0)), Network(momentum=0.2),
        Network(is_tied=True), Network().double(), at_rest(Network()), nn.Sequential(Network()),
        Network().requires_grad_(False),
    ],
    ids=["width", "number", "constant", "option", "tied", "type", "a child at rest", "inside another", "frozen"],
)  # fmt: skip
def test_another_network_is_exported(other: nn.Module, kept: KeptExports) -> None:
    capture(Network(), EXAMPLE)
    capture(other, EXAMPLE.to(next(other.parameters()).dtype))
    assert kept.reused == 0


def test_values_of_constants_count(kept: KeptExports) -> None:
    graphs = [capture(Network(scale=torch.tensor(scale)), EXAMPLE) for scale in (2.0, 3.0)]
    assert kept.reused == 0
    values = [{float(tensor) for tensor in graph.state.values() if tensor.dim() == 0} for graph in graphs]
    assert 2.0 in values[0] - values[1]
    assert 3.0 in values[1] - values[0]


@pytest.mark.slow
def test_another_forward_another_example_and_autocast_count(kept: KeptExports, monkeypatch: pytest.MonkeyPatch) -> None:
    capture(Network(), EXAMPLE)
    capture(Network(), EXAMPLE[:3])
    with torch.autocast("cpu", torch.bfloat16):
        capture(Network(), EXAMPLE)
    monkeypatch.setattr(Network, "forward", lambda self, x: self.first(x))
    changed = capture(Network(), EXAMPLE)
    assert kept.reused == 0
    assert len(changed.nodes) == 1


def test_what_cannot_be_compared_is_not_kept() -> None:
    module = Network()
    module.scale = lambda x: x  # type: ignore[assignment]
    assert key_of(module, [EXAMPLE], {}, {}) is None
