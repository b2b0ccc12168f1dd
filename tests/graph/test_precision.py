"""A capture inside torch.autocast is of the module under it, and the self-check compares the two there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.precision import check_precision, left, surrounding, under

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Calls(nn.Module):
    """A convolution without bias of what an operator makes of another's result, and a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.c, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.b(self.function(self.a(x))).mean((2, 3)))
        return out


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, 8, 8, generator=generator), torch.randint(3, (5,), generator=generator)


def captured(module: nn.Module, precision: str) -> Graph:
    x, y = batch()
    with under(precision):
        return capture(module, x, loss=functional.cross_entropy, target=y, verify=True)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "resized": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "in float32": lambda x: x / torch.linalg.vector_norm(x.float(), dim=1, keepdim=True).add(1.0),
    "decomposed": lambda x: functional.glu(torch.cat([x, x], 1), 1),
    "a product of several types": lambda x: torch.einsum("bchw,cd->bdhw", x, torch.eye(4)),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.flatten(2)] * 3).view(x.shape),
    "in a region of its own": lambda x: _in_float32(x),
    "padded": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "batched product": lambda x: _batched(x),
}  # fmt: skip


def _batched(x: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros(1, 1, 1), x[:, :, :4, 0], x[:, :, :4, 0]).mean(2)[:, :, None, None] + x


def _in_float32(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.softmax(x.float(), 1)


@pytest.mark.quick("bf16-resized")
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("precision", sorted(LOWER))
def test_a_graph_trains_as_the_module_does_under_autocast(precision: str, name: str) -> None:
    torch.manual_seed(0)
    graph = captured(Calls(FUNCTIONS[name]), precision)
    types = {spec.dtype for node in graph.nodes for spec in node.outputs}
    assert str(LOWER[precision]).removeprefix("torch.") in types
    assert graph.loss is not None
    assert {spec.dtype for node in graph.loss.nodes for spec in node.outputs} == {"float32"}
    assert all(
        spec.batch_axis == 0
        for node in graph.nodes
        for spec in node.outputs
        if len(spec.shape) == 4 and "cast" not in node.name
    )
    assert {spec.dtype for spec in graph.weights} == {"float32"}


@pytest.mark.slow
def test_float64_is_not_cast() -> None:
    x, y = batch()
    targets = []
    for precision in ("float32", "bf16"):
        with under(precision):
            graph = capture(Calls(lambda x: x).double(), x.double(), loss=functional.cross_entropy, target=y)
        targets.append([node.target for node in graph.nodes])
    assert targets[0] == targets[1]


def test_a_region_is_left_and_entered() -> None:
    assert surrounding() is None
    with under("fp16"):
        assert surrounding() == ("cpu", torch.float16)
        with left():
            assert surrounding() is None
        assert surrounding() is not None
    with under("float32"), left():
        assert surrounding() is None


class Counting(nn.Module):
    """It computes otherwise from its fourth call on: when it is compared, it has been exported."""

    def __init__(self, first_call: int) -> None:
        super().__init__()
        self.a, self.calls, self.first_call = nn.Linear(6, 3), 0, first_call

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.calls += 1
        out: Tensor = self.a(x) * (1.1 if self.calls >= self.first_call and not torch.compiler.is_exporting() else 1.0)
        return out


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("precision", [*LOWER, "float32"])
def test_a_module_that_computes_something_else_is_refused(precision: str) -> None:
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    with under(precision), pytest.raises(CaptureFailed, match="does not compute what the module does"):
        capture(Counting(1), x, loss=functional.cross_entropy, target=y, verify=True)
    with under(precision):
        capture(Counting(100), x, loss=functional.cross_entropy, target=y, verify=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.double(), "c.weight is float64|a.weight is float64"),
        (lambda m: m.bfloat16(), "is bfloat16"),
        (lambda m: m.half(), "is float16"),
        (lambda m: m.to(torch.complex64), "is complex64"),
    ],
)
@pytest.mark.parametrize("precision", sorted(LOWER))
def test_weights_of_another_type_are_refused(
    precision: str, change: Callable[[nn.Module], nn.Module], message: str
) -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2)})
    changed = change(copy.deepcopy(module))
    check_precision(precision, module)
    check_precision("float32", changed)
    with pytest.raises(BadValue, match=message) as refused:
        check_precision(precision, changed)
    assert "model.float()" in str(refused.value.hint)


def test_frozen_weights_may_be_smaller() -> None:
    module = nn.Sequential(nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2))
    check_precision("bf16", module)
