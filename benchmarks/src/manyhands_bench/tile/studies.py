"""The paper's studies, for `manyhands bench tile --full`: Raspberry Pis by the catalogue, simulated, as plots.

fig_5_2c    communication of an interior tile, by batch size         the paper's cost model
fig_5_2de   groupings by the ratio of communication to computation   the paper's cost model
fig_6_1     where a step's time goes, and the speed-up               simulated, 1-6 devices of 1-4 tiles
fig_6_3     batches of 1-8 samples by three groupings                simulated, 6 devices of 4 tiles
fig_6_4     forward and backward at 0.05-1 Mbit/s                    simulated, 6 devices of 4 tiles
fig_6_6     batches of 1-16 samples, data parallel, layer partition  simulated, 2 devices of 4 cores
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.lab import slot_names, with_slots
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import estimate_cluster
from manyhands.planner.grouping import Costs, group_tiles, kernel_layers
from manyhands.schedule.actions import Action, Await, Backward, Receive, Reduce, Send, Step
from manyhands.simulator.simulate import simulate
from manyhands_bench.claims import ESTIMATED
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.parts import PROFILE_MACHINE
from manyhands_bench.tile.groups import EVERY_LAYER, ONE_GROUP, Priced, linked, without_weights
from manyhands_bench.tile.plots import (
    ExtremeCosts,
    StepSplit,
    draw_baselines,
    draw_batches,
    draw_components,
    draw_cost_ratios,
    draw_rates,
    draw_speedups,
)
from manyhands_bench.tile.setup import TiledNetwork, TileVariant, square_grid
from manyhands_bench.tile.tile_costs import communication_components, cost_sweep

CLUSTER = "pi3x6"
CLUSTER_OF_BASELINES = "decnn-880"
"""Its Pi 4 stand for the CPUs of the paper's Jetson Nanos: four cores of about the same speed, and as much memory."""
SLOTS = 4
"""The most tiles on a device: one for each core."""
GRID_OF_CHAPTER_5 = (3, 3)
RATIOS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5)
BATCHES = (1, 2, 4, 8)
BATCHES_OF_BASELINES = (1, 2, 4, 8, 16)
RATES_MBIT = (0.05, 0.1, 0.2, 0.5, 1.0)
GROUPINGS = {"1 group": ONE_GROUP[1], "every layer": EVERY_LAYER[1], "optimal": "optimal, deltas"}
"""The paper's groupings: groups of deltas backward."""


@dataclass
class Pis:
    """A number of Raspberry Pis with a number of tiles on each."""

    subject: TiledNetwork
    devices: int
    tiles: int
    of: str = CLUSTER
    """A preset cluster."""

    @property
    def network(self) -> Network:
        return self.subject.graph.network

    @cached_property
    def cluster(self) -> Cluster:
        whole = with_slots(preset(self.of), SLOTS)
        names = [n for device in preset(self.of).names[: self.devices] for n in slot_names(device, SLOTS)[: self.tiles]]
        links = tuple(link for link in whole.links if link.sender in names and link.receiver in names)
        return Cluster(self.of, tuple(map(whole.device, names)), whole.link, links)

    @cached_property
    def plan(self) -> Plan:
        """A plan by tiles on a grid as square as possible; with one worker, everything on it."""
        names = self.cluster.names
        return (
            self.subject.single(names[0])
            if len(names) == 1
            else self.subject.tiles(names, TileVariant(square_grid(len(names))))
        )

    def priced(self, batch_size: int = 1, link: Link | None = None) -> Priced:
        cluster = linked(self.cluster, link) if link is not None else self.cluster
        plan = resolve(msgspec.structs.replace(self.plan, batch_size=batch_size), self.network)
        return Priced(plan, self.network, cluster, estimate_cluster(self.network, cluster))

    def ways(self, batch_size: int) -> dict[str, Plan]:
        """Return plans of a batch by tiles, by samples, and by layers with a sample as a micro-batch."""
        names = self.cluster.names
        in_turn = msgspec.structs.replace(
            self.subject.in_turn(names), batch_size=batch_size, micro_batches=batch_size, warm_up="P-p"
        )
        return {
            "tiles": resolve(msgspec.structs.replace(self.plan, batch_size=batch_size), self.network),
            "data parallel": self.subject.by_samples(names, batch_size),
            "layer partition": resolve(in_turn, self.network),
        }

    def split(self) -> StepSplit:
        """Return the time of a step by part: computing, waiting for boundary data, waiting for the weights' sums."""
        priced = self.priced()
        bare = priced.simulated(self.plan, without_weights(self.plan, self.network))
        computing = max(device.busy_seconds for device in bare.devices.values())
        whole = simulate(self.plan, self.network, self.cluster, priced.profile, keep_spans=False).seconds
        return StepSplit(self.devices, self.tiles, computing, bare.seconds - computing, whole - bare.seconds)


def draw_studies(subject: TiledNetwork, out: Path, quick: bool, say: Progress) -> Figures:
    """Draw every study as a picture in `out`, and return the numbers that its claims rest on."""
    out.mkdir(parents=True, exist_ok=True)
    figures = _chapter_5(subject, out, say)
    figures |= _speedups(subject, out, quick, say)
    pis = Pis(subject, 2, 2) if quick else Pis(subject, 6, SLOTS)
    figures |= _batches(pis, out, say)
    figures |= _rates(pis, out, say)
    baselines = Pis(subject, 2, 2 if quick else SLOTS, CLUSTER_OF_BASELINES)
    figures |= _baselines(baselines, out, say)
    return figures | {
        "studies": str(out),
        f"studies_{PROFILE_MACHINE}": ESTIMATED,
        "studies_setting": f"{subject}; chapter 5 by the paper's cost model on a 3x3 grid; chapter 6 simulated "
        f"with the catalogue's numbers of {CLUSTER}, a tile on each core, weights added up by all-reduce; "
        f"Fig. 6.6 on {baselines.devices} Pi 4 ({CLUSTER_OF_BASELINES}), {baselines.tiles} cores of each, for the "
        "CPUs of the paper's two Jetson Nanos: data parallel leaves cores idle where samples are fewer, a partition by "
        "layers has as even multiply-accumulates as can be and passes on sample by sample (1F1B); no such device was "
        "measured",
    }


def _chapter_5(subject: TiledNetwork, out: Path, say: Progress) -> Figures:
    say("studies of chapter 5")
    network = subject.graph.network
    parts = communication_components(network, GRID_OF_CHAPTER_5, BATCHES)
    elements = {
        "input and output": [part.samples for part in parts],
        "boundary, at the least": [component.boundary for component in parts],
        "weights": [component.weights for component in parts],
    }
    draw_components(BATCHES, elements, out / "fig_5_2c.png")
    rows = cost_sweep(network, GRID_OF_CHAPTER_5, RATIOS)
    costs = {
        way: ExtremeCosts(
            [getattr(row, f"{way}_one_group") for row in rows],
            [getattr(row, f"{way}_every_layer") for row in rows],
            [getattr(row, f"{way}_groups") for row in rows],
        )
        for way in ("forward", "backward")
    }
    draw_cost_ratios(RATIOS, costs, out / "fig_5_2de.png")
    bytes_only = group_tiles(kernel_layers(network), GRID_OF_CHAPTER_5, Costs(0.0, 1.0))
    return {
        "fig_5_2_forward_one_group_over_every_layer": bytes_only.forward.one_group / bytes_only.forward.every_layer,
        "fig_5_2_backward_one_group_over_every_layer": bytes_only.backward.one_group / bytes_only.backward.every_layer,
        "fig_5_2_forward_groups": len(bytes_only.forward.best.starts),
        "fig_5_2_backward_groups": len(bytes_only.backward.best.starts),
    }


def _speedups(subject: TiledNetwork, out: Path, quick: bool, say: Progress) -> Figures:
    splits = []
    for devices in (1, 2) if quick else range(1, 7):
        for tiles in (1, 2) if quick else range(1, SLOTS + 1):
            say(f"Fig. 6.1, {devices} device(s) of {tiles} tile(s)")
            splits.append(Pis(subject, devices, tiles).split())
    draw_speedups(splits, out / "fig_6_1.png")
    last = splits[-1]
    return {
        "fig_6_1_single_seconds": splits[0].seconds,
        f"fig_6_1_speedup_{last.devices}x{last.tiles}": splits[0].seconds / last.seconds,
        f"fig_6_1_speedup_{last.devices}x{last.tiles}_without_weights": splits[0].bare_seconds / last.bare_seconds,
    }


def _batches(pis: Pis, out: Path, say: Progress) -> Figures:
    seconds: dict[str, list[float]] = {name: [] for name in GROUPINGS}
    for batch_size in BATCHES:
        say(f"Fig. 6.3, batch {batch_size}")
        priced = pis.priced(batch_size)
        groupings = {groups.name: groups for groups in priced.groupings}
        for name, planned in GROUPINGS.items():
            plan = priced.planned(groupings[planned])
            seconds[name].append(simulate(plan, pis.network, priced.cluster, priced.profile, keep_spans=False).seconds)
    draw_batches(BATCHES, seconds, out / "fig_6_3.png")
    return {
        f"fig_6_3_batch_{BATCHES[-1]}_one_group_over_optimal": seconds["1 group"][-1] / seconds["optimal"][-1],
        f"fig_6_3_batch_{BATCHES[-1]}_every_layer_over_optimal": seconds["every layer"][-1] / seconds["optimal"][-1],
    }


def _rates(pis: Pis, out: Path, say: Progress) -> Figures:
    seconds_of: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in GROUPINGS} for way in ("forward", "backward")
    }
    for rate in RATES_MBIT:
        say(f"Fig. 6.4, {rate:g} Mbit/s")
        priced = pis.priced(link=Link(rate * 1e6 / 8, pis.cluster.link.delay_seconds))
        groupings = {groups.name: groups for groups in priced.groupings}
        for name, planned in GROUPINGS.items():
            for way, seconds in _ways(priced, priced.planned(groupings[planned])).items():
                seconds_of[way][name].append(seconds)
    draw_rates(RATES_MBIT, seconds_of, out / "fig_6_4.png")
    return {
        f"fig_6_4_{way}_one_group_over_every_layer_at_{rate:g}": lines["1 group"][number] / lines["every layer"][number]
        for way, lines in seconds_of.items()
        for number, rate in ((0, RATES_MBIT[0]), (-1, RATES_MBIT[-1]))
    }


def _baselines(pis: Pis, out: Path, say: Progress) -> Figures:
    seconds: dict[str, list[float]] = {"tiles": [], "data parallel": [], "layer partition": []}
    profile = estimate_cluster(pis.network, pis.cluster)
    for batch_size in BATCHES_OF_BASELINES:
        say(f"Fig. 6.6, batch {batch_size}")
        for name, plan in pis.ways(batch_size).items():
            seconds[name].append(simulate(plan, pis.network, pis.cluster, profile, keep_spans=False).seconds)
    draw_baselines(BATCHES_OF_BASELINES, seconds, out / "fig_6_6.png")
    figures: Figures = {}
    for number, batch_size in enumerate(BATCHES_OF_BASELINES):
        tiles, samples, layers = (row[number] for row in seconds.values())
        figures |= {
            f"fig_6_6_batch_{batch_size}_tiles_seconds": tiles,
            f"fig_6_6_batch_{batch_size}_data_parallel_over_tiles": samples / tiles,
            f"fig_6_6_batch_{batch_size}_layer_partition_over_tiles": layers / tiles,
        }
    return figures


def _ways(priced: Priced, plan: Plan) -> dict[str, float]:
    """Return the seconds of the forward pass and of the backward pass, each alone, without the weights' sums."""
    actions = without_weights(plan, priced.network)
    ahead = {device: [action for action in ordered if not _is_backward(action)] for device, ordered in actions.items()}
    back = {device: [action for action in ordered if _is_backward(action)] for device, ordered in actions.items()}
    return {
        "forward": priced.simulated(plan, ahead).seconds,
        "backward": priced.simulated(plan, back).seconds,
    }  # fmt: skip


def _is_backward(action: Action) -> bool:
    if isinstance(action, (Send, Receive)):
        return action.message.kind in ("gradient", "halo-gradient", "output-gradient")
    return isinstance(action, (Backward, Step)) or (isinstance(action, (Reduce, Await)) and action.backward)
