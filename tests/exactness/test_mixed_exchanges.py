"""Between two stages, however each is shared, exactly what the reader needs and did not make itself travels.

Against sets of elements: what a device needs is found element by element, from the rows and columns that each operator
reads, not from boxes.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from drawn_plans import mixed_plans
from hand_made import COLUMNS, ROWS, chain, cluster
from manyhands.facts.boxes import Box
from manyhands.facts.network import Network
from manyhands.facts.plan import BySamples, ByTiles, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.actions import Receive
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.tiles import TileGeometry

Place = tuple[int, int, int]
"""Sample, row, column; all channels go together."""
Travel = tuple[int, str, str, str, Place]
"""The stage that reads, from, to, tensor, place."""
NETWORKS = {
    "skips": chain(5, skips={3: 0, 4: 0}),
    "wide": chain(4, kernel=5),
    "statistics": chain(5, statistics=[1, 3], skips={4: 2}),
}


def places(box: Box) -> set[Place]:
    assert not box.is_empty
    samples, _, rows, columns = (range(start, stop) for start, stop in box.intervals)
    return set(product(samples, rows, columns))


def owned(geometry: StageGeometry, device: str, tensor: str) -> set[Place]:
    return {place for box in geometry.owned(tensor).boxes(device) if not box.is_empty for place in places(box)}


def around(place: Place, reach: int) -> set[Place]:
    sample, row, column = place
    rows = range(max(0, row - reach), min(ROWS, row + reach + 1))
    columns = range(max(0, column - reach), min(COLUMNS, column + reach + 1))
    return set(product([sample], rows, columns))


def needed(geometry: StageGeometry, device: str, reach: int) -> dict[str, set[Place]]:
    """Tensor made before a stage -> the places that a device needs of it."""
    network, found = geometry.network, dict[str, set[Place]]()
    if not isinstance(geometry, TileGeometry):
        return {name: owned(geometry, device, name) for op in geometry.ops for name in op.inputs}
    for first, last in pairwise((*geometry.group_starts, geometry.last)):
        wanted: dict[str, set[Place]] = {}
        for op in reversed(network.ops[first:last]):
            (made,) = op.outputs
            leaves = made in network.outputs or any(reader >= last for reader in network.readers.get(made, ()))
            if leaves or op.statistics:
                wanted.setdefault(made, set()).update(owned(geometry, device, made))
            for name in op.inputs:
                read = wanted.setdefault(name, set())
                for place in wanted.get(made, ()):
                    read |= around(place, reach)
                if op.statistics:
                    read |= owned(geometry, device, name)
        for name, read in wanted.items():
            if network.producer.get(name, -1) < first:
                found.setdefault(name, set()).update(read)
    return found


def travelling(lowering: Lowering, kind: str) -> Counter[Travel]:
    """What is received in one micro-batch."""
    return Counter(
        (action.message.stage, action.source, device, part.tensor, place)
        for device, work in lowering.work.items()
        for action in (*work.forward(0), *work.backward(0, is_last=False))
        if isinstance(action, Receive) and action.message.kind == kind
        for part in action.message.parts
        for place in places(part.box)
    )


def check_exchanges(network: Network, plan: Plan, reach: int) -> int:
    """How many places travel forward."""
    lowering = Lowering(resolve(plan, network, cluster(plan.devices)), network)
    values, gradients = travelling(lowering, "value"), travelling(lowering, "gradient")
    expected: set[tuple[int, str, str, Place]] = set()
    back: set[Travel] = set()
    for geometry in lowering.geometries:
        for device in geometry.devices:
            for tensor, wanted in needed(geometry, device, reach).items():
                made = network.producer.get(tensor)
                if made is None or made >= geometry.first:
                    continue
                maker = next(g for g in lowering.geometries if g.first <= made < g.last)
                has = owned(maker, device, tensor) if device in maker.devices else set()
                expected |= {(geometry.index, device, tensor, place) for place in wanted - has}
                if isinstance(geometry, TileGeometry) and geometry.backward_groups is not None:
                    own = owned(geometry, device, tensor)  # complete there, and sent to whoever made it
                    back |= {
                        (geometry.index, device, other, tensor, place)
                        for other in maker.devices
                        for place in own & owned(maker, other, tensor)
                        if other != device
                    }
    assert Counter((stage, to, tensor, place) for stage, _, to, tensor, place in values.elements()) == Counter(expected)
    for stage, source, target, tensor, place in values:
        maker = next(g for g in lowering.geometries if g.is_made_here(tensor))
        assert place in owned(maker, source, tensor)
        consumer = lowering.geometries[stage]
        if not isinstance(consumer, TileGeometry) or consumer.backward_groups is None:
            back.add((stage, target, source, tensor, place))
    assert gradients == Counter(back)
    return len(values)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=15)
@given(st.data())
def test_exactly_what_is_needed_travels_between_stages(name: str, data: st.DataObject) -> None:
    plan = data.draw(mixed_plans(NETWORKS[name]))
    note(str(plan))
    check_exchanges(NETWORKS[name], plan, 2 if name == "wide" else 1)


def test_tiles_and_samples_on_the_same_devices_exchange_what_they_do_not_share() -> None:
    """Two rows of tiles and a sample each: a device keeps half of its own sample, and sends half of the other's."""
    tiles, samples = ByTiles((1, 1)), BySamples((1, 1))
    for shares in ((tiles, samples), (samples, tiles)):
        stages = (Stage((0, 2), ("a", "b"), shares[0]), Stage((2, 5), ("a", "b"), shares[1]))
        plan = Plan("chain", 2, stages, order="sequential")
        network = chain(5)
        halo = COLUMNS * 2 if shares[1] is tiles else 0  # of the other's sample its rim row as well
        assert check_exchanges(network, plan, 1) == ROWS * COLUMNS + halo
