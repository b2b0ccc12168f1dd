"""What operators keep from forward for backward, and whose memory they may take: the results stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tile_checks import CONTEXT, Case, sums_operator
from torch import Tensor, nn

from manyhands.executor.tile_call import BoxTensor, ForwardCall, InputGradientCall, Notes, WeightGradientCall
from manyhands.facts.boxes import Box
from manyhands.facts.profile import Kernel

FORMATS = [torch.contiguous_format, torch.channels_last]
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "halving": lambda x: F.max_pool2d(x, 2),
    "overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
    "dilated": lambda x: F.max_pool2d(x, (2, 3), 1, 1, 2),
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("what", POOLS)
def test_places_kept_forward_are_those_found_again(what: str, layout: torch.memory_format) -> None:
    case = Case.of(POOLS[what], (3, 12, 14))
    whole = next(iter(case.inputs.values())).mul(1.5).round().contiguous(memory_format=layout)  # many equals
    leaf = whole.clone().requires_grad_()
    made = POOLS[what](leaf)
    made.backward(case.gradient)  # type: ignore[no-untyped-call]
    operator, out, notes = case.operator(), Box.whole(made.shape), Notes()
    source = BoxTensor(Box.whole(whole.shape), whole)
    assert torch.equal(operator.forward(ForwardCall([source], out, CONTEXT, notes=notes)), made)
    smaller = out.replace(2, (1, 4))
    for box in (out, smaller):  # backward may be over another box: nothing kept is of use then
        gradient = case.gradient[box.slices()]
        (found,) = operator.input_gradients(
            InputGradientCall([source], None, gradient, box, [True], CONTEXT, notes=notes)
        )
        (again,) = operator.input_gradients(InputGradientCall([source], None, gradient, box, [True], CONTEXT))
        assert found is not None
        assert again is not None
        assert found.box == again.box
        assert torch.equal(found.tensor, again.tensor)
        if box == out:
            inside = found.box.intersect(source.box)
            assert leaf.grad is not None
            assert torch.equal(found.view(inside), leaf.grad[inside.slices()])


def test_places_are_kept_where_they_were_found() -> None:
    """Nothing is kept of windows that are taken apart, and with the places the input's values are not read."""
    case = Case.of(POOLS["overlapping"], (3, 12, 14))
    operator, out, notes = case.operator(), Box.whole(case.made.shape), Notes()
    (whole,) = case.inputs.values()
    source = BoxTensor(Box.whole(whole.shape), whole.clone())
    operator.forward(ForwardCall([source], out, CONTEXT, notes=notes))
    assert [held.box for held in notes.values()] == [out]
    source.tensor.fill_(float("nan"))
    (found,) = operator.input_gradients(
        InputGradientCall([source], None, case.gradient, out, [True], CONTEXT, notes=notes)
    )
    assert found is not None
    (wanted,) = case.input_gradients.values()
    assert torch.equal(found.view(source.box), wanted)


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("function", [F.relu, lambda x: F.leaky_relu(x, 0.1), torch.sigmoid, torch.tanh])
def test_activations_in_place(function: Callable[[Tensor], Tensor], layout: torch.memory_format) -> None:
    case = Case.of(function, (3, 8, 11))
    operator, out = case.operator(), Box.whole(case.made.shape)
    (whole,), (wanted,) = case.inputs.values(), case.input_gradients.values()
    data, gradient = whole.contiguous(memory_format=layout).clone(), case.gradient.contiguous(memory_format=layout)
    made = operator.forward(ForwardCall([BoxTensor(out, data)], out, CONTEXT, may_overwrite=True))
    assert made.data_ptr() == data.data_ptr()
    assert torch.allclose(made, case.made, rtol=0, atol=1e-14)
    given = gradient.clone()
    (found,) = operator.input_gradients(
        InputGradientCall([None], BoxTensor(out, made), given, out, [True], CONTEXT, may_overwrite=True)
    )
    assert found is not None
    assert torch.allclose(found.tensor, wanted, rtol=0, atol=1e-14)


def test_a_view_with_gaps_is_not_written_to() -> None:
    case = Case.of(F.relu, (3, 8, 11))
    operator, out = case.operator(), Box.whole(case.made.shape)
    room = F.pad(case.gradient, (1, 1, 1, 1))
    given = room[:, :, 1:-1, 1:-1]
    (found,) = operator.input_gradients(
        InputGradientCall([None], BoxTensor(out, case.made), given, out, [True], CONTEXT, may_overwrite=True)
    )
    assert found is not None
    assert torch.equal(given, case.gradient)
    assert torch.equal(found.tensor, next(iter(case.input_gradients.values())))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_over_the_memory_of_its_gradient(affine: bool, layout: torch.memory_format) -> None:
    case = Case.of(nn.BatchNorm2d(6, affine=affine), (6, 9, 12))
    operator, out = sums_operator(case), Box.whole(case.made.shape)
    (whole,), (wanted,) = case.inputs.values(), case.input_gradients.values()
    source = [BoxTensor(out, whole.contiguous(memory_format=layout))]
    gradient = case.gradient.contiguous(memory_format=layout).clone()
    state = operator.combine([operator.local_statistics(source, out)], [9 * 12])
    total = operator.local_backward_statistics(source, BoxTensor(out, gradient), out, state)
    operator.weight_gradients(WeightGradientCall(source, gradient, out, CONTEXT, statistics=state))
    (found,) = operator.input_gradients(
        InputGradientCall(
            source,
            None,
            gradient,
            out,
            [True],
            CONTEXT,
            may_overwrite=True,
            statistics=state,
            total=total,
            corrected=out,
        )
    )
    assert found is not None
    assert found.tensor.data_ptr() == gradient.data_ptr()
    assert torch.allclose(found.tensor, wanted, rtol=0, atol=1e-12)
    for name, one in case.weight_gradients.items():
        grown = operator.weights.tensors[name].grad
        assert grown is not None
        assert torch.allclose(grown, one, rtol=0, atol=1e-12), name


def test_weight_gradients_of_micro_batches_add_up() -> None:
    """What becomes a weight's gradient is given away: the next micro-batch adds to it."""
    case = Case.of(nn.BatchNorm2d(6), (6, 9, 12))
    operator, out = sums_operator(case), Box.whole(case.made.shape)
    source = [BoxTensor(out, next(iter(case.inputs.values())))]
    for _ in range(2):
        state = operator.combine([operator.local_statistics(source, out)], [9 * 12])
        operator.local_backward_statistics(source, BoxTensor(out, case.gradient), out, state)
        operator.weight_gradients(WeightGradientCall(source, case.gradient, out, CONTEXT, statistics=state))
    for name, one in case.weight_gradients.items():
        found = operator.weights.tensors[name].grad
        assert found is not None
        assert torch.allclose(found, 2 * one, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("kernel", [None, Kernel(), Kernel(channels_last=True)])
def test_both_gradients_of_a_convolution(kernel: Kernel | None) -> None:
    case = Case.of(nn.Conv2d(4, 6, 3, padding=1), (4, 9, 12))
    operator, out = case.operator(kernel), Box.whole(case.made.shape)
    ((name, whole),) = case.inputs.items()
    upper = out.replace(2, (0, 5))
    lower = out.replace(2, (5, 9))
    total = torch.zeros_like(whole)
    for box in (upper, lower):
        demand = operator.demand(0, box)
        source = BoxTensor(demand, whole[demand.slices()])
        gradient = case.gradient[box.slices()]
        operator.weight_gradients(WeightGradientCall([source], gradient, box, CONTEXT))
        (found,) = operator.input_gradients(InputGradientCall([source], None, gradient, box, [True], CONTEXT))
        assert found is not None
        assert found.box.intervals[3] == (0, 12)  # as much padding on both sides: none comes back
        common = found.box.intersect(Box.whole(whole.shape))
        total[common.slices()] += found.view(common)
    assert torch.allclose(total, case.input_gradients[name], rtol=0, atol=1e-12)
    for weight, one in case.weight_gradients.items():
        grown = operator.weights.tensors[weight].grad
        assert grown is not None
        assert torch.allclose(grown, one, rtol=0, atol=1e-12), weight
