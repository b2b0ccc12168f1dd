"""The training job of several edges, each with its own features of the same samples, and a server that joins them.

Every edge runs the layers that read its inputs, as far ahead of the gradients as K allows; the server has the rest and
the loss (schedule/replay.py). K may go by epoch; where the network is cut follows from which device has which inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Self

from torch.utils.data import Dataset

from manyhands.explaining.planned_run import PlannedRun
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue, WorkerLost, unknown
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.network import Network
from manyhands.facts.plan import Codec, Plan, Replay, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Kernel, Profile
from manyhands.facts.trace import LinkTrace
from manyhands.job.base import Guide, Job
from manyhands.job.callbacks import OnStep
from manyhands.job.result import TrainResult
from manyhands.planner.split import Bound, Deployment
from manyhands.plans.planning import batch_norm_named
from manyhands.runtime.control_messages import Reshape
from manyhands.runtime.control_parts import Arrival, Shape
from manyhands.runtime.controller import Change, Controller
from manyhands.runtime.following import Following
from manyhands.runtime.member import Member
from manyhands.runtime.retry_policy import RetryPolicy
from manyhands.session.measuring import measure
from manyhands.split.config import AMONG_SILOS, SplitConfig
from manyhands.split.job import LEAST_BITS, SplitResult
from manyhands.split.plans import Ends, Phases, mode_of
from manyhands.split.session import look_at_link, rates_of
from manyhands.split.silos import JoinedSilos, check_again

SILO_BASELINES: dict[str, dict[str, Any]] = {
    AMONG_SILOS: {"k": 0, "bits": 32}, "k0": {"k": 0}, "uncompressed": {"bits": 32}, "unbounded": {"k": None},
}  # fmt: skip


def as_baseline(config: SplitConfig) -> SplitConfig:
    """Return the configuration with the options that its baseline fixes."""
    if not config.rival:
        return config
    if config.rival not in SILO_BASELINES:
        raise unknown("rival among silos", config.rival, SILO_BASELINES)
    return replace(config, rival="", **SILO_BASELINES[config.rival])


def silo_stages(network: Network, holders: Mapping[str, Sequence[str]], server: str, codec: Codec) -> tuple[Stage, ...]:
    """Return for each edge a stage of the layers that read its inputs alone, one after another; then the server's."""
    places: dict[str, tuple[int, int]] = {}
    edge, cut = "", 0
    owners = list(_owners(network, {name: inputs for name, inputs in holders.items() if name != server}))
    for index, allowed in enumerate(owners):
        if len(allowed) > 1:  # several have all it is made from: it goes with what comes next
            later = next((names for names in owners[index:] if len(names) < 2), allowed)
            allowed = later & allowed or allowed
        if edge not in allowed:
            edge = next((name for name in sorted(allowed) if name not in places), "")
        if not edge:
            break
        places[edge] = (places.get(edge, (cut, cut))[0], index + 1)
        cut = index + 1
    missing = [name for name in holders if name != server and name not in places]
    if missing or cut == len(network.layers):
        idle = ", ".join(missing) or server
        raise BadValue(
            f"{network.name} gives {idle} no layers of its own.",
            hint="forward must run each device's inputs through layers of their own, and join what these give.",
        )
    _check_raw(network, places)
    bounds = [first for first, _ in places.values()] + [cut]
    edges = (Stage((first, last), (name,)) for name, first, last in zip(places, bounds, bounds[1:], strict=False))
    return (*edges, Stage((cut, len(network.layers)), (server,), codec=codec))


def _owners(network: Network, holders: Mapping[str, Sequence[str]]) -> Iterator[frozenset[str]]:
    """Yield for each layer the edges that have all it is made from; every edge has the constants."""
    owners = {name: frozenset(edge for edge, inputs in holders.items() if name in inputs) for name in network.inputs}
    for layer in network.layers:
        layer_owners = frozenset(holders)
        for op in network.ops[layer.first : layer.last]:
            op_owners = frozenset(holders).intersection(*(owners[name] for name in op.inputs))
            owners |= dict.fromkeys(op.outputs, op_owners)
            layer_owners &= op_owners
        yield layer_owners


def _check_raw(network: Network, places: Mapping[str, tuple[int, int]]) -> None:
    """Refuse stages of which data itself, or what was made of it without a weight, would leave an edge."""
    raw = set(network.inputs)
    for op in network.ops:
        if not op.weights and op.inputs and all(name in raw for name in op.inputs):
            raw.update(op.outputs)
    for edge, (first, last) in places.items():
        start, end = network.layers[first].first, network.layers[last - 1].last
        made = {name for op in network.ops[start:end] for name in op.outputs}
        leaks = [name for name in network.crossing(end) if name in made and name in raw]
        if leaks:
            raise BadValue(
                f"{edge} would send its data itself ({', '.join(leaks)}): no layer with weights reads it first.",
                hint="Give every device's inputs a layer of their own in forward.",
            )


class SiloController:
    """The `Controller` and also the `Replan` of such a job: only K changes, by epoch; no device can be spared."""

    def __init__(
        self, stages: tuple[Stage, ...], ends: Ends, phases: Phases, steps_per_epoch: int, measured: Profile,
        cluster: Cluster, joined: JoinedSilos, data: Dataset[Any] | None, first_step: int,
    ) -> None:  # fmt: skip
        self.stages, self.ends, self.phases, self.steps_per_epoch = stages, ends, phases, steps_per_epoch
        self.measured, self.cluster, self.joined, self.own = measured, cluster, joined, data
        self.steps = first_step
        self._members = self._present()
        self.plan = self.plan_at(first_step)

    def _present(self) -> set[Member]:
        return set(self.joined.session.coordinator.alive())

    def k_at(self, step: int) -> Bound:
        epoch = step // self.steps_per_epoch
        return next(k for start, k in reversed(self.phases) if start <= epoch)

    def plan_at(self, step: int) -> Plan:
        k, ends = self.k_at(step), self.ends
        batches = ends.round_batches(k)
        return Plan(
            ends.network, batches * ends.batch_size, self.stages, micro_batches=batches, order="replay",
            replay=Replay(k, ends.mode), optimizer_slots=ends.optimizer_slots, batch_norm=ends.batch_norm,
            gradient_norm=ends.gradient_norm,
        )  # fmt: skip

    def stop_at(self, step: int) -> int | None:
        starts = [epoch * self.steps_per_epoch for epoch, _ in self.phases]
        return next((start for start in starts if start > step), None)

    def should_change(self, steps_done: int) -> bool:
        self.steps = steps_done
        return False

    def arrived(self, device: str, arrivals: Sequence[Arrival]) -> None:
        pass

    def began(self, plan: Plan, steps_done: int) -> None:
        self.steps = steps_done

    def stepped(self, step: int) -> None:
        self.steps = step + 1

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change:
        missing = [name for name in self.plan.devices if name not in names]
        if missing:
            raise WorkerLost(f"{', '.join(missing)} is lost, and its data with it.", hint="Start it again, and resume.")
        if (present := self._present()) != self._members:
            check_again(self.joined.session.coordinator, self.joined, self.own)
            self._members = present
        self.plan = self.plan_at(self.steps)
        return Change(self.plan, self.kernels(self.plan), "redeployed", "phase", 0)

    def kernels(self, plan: Plan) -> dict[str, Mapping[str, Kernel]]:
        return {name: self.measured.of(name).kernels for name in plan.devices}

    def present(self, plan: Plan, names: tuple[str, ...]) -> tuple[Cluster, Profile]:
        return self.cluster, self.measured


class SiloJob(Job):
    """The job of one `split_train` call with two edges or more."""

    joined: JoinedSilos
    trace: LinkTrace | None
    steering: SiloController
    last_planned: PlannedRun

    def among(self, joined: JoinedSilos, trace: LinkTrace | None, data: Dataset[Any] | None) -> Self:
        """Return the job with the devices that have silos, the trace of their links, and the data at hand."""
        self.joined, self.trace, self.own = joined, trace, data
        if self.settings.cut != "auto" or self.settings.edge_side != "upstream":
            raise BadValue("With several edges the network is cut where their features meet.", hint="Leave out cut.")
        return self

    @property
    def settings(self) -> SplitConfig:
        """The configuration of this kind of job, as a baseline fixes it."""
        assert isinstance(self.config, SplitConfig)
        return as_baseline(self.config)

    def prepared(self) -> PlannedRun:
        config, network, workload, joined = self.settings, self.graph.network, self.workload, self.joined
        size = workload.batch_size
        bits = LEAST_BITS if config.bits == "auto" else int(config.bits)
        codec = Codec(bits, config.error_feedback, config.pack_gradients)
        stages = silo_stages(network, joined.holders, joined.server, codec)
        cluster, profile = measure(
            self.session, self.graph, size, optimizer=workload.optimizer, say=self.say, ladder=(size,)
        )
        cluster = self._linked(cluster)
        ends = Ends(
            network.name, len(network.layers), size, mode=mode_of(config.mode),
            optimizer_slots=workload.optimizer_slots, batch_norm=batch_norm_named(workload.batch_norm),
            gradient_norm=config.clip_norm is not None,
        )  # fmt: skip
        self.steering = SiloController(
            stages, ends, config.phases, workload.order.steps_per_epoch, profile, cluster, joined, self.own,
            self.start.steps_done,
        )  # fmt: skip
        return self.checked(resolve(self.steering.plan, network, cluster), cluster, profile)

    def _linked(self, cluster: Cluster) -> Cluster:
        """Return the cluster with each edge's link to the server as measured, or as the trace has it."""
        links = []
        for edge in self.joined.edges:
            if self.trace is not None:
                up, down, delay = self.trace.up.mean, self.trace.down.mean, self.settings.delay
            else:
                rates = rates_of(*look_at_link(self.session.coordinator, edge, self.joined.server))
                up, down, delay = rates.up_bytes_per_second, rates.down_bytes_per_second, rates.delay_seconds
            links += [
                DirectedLink(edge, self.joined.server, Link(max(up, 1.0), delay)),
                DirectedLink(self.joined.server, edge, Link(max(down, 1.0), delay)),
            ]
        return Cluster(cluster.name, cluster.devices, cluster.link, tuple(links), cluster.sites)

    # What `Job.run` calls

    def replanner(self, planned: PlannedRun, strategy: str) -> Guide:
        return self.steering

    def controller(self) -> Controller | None:
        return self.steering

    def backup_every(self, planned: PlannedRun) -> int:
        return 0

    def train(self, planned: PlannedRun, on_step: OnStep | None) -> SplitResult:
        seconds: list[float] = []

        def stepped(step: int, loss: float, took: float) -> None:
            self.steering.stepped(step)
            seconds.append(took)
            if on_step is not None:
                on_step(step, loss, took)

        count = len(self.joined.edges) + 1
        retry_policy = RetryPolicy("auto", count, count, self.session.rejoin_seconds)
        with self._following():
            result, self.last_planned = self.run(planned, stepped, "auto", retry_policy)
        server, between = self.joined.server, result.bytes_between
        stage = planned.plan.stages[-1]
        cut = stage.layers[0]
        assert isinstance(cut, int), "resolved plans name layers by their numbers"
        return SplitResult(
            **{entry.name: getattr(result, entry.name) for entry in fields(TrainResult)},
            cuts=[(self.start.steps_done, cut)], step_seconds=seconds,
            bytes_up=sum(size for (_, to), size in between.items() if to == server),
            bytes_down=sum(size for (source, _), size in between.items() if source == server),
            deployment=Deployment(cut, self.steering.plan.replay.k, stage.codec.bits),
        )  # fmt: skip

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Make each edge's own link follow the trace while this lasts."""
        if self.trace is None:
            yield
            return
        server, coordinator = self.joined.server, self.session.coordinator
        try:
            with contextlib.ExitStack() as stack:
                for edge in self.joined.edges:
                    stack.enter_context(
                        Following(
                            coordinator, self.trace, up=(edge, server), down=(server, edge),
                            delay_seconds=self.settings.delay,
                        )
                    )  # fmt: skip
                yield
        finally:
            for edge in self.joined.edges:
                for sender, receiver in ((edge, server), (server, edge)):
                    coordinator.send(sender, Reshape({receiver: Shape(None, 0.0)}), 2.0)
