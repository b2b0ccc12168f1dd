"""Figures of `manyhands bench scale`: very many devices in sites, and workers on hosts. All steps are simulated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from manyhands.explaining.bottleneck import limits_of
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.profile import Profile, estimate_cluster
from manyhands.planner.placing import placed
from manyhands.plans import planning
from manyhands.plans.networks import load_network
from manyhands.plans.simulating import simulate
from manyhands_bench.claims import ESTIMATED
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE, measure_parts
from manyhands_bench.tile.setup import QUICK_SHAPE, SHAPE, TiledNetwork
from manyhands_bench.tile.studies import Pis

NETWORK = "resnet18"
UPLINK = {"rate": "100 Mbit/s", "delay": "10 ms", "link": {"rate": "1 Gbit/s", "delay": "0.3 ms"}}
BACKBONE = {"rate": "10 Gbit/s", "delay": "5 ms"}
KINDS = ("pi4", "jetson-nano")
SAMPLES = 2
"""Samples of a mini-batch for each device."""
DEVICES = 4
TILES = (3, 4)
"""Devices, and workers on each: as in TILE's 4 x 3 and 4 x 4 tiles."""


@dataclass
class Scale:
    """The amount of it: how many sites there are, with how many devices each."""

    planned: tuple[int, int] = (20, 50)
    simulated: tuple[int, int] = (100, 100)
    shape: tuple[int, ...] = SHAPE
    say: Progress = print

    @cached_property
    def network(self) -> Network:
        return load_network(NETWORK)


def bench_scale(
    *, quick: bool = False, only: Sequence[str] = (), out: Path | None = None, on_progress: Progress = print
) -> Figures:
    """Return every figure; a part that cannot be measured is left out, with the reason."""
    scale = Scale((4, 10), (10, 20), QUICK_SHAPE, on_progress) if quick else Scale(say=on_progress)
    figures = measure_parts(PARTS, scale, only=only, quick=quick, out=out, say=on_progress)
    return {**figures, PROFILE_MACHINE: ESTIMATED}


def sites(count: int, each: int) -> Cluster:
    """Return so many sites of so many devices of two kinds."""
    devices = [
        {"kind": kind, "count": (each + place) // len(KINDS), "site": "site"} for place, kind in enumerate(KINDS)
    ]
    return Cluster.from_dict(
        {
            "name": f"sites-{count}x{each}",
            "sites": [{"name": "site", "count": count, **UPLINK}],
            "devices": devices,
            "link": BACKBONE,
        }
    )


def _planned(scale: Scale) -> Figures:
    """Plan for sites by strategy auto, simulate the plan and explain it."""
    cluster = sites(*scale.planned)
    count = len(cluster.devices)
    profile = estimate_cluster(scale.network, cluster)
    scale.say(f"planning for {count} devices")
    begin, begin_computing = time.perf_counter(), time.process_time()
    planned = planning.plan(scale.network, cluster, batch_size=SAMPLES * count, profile=profile)
    figures: Figures = {
        f"plan_seconds_{count}": time.perf_counter() - begin,
        f"plan_cpu_seconds_{count}": time.process_time() - begin_computing,
    }
    figures |= _simulated(scale, planned.plan, cluster, profile)
    spans = simulate(planned.plan, scale.network, cluster, profile)
    limits = limits_of(spans, planned.plan, scale.network, cluster)
    figures[f"limit_{count}"] = limits[0].text
    rows = (f"{candidate.name} {candidate.seconds:.3g} s" for candidate in planned.candidates)
    count_of_sites, each = scale.planned
    figures["plan_setting"] = (
        f"{NETWORK}, {SAMPLES} samples a device, {count_of_sites} sites of {each} devices ({', '.join(KINDS)}) behind "
        f"{UPLINK['rate']} each; simulated seconds of a step with the catalogue's numbers: {', '.join(rows)}"
    )
    return figures


def _largest(scale: Scale) -> Figures:
    """Simulate a plan by samples on very many devices: every site a replica of one stage."""
    cluster = sites(*scale.simulated)
    profile = estimate_cluster(scale.network, cluster)
    count = len(cluster.devices)
    share = {"by": "samples", "samples": [SAMPLES] * count}
    stage = {"layers": [0, len(scale.network.layers)], "devices": list(cluster.names), "share": share}
    document = {"network": NETWORK, "batch_size": SAMPLES * count, "stages": [stage], "batch_norm": "local"}
    plan = placed(Plan.from_dict(document), cluster)
    return _simulated(scale, plan, cluster, profile)


def _simulated(scale: Scale, plan: Plan, cluster: Cluster, profile: Profile) -> Figures:
    count = len(cluster.devices)
    scale.say(f"simulating {count} devices")
    begin = time.perf_counter()
    result = simulate(plan, scale.network, cluster, profile, keep_spans=False)
    return {
        f"simulate_seconds_{count}": time.perf_counter() - begin,
        f"simulated_step_seconds_{count}": result.seconds,
        f"simulated_actions_{count}": result.actions,
    }


def _hosts(scale: Scale) -> Figures:
    """Simulate tiles on Pis with several workers each, with sums in one group and through the hosts."""
    subject = TiledNetwork.of(scale.shape)
    seconds: dict[tuple[int, bool], float] = {}
    for tiles in TILES:
        scale.say(f"{DEVICES} Pis of {tiles} tiles")
        pis = Pis(subject, DEVICES, tiles)
        profile = estimate_cluster(pis.network, pis.cluster)
        flat = msgspec.structs.replace(pis.plan, places={})
        for is_placed, plan in ((False, flat), (True, placed(flat, pis.cluster))):
            result = simulate(plan, pis.network, pis.cluster, profile, keep_spans=False)
            seconds[tiles, is_placed] = result.seconds
    few, many = TILES
    figures: Figures = {}
    for is_placed, name in ((False, "flat"), (True, "by_host")):
        figures[f"tiles_4x4_over_4x3_{name}"] = seconds[many, is_placed] / seconds[few, is_placed]
        figures |= {f"tiles_4x{tiles}_{name}_seconds": seconds[tiles, is_placed] for tiles in TILES}
    return figures


PARTS = {"planned": _planned, "largest": _largest, "hosts": _hosts}
