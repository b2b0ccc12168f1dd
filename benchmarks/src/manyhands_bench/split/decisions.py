"""Whether the decision engine earns its place: its deployments over whole recordings, beside fixed ones.

ours      the engine as a job runs it: it measures by the job's own transfers, looks, and redeploys where that pays
frozen    the engine's first deployment, kept to the end
hindsight the best single deployment of all, chosen when the recording is over

The devices are the catalogue's, the clock is virtual: a batch takes what Eq. 9 to 12 say at the rates of the moment,
and a change drains the round under way, moves its layers over the link, and starts again. The decisions are the
library's own: the same engine, meters and prices. Simulated, therefore, but for the recordings.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy

from manyhands.facts.cluster import preset
from manyhands.facts.decode import decode
from manyhands.facts.network import Network
from manyhands.facts.profile import estimate_cluster
from manyhands.facts.trace import LinkTrace, Trace
from manyhands.files.documents import read_document, write_document
from manyhands.graph.capture import capture
from manyhands.models.registry import ZOO, build, example_batch, example_target, loss_function
from manyhands.planner.rates import LONGEST_PROBE_SECONDS, Engine, EngineSettings, Rates
from manyhands.planner.split import (
    WIDTHS,
    Deployment,
    LinkRates,
    SplitProfile,
    directions,
    edge_only_price,
    modules,
    moving_seconds,
    prices,
    seconds_of,
)
from manyhands.planner.split_choice import choose
from manyhands.planner.split_profile import split_profile
from manyhands.plans.networks import EXAMPLE_SAMPLES, load_network
from manyhands.split.controller import FIRST_TAU, REDEPLOY_SECONDS
from manyhands_bench.figures import Figures, Progress
from manyhands_bench.split.site import K, mean_rates
from manyhands_bench.split.traces import MBIT, MORE_TRACES, TRACES, part, read_traces

STORED = "decisions.json"
SECTION_SECONDS = 180.0
"""Every recording is played for so long, from its beginning; a shorter one begins again."""
SLICE_SECONDS = 0.5
"""Within a slice the link's rates and the deployment stay as they are."""
FIRST_SECONDS = 1.0
"""What is seen of the link before the first deployment is chosen."""
LEAST_RATE = 1000.0
EDGES = {"tx2": "edge-cloud", "pi4": "edge-cloud-pi"}
"""Two edges of different speed, each with the paper's server."""
BATCH_SIZE = 32
CIFAR = (3, 32, 32)
SMALL: Mapping[str, Any] = {"num_classes": 10, "small_images": True}
NETWORKS: dict[str, tuple[tuple[int, ...], Mapping[str, Any]]] = {
    "resnet50": (CIFAR, SMALL),
    "vgg19": (CIFAR, {"num_classes": 10}),
    "mobilenetv3-large": (CIFAR, SMALL),
    "mobilenetv2-32": (CIFAR, {}),
    "efficientnet-b1-32": (CIFAR, {}),
}
"""Networks for CIFAR-10 with the shape of a sample and how they are built:
three of SPLIT's Table 1, two of ASTEROID's."""


@dataclass
class Drive:
    """One job over one recording: the moments of its batches by a virtual clock."""

    profile: SplitProfile
    trace: LinkTrace
    seconds: float
    now: float = 0.0
    batches: float = 0.0
    changes: list[tuple[float, Deployment]] = field(default_factory=list)
    moving: float = 0.0
    """Seconds spent on changes."""
    probing: float = 0.0
    """Seconds spent on probes."""

    def rates(self, begin: float) -> LinkRates:
        mean = mean_rates(self.trace, begin, begin + SLICE_SECONDS)
        return LinkRates(max(mean.up_bytes_per_second, LEAST_RATE), max(mean.down_bytes_per_second, LEAST_RATE))

    def kept(self) -> dict[Deployment, float]:
        """Return the batches that every single deployment completes if it is kept to the end."""
        ks = tuple(range(K + 1))
        alone = Deployment(self.profile.edge_only)
        sums = numpy.zeros((len(ks), len(self.profile.cuts), len(WIDTHS)))
        now, by_itself = 0.0, 0.0
        while now < self.seconds:
            rates = self.rates(now)
            sums += SLICE_SECONDS * FIRST_TAU / prices(self.profile, rates, FIRST_TAU, None, ks, WIDTHS, drains=True)
            by_itself += SLICE_SECONDS * FIRST_TAU / edge_only_price(self.profile, rates, FIRST_TAU, None)
            now += SLICE_SECONDS
        kept = {
            Deployment(cut.layer, k, bits): float(sums[level, place, width])
            for level, k in enumerate(ks)
            for place, cut in enumerate(self.profile.cuts)
            for width, bits in enumerate(WIDTHS)
        }
        return kept | {alone: by_itself}

    def engine(self, first: Deployment, seen: LinkRates, settings: EngineSettings) -> Engine:
        return Engine(
            self.profile, Rates(seen), first, k=K, widths=WIDTHS, chooser=choose, drains=True, settings=settings
        )

    def driven(self, first: Deployment, seen: LinkRates, settings: EngineSettings) -> float:
        """Return the batches that are completed where the engine decides."""
        engine = self.engine(first, seen, settings)
        engine.probe(0.0)
        running, group = first, 0.0
        while self.now < self.seconds:
            rates = self.rates(self.now)
            self._probed(engine, running, rates)
            done = SLICE_SECONDS / batch_seconds(self.profile, rates, running)
            self._measured(engine, running, rates, done)
            self.batches, group, self.now = self.batches + done, group + done, self.now + SLICE_SECONDS
            engine.look(self.now, int(self.batches))
            size = 1 if running.k is None else running.k + 1
            if engine.current != running and group >= size:
                self._changed(running, engine.current, rates)
                running, group = engine.current, 0.0
                engine.deployed(self.now)
            elif group >= size:
                group -= size * math.floor(group / size)
        return self.batches

    def _measured(self, engine: Engine, running: Deployment, rates: LinkRates, done: float) -> None:
        """Feed the engine's meters with what this slice's batches have sent."""
        times = modules(self.profile, rates, [running.k], [running.bits], drains=True)
        place = self.profile.index(running.cut)
        end = self.now + SLICE_SECONDS
        onward, back = directions(self.profile, rates)
        for meter, busy, rate in (
            (engine.rates.up, float(times.t2[0, place, 0]), onward),
            (engine.rates.down, float(times.t4[0, place, 0]), back),
        ):
            seconds = min(busy * done, SLICE_SECONDS)
            if seconds > 0:
                meter.transfer(seconds * rate, end - seconds, end)

    def _probed(self, engine: Engine, running: Deployment, rates: LinkRates) -> None:
        """Send what the engine wants to be sent while the edge works alone; training waits for it."""
        if running.cut != self.profile.edge_only:
            return
        up, down = engine.probe(self.now)
        if not up and not down:
            return
        meters, speeds = engine.rates, (rates.up_bytes_per_second, rates.down_bytes_per_second)
        ways = tuple(zip((meters.up, meters.down), (up, down), speeds, strict=True))
        taken = {meter: size / rate for meter, size, rate in ways if size}
        begin, self.now = self.now, self.now + min(max(taken.values()), LONGEST_PROBE_SECONDS)
        for meter, size, _ in ways:
            if size:  # one that is given up ends now at best
                meter.transfer(size, begin, min(begin + taken[meter], self.now))
        self.probing += self.now - begin
        engine.probed(self.now, has_arrived=max(taken.values()) <= LONGEST_PROBE_SECONDS)

    def _changed(self, before: Deployment, after: Deployment, rates: LinkRates) -> None:
        seconds = float(moving_seconds(self.profile, rates, before.cut, numpy.array([after.cut]))[0])
        self.now += seconds + self.profile.redeploy_seconds
        self.moving += seconds + self.profile.redeploy_seconds
        self.changes.append((self.now, after))


def batch_seconds(profile: SplitProfile, rates: LinkRates, deployment: Deployment) -> float:
    """Return the seconds of a batch in a long run of one deployment."""
    return seconds_of(profile, rates, FIRST_TAU, deployment, drains=True) / FIRST_TAU


@cache
def network_of(model: str) -> Network:
    """Return one of the paper's networks, captured as it is trained there."""
    shape, options = NETWORKS[model]
    if not options:
        return load_network(model, shape)
    batch = example_batch(model, EXAMPLE_SAMPLES, input_shape=shape)
    target = example_target(model, EXAMPLE_SAMPLES, input_shape=shape)
    target = target % options["num_classes"]
    loss = loss_function(ZOO[model].loss)
    return capture(build(model, **options), batch, granularity="blocks", name=model, loss=loss, target=target).network


@cache
def profile_of(model: str, edge: str) -> SplitProfile:
    """Return a network between the catalogue's edge and server."""
    network, cluster = network_of(model), preset(EDGES[edge])
    profile = estimate_cluster(network, cluster)
    made = split_profile(network, profile.of("edge"), profile.of("cloud"), BATCH_SIZE)
    return msgspec.structs.replace(
        made, redeploy_seconds=REDEPLOY_SECONDS, memory_bytes=float(cluster.device("edge").memory_bytes)
    )


class Decided(msgspec.Struct, frozen=True):
    """One job over one recording, by three ways of deciding: batches completed."""

    trace: str
    model: str
    edge: str
    ours: float
    frozen: float
    hindsight: float
    changes: int
    moving: float
    probing: float
    first: Deployment
    best: Deployment


def decided(
    name: str, trace: LinkTrace, model: str, edge: str, settings: EngineSettings, seconds: float = SECTION_SECONDS
) -> Decided:
    """Play one recording with all three."""
    profile = profile_of(model, edge)
    seen = mean_rates(trace, 0.0, FIRST_SECONDS)
    seen = LinkRates(max(seen.up_bytes_per_second, LEAST_RATE), max(seen.down_bytes_per_second, LEAST_RATE))
    first = choose(profile, seen, FIRST_TAU, None, K, WIDTHS, drains=True)
    drive = Drive(profile, trace, seconds)
    ours = drive.driven(first, seen, settings) * seconds / drive.now
    kept = drive.kept()
    best = max(kept, key=kept.__getitem__)
    return Decided(
        name, model, edge, ours, kept[first], kept[best], len(drive.changes), drive.moving, drive.probing, first, best
    )


# ---- Links


def drawn_links(seconds: float) -> dict[str, LinkTrace]:
    """Return links of which there is no recording: two by WiFi, drawn, and a cable of one hop.

    WiFi goes between good seconds and bad ones, as where people move and neighbours send: means of 45 and 12 Mbit/s,
    which last 20 and 8 seconds on average, and each second differs by a third.
    """
    links = {"one_hop": LinkTrace.constant(100 * MBIT, 100 * MBIT)}
    for seed, name in enumerate(("wifi_near", "wifi_far")):
        drawing, moments, rates, is_good, left = random.Random(seed), [], [], True, 0.0
        for second in range(round(seconds)):
            if left <= 0:
                is_good = not is_good if second else True
                left = drawing.expovariate(1 / (20.0 if is_good else 8.0))
            mean = (45.0 if is_good else 12.0) / (1 + 2 * seed)
            moments.append(float(second))
            rates.append(max(0.1, drawing.gauss(mean, mean / 3)) * MBIT)
            left -= 1.0
        way = Trace(tuple(moments), tuple(rates))
        links[name] = LinkTrace(way, way, is_one_way=True, name=name)
    return links


def recorded_links(folder: Path, seconds: float) -> dict[str, LinkTrace]:
    """Return the recordings, each from its beginning."""
    return {
        name: LinkTrace(part(trace.up, 0.0, seconds), part(trace.down, 0.0, seconds), trace.is_one_way, trace.name)
        for name, trace in read_traces(folder, TRACES | MORE_TRACES).items()
    }


# ---- Figures


def bench_decisions(folder: Path, quick: bool, out: Path | None, say: Progress) -> Figures:
    """Play every network on every edge over every link, and return what deciding again has gained. Every job is stored
    as it ends, and the same folder goes on where it was interrupted."""
    seconds = 30.0 if quick else SECTION_SECONDS
    links = recorded_links(folder, seconds) | drawn_links(seconds)
    models = list(NETWORKS)[:1] if quick else list(NETWORKS)
    path = None if out is None else out / STORED
    rows = decode(read_document(path), list[Decided], str(path)) if path is not None and path.exists() else []
    done = {(row.model, row.edge, row.trace) for row in rows}
    for model in models:
        for edge in EDGES:
            for name in (link for link in links if (model, edge, link) not in done):
                say(f"deciding: {model} on {edge}, {name}")
                rows.append(decided(name, links[name], model, edge, EngineSettings(tau=FIRST_TAU), seconds))
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_document(path, msgspec.to_builtins(rows))
    return decision_figures(rows, seconds)


def decision_figures(rows: Sequence[Decided], seconds: float) -> Figures:
    frozen = {row: row.ours / row.frozen for row in rows}
    hindsight = {row: row.ours / row.hindsight for row in rows}
    mean = statistics.geometric_mean
    changed = [row for row in rows if row.changes]
    figures: Figures = {
        "redeployments": sum(row.changes for row in rows),
        "jobs": len(rows),
        "jobs_that_changed": len(changed),
        "gain_over_frozen": mean(frozen.values()),
        "gain_over_frozen_least": min(frozen.values()),
        "gain_over_frozen_most": max(frozen.values()),
        "gain_over_hindsight": mean(hindsight.values()),
        "gain_over_hindsight_least": min(hindsight.values()),
        "gain_over_hindsight_most": max(hindsight.values()),
        "section_seconds": seconds,
    }
    if changed:
        figures["gain_over_frozen_where_changed"] = mean(frozen[row] for row in changed)
    for kind, value in (("link", "trace"), ("network", "model"), ("edge", "edge")):
        for name in dict.fromkeys(getattr(row, value) for row in rows):
            of_it = [row for row in rows if getattr(row, value) == name]
            key = f"{kind}_{name}".replace("-", "_")
            figures[f"gain_over_frozen_{key}"] = mean(frozen[row] for row in of_it)
            figures[f"gain_over_hindsight_{key}"] = mean(hindsight[row] for row in of_it)
            figures[f"redeployments_{key}"] = sum(row.changes for row in of_it)
    figures["decisions_setting"] = (
        f"virtual clock: {seconds:g} s from the beginning of each of {len({row.trace for row in rows})} links "
        f"(WiFi and one hop are drawn, the others recorded), {', '.join(dict.fromkeys(row.model for row in rows))}, "
        f"mini-batches of {BATCH_SIZE}, edges {', '.join(EDGES)} and the server of the catalogue; grouped, K={K}; the "
        f"first deployment is chosen by the rates of the first {FIRST_SECONDS:g} s; frozen: that one kept; hindsight: "
        "the best one to keep"
    )
    figures["decisions_each"] = "; ".join(_text(row) for row in rows)
    return figures


def _text(row: Decided) -> str:
    return (
        f"{row.model} {row.edge} {row.trace}: {row.ours:.0f} batches, frozen {row.frozen:.0f}, hindsight "
        f"{row.hindsight:.0f}, {row.changes} change(s)"
    )
