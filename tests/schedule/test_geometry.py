"""The boxes of a stage, checked by computing with them: every device in NaN-filled buffers, against the whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cropped import Mixed, Plain, Split, Whole, captured, part
from torch import Tensor

from hand_made import chain
from manyhands.facts.moves import Move, volume
from manyhands.facts.plan import ByChannels, BySamples, Plan, Share, Stage
from manyhands.facts.plan_check import resolve
from manyhands.graph.graph import Graph
from manyhands.schedule.geometry import StageGeometry

SAMPLES = 2
NETWORKS: dict[str, tuple[type, int, int]] = {
    "mixed 13x11": (Mixed, 13, 11),
    "plain 23x14": (Plain, 23, 14),
}


@cache
def graph_of(name: str) -> Graph:
    module, rows, columns = NETWORKS[name]
    return captured(module(), rows, columns)


@cache
def whole_of(name: str) -> Whole:
    _, rows, columns = NETWORKS[name]
    torch.manual_seed(1)
    return Whole.run(graph_of(name), torch.randn(SAMPLES, 2, rows, columns, dtype=torch.float64))


def geometry_of(graph: Graph, share: Share, count: int) -> StageGeometry:
    """One stage with this share."""
    network = graph.network
    stage = Stage((0, len(network.layers)), tuple(f"d{i}" for i in range(count)), share)
    return StageGeometry(resolve(Plan(network.name, SAMPLES, (stage,)), network), 0, network)


def run(name: str, geometry: StageGeometry) -> Split:
    whole = whole_of(name)
    entering = {name: whole.values[name].detach() for name in geometry.network.inputs}
    split = Split(graph_of(name), geometry, entering)
    split.forward()
    return split


def assert_close(got: Tensor, expected: Tensor, what: str) -> None:
    assert not got.isnan().any(), f"{what} has {int(got.isnan().sum())} NaN"
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def assert_forward_is_exact(name: str, split: Split) -> None:
    whole, geometry = whole_of(name), split.geometry
    for device in geometry.devices:
        for tensor, box in geometry.computed[device].items():
            expected = part(whole.values[tensor].detach(), box)
            assert_close(part(split.values[device][tensor], box), expected, f"{device} {tensor}{box}")
    for tensor in geometry.network.outputs:
        assert geometry.owned(tensor).is_partition(geometry.shape(tensor))
        for device, box in geometry.owned(tensor).pieces():
            assert_close(part(split.values[device][tensor], box), part(whole.values[tensor].detach(), box), tensor)


def leaving_of(name: str, geometry: StageGeometry) -> dict[str, Tensor]:
    """Gradients that come back to the stage: of the sum of squares of the network's outputs."""
    return {tensor: 2 * whole_of(name).values[tensor].detach() for tensor in geometry.network.outputs}


def assert_gradients_are_exact(name: str, split: Split, entering: dict[str, Tensor]) -> None:
    whole, geometry = whole_of(name), split.geometry
    for tensor, gradient in entering.items():
        expected = whole.values[tensor].grad
        assert expected is not None
        assert_close(gradient, expected, f"gradient of {tensor}")
    for weight in geometry.network.weights_of(geometry.first, geometry.last):
        expected = whole.weights[weight].grad
        if expected is not None:
            terms = [split.weights[device][weight].grad for device in geometry.devices]
            got = sum((term for term in terms if term is not None), torch.zeros_like(expected))
            assert_close(got, expected, f"gradient of {weight}")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 1, 1), (1, 3)])
def test_channels_compute_the_whole(name: str, sizes: tuple[int, ...]) -> None:
    geometry = geometry_of(graph_of(name), ByChannels(sizes), len(sizes))
    split = run(name, geometry)
    assert_forward_is_exact(name, split)
    entering = split.backward(leaving_of(name, geometry))
    assert_gradients_are_exact(name, split, entering)


def test_the_checks_would_notice_a_box_that_is_too_small() -> None:
    """The interpreter's own proof: take one column off one fetch, and a NaN is found."""
    geometry = geometry_of(graph_of("plain 23x14"), ByChannels((1, 1)), 2)
    group = next(group for group in geometry.groups if group.fetches)
    name, found = next(iter(group.fetches.items()))
    start, stop = found[0].box.intervals[3]
    less = Move(found[0].source, found[0].target, found[0].box.replace(3, (start, stop - 1)))
    group.fetches[name] = (less, *found[1:])
    with pytest.raises(AssertionError, match="lacks a part of"):
        run("plain 23x14", geometry)


# What moves, by count


def chain_geometry(share: Share) -> StageGeometry:
    network = chain(4)
    plan = Plan("chain", SAMPLES, (Stage((0, len(network.layers)), ("d0", "d1"), share),))
    return StageGeometry(resolve(plan, network), 0, network)


def test_by_samples_nothing_is_exchanged_inside() -> None:
    geometry = chain_geometry(BySamples((1, 1)))
    assert [group.fetches for group in geometry.groups] == [{}]
    assert geometry.fractions("d0") == geometry.backward_fractions("d0") == (0.5,) * 4
    assert str(geometry.entering("x").hull("d1")) == "[1:2,0:4,0:8,0:6]"
    assert geometry.loss_devices == ("d0", "d1")


def test_by_channels_a_dense_operator_fetches_the_others() -> None:
    geometry = chain_geometry(ByChannels((3, 1)))
    assert [sum(map(volume, group.fetches.values())) for group in geometry.groups] == [0, 384, 384, 384]
    assert geometry.fractions("d0") == (0.75,) * 4
