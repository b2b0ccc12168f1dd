"""TILE's study of GPUs (Fig. 6.5): two tiles on GPUs, by batch size, exchanging after 1, 5 or 16 groups of layers.

    gpus       two workers on one GPU, which exchange there; or through the machine's memory, as two machines do
    gpu_cpu    one worker on the GPU and one on the processors, with tiles in proportion to their speeds

Over a fast link a step is measured: this machine's memory. Over 2 Mbit/s it is simulated, with the seconds of layers as
measured here. The sum of the weights' gradients is left out, which is the same for all groupings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from manyhands.executor.gpu_peers import GPU_SHARING_VARIABLE
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.facts.plan import ByTiles, LayerName, Plan
from manyhands.facts.profile import Profile
from manyhands.planner.tiles import ExchangeGroups, with_groups
from manyhands.runtime.measuring import measure_on
from manyhands.schedule.tiles import TileGeometry
from manyhands.session.opening import open_session
from manyhands.session.session import Session, usable_cores
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE, profiled_here
from manyhands_bench.tile.groups import SLOW, Priced, bare_step_seconds, linked
from manyhands_bench.tile.setup import QUICK_SHAPE, SHAPE, TiledNetwork, TileVariant

BATCHES = (1, 2, 4, 8)
GROUPS = (1, 5, 16)
"""Groups of layers with one exchange each; the network has 16 layers, so the last is an exchange at every layer."""
PROFILE_SECONDS = 2.0
STEPS, QUICK_STEPS = 4, 1
MOST_UNEVEN = 8
"""The most times as many rows as the other tile that one has."""
ROWS = TileVariant((2, 1))


@dataclass(frozen=True)
class Pair:
    """Two devices that have a tile each."""

    name: str
    text: str
    cluster: Cluster
    shares_gpu: bool


def pairs() -> tuple[Pair, ...]:
    on_one = Cluster.local(2, gpus=[0, 0])
    return (
        Pair("gpus", "two workers on one GPU, exchanging there", on_one, True),
        Pair("gpus_apart", "two workers on one GPU, exchanging through the machine's memory", on_one, False),
        Pair("gpu_cpu", "a GPU and the machine's processors", Cluster.local(2, gpus=1), True),
    )


def bench_gpu_tiles(quick: bool, say: Progress) -> Figures:
    """Return the seconds of a step for every pair, batch size, grouping and link."""
    if not torch.cuda.is_available():
        raise BadValue("--compute cuda needs a GPU; torch finds none on this machine.", hint="Leave out --compute.")
    figures: Figures = {
        "gpu_tiles_setting": f"{torch.cuda.get_device_name()} and {usable_cores()} cores, "
        f"{'x'.join(map(str, QUICK_SHAPE if quick else SHAPE))}, median of {QUICK_STEPS if quick else STEPS} steps; "
        "fast: measured; slow: simulated at 2 Mbit/s from the layers' seconds measured here; without the sum of the "
        "weights' gradients",
        PROFILE_MACHINE: profiled_here(),
    }
    batches = BATCHES[:2] if quick else BATCHES
    subjects = [TiledNetwork.of(QUICK_SHAPE if quick else SHAPE, batch_size=batch_size) for batch_size in batches]
    for pair in pairs():
        with _session(pair) as session:
            for subject in subjects:
                say(f"batch {subject.batch_size}, {pair.text}")
                figures |= _measured(subject, session, pair, QUICK_STEPS if quick else STEPS)
    return figures | _gains(figures, batches)


@contextlib.contextmanager
def _session(pair: Pair) -> Iterator[Session]:
    before = os.environ.get(GPU_SHARING_VARIABLE)
    os.environ[GPU_SHARING_VARIABLE] = "1" if pair.shares_gpu else "0"
    try:
        with open_session(pair.cluster, threads=max(1, usable_cores() - 1), apart=True) as session:
            yield session
    finally:
        if before is None:
            del os.environ[GPU_SHARING_VARIABLE]
        else:
            os.environ[GPU_SHARING_VARIABLE] = before


def _measured(subject: TiledNetwork, session: Session, pair: Pair, steps: int) -> Figures:
    answers = measure_on(
        session.coordinator, subject.graph, session.cluster.names, ladder=(subject.batch_size,),
        seconds=PROFILE_SECONDS, kernels={},
    )  # fmt: skip
    profile = Profile({name: answer.profile for name, answer in answers.items()})
    plan = _in_proportion(subject, session.cluster.names, profile)
    slow = Priced(plan, subject.graph.network, linked(session.cluster, SLOW), profile)
    figures: Figures = {f"gpu_tiles_{pair.name}_b{subject.batch_size}_plan": str(plan.stages[0].share)}
    for count, groups in _groupings(plan, subject).items():
        planned = with_groups(plan, 0, groups)
        key = f"gpu_tiles_{pair.name}_b{subject.batch_size}_g{count}"
        figures[f"{key}_fast_seconds"] = bare_step_seconds(subject, session, planned, steps)
        figures[f"{key}_slow_seconds"] = slow.bare_seconds(planned)
    return figures


def _in_proportion(subject: TiledNetwork, names: tuple[str, ...], profile: Profile) -> Plan:
    """Return a plan of two tiles whose rows are in proportion to the devices' speeds."""
    plan = subject.tiles(names, ROWS)
    layers = range(len(subject.graph.network.layers))
    seconds = [
        sum(sum(profile.devices[name].layer_seconds(layer, subject.batch_size)) for layer in layers) for name in names
    ]
    uneven = min(MOST_UNEVEN, max(1, round(max(seconds) / min(seconds))))
    rows = (uneven, 1) if seconds[0] <= seconds[1] else (1, uneven)
    stage = msgspec.structs.replace(plan.stages[0], share=ByTiles(rows, (1,)))
    return subject.plan(stage, batch_size=subject.batch_size)


def _groupings(plan: Plan, subject: TiledNetwork) -> Mapping[int, ExchangeGroups]:
    """Return the paper's groupings: exchanges before evenly spaced layers, backward by groups of deltas."""
    geometry = TileGeometry(plan, 0, subject.graph.network)
    places = geometry.places_to_exchange
    groupings = {}
    for count in GROUPS:
        chosen = [places[number * len(places) // min(count, len(places))] for number in range(min(count, len(places)))]
        starts: tuple[LayerName, ...] = geometry.start_names(tuple(chosen))
        groupings[count] = ExchangeGroups(f"{count} groups", starts, starts)
    return groupings


def _gains(figures: Figures, batches: tuple[int, ...]) -> Figures:
    """Return how many times as long an exchange at every layer takes as one group, at the largest batch."""
    batch_size, gains = batches[-1], dict[str, float | int | str]()
    for pair in pairs():
        for link in ("fast", "slow"):
            every_layer, one_group = (
                float(figures[f"gpu_tiles_{pair.name}_b{batch_size}_g{count}_{link}_seconds"])
                for count in (GROUPS[-1], GROUPS[0])
            )
            gains[f"gpu_tiles_{pair.name}_{link}_every_layer_over_one_group"] = every_layer / one_group
    return gains
