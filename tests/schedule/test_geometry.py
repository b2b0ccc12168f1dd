"""The boxes of a stage by samples, and what moves, by count; tiles and channels are tested with the executor itself."""

from __future__ import annotations

from hand_made import chain
from manyhands.facts.plan import BySamples, Plan, Share, Stage
from manyhands.facts.plan_check import resolve
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.sharing import geometry_of

SAMPLES = 2


def chain_geometry(share: Share) -> StageGeometry:
    network = chain(4)
    plan = Plan("chain", SAMPLES, (Stage((0, len(network.layers)), ("d0", "d1"), share),))
    return geometry_of(resolve(plan, network), 0, network)


def test_by_samples_nothing_is_exchanged_inside() -> None:
    geometry = chain_geometry(BySamples((1, 1)))
    assert [group.fetches for group in geometry.groups] == [{}]
    assert geometry.fractions("d0") == geometry.backward_fractions("d0") == (0.5,) * 4
    assert str(geometry.entering("x").hull("d1")) == "[1:2,0:4,0:8,0:6]"
    assert geometry.loss_devices == ("d0", "d1")
