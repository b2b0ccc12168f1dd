"""Measures the layers and links of a session's devices, and stores the measurements for the next run."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadFile, ManyhandsError, TimedOut, WorkerLost
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.profile import DeviceProfile, Kernel, LayerTiming, Profile, Timing
from manyhands.files.documents import read_document, write_document
from manyhands.graph.graph import Graph
from manyhands.plans.local_profiles import keep_links, with_costs
from manyhands.profiler.store import load_profile, profile_path, save_profile
from manyhands.profiler.this_machine import identify
from manyhands.runtime.measuring import learn_routes, measure_on, probe_links
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session.measuring_turn import turn_to_measure
from manyhands.session.session import Say, Session
from manyhands.session.step_costs import measure_step_costs, with_known_step_costs, with_step_costs

WORTH_PROBING = 6_000_000
"""Bytes per second of the slowest link from which it is worth measuring what messages cost the devices."""


MEASURE_SECONDS = 6.0


def stored_kernels(graph: Graph, threads: int, *, training: bool = True) -> Mapping[str, Kernel]:
    """Return the kernels that `manyhands profile` found for this network on this machine; else none: the defaults."""
    path = profile_path(graph.network, identify(threads or None), training=training)
    try:
        return load_profile(path, graph.network).kernels if path.exists() else {}
    except BadFile:
        return {}


def measure_who_stays(
    session: Session, graph: Graph, batch_size: int, retry_policy: RetryPolicy | None, *,
    optimizer: Optimizer | None = None,
    say: Say | None = None, ladder: tuple[int, ...] = (), training: bool = True,
) -> tuple[Cluster, Profile]:  # fmt: skip
    """Measure as `measure` does, without the devices that leave or fail meanwhile, as long as enough remain.

    Where too few remain, wait for others. `retry_policy`: None where a plan is given, which names every device that it
    needs.
    """
    return among_who_stay(
        session, retry_policy, say,
        lambda: measure(session, graph, batch_size, optimizer=optimizer, say=say, ladder=ladder, training=training),
    )  # fmt: skip


def among_who_stay(
    session: Session, retry_policy: RetryPolicy | None, say: Say | None, make: Callable[[], tuple[Cluster, Profile]]
) -> tuple[Cluster, Profile]:
    """Return what `make` measures; where a device leaves or fails meanwhile, measure again without it."""
    while True:
        try:
            return make()
        except (WorkerLost, TimedOut):
            lost_names = session.go_on_without_lost(retry_policy) if retry_policy is not None else []
            if not lost_names and (retry_policy is None or not session.wait_for_enough(retry_policy)):
                raise
            if lost_names and say is not None:
                say(f"Beginning without {', '.join(lost_names)}: {len(session.cluster.names)} device(s) left.")


def measure(
    session: Session,
    graph: Graph,
    batch_size: int,
    *,
    optimizer: Optimizer | None = None,
    say: Say | None = None,
    seconds: float | None = None,
    refresh: bool = False,
    ladder: tuple[int, ...] = (),
    kernels: Mapping[str, Kernel] | None = None,
    training: bool = True,
) -> tuple[Cluster, Profile]:
    """Return the session's cluster with measured numbers, and the profile of `graph` on it; both are stored and reused.

    `ladder`: the sample counts to measure, up to a device's share; by default one, half an even share, and an even
    share. `kernels`: by default those that were found for this machine; others are measured anew, and not stored.
    `training`: False for inference: forward passes in evaluation mode, stored separately.
    """
    count, seconds = len(session.cluster.devices), seconds or MEASURE_SECONDS
    shares = ladder or tuple(sorted({1, max(1, batch_size // (2 * count)), max(1, batch_size // count)}))
    with turn_to_measure(session, seconds, say) as is_alone:
        measured = None if refresh or kernels is not None else stored_measurements(
            session, graph, shares, optimizer, training=training
        )  # fmt: skip
        if measured is None:
            if say is not None:
                say(f"measuring {graph.name} on {count} worker(s) at once")
            found_kernels = stored_kernels(graph, session.threads, training=training) if kernels is None else kernels
            measured = _measured(session, graph, shares, batch_size, seconds, optimizer, found_kernels, training)
            measured = measured if is_alone else with_coarse_profiles(measured)
            if kernels is None:
                keep_measurements(session, graph, measured, optimizer, training=training)
        return with_probed_links(session, measured, refresh=refresh)


def with_coarse_profiles(measured: Measurements) -> Measurements:
    """Return measurements that another run may have disturbed: marked, so that a run measures again when it can."""
    return {
        name: (msgspec.structs.replace(profile, is_coarse=True), rate) for name, (profile, rate) in measured.items()
    }


def with_probed_links(
    session: Session, measured: Measurements, *, is_quick: bool = False, refresh: bool = False
) -> tuple[Cluster, Profile]:
    """Return the session's cluster with measured numbers, its links measured now, and the profile. `refresh`: measure
    what a step costs beside its layers, even if it is stored; `is_quick` without that: only as it is known."""
    devices = tuple(
        msgspec.structs.replace(
            device,
            memory_bytes_per_second=measured[device.name][1],
            estimated=False,
            gpu=session.coordinator.members[device.name].facts.gpu,
        )
        for device in session.cluster.devices
    )
    cluster = msgspec.structs.replace(session.cluster, devices=devices)
    if len(devices) > 1:
        learn_routes(session.coordinator, cluster.names)
        with_links = _with_message_costs if session.has_links else _with_links
        cluster = with_links(session, cluster, is_quick)
        if is_plain(session) and not is_quick:
            keep_links(cluster, session.threads)
    if is_plain(session):
        if is_quick and not refresh:
            cluster = with_known_step_costs(session, cluster)
        else:
            cluster = with_step_costs(session, cluster, refresh=refresh)
    return cluster, Profile(
        {name: measured[name][0] for name in cluster.names}
    )  # in the cluster's order, not that of the replies


def is_plain(session: Session) -> bool:
    """Return whether these are local workers as `local:N` names them: CPUs only, none slowed down."""
    members = [session.coordinator.members[name].facts for name in session.cluster.names]
    return session.is_local and all(member.compute == "cpu" and member.slowdown == 1 for member in members)


def _with_links(session: Session, cluster: Cluster, is_quick: bool) -> Cluster:
    """Return the cluster with port rates and delays as measured when all workers exchange data at once, and every
    pair's link.

    Where every core computes, moving bytes takes time from computing; with a core to spare for each worker it does not:
    that is measured too.
    """
    probes = probe_links(session.coordinator, cluster.names, is_quick=is_quick)
    if is_plain(session):  # what messages cost the workers is measured by itself: `step_costs`
        delay = statistics.median(min(link.delay_seconds for link in p.links.values()) for p in probes.values())
    else:
        delay = statistics.median(probe.delay_seconds for probe in probes.values())
    usual = statistics.median(probe.bytes_per_second for probe in probes.values())
    copying = statistics.median(probe.lost_seconds_per_byte for probe in probes.values()) * 1e9
    devices = []
    for device in cluster.devices:
        probe = probes[device.name]
        rate, lost = probe.bytes_per_second, probe.lost_seconds_per_byte * 1e9
        if session.is_local:  # equal hardware: a difference is noise
            rate, lost = usual, copying
        devices.append(
            msgspec.structs.replace(
                device, up_bytes_per_second=rate, down_bytes_per_second=rate,
                copy_seconds_per_gigabyte=lost,
            )
        )  # fmt: skip
    relay = session.coordinator.routes.relay
    links = [
        DirectedLink(name, other, link, relay(name, other))
        for name, probe in probes.items()
        for other, link in probe.links.items()
    ]
    if session.is_local or any(device.host for device in devices):  # one machine's pairs are alike
        links = []
    usual_link = Link(max(probe.bytes_per_second for probe in probes.values()), delay)
    return Cluster(cluster.name, tuple(devices), usual_link, tuple(links), cluster.sites)


def _with_message_costs(session: Session, cluster: Cluster, is_quick: bool) -> Cluster:
    """Return a cluster whose links are known, with what messages cost its devices beside the links' time: computing
    time lost to each message and each byte. Where links are so slow that this is negligible, it is not measured."""
    relays = _relays(session, cluster)
    slowest = min(cluster.bytes_per_second_between(a, b) for a in cluster.names for b in cluster.names if a != b)
    if slowest < WORTH_PROBING and not relays:
        return cluster
    probes = probe_links(session.coordinator, cluster.names, is_quick=is_quick)
    for (sender, receiver), relay in relays.items():
        links = tuple(link for link in cluster.links if (link.sender, link.receiver) != (sender, receiver))
        relayed = DirectedLink(sender, receiver, probes[sender].links[receiver], relay)
        cluster = msgspec.structs.replace(cluster, links=(*links, relayed))
    devices = []
    for device in cluster.devices:
        probe = probes[device.name]
        others = [name for name in cluster.names if name != device.name]
        delay = max(cluster.link_between(device.name, other).delay_seconds for other in others)
        each = max(0.0, probe.delay_seconds - delay) / (2 * len(others))
        lost = probe.lost_seconds_per_byte * 1e9
        devices.append(msgspec.structs.replace(device, copy_seconds_per_gigabyte=lost, message_seconds=each))
    priced = Cluster(cluster.name, tuple(devices), cluster.link, cluster.links, cluster.sites)
    speeds = {(device.gflops, device.cores, device.compute, device.host, device.site) for device in cluster.devices}
    if is_quick or session.scale is None or session.stands_in or relays or len(speeds) > 1:
        return priced
    return with_costs(priced, measure_step_costs(session, cluster))  # a lab's equal devices, at their shares of a core


def _relays(session: Session, cluster: Cluster) -> dict[tuple[str, str], str]:
    """Return the pairs, each way, that are relayed and whose links nobody has described as such: what passes a relay
    is measured, whatever was written of a direct link."""
    pairs = session.coordinator.routes.relayed(cluster.names)
    both = {(a, b): relay for pair, relay in pairs.items() for a, b in (pair, pair[::-1])}
    return {pair: relay for pair, relay in both.items() if cluster.relays.get(pair) != relay}


def _measured(
    session: Session,
    graph: Graph,
    shares: tuple[int, ...],
    batch_size: int,
    seconds: float,
    optimizer: Optimizer | None,
    kernels: Mapping[str, Kernel],
    training: bool,
) -> Measurements:
    """Measure shares on all workers at once, as they will run; on one machine, the whole batch on one worker alone."""
    crowded = session.is_local and len(session.cluster.devices) > 1
    ladder = shares if crowded else tuple(sorted({*shares, batch_size}))
    reports = measure_on(
        session.coordinator, graph, session.cluster.names, ladder=ladder, seconds=seconds, kernels=kernels,
        optimizer=optimizer, training=training,
    )  # fmt: skip
    measured = {name: (report.profile, report.memory_bytes_per_second) for name, report in reports.items()}
    if not crowded:
        return measured
    measured = alike(session, measured)
    if batch_size > shares[-1]:
        for names in _equal(session):
            alone = measure_on(
                session.coordinator, graph, names[:1], ladder=(batch_size,), seconds=seconds, kernels=kernels,
                optimizer=optimizer, training=training,
            )[names[0]].profile  # fmt: skip
            measured |= {name: (_joined(measured[name][0], alone), measured[name][1]) for name in names}
    return measured


def _joined(shares: DeviceProfile, alone: DeviceProfile) -> DeviceProfile:
    """Return one profile whose ladder goes from the shares up to the whole batch."""
    layers = tuple(
        LayerTiming(share_timing.layer, (*share_timing.ladder, *(timing for timing in batch_timing.ladder)))
        for share_timing, batch_timing in zip(shares.layers, alone.layers, strict=True)
    )
    return msgspec.structs.replace(shares, layers=layers, peak_bytes=shares.peak_bytes | alone.peak_bytes)


def _equal(session: Session) -> list[list[str]]:
    """Return the names of one machine's workers, grouped by what they compute with and by slowdown."""
    groups: dict[tuple[str, float], list[str]] = {}
    for device in session.cluster.devices:
        slowdown = session.coordinator.members[device.name].facts.slowdown
        groups.setdefault((device.compute.partition(":")[0], slowdown), []).append(device.name)
    return list(groups.values())


def alike(session: Session, measured: Measurements) -> Measurements:
    """Give workers on equal hardware equal numbers, the medians: a difference between them is noise."""
    levelled: Measurements = {}
    for names in _equal(session):
        profiles = [measured[name][0] for name in names]
        rate = statistics.median(measured[name][1] for name in names)
        spread = statistics.median(profile.spread for profile in profiles)
        is_coarse = any(profile.is_coarse for profile in profiles)
        common = msgspec.structs.replace(profiles[0], layers=_median(profiles), spread=spread, is_coarse=is_coarse)
        levelled |= {name: (msgspec.structs.replace(common, device=name), rate) for name in names}
    return {name: levelled[name] for name in session.cluster.names}


def _median(profiles: list[DeviceProfile]) -> tuple[LayerTiming, ...]:
    sizes = sorted(set.intersection(*({timing.samples for timing in profile.ladders[0]} for profile in profiles)))
    layers = []
    for layers_alike in zip(*(profile.layers for profile in profiles)):
        timings = [{timing.samples: timing for timing in layer.ladder} for layer in layers_alike]
        ladder = tuple(
            Timing(
                samples,
                statistics.median(by_samples[samples].forward_seconds for by_samples in timings),
                statistics.median(by_samples[samples].backward_seconds for by_samples in timings),
            )
            for samples in sizes
        )
        layers.append(LayerTiming(layers_alike[0].layer, ladder))
    return tuple(layers)


def profile_place(
    session: Session, graph: Graph, name: str, optimizer: Optimizer | None, training: bool = True
) -> Path:
    """Return the file that stores a device's profile: by machine and network, and by whatever else changes it. Local
    workers on equal hardware share one."""
    facts = session.coordinator.members[name].facts
    base = profile_path(graph.network, identify(session.threads or None), training=training)
    kind = f"{len(session.cluster.devices)}workers" if session.is_local else f"{session.kind}{name}"
    if facts.slowdown != 1:
        kind += f"_slow{facts.slowdown:g}"
    stepping = hashlib.sha256(repr(optimizer).encode()).hexdigest()[:8] if optimizer is not None else "still"
    return base.with_name(f"{base.stem}_{kind}_{facts.compute.replace(':', '')}_{stepping}.json")


def _rate_path(path: Path) -> Path:
    return path.with_suffix(".rate.json")


def stored_measurements(
    session: Session, graph: Graph, shares: tuple[int, ...], optimizer: Optimizer | None, *, training: bool = True,
    may_be_coarse: bool = False,
) -> Measurements | None:  # fmt: skip
    """Return the measurements that an earlier run stored for these devices; None unless there are those of all."""
    kernels = dict(stored_kernels(graph, session.threads, training=training))
    loaded: Measurements = {}
    for name in session.cluster.names:
        path = profile_place(session, graph, name, optimizer, training)
        try:
            profile = load_profile(path, graph.network)
            raw = read_document(_rate_path(path))
        except ManyhandsError:
            return None
        sizes = {timing.samples for timing in profile.layers[0].ladder}
        has_shares = sizes >= set(shares) or profile.is_coarse  # coarse: as many as there was time for
        if profile.machine != session.coordinator.members[name].facts.machine or not has_shares:
            return None
        if not isinstance(raw, float) or profile.kernels != kernels or (profile.is_coarse and not may_be_coarse):
            return None
        loaded[name] = (msgspec.structs.replace(profile, device=name), raw)
    return loaded


def keep_measurements(
    session: Session, graph: Graph, measured: Measurements, optimizer: Optimizer | None, *, training: bool = True
) -> None:
    """Store measurements for the next run; coarse ones say so."""
    with contextlib.suppress(BadFile):  # a cache that cannot be written only costs time
        for name, (profile, rate) in measured.items():
            path = profile_place(session, graph, name, optimizer, training)
            save_profile(profile, path)
            write_document(_rate_path(path), rate)


Measurements = dict[str, tuple[DeviceProfile, float]]
