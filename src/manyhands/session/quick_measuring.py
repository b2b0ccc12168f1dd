"""Measures the devices of a session within a limit of seconds, so that a run can begin: what is stored goes first.

Where one thread computes on each worker of this machine, the seconds that it computes are counted, and not those for
which other work pauses it: several runs that begin at once do not measure each other. They also take turns, as long as
that takes no more than a few times the limit; what is measured beside others nevertheless is marked as coarse.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.graph.graph import Graph
from manyhands.plans.local_profiles import stored_links
from manyhands.profiler.quick import LEAST_PASSES
from manyhands.runtime.measuring import measure_quickly_on
from manyhands.session.measuring import (
    Measurements,
    alike,
    is_plain,
    keep_measurements,
    stored_kernels,
    stored_measurements,
    with_coarse_profiles,
    with_probed_links,
)
from manyhands.session.measuring_turn import turn_to_measure
from manyhands.session.session import Say, Session, usable_cores
from manyhands.session.step_costs import with_known_step_costs

_LAYERS = 0.75
"""The part of the limit for layers; the rest is for the optimiser's step and the links."""
_ROOM = 1.3
"""Passes take a bit longer than their layers."""


def measure_within(
    session: Session,
    graph: Graph,
    batch_size: int,
    seconds: float,
    *,
    optimizer: Optimizer | None = None,
    say: Say | None = None,
    refresh: bool = False,
) -> tuple[Cluster, Profile]:
    """Return the session's cluster and the profile of training `graph` on it, measured within about `seconds`; both are
    stored and reused, marked as coarse where time did not suffice or another run measured meanwhile. `refresh`: measure
    even if they are stored."""
    count = len(session.cluster.devices)
    share = max(1, batch_size // count)
    shares = tuple(sorted({1, max(1, share // 2), share}))
    with turn_to_measure(session, seconds, say) as is_alone:
        measured = None if refresh else stored_measurements(session, graph, shares, optimizer, may_be_coarse=True)
        if measured is None:
            if say is not None:
                say(f"measuring {graph.name} on {count} worker(s) at once, for {seconds:g} s at most")
            ladder = tuple(dict.fromkeys((1, share, *shares, batch_size)))
            measured = _measured(session, graph, ladder, _LAYERS * seconds, optimizer)
            measured = measured if is_alone else with_coarse_profiles(measured)
            keep_measurements(session, graph, measured, optimizer)
        links = stored_links(session.cluster, session.threads) if is_plain(session) else None
        if links is None or refresh:
            return with_probed_links(session, measured, is_quick=True, refresh=refresh)
    devices = tuple(
        msgspec.structs.replace(
            device, memory_bytes_per_second=measured[device.name][1], estimated=False,
            up_bytes_per_second=links.device(device.name).up_bytes_per_second,
            down_bytes_per_second=links.device(device.name).down_bytes_per_second,
            copy_seconds_per_gigabyte=links.device(device.name).copy_seconds_per_gigabyte,
        )
        for device in session.cluster.devices
    )  # fmt: skip
    cluster = Cluster(session.cluster.name, devices, links.link, links.links, session.cluster.sites)
    cluster = with_known_step_costs(session, cluster)
    return cluster, Profile({name: measured[name][0] for name in cluster.names})


def thorough_seconds(profile: Profile, batch_size: int) -> float:
    """Return the limit of seconds within which `measure_within` is likely to leave no profile coarse."""
    count = len(profile.devices)
    sizes = {1, max(1, batch_size // count // 2), max(1, batch_size // count), batch_size}
    steps = (
        sum(sum(device.layer_seconds(layer, size)) for layer in range(len(device.layers)) for size in sizes)
        for device in profile.devices.values()
    )
    return _ROOM * LEAST_PASSES * max(steps) / _LAYERS


def _measured(
    session: Session, graph: Graph, ladder: Sequence[int], seconds: float, optimizer: Optimizer | None
) -> Measurements:
    members = [session.coordinator.members[name].facts for name in session.cluster.names]
    alone = session.is_local and session.threads == 1 and all(member.compute == "cpu" for member in members)
    reports = measure_quickly_on(
        session.coordinator, graph, session.cluster.names, ladder=tuple(ladder), seconds=seconds,
        kernels=stored_kernels(graph, session.threads), optimizer=optimizer, alone=alone,
    )  # fmt: skip
    crowd = max(1.0, len(members) / usable_cores()) if alone else 1.0
    measured = {
        name: (_times(report.profile, crowd, ladder[-1]), report.memory_bytes_per_second)
        for name, report in reports.items()
    }
    return alike(session, measured) if session.is_local and len(members) > 1 else measured


def _times(profile: DeviceProfile, factor: float, batch_size: int) -> DeviceProfile:
    """Return the profile of a device that has one core for so many workers; none for the whole batch, for which it is
    alone."""
    if factor == 1.0:
        return profile

    def crowded(timing: Timing) -> Timing:
        times = factor if timing.samples < batch_size else 1.0
        return Timing(timing.samples, timing.forward_seconds * times, timing.backward_seconds * times)

    layers = tuple(LayerTiming(layer.layer, tuple(map(crowded, layer.ladder))) for layer in profile.layers)
    return msgspec.structs.replace(profile, layers=layers)
