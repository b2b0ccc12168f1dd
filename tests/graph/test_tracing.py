"""A plain module's program as a trace gives it, beside torch.export's; and what is left to torch.export."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.graph import capture as capturing
from manyhands.graph import custom_functions, export
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.tracing import traced
from manyhands.models.registry import build


class Attention(nn.Module):
    """Sizes of the batch as arguments, several outputs of one operator, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        queries, keys, values = self.inner(x).chunk(3, dim=-1)
        scores = torch.softmax(queries @ keys.transpose(1, 2) + torch.arange(length, dtype=x.dtype), -1)
        mixed: Tensor = self.drop(scores @ values).reshape(batch * length, 8)
        made: Tensor = self.out(mixed).view(batch, length, 8).mean(1)
        return made


class Norms(nn.Module):
    """Norms of all kinds, writes in place and in buffers, and a frozen weight."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.GroupNorm(2, 8), nn.Hardswish(),
            nn.BatchNorm2d(8, momentum=None), nn.MaxPool2d(2),
        )  # fmt: skip
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.layers[0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.layers(x)
        x.mul_(0.5)
        return x.flatten(1).narrow(1, 0, 10)


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (5, 8)),
    "norms": (Norms, (3, 8, 8)),
    "resnet18": (lambda: build("resnet18"), (3, 32, 32)),
    "mobilenetv3-large": (lambda: build("mobilenetv3-large"), (3, 32, 32)),
}


def captured(module: nn.Module, shape: tuple[int, ...]) -> Graph:
    capturing._pytorch_losses.clear()
    return capture(module, torch.randn(4, *shape), loss=functional.cross_entropy, target=torch.tensor([0, 1, 2, 3]))


def plain_names(graph: Graph) -> str:
    """Return all that a graph says, with its values numbered in the order in which they are made."""
    text = "\n".join(map(repr, (graph.inputs, graph.input_tree, graph.nodes, graph.output_tree, graph.weights,
                                graph.aliases, graph.loss_combination)))  # fmt: skip
    names = list(dict.fromkeys(spec.name.partition(":")[0] for node in graph.nodes for spec in node.outputs))
    numbers = {name: f"v{number}" for number, name in enumerate(names)}
    return re.sub(r"'([\w.]+)(?=[:'])", lambda found: f"'{numbers.get(found[1], found[1])}", text)


@pytest.mark.parametrize("name", PLAIN)
def test_a_trace_gives_the_graph_of_torch_export(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = PLAIN[name]
    torch.manual_seed(0)
    module = make()
    programs: list[Any] = []

    def noted(*arguments: Any) -> Any:
        programs.append(traced(*arguments))
        return programs[-1]

    monkeypatch.setattr(capturing, "export_module", export.export_module)  # not one that an earlier test has kept
    monkeypatch.setattr(export, "traced", noted)
    by_trace = captured(module, shape)
    assert len(programs) == 2
    assert all(program is not None for program in programs), "the module or its loss was left to torch.export"
    monkeypatch.setattr(export, "traced", lambda *arguments: None)
    by_export = captured(module, shape)
    assert plain_names(by_trace) == plain_names(by_export)
    assert by_trace.loss is not None
    assert by_export.loss is not None
    assert plain_names(by_trace.loss) == plain_names(by_export.loss)
    assert {name: tensor.data_ptr() for name, tensor in by_trace.state.items()} == {
        name: tensor.data_ptr() for name, tensor in by_export.state.items()
    }


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


DECISIONS: dict[str, Callable[[Tensor], bool]] = {
    "many": lambda x: len(x) > 100,
    "few": lambda x: len(x) < 3,
    "more": lambda x: x.shape[0] > 5000,
    "length": lambda x: len(x) == 7,
    "turns": lambda x: (x.size(0) * 3 + 1) % 5 == 2,
    "float": lambda x: 1 / x.numel() < 1e-6,
    "kept": lambda x: {300: True}.get(x.shape[0], False),
    "elements": lambda x: x.shape.numel() > 40_000,
    "part": lambda x: x.shape[:2].numel() > 40_000,
    "rebuilt": lambda x: torch.Size(list(x.shape)).numel() > 40_000,
    "root": lambda x: math.isqrt(x.shape[0]) > 100,
    "divisor": lambda x: math.gcd(x.shape[0], 64) == 64,
    "bytes": lambda x: x.nbytes > 200_000,
    "bits": lambda x: x.shape[0].bit_length() > 12,
    "text": lambda x: str(x.shape[0]) == "7000",
}
"""By the number of samples: most of them alike in every run of a trace."""


class Odd(nn.Module):
    """A module that is not plain in one way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.scale, self.last = kind, nn.Linear(6, 6), torch.tensor([2.0] * 6), None

    def forward(self, x: Tensor) -> tuple[Tensor]:
        y: Tensor = self.linear(x)
        if self.kind in DECISIONS and DECISIONS[self.kind](x):
            y = y + 1
        elif self.kind == "square":
            y = y.repeat(len(x), 1)
        elif self.kind == "number":
            y = y * x.max().item()
        elif self.kind == "elsewhere":
            y = y * self.scale
        elif self.kind == "assigned":
            self.last = y  # type: ignore[assignment]
        elif self.kind == "ungraded":
            with torch.no_grad():
                y = y + self.linear(x)
        elif self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y = self.linear(x)
        elif self.kind == "function":
            y = _Reverse.apply(y)  # type: ignore[no-untyped-call]
        elif self.kind == "constant":
            y = y + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        return (y,)


KINDS = (
    "many",
    "few",
    "more",
    "length",
    "turns",
    "float",
    "kept",
    "elements",
    "part",
    "rebuilt",
    "root",
    "divisor",
    "bytes",
    "bits",
    "text",
    "square",
    "number",
    "elsewhere",
    "assigned",
    "ungraded",
    "autocast",
    "function",
    "constant",
)


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_what_is_not_plain_is_left_to_torch_export(kind: str) -> None:
    module, met = Odd(kind), ["before"]
    weights, call = dict(module.named_parameters()), nn.Module.__call__
    with custom_functions.with_gradients(met):
        program = traced(module, [torch.randn(4, 6)], [True], met)
    assert (program is None) == (kind != "")
    assert met == ["before"]
    assert module.last is None
    assert all(parameter is weights[name] for name, parameter in module.named_parameters())
    assert nn.Module.__call__ is call


def test_weights_that_are_tied_are_left_to_torch_export() -> None:
    module = Odd("")
    module.other = nn.Linear(6, 6)
    module.other.weight = module.linear.weight
    assert traced(module, [torch.randn(4, 6)], [True], []) is None
