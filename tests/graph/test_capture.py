"""Capture: structures of inputs and outputs, tied and frozen weights, buffers, in-place writes, and clear errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import assert_close, assert_same, by_module, by_pieces, detached, flat
from torch import Tensor, nn

from manyhands.facts.errors import CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.weights import Weights
from tape import backward, forward


def total(outputs: Any, target: Tensor) -> Tensor:
    return sum((leaf.square().mean() for leaf in flat(outputs)), target.sum() * 0)


def check(module: nn.Module, batch: Any, *, bounds: tuple[int, ...] = (1, 3), other: Any = None) -> Graph:
    """Capture, and compare a training step with the module's own, cut at `bounds`, on another batch too."""
    module = module.double()
    graph = capture(module, batch, loss=total, target=torch.zeros(_samples(batch)))
    for given in (batch, other) if other is not None else (batch,):
        target = torch.zeros(_samples(given))
        wanted = by_module(module, graph, given, target, total)
        for places in ((), bounds):
            assert_same(by_pieces(graph, places, given, target), wanted)
    return graph


def _samples(batch: Any) -> int:
    return int(flat(batch)[0].shape[0])


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


# Inputs and outputs


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(5, 4)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.a(left) + self.b(right)
        return joint, joint.relu()


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"sum": self.a(batch["x"]) + batch["more"][0], "parts": [batch["more"][1] * 2]}


@pytest.mark.slow
def test_inputs_as_tuple_and_as_keywords() -> None:
    graph = check(TwoInputs(), (randn(2, 3), randn(2, 5)), other=(randn(5, 3), randn(5, 5)))
    assert [spec.name for spec in graph.inputs] == ["left", "right"]
    # Keywords may come in any order.
    other = {"left": randn(4, 3), "right": randn(4, 5)}
    graph = check(TwoInputs(), {"right": randn(2, 5), "left": randn(2, 3)}, other=other)
    assert {spec.name for spec in graph.inputs} == {"left", "right"}


def test_one_positional_dict_with_nested_lists() -> None:
    batch = {"x": randn(2, 3), "more": [randn(2, 4), randn(2, 1)]}
    graph = check(TakesDict(), batch, other={"x": randn(3, 3), "more": [randn(3, 4), randn(3, 1)]})
    values, _ = forward([Piece(graph, Weights.copied(graph))], bind_inputs(graph, batch))
    outputs = outputs_of(graph, values)
    assert set(outputs) == {"sum", "parts"}
    assert isinstance(outputs["parts"], list)


@pytest.mark.slow
def test_an_input_may_be_returned_as_it_is() -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.a(x)
            return y, x, y

    check(Passes(), randn(2, 3), bounds=())


@pytest.mark.slow
def test_a_batch_of_one_captures_a_free_batch() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    check(module, randn(1, 1, 6, 6), other=randn(7, 1, 6, 6))


@pytest.mark.slow
def test_rows_that_are_samples_times_tokens() -> None:
    class Folds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.a(x.reshape(-1, 3)).relu()
            return rows.view(x.shape[0], 5, 4).mean(1) + rows.new_zeros(x.shape[0], 4)

    graph = check(Folds(), randn(2, 5, 3), other=randn(4, 5, 3))
    assert any(spec.rows_per_sample == 5 for node in graph.nodes for spec in node.outputs)


# Weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.words(x)))


@pytest.mark.slow
def test_tied_weights_are_one_weight_and_come_back_under_both_names() -> None:
    module = Tied()
    graph = check(module, torch.tensor([[1, 2], [3, 3], [0, 6]]), other=torch.tensor([[5, 5]]))
    assert len(graph.weights) == 3
    assert graph.aliases in ({"head.weight": "words.weight"}, {"words.weight": "head.weight"})
    weights = Weights.copied(graph)
    with torch.no_grad():
        for tensor in weights.tensors.values():
            tensor.add_(1)
    untied = Tied().double()
    untied.head.weight = nn.Parameter(torch.zeros_like(untied.head.weight))
    weights.load_into(untied, graph)
    assert torch.equal(untied.head.weight, module.words.weight + 1)
    assert torch.equal(untied.words.weight, module.words.weight + 1)
    weights.load_into(module, graph)
    assert torch.equal(module.head.weight, untied.head.weight)
    assert module.head.weight is module.words.weight


def test_shared_weights_train_the_module() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    graph = capture(module, randn(3, 3))
    values, tape = forward([Piece(graph, Weights.shared(graph, module))], {"input": randn(3, 3)})
    backward(tape, {name: torch.ones_like(values[name]) for name in graph.outputs})
    assert module[0].weight.grad is not None
    assert int(module[1].num_batches_tracked) == 1


class Averages(nn.Module):
    """Keeps its own statistics, as a user might write them."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.seen += 1
        return self.a(x - self.mean)


def test_buffers_the_user_updates() -> None:
    module = Averages()
    graph = check(module, randn(2, 3), other=randn(5, 3))
    weights = Weights.copied(graph)
    piece = Piece(graph, weights)
    before = weights.tensors["mean"].clone()
    piece({"x": randn(2, 3)}, Context(training=False))
    assert torch.equal(weights.tensors["mean"], before)
    piece({"x": randn(2, 3)}, Context(training=True))
    assert torch.equal(weights.tensors["mean"], 0.1 * randn(2, 3).mean(0))


def test_frozen_parameters_collect_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    graph = check(module, randn(2, 3))
    assert {spec.name for spec in graph.weights if not spec.trainable} == {"0.weight"}


@pytest.mark.slow
def test_frozen_batch_norm_keeps_its_statistics() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).double()
    module[1].running_mean = randn(2)
    module[1].eval()
    graph = check(module, randn(3, 1, 5, 5))
    assert not module[1].training
    assert module.training
    weights = Weights.copied(graph)
    Piece(graph, weights)({"input": randn(3, 1, 5, 5)})
    assert torch.equal(weights.tensors["1.running_mean"], module[1].running_mean)
    assert not torch.equal(weights.tensors["3.running_mean"], module[3].running_mean)


def test_a_module_in_evaluation_is_captured_for_training_and_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval()
    module[0].train()
    graph = capture(module, torch.randn(2, 3))
    assert [child.training for child in module.modules()] == [False, True, False, False]
    assert any(node.target == "aten.dropout.default" for node in graph.nodes)
    batch_norm = next(node for node in graph.nodes if node.target == "aten.batch_norm.default")
    assert batch_norm.arguments[5] is True


# Gradient regions and writes in place


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.a(x).sigmoid()
            scale = target.amax(1, keepdim=True)
        return self.b(x) * target / scale


def test_no_grad_regions_stop_gradients() -> None:
    graph = check(NoGrad(), randn(2, 3), other=randn(6, 3))
    weights = Weights.copied(graph)
    values, tape = forward([Piece(graph, weights)], {"x": randn(2, 3)})
    backward(tape, {name: torch.ones_like(values[name]) for name in graph.outputs})
    assert weights.tensors["a.weight"].grad is None


class WritesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += 1
        y = self.conv(x)
        z = y
        y += x
        y.relu_()
        z = self.norm(z)  # the old name reads what was written
        old = z * 1
        z.mul_(2).add_(old, alpha=3)
        return F.relu(z, inplace=True) + y.sigmoid()


@pytest.mark.slow
def test_writes_in_place_are_seen_by_later_readers() -> None:
    check(WritesInPlace(), randn(2, 1, 4, 4), bounds=(2, 4, 5, 6), other=randn(3, 1, 4, 4))


def test_a_cache_that_begins_empty() -> None:
    """torch.tensor([]) is detached in place, and joined with a tensor of other axes, which PyTorch lets pass."""

    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            cache = torch.tensor([], dtype=x.dtype)
            cache = torch.cat([cache, self.a(x)], dim=-2)
            return torch.cat([cache, x], dim=-2)

    check(Caches(), randn(2, 4, 3), other=randn(3, 4, 3))


def test_the_input_given_is_never_written() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.relu_())

    graph = capture(Writes().double(), randn(2, 3))
    x = randn(2, 3)
    Piece(graph, Weights.copied(graph))({"x": x})
    assert torch.equal(x, randn(2, 3))


def test_changing_the_dtype_and_place_of_a_tensor() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).to(x.device, torch.float32).to(device="cpu").double()
            return y + torch.arange(3, device=x.device, dtype=x.dtype) + torch.zeros(x.shape, device=x.device)

    check(Moves(), randn(2, 3), other=randn(4, 3))


# Errors name the line


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # mark
            return x
        return -x


class FixesBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return y.view(4, 3).sum(1)  # mark


class OffTheList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return torch.linalg.svdvals(y.unsqueeze(1))  # mark


class InnerDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.lstm(x.unsqueeze(1))[0]  # mark
        return out.squeeze(1)


class Helper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x)


def helper(x: Tensor) -> Tensor:
    y = x.abs()
    return y if bool((y > 1).all()) else x  # mark


@pytest.mark.quick(every=10)
@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize(
    ("module", "guilty"),
    [
        (Branches(), Branches.forward), (FixesBatch(), FixesBatch.forward), (OffTheList(), OffTheList.forward),
        (InnerDropout(), InnerDropout.forward), (Helper(), helper),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_errors_name_the_very_line(module: nn.Module, guilty: Callable[..., Any], nested: bool) -> None:
    whole = nn.Sequential(nn.Linear(3, 3), module) if nested else module
    with pytest.raises(CaptureFailed) as caught:
        capture(whole, torch.randn(4, 3))
    assert f"test_capture.py:{line_of(guilty, '# mark')}" in str(caught.value)


def test_off_the_list_names_the_operator() -> None:
    with pytest.raises(CaptureFailed, match="svd"):
        capture(OffTheList(), torch.randn(4, 3))


def test_inputs_and_outputs_must_be_tensors() -> None:
    with pytest.raises(CaptureFailed, match=r"the input\[1\] is a int"):
        capture(TwoInputs(), (torch.randn(2, 3), 5))

    class ReturnsNumber(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, 3

    with pytest.raises(CaptureFailed, match=r"the output\[1\] is a int"):
        capture(ReturnsNumber(), torch.randn(2, 3))
    with pytest.raises(CaptureFailed, match="no tensor with a batch axis"):
        capture(nn.ReLU(), torch.tensor(1.0))


def test_a_loss_needs_a_target_and_returns_one_number() -> None:
    with pytest.raises(CaptureFailed, match="target"):
        capture(nn.Linear(3, 3), torch.randn(2, 3), loss=F.mse_loss)
    with pytest.raises(CaptureFailed, match="one number"):
        capture(nn.Linear(3, 3), torch.randn(2, 3), loss=lambda a, b: (a - b).square(), target=torch.randn(2, 3))


def test_the_captured_output_does_not_depend_on_the_example() -> None:
    module = nn.Linear(3, 2).double()
    graph = capture(module, torch.zeros(2, 3, dtype=torch.float64))
    made = Piece(graph, Weights.copied(graph))({"input": randn(9, 3)})
    assert_close(made[graph.outputs[0]].detach(), detached(module(randn(9, 3))), "output")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both_ways", [False, True])
def test_recurrent_layers_are_captured_without_unrolling(kind: type[nn.Module], both_ways: bool) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(5, 4, batch_first=True, bidirectional=both_ways)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)[0]
            return output[:, -1]

    module = Reader().double()
    graph = capture(module, torch.randn(2, 200, 5, dtype=torch.float64))
    x = torch.randn(3, 200, 5, dtype=torch.float64)
    found = Piece(graph, Weights.copied(graph))({"x": x})[graph.outputs[0]]
    assert_close(found.detach(), module(x).detach(), "output")
    # and torch's own kernels are back in place: eager and fake shapes as before
    assert module(x).shape == (3, 8 if both_ways else 4)
