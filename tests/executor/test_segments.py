"""A stage cut into segments gives what it gives in one piece, and knows where numbers stopped being numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import relative
from manyhands.executor.segment_micro_batch import SegmentMicroBatch
from manyhands.executor.segments import Segments, bounds_of, node_input
from manyhands.executor.statistics import merged, own_moments
from manyhands.graph.graph import Graph
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs
from manyhands.graph.weights import Weights
from manyhands.schedule.actions import Backward, Forward, Reduce, Step
from small_networks import batches_of, captured
from tape import CapturedLoss

CONTEXT = Context(seed=3, step=2)


def norms_of(graph: Graph) -> list[int]:
    return [place for place, op in enumerate(graph.network.ops) if op.statistics]


def segments_of(graph: Graph, bounds: set[int], norms: list[int]) -> tuple[Segments, Weights]:
    weights = Weights.copied(graph)
    whole = {0, len(graph.nodes)} | bounds | {end for op in norms for end in (op, op + 1)}
    return Segments(graph, weights, whole, kernels={}, shared_norms=norms), weights


def forward(segments: Segments, batch: SegmentMicroBatch, norms: list[int], context: Context = CONTEXT) -> None:
    """Up to each shared norm, its statistics, and on."""
    start = 0
    for op in norms:
        segments.forward(batch, start, op, context)
        batch.moments[op] = merged([own_moments(batch.values[segments.norms[op].input])])
        start = op
    segments.forward(batch, start, len(segments.graph.nodes), context)


def backward(segments: Segments, batch: SegmentMicroBatch, norms: list[int]) -> None:
    high = len(segments.graph.nodes)
    for op in reversed(norms):
        segments.backward(batch, op + 1, high)
        norm = segments.norms[op]
        data, gradient = batch.tapes[op].data, batch.gradients[norm.output]
        assert data is not None
        scaled, own = norm.own_sums(data, gradient, batch.moments[op])
        batch.scaled[op] = (scaled, own, [own])
        high = op + 1
    segments.backward(batch, 0, high)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("name", ["small", "skips", "pair", "norms"])
@settings(max_examples=15)
@given(data=st.data())
def test_any_cuts_give_the_same(name: str, data: st.DataObject) -> None:
    graph = captured(name)
    bounds = data.draw(st.sets(st.integers(0, len(graph.nodes))))
    norms = sorted(data.draw(st.sets(st.sampled_from(norms_of(graph))))) if norms_of(graph) else []
    inputs, targets = batches_of(name, 1, 5)[0]
    named = bind_inputs(graph, inputs)

    weights = Weights.copied(graph)
    values = Piece(graph, weights)(named, CONTEXT)
    _, gradients = CapturedLoss(graph)(values, targets)
    torch.autograd.backward([values[n] for n in gradients], list(gradients.values()))

    segments, own = segments_of(graph, bounds, norms)
    batch = SegmentMicroBatch(values=dict(named))
    forward(segments, batch, norms)
    for output in graph.outputs:
        assert relative(batch.values[output], values[output].detach()) <= 1e-12
    batch.add_gradients({output: gradient.clone() for output, gradient in gradients.items()})
    backward(segments, batch, norms)
    for weight, tensor in weights.tensors.items():
        found = own.tensors[weight]
        assert relative(found.detach(), tensor.detach()) <= 1e-12, weight  # buffers too
        assert (found.grad is None) == (tensor.grad is None), weight
        if tensor.grad is not None:
            assert found.grad is not None
            assert relative(found.grad, tensor.grad) <= 1e-10, weight
    assert not batch.tapes, "what backward has passed is let go"
    assert not batch.moments
    assert not batch.scaled
    assert not [name for name in batch.gradients if name in graph.network.producer], "nobody reads these any more"


def test_evaluation_keeps_nothing_for_backward() -> None:
    graph = captured("small")
    segments, weights = segments_of(graph, {3, 6}, [])
    before = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
    inputs, _ = batches_of("small", 1, 3)[0]
    batch = SegmentMicroBatch(values=bind_inputs(graph, inputs))
    segments.forward(batch, 0, len(graph.nodes), Context(training=False))
    assert not batch.tapes
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.tensors.items())


def test_bounds_are_where_actions_begin_and_end() -> None:
    actions = [Forward(0, 0, 0, 7), Forward(0, 1, 7, 12), Backward(0, 0, 8, 12), Backward(0, 0, 0, 8), Step(0)]
    assert bounds_of(actions, []) == {0, 7, 8, 12}
    statistics = Reduce(0, "statistics", 4, 5, ("a", "b"), 8, 0)
    assert bounds_of([*actions, statistics], [4]) == {0, 4, 5, 7, 8, 12}


def test_the_first_tensor_an_operator_reads() -> None:
    graph = captured("small")
    node = next(node for node in graph.nodes if node.target == "aten.batch_norm.default")
    assert node_input(node) == graph.network.ops[graph.nodes.index(node)].inputs[0]


# Numbers that are none


def first_bad(graph: Graph, batch: SegmentMicroBatch, segments: Segments) -> str:
    """The layer, or the input, where it began."""
    tensor = segments.first_not_finite(batch, CONTEXT)
    if tensor is None:
        return ""
    made = graph.network.producer.get(tensor)
    return tensor if made is None else graph.network.layers[graph.network.layer_of_op[made]].name


@pytest.mark.parametrize("cuts", [set(), {2}, {3, 5}, {1, 2, 3, 4, 5, 6, 7}], ids=str)
def test_a_logarithm_of_a_negative_number_is_found(cuts: set[int]) -> None:
    graph = captured("logs")
    segments, weights = segments_of(graph, cuts, [])
    batch = SegmentMicroBatch(values={"x": torch.ones(2, 6, dtype=torch.float64)})
    segments.forward(batch, 0, len(graph.nodes), CONTEXT)
    assert first_bad(graph, batch, segments) == ""
    with torch.no_grad():
        weights.tensors["b.bias"].fill_(-100.0)
    segments.forward(batch, 0, len(graph.nodes), CONTEXT)
    assert first_bad(graph, batch, segments) == "log"


@pytest.mark.parametrize("weight", ["b.weight", "d.bias"])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_weight_that_is_no_number_is_found(weight: str, number: float) -> None:
    graph = captured("logs")
    segments, weights = segments_of(graph, {2, 5}, [])
    with torch.no_grad():
        weights.tensors[weight].view(-1)[0] = number
    batch = SegmentMicroBatch(values={"x": torch.ones(2, 6, dtype=torch.float64)})
    segments.forward(batch, 0, len(graph.nodes), CONTEXT)
    assert first_bad(graph, batch, segments) == weight.split(".")[0]


def test_looking_for_it_changes_nothing() -> None:
    graph = captured("norms")
    norms = norms_of(graph)
    segments, weights = segments_of(graph, {4}, norms)
    inputs, _ = batches_of("norms", 1, 4)[0]
    inputs[1, 0, 2, 2] = float("nan")
    batch = SegmentMicroBatch(values=bind_inputs(graph, inputs))
    forward(segments, batch, norms)
    before = {name: tensor.detach().clone() for name, tensor in weights.tensors.items()}
    assert first_bad(graph, batch, segments) == "x"
    assert all(torch.equal(t, before[n]) or bool(t.isnan().any()) for n, t in weights.tensors.items())


@pytest.mark.parametrize("is_shared", [False, True])
def test_batch_norms_on_the_way_are_run_as_they_were(is_shared: bool) -> None:
    graph = captured("norms")
    norms = norms_of(graph) if is_shared else []
    segments, weights = segments_of(graph, set(), norms)
    with torch.no_grad():
        weights.tensors["d.weight"][0, 0] = float("inf")
    inputs, _ = batches_of("norms", 1, 4)[0]
    batch = SegmentMicroBatch(values=bind_inputs(graph, inputs))
    forward(segments, batch, norms)
    assert first_bad(graph, batch, segments) == "d"
