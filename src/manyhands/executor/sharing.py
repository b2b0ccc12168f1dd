"""Ways of sharing a stage, put together: the struct by which plans name one, its geometry, and what runs it.

    way        struct (facts/plan.py)   geometry (schedule/)     runner (executor/)
    single     Single                   StageGeometry            SegmentRunner
    samples    BySamples                SampleGeometry           SegmentRunner
    tiles      ByTiles                  TileGeometry             TileRunner
    channels   ByChannels               ChannelGeometry          ChannelRunner

Another package adds a way with `register_sharing`, on every device of a run (facts/extensions.py). torch is imported
when a runner is made and not before: planning with a registered way needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from manyhands.facts.plan import Share, register_share, share_name, unregister_share
from manyhands.facts.profile import Kernel
from manyhands.schedule.actions import Action
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.sharing import register_geometry, unregister_geometry

if TYPE_CHECKING:
    import torch

    from manyhands.executor.runner import Runner
    from manyhands.graph.graph import Graph
    from manyhands.graph.weights import Weights


@dataclass(frozen=True)
class RunnerSetup:
    """The facts that a runner is made from, beside the geometry of its stage."""

    graph: Graph
    weights: Weights
    device: str
    actions: Sequence[Action]
    """All of the device's actions in a round, those of other stages among them."""
    kernels: Mapping[str, Kernel]
    torch_device: torch.device


RunnerFactory = Callable[[StageGeometry, RunnerSetup], "Runner"]


def segment_runner(geometry: StageGeometry, setup: RunnerSetup) -> Runner:
    """Return a runner of whole samples."""
    from manyhands.executor.carrying import CarryingRunner
    from manyhands.executor.runner import SegmentRunner
    from manyhands.graph.kernels import kernel_calls

    calls = kernel_calls(setup.graph, setup.kernels)
    runner = CarryingRunner if setup.graph.carried else SegmentRunner
    return runner(setup.graph, setup.weights, geometry, setup.device, setup.actions, calls)


def _tile_runner(geometry: StageGeometry, setup: RunnerSetup) -> Runner:
    from manyhands.executor.tiles import TileRunner
    from manyhands.schedule.tiles import TileGeometry

    assert isinstance(geometry, TileGeometry)
    return TileRunner(setup.graph, setup.weights, geometry, setup.device, setup.kernels, setup.torch_device)


def _channel_runner(geometry: StageGeometry, setup: RunnerSetup) -> Runner:
    from manyhands.executor.channels import ChannelRunner
    from manyhands.schedule.channels import ChannelGeometry

    assert isinstance(geometry, ChannelGeometry)
    return ChannelRunner(setup.graph, setup.weights, geometry, setup.device, setup.actions, setup.kernels)


_runners: dict[str, RunnerFactory] = {
    "single": segment_runner,
    "samples": segment_runner,
    "tiles": _tile_runner,
    "channels": _channel_runner,
}
"""Name of a way of sharing -> the factory of the runners of such a stage."""


def make_runner(geometry: StageGeometry, setup: RunnerSetup) -> Runner:
    """Return the runner of a stage on a device, by the way in which the stage is shared."""
    return _runners[geometry.sharing](geometry, setup)


def register_sharing(share: type[Share], geometry: type[StageGeometry], runner: RunnerFactory = segment_runner) -> None:
    """Add a way of sharing a stage, which plans name by the tag of `share`.

    `geometry` says what each device has, computes and exchanges of such a stage, `runner` makes what computes it: by
    default one for devices that compute whole samples, each as one box.
    """
    register_share(share)
    register_geometry(share, geometry)
    _runners[share_name(share)] = runner


def unregister_sharing(share: type[Share]) -> None:
    """Undo `register_sharing`; what came with manyhands stays."""
    unregister_share(share_name(share))
    unregister_geometry(share)
    _runners.pop(share_name(share), None)
