"""Operators that are not run: what is advised in their place runs, and gives the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.facts.errors import CaptureFailed
from manyhands.graph import ops
from manyhands.graph.capture import capture
from manyhands.graph.piece import Piece
from manyhands.graph.replacements import OTHERS, SAME, advice
from manyhands.graph.weights import Weights

N, K = 5, 2
SPREAD = torch.linspace(-3.3, 3.9, 24, dtype=torch.float64).reshape(4, 6)
INSIDE, ABOVE = SPREAD / 10, SPREAD.abs() + 1.1
SQUARE = torch.linspace(-1, 1, 4 * 9, dtype=torch.float64).reshape(4, 3, 3)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "addmv": (torch.addmv, (SPREAD[:, 0], SPREAD, SPREAD[0])),
    "cdist": (torch.cdist, (SQUARE, SQUARE.flip(2))),
    "median": (lambda x: x.median(1)[0], (SPREAD.flip(1),)),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), (SPREAD, SPREAD.T.contiguous())),
}  # fmt: skip


class Advised(nn.Module):
    """Runs what is advised, as somebody would write it."""

    def __init__(self, written: str, names: str, fixed: dict[str, Tensor]) -> None:
        super().__init__()
        self.written, self.names, self.fixed = written, names, fixed

    def forward(self, *given: Tensor) -> Any:
        known = {"torch": torch, "math": math, "F": functional, "n": N, "k": K, **self.fixed}
        return eval(self.written, known | dict(zip(self.names, given)))  # noqa: S307


def test_every_advice_is_tried() -> None:
    assert set(CASES) == set(SAME)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", sorted(SAME))
def test_what_is_advised_runs_and_gives_the_same(name: str) -> None:
    refused, given = CASES[name]
    named = dict(zip("xyz", given))
    batched = {key: one for key, one in named.items() if one.shape[0] == 4}
    fixed = {key: one for key, one in named.items() if key not in batched}
    graph = capture(Advised(SAME[name], "".join(batched), fixed), tuple(batched.values()))
    inputs = {spec.name: tensor for spec, tensor in zip(graph.inputs, batched.values(), strict=True)}
    found = Piece(graph, Weights.copied(graph))(inputs)
    expected = refused(*given)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for leaf, one in zip(graph.outputs, expected, strict=True):
        torch.testing.assert_close(found[leaf], one, rtol=1e-9, atol=1e-9, check_dtype=False)


def test_nothing_is_advised_against_itself() -> None:
    for name in OTHERS:
        assert f"aten.{name}.default" not in ops.ALLOWED, name


class Uses(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("call", "operator", "hint"),
    [
        (lambda x: torch.special.bessel_j0(x), "special_bessel_j0", "Write it with other operators of torch."),
        (lambda x: x.median(1)[0], "median", "Write torch.sort(x, dim=1)"),
        (lambda x: x + torch.randperm(6), "randperm", "torch.randn_like(x)"),
    ],
    ids=["unknown", "same", "other"],
)
def test_the_refusal_names_operator_line_and_what_to_write(call: Any, operator: str, hint: str) -> None:
    with pytest.raises(CaptureFailed, match=rf"The operator {operator} \(aten\.{operator}\.") as caught:
        capture(Uses(call), torch.randn(4, 6))
    first = call.__code__.co_firstlineno
    assert f"{__file__}:{first}:\n    (lambda x: " in caught.value.message, "the user's own file, whole"
    assert hint in caught.value.hint
    assert "ops.py" not in str(caught.value), "nobody is sent to our source"
    assert "report this message" in caught.value.hint


def test_a_layer_of_torch_is_named_where_there_is_no_line() -> None:
    with pytest.raises(CaptureFailed, match=r"The operator fractional_max_pool2d .*\n  at layer '1'"):
        capture(nn.Sequential(nn.Conv2d(1, 2, 3), nn.FractionalMaxPool2d(2, output_size=2)), torch.randn(4, 1, 8, 8))


def test_writing_to_a_part_of_a_tensor() -> None:
    assert advice("aten.index_fill_.int_Tensor").startswith("Write torch.where(mask, value, x)")
