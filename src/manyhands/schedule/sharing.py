"""The ways in which a stage can be shared: for each struct by which a plan names one, the geometry of such a stage.

The executor adds how such a stage is run (executor/sharing.py, where other packages register theirs); this half knows
nothing of torch, so that planner and simulator need only it.
"""

from __future__ import annotations

from manyhands.facts.network import Network
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Plan, Share
from manyhands.schedule.channels import ChannelGeometry
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.samples import SampleGeometry
from manyhands.schedule.tiles import TileGeometry

_geometries: dict[type[Share], type[StageGeometry]] = {
    BySamples: SampleGeometry,
    ByTiles: TileGeometry,
    ByChannels: ChannelGeometry,
}


def geometry_of(plan: Plan, index: int, network: Network) -> StageGeometry:
    """Return the geometry of a stage of a resolved plan; one device computes all of it, however it is shared."""
    stage = plan.stages[index]
    kind = _geometries[type(stage.share)] if len(stage.devices) > 1 else StageGeometry
    return kind(plan, index, network)


def register_geometry(share: type[Share], geometry: type[StageGeometry]) -> None:
    """Register the geometry of stages that plans share by a struct; `executor.sharing.register_sharing` calls it."""
    _geometries[share] = geometry


def unregister_geometry(share: type[Share]) -> None:
    """Undo `register_geometry`."""
    _geometries.pop(share, None)
