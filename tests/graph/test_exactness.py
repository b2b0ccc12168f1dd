"""Where a captured graph could silently differ from its module: noise at rest, buffers, gradient regions, aliases."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_checks import assert_close, assert_same, by_module, by_pieces, flat, settled
from torch import Tensor, nn

from manyhands.facts.errors import BadValue, CaptureFailed
from manyhands.graph.capture import capture
from manyhands.graph.describe import describe, fingerprint
from manyhands.graph.document import from_document, state_of, to_document
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.weights import Weights
from manyhands.models import registry
from tape import backward, forward


class Calls(nn.Module):
    """A module whose forward is a function, for short examples."""

    def __init__(self, function: Callable[..., Any], **own: Any) -> None:
        super().__init__()
        self.function = function
        for name, thing in own.items():
            if isinstance(thing, Tensor) and not isinstance(thing, nn.Parameter):
                self.register_buffer(name, thing)
            else:
                setattr(self, name, thing)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def total(outputs: Any, target: Tensor) -> Tensor:
    return sum((leaf.square().mean() for leaf in flat(outputs)), target.sum() * 0)


def check(module: nn.Module, x: Tensor, *, evaluates: bool = True) -> Graph:
    """Training steps and evaluation of graph and module agree."""
    module = module.double()
    target = torch.zeros(len(x))
    graph = capture(module, x, loss=total, target=target)
    assert_same(by_pieces(graph, (1,), x, target), by_module(module, graph, x, target, total))
    own, weights = copy.deepcopy(module), Weights.copied(graph)
    for _ in range(3):  # what one step leaves in buffers the next one reads
        values, tape = forward([Piece(graph, weights)], bind_inputs(graph, x))
        backward(tape, {name: torch.ones_like(values[name]) for name in graph.outputs})
        wanted = own(x)
        total(wanted, target).backward()
        assert_close(flat(outputs_of(graph, values))[0], flat(wanted)[0].detach(), "output")
    for name, buffer in own.named_buffers():
        assert_close(weights.tensors[name], buffer, name)
        assert not weights.tensors[name].requires_grad
    if evaluates:
        assert_close(evaluated(graph, weights, x), own.eval()(x).detach(), "evaluation")
    return graph


def evaluated(graph: Graph, weights: Weights, x: Tensor, seed: int = 0) -> Tensor:
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    values, _ = forward([Piece(graph, weights)], bind_inputs(graph, x), Context(training=False, seed=seed))
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in before.items())
    output = outputs_of(graph, values)
    assert isinstance(output, Tensor)
    return output


# Noise at rest


@pytest.mark.slow
def test_stochastic_depth_evaluates_as_the_module_does() -> None:
    torch.manual_seed(0)
    module = registry.build("efficientnet-b1", num_classes=10).double()
    x = randn(4, 3, 48, 48)
    settled(module, x)
    graph = capture(module, x)
    assert any("bernoulli" in node.target for node in graph.nodes)
    wanted = module.eval()(x).detach()
    assert float(wanted.abs().max()) > 1e-3
    weights = Weights.copied(graph)
    assert_close(evaluated(graph, weights, x), wanted, "output")
    assert torch.equal(evaluated(graph, weights, x), evaluated(graph, weights, x, seed=5))


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda self, x: torch.bernoulli(x.sigmoid()), lambda x: x.sigmoid()),
        (lambda self, x: torch.bernoulli(x, 0.3), lambda x: torch.full_like(x, 0.3)),
        (lambda self, x: torch.empty_like(x).bernoulli_(0.25), lambda x: torch.full_like(x, 0.25)),
        (lambda self, x: torch.rand_like(x, dtype=torch.float32), lambda x: torch.full_like(x, 0.5).float()),
        (lambda self, x: x + torch.randn_like(x), lambda x: x),
    ],
    ids=["bernoulli", "bernoulli.p", "bernoulli_", "rand_like", "randn_like"],
)
def test_in_evaluation_noise_is_its_expectation(
    function: Callable[..., Any], wanted: Callable[[Tensor], Tensor]
) -> None:
    graph = capture(Calls(function), randn(2, 3))
    assert_close(evaluated(graph, Weights.copied(graph), randn(4, 3)), wanted(randn(4, 3)), "output")


def test_a_coin_of_probability_one_written_as_an_integer() -> None:
    graph = capture(Calls(lambda self, x: x * torch.zeros_like(x).bernoulli_(1)), randn(2, 3))
    made = Piece(graph, Weights.copied(graph))(bind_inputs(graph, randn(4, 3)))
    assert torch.equal(made[graph.outputs[0]], randn(4, 3))


# Buffers


class Ema(nn.Module):
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        self.ema = 0.9 * self.ema + 0.1 * h.mean(0).detach()
        return h - self.ema


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("nested", [False, True])
def test_a_buffer_that_is_assigned_anew(nested: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Ema()) if nested else Ema()
    graph = check(module, randn(4, 6))
    (update,) = (node for node in graph.nodes if node.updates)
    assert update.updates == ("1.ema" if nested else "ema")
    assert module.get_buffer(update.updates).count_nonzero() == 0
    assert from_document(to_document(graph), state_of(graph)).nodes == graph.nodes


def test_a_buffer_only_written_is_kept_up_to_date() -> None:
    def last(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        self.last = h.mean(0).detach()
        return h

    check(Calls(last, linear=nn.Linear(6, 3), last=torch.zeros(3)), randn(4, 6))


def test_a_buffer_keeps_its_shape() -> None:
    def grows(self: Any, x: Tensor) -> Tensor:
        self.last = x.detach()
        return x * 2

    with pytest.raises(CaptureFailed, match="buffer 'last'"):
        capture(Calls(grows, last=torch.zeros(1, 3)), randn(2, 3))


class WritesPart(nn.Module):
    buf: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buf", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.buf[0].add_(1.0)
        return x * self.buf.sum()


def test_a_buffer_moved_to_another() -> None:
    def moves(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        result = h + self.before
        self.before = self.now.clone() if self.clones else self.now
        self.now = h.mean(0).detach()
        return result

    module = Calls(moves, linear=nn.Linear(6, 3), now=torch.zeros(3), before=torch.zeros(3), clones=True)
    check(module, randn(4, 6))
    module.clones = False
    now = module.now
    with pytest.raises(CaptureFailed, match=r"clone\(\)"):
        capture(module, randn(4, 6))
    assert module.now is now


def test_a_part_of_a_buffer_is_not_written() -> None:
    line = WritesPart.forward.__code__.co_firstlineno + 1
    with pytest.raises(CaptureFailed, match=f"(?s)view of 'buf'.*test_exactness.py:{line}"):
        capture(WritesPart(), randn(2, 3))


def test_a_buffer_written_with_a_live_value_never_takes_part_in_gradients() -> None:
    def live(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        self.seen.copy_(h.mean(0))
        return h

    module = Calls(live, linear=nn.Linear(6, 3), seen=torch.zeros(3)).double()
    graph = capture(module, randn(4, 6))
    weights = Weights.copied(graph)
    for _ in range(2):
        values, tape = forward([Piece(graph, weights)], bind_inputs(graph, randn(4, 6)))
        backward(tape, {name: torch.ones_like(values[name]) for name in graph.outputs})
    assert not weights.tensors["seen"].requires_grad
    assert_close(weights.tensors["seen"], module.linear(randn(4, 6)).mean(0).detach(), "seen")


# Without gradients


def test_no_grad_regions_save_nothing_and_are_marked() -> None:
    def teacher(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x).sigmoid()
            self.ema.mul_(0.9).add_(wanted.mean(0), alpha=0.1)
        return self.student(x) * wanted

    module = Calls(teacher, teacher=nn.Linear(6, 3), student=nn.Linear(6, 3), ema=torch.zeros(3))
    graph = check(module, randn(4, 6))
    marked = {node.target for node in graph.nodes if node.without_gradient}
    assert {"aten.linear.default", "aten.sigmoid.default"} <= marked
    network = describe(graph)
    by_name = {op.name: op for op in network.ops}
    for node in graph.nodes:
        if node.without_gradient:
            assert (by_name[node.name].saved_bytes, by_name[node.name].saved_fixed_bytes) == (0, 0)
            assert not any(network.tensors[name].differentiable for name in by_name[node.name].outputs)
    again = from_document(to_document(graph), state_of(graph))
    assert again.nodes == graph.nodes
    assert fingerprint(again) == fingerprint(graph)


def test_describing_does_not_depend_on_the_gradient_mode_around() -> None:
    graph = capture(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3))
    with torch.no_grad():
        inside = describe(graph)
        captured = capture(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(2, 3))
    assert inside == describe(graph)
    assert any(op.saved_bytes for op in inside.ops)
    assert not any(node.without_gradient for node in captured.nodes)


def test_writing_under_no_grad_to_what_gradients_flow_through() -> None:
    def scales(self: Any, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        with torch.no_grad():
            h.mul_(2.0)
        return h

    with pytest.raises(CaptureFailed, match="no_grad"):
        capture(Calls(scales, linear=nn.Linear(3, 3)), torch.randn(2, 3))


# Names


def test_a_child_called_loss_keeps_its_name() -> None:
    module = Calls(lambda self, x: self.loss(x) + self.inner(x) + self.weight, loss=nn.Linear(6, 3),
                   inner=nn.Linear(6, 3), weight=nn.Parameter(torch.randn(3)))  # fmt: skip
    graph = check(module, randn(4, 6))
    wanted = {name for name, _ in module.named_parameters()}
    assert {spec.name for spec in graph.weights} == wanted
    assert {node.module for node in graph.nodes} >= {"loss", "inner"}


def test_weights_of_a_loss_are_named_as_in_the_loss() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return ((output - target).square() * self.scale).mean()

    graph = capture(nn.Linear(3, 3), torch.randn(2, 3), loss=Scaled(), target=torch.randn(2, 3))
    assert graph.loss is not None
    assert [spec.name for spec in graph.loss.weights] == ["scale"]


def test_input_names_are_plain() -> None:
    module = Calls(lambda self, x: self.linear(x["my input"]) + x["my-input"], linear=nn.Linear(3, 3))
    graph = capture(module, {"my input": torch.randn(2, 3), "my-input": torch.randn(2, 3)})
    assert [spec.name for spec in graph.inputs] == ["my_input", "my_input_2"]
    batch = {"my input": torch.randn(4, 3), "my-input": torch.randn(4, 3)}
    assert torch.equal(bind_inputs(graph, batch)["my_input_2"], batch["my-input"])


# Masks and merged axes


def test_dropout_where_samples_are_interleaved_is_refused() -> None:
    def inner(self: Any, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(5 * x.shape[0], 8)
        return self.drop(rows.relu()).view(5, x.shape[0], 8).transpose(0, 1)

    with pytest.raises(CaptureFailed, match="batch first"):
        capture(Calls(inner, drop=nn.Dropout(0.5)), randn(3, 5, 8))
    still = capture(Calls(inner, drop=nn.Identity()), randn(3, 5, 8))
    assert [op.mixes_samples for op in still.network.ops] == [False] * 5, "each row stays with its sample"


def test_dropout_on_rows_of_whole_samples_is_drawn_by_sample() -> None:
    def outer(self: Any, x: Tensor) -> Tensor:
        return self.drop(x.reshape(5 * x.shape[0], 8)).view(x.shape[0], 5, 8)

    graph = capture(Calls(outer, drop=nn.Dropout(0.5)), randn(3, 5, 8))
    piece, x = Piece(graph, Weights.copied(graph)), randn(4, 5, 8)
    (name,) = graph.outputs
    whole = piece({graph.inputs[0].name: x})[name]
    part = piece({graph.inputs[0].name: x[1:3]}, Context(first_sample=1))[name]
    assert torch.equal(part, whole[1:3])
    assert not any(op.mixes_samples for op in graph.network.ops)


def test_feature_dropout_needs_the_batch_in_front() -> None:
    def behind(self: Any, x: Tensor) -> Tensor:
        return F.dropout2d(x.permute(1, 2, 0).unsqueeze(-1), 0.5, self.training)

    with pytest.raises(CaptureFailed, match="axis 2"):
        capture(Calls(behind), randn(3, 5, 8))


# Operators that mix samples

Function = Callable[[Any, Tensor], Any]
MIXING: dict[str, Function] = {
    "flip": lambda self, x: self.l(x).flip(0),
    "flip both": lambda self, x: self.l(x).flip((0, 1)),
    "roll": lambda self, x: self.l(x).roll(1, 0),
    "roll all": lambda self, x: self.l(x).roll(1),
    "index": lambda self, x: self.l(x)[x.argmax(1) % 2],
    "index_select": lambda self, x: self.l(x).index_select(0, x.argmax(1) % 2),
    "gather": lambda self, x: self.l(x).gather(0, (x > 0).long()),
    "repeat": lambda self, x: self.l(x).repeat(2, 1).view(x.shape[0], 12),
    "tile": lambda self, x: self.l(x).tile(2, 1).view(x.shape[0], 12),
    "vstack": lambda self, x: torch.vstack([self.l(x), x]).view(x.shape[0], 12),
    "cat": lambda self, x: torch.cat([self.l(x), x]).view(x.shape[0], 12),
    "arange": lambda self, x: self.l(x) * torch.arange(x.shape[0]).unsqueeze(1),
    "count": lambda self, x: self.l(x) / x.shape[0],
    "full of counts": lambda self, x: self.l(x) * torch.full((6,), x.shape[0]),
    "cumsum": lambda self, x: self.l(x).cumsum(0),
    "sort": lambda self, x: self.l(x).sort(0)[0],
    "norm": lambda self, x: self.l(x) / self.l(x).norm(2, 0),
    "normalize": lambda self, x: F.normalize(self.l(x), dim=0),
    "mean": lambda self, x: self.l(x) - self.l(x).mean(0),
    "max": lambda self, x: self.l(x) - self.l(x).max(),
    "softmax": lambda self, x: self.l(x).softmax(0),
    "recurrent": lambda self, x: self.r(self.l(x).unsqueeze(1))[0].squeeze(1),
}
APART: dict[str, Function] = {
    "flip": lambda self, x: self.l(x).flip(1),
    "roll": lambda self, x: self.l(x).roll(1, -1),
    "index": lambda self, x: self.l(x)[:, torch.tensor([0, 2, 1])],
    "look up": lambda self, x: self.table[x.argmax(1)],
    "gather": lambda self, x: self.l(x).gather(1, (x > 0).long()),
    "repeat": lambda self, x: self.l(x).repeat(1, 2),
    "cat": lambda self, x: torch.cat([self.l(x), x], 1),
    "stack": lambda self, x: torch.stack([self.l(x), x]).transpose(0, 1),
    "topk": lambda self, x: self.l(x).topk(2, 1)[0],
    "sort": lambda self, x: self.l(x).sort()[0],
    "norm": lambda self, x: self.l(x) / self.l(x).norm(2, 1, keepdim=True),
    "normalize": lambda self, x: F.normalize(self.l(x), dim=1),
    "cosine": lambda self, x: F.cosine_similarity(self.l(x), x, dim=1),
    "zeros": lambda self, x: self.l(x) + torch.zeros(x.shape[0], 6),
    "var": lambda self, x: self.l(x).var(1),
    "split": lambda self, x: self.l(x).chunk(2, 1)[0] + self.l(x)[:, 3:],
    "rows": lambda self, x: self.l(x).view(2 * x.shape[0], 3).tanh().view(x.shape[0], 6),
    "recurrent": lambda self, x: self.r(self.l(x).unsqueeze(0))[0].squeeze(0),
}


def _is_apart(function: Function) -> tuple[bool, bool]:
    """Whether shares of the batch compute what the whole does, and whether the network says so."""
    module = Calls(function, l=nn.Linear(6, 6), table=torch.randn(6, 2), r=nn.GRU(6, 2)).double()
    x = randn(4, 6)
    graph = capture(module, x)
    piece = Piece(graph, Weights.copied(graph))
    whole, *parts = (piece({graph.inputs[0].name: one})[graph.outputs[0]] for one in (x, x[:2], x[2:]))
    return torch.allclose(torch.cat(parts), whole), not any(op.mixes_samples for op in graph.network.ops)


@pytest.mark.quick(every=11)
@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", MIXING)
def test_operators_that_mix_samples_are_told(name: str) -> None:
    assert _is_apart(MIXING[name]) == (False, False)


@pytest.mark.quick(every=18)
@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", APART)
def test_operators_that_keep_samples_apart_are_told(name: str) -> None:
    assert _is_apart(APART[name]) == (True, True)


# Normalisation


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, track_running_stats=False), nn.BatchNorm2d(4), nn.InstanceNorm2d(4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    ],
    ids=["batch, no statistics", "batch", "instance", "instance with statistics"],
)  # fmt: skip
def test_normalisation_in_training_and_evaluation(norm: nn.Module) -> None:
    graph = check(nn.Sequential(nn.Conv2d(2, 4, 2, bias=False), norm), randn(3, 2, 5, 5))
    assert from_document(to_document(graph), state_of(graph)).nodes == graph.nodes


# Aliases


def _outer_reader(self: Any, x: Tensor) -> Tensor:
    copy_ = self.linear(x).detach().clone()
    flat_view = copy_.view(-1)
    with torch.no_grad():
        copy_.mul_(2.0)
    return x + flat_view.view(x.shape)


def _coins(self: Any, x: Tensor) -> Tensor:
    mask = torch.zeros_like(x)
    view = mask.view(-1)
    mask.bernoulli_(1.0)
    return self.linear(x) + view.view(x.shape)


def _einsum(self: Any, x: Tensor) -> Tensor:
    h = self.linear(x).clone()
    torch.einsum("ij->ji", h).mul_(2.0)
    return h


def _dropped(self: Any, x: Tensor) -> Tensor:
    h = self.linear(x)
    z = F.dropout(h, 0.5, self.training)
    z.mul_(2.0)
    return h + z  # in evaluation z is h


@pytest.mark.parametrize("function", [_outer_reader, _coins])
def test_memory_that_is_written_is_read_anew_under_its_other_names(function: Callable[..., Any]) -> None:
    module, x = Calls(function, linear=nn.Linear(3, 3)).double(), randn(2, 3)
    graph = capture(module, x)
    outputs = Piece(graph, Weights.copied(graph))({graph.inputs[0].name: x})
    torch.testing.assert_close(outputs[graph.outputs[0]], module(x), rtol=0, atol=1e-14)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("function", [_einsum, _dropped])
def test_writes_to_what_may_be_a_view_or_not_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureFailed, match="in place through a view made by"):
        capture(Calls(function, linear=nn.Linear(3, 3)).double(), randn(2, 3))


# Attention


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], 5, heads, 4).transpose(1, 2)


MASKED = torch.ones(5, 5, dtype=torch.bool)
MASKED[2] = False


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("heads", "options"),
    [(4, {}), (2, {"enable_gqa": True}), (4, {"attn_mask": MASKED}), (4, {"is_causal": True, "scale": 0.3})],
    ids=["plain", "grouped", "fully masked row", "causal"],
)
def test_attention_that_drops_next_to_nothing_is_attention(heads: int, options: dict[str, Any]) -> None:
    def attends(self: Any, x: Tensor) -> Tensor:
        q, k = _heads(self.query(x), 4), _heads(self.key(x), heads)
        return F.scaled_dot_product_attention(q, k, k, dropout_p=1e-15, **options)

    module = Calls(attends, query=nn.Linear(8, 16), key=nn.Linear(8, heads * 4)).double()
    graph = capture(module, randn(3, 5, 8))
    made = Piece(graph, Weights.copied(graph))(bind_inputs(graph, randn(3, 5, 8)))[graph.outputs[0]]
    assert_close(made.detach(), module(randn(3, 5, 8)).detach(), "output")


# What capture() says


def test_what_cannot_be_captured_is_said_at_once() -> None:
    with pytest.raises(CaptureFailed, match="class Linear"):
        capture(nn.Linear, torch.randn(2, 3))  # type: ignore[arg-type]
    with pytest.raises(CaptureFailed, match="a function"):
        capture(total, torch.randn(2, 3))  # type: ignore[arg-type]
    with pytest.raises(CaptureFailed, match="empty"):
        capture(nn.Linear(3, 3), torch.randn(0, 3))
    with pytest.raises(BadValue, match="atoms"):
        capture(nn.Linear(3, 3), torch.randn(2, 3), granularity="atoms")


def test_a_module_that_fails_by_itself_is_not_blamed_on_control_flow(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureFailed, match=r"Does the module itself run on \(batch, 3\)") as caught:
        capture(nn.Linear(4, 3), torch.randn(2, 3))
    assert "control flow" not in str(caught.value)

    def branches(self: Any, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    with pytest.raises(CaptureFailed, match="control flow"):
        capture(Calls(branches), torch.randn(2, 3))
    assert capfd.readouterr().err == ""
    assert not logging.getLogger("torch").disabled
