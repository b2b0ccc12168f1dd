"""Plans again for the present devices when a job's workers change while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from manyhands.executor.messages import runs_here
from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, Kernel, Profile
from manyhands.graph.graph import Graph
from manyhands.planner.placing import placed
from manyhands.planner.replanning import replanned
from manyhands.plans.simulating import simulate
from manyhands.runtime.controller import Change
from manyhands.runtime.measuring import measure_on
from manyhands.schedule.backup import holders, rounds_between
from manyhands.schedule.policy import Schedule
from manyhands.session.measuring import MEASURE_SECONDS, stored_kernels
from manyhands.session.session import Session

OF_MEASURING = SWITCHED, KEPT = "switched", "kept"
"""How a plan was made that was measured for while training: it is another, or the same one."""


def happened(event: str, facts: Mapping[str, Any]) -> str:
    """Return what happened to the workers, in words; empty if it is not worth reporting."""
    if event == "out of memory" and "why_not" in facts:
        return f"{facts['reason']} More micro-batches are of no use: {facts['why_not']}."
    if event in ("lost", "out of memory"):
        return str(facts["reason"])
    if event == "replanned" and facts["how"] in OF_MEASURING:
        return str(facts["reason"])
    if event == "recovered" and facts["how"] in OF_MEASURING:
        return ""
    if event == "recovered":
        devices, again = facts["devices"], facts["replayed"]
        repeated = f", {again} step(s) run again" if again else ""
        return (
            f"Going on with {', '.join(devices)} from step {facts['step']} after {facts['seconds']:.2f} s "
            f"({facts['how']} re-planning{repeated})."
        )
    if event == "waiting":
        return f"{facts['workers']} worker(s) left, {facts['least']} needed: waiting {facts['seconds']:g} s for others."
    if event == "rewound":
        return f"{facts['reason'][:1].upper()}{facts['reason'][1:]}, of step {facts['step']}."
    if event == "skipped":
        return f"Gradients of step {facts['step']} overflowed: it is skipped, and the loss scaled by half as much."
    if event == "note":
        return str(facts["text"])
    words = {"joined": "joins", "leaving": "leaves and hands over", "left": "has left"}
    return f"{facts['device']} {words[event]}." if event in words else ""


def unplanned(recoveries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the recoveries after workers came or went: the others were pauses in which the run itself measured."""
    return [facts for facts in recoveries if facts["how"] not in OF_MEASURING]


class Replanner:
    """Plans again when workers change; knows every device that was ever present, and its measurements."""

    def __init__(
        self, session: Session, graph: Graph, cluster: Cluster, profile: Profile, strategy: str,
        optimizer: Optimizer | None, seconds: float, backup_every: int | None, *, training: bool = True,
    ) -> None:  # fmt: skip
        self.session, self.graph, self.cluster = session, graph, cluster
        self.strategy, self.optimizer, self.backup_every = strategy, optimizer, backup_every
        self.training = training
        self.profiles: dict[str, DeviceProfile] = dict(profile.devices)
        self._base: tuple[Plan, float] | None = None
        """The base of incremental re-planning, and the predicted seconds of its round: the plan that was last made in
        full, so that its shape returns when all devices are back."""
        self._seconds = seconds
        self._machines = {
            name: (member.facts.machine, member.facts.compute) for name, member in session.coordinator.members.items()
        }

    def __call__(self, plan: Plan, names: tuple[str, ...], how: str) -> Change:
        network = self.graph.network
        base, seconds = self._base = self._base or (plan, self._seconds)
        cluster, profile = self.present(plan, names)

        def price(candidate: Plan) -> float:
            runs_here(resolve(candidate, network, cluster), network)
            return simulate(candidate, network, cluster, profile, keep_spans=False, within_memory=True).seconds

        replan = replanned(
            base, network, cluster, Profile(self.profiles), price=price, how=how, strategy=self.strategy,
            reference_seconds=seconds,
        )  # fmt: skip
        if replan.how == "heavy":
            self._base = (replan.plan, replan.seconds)
        chosen = resolve(placed(replan.plan, cluster), network, cluster)
        every = chosen_backups(chosen, network, cluster, replan.seconds, self.backup_every)
        return Change(chosen, self.kernels(chosen), replan.how, replan.reason, every)

    def learnt(self, cluster: Cluster, profile: Profile) -> None:
        """Take new measurements of the devices present."""
        self.cluster, self._base = cluster, None
        self.profiles |= profile.devices

    def begins_anew(self, plan: Plan, seconds: float) -> None:
        """Take a plan, and the predicted seconds of its round, as the base of incremental re-planning."""
        self._base = plan, seconds

    def kernels(self, plan: Plan) -> dict[str, Mapping[str, Kernel]]:
        return {name: self.profiles[name].kernels for name in plan.devices}

    def present(self, plan: Plan, names: tuple[str, ...]) -> tuple[Cluster, Profile]:
        """Return the present devices as a cluster, and their profile; devices not measured yet are measured."""
        devices_by_name = {device.name: device for device in self.cluster.devices}
        for name in names:
            if name not in devices_by_name:
                devices_by_name[name] = self._like(name)
        for name in names:
            if name not in self.profiles:
                self.profiles[name] = self._profile(name, plan)
        links = tuple(
            link for link in self.cluster.links if link.sender in devices_by_name and link.receiver in devices_by_name
        )
        self.cluster = Cluster(
            self.cluster.name, tuple(devices_by_name.values()), self.cluster.link, links, self.cluster.sites
        )
        present_names = set(names)
        devices = tuple(device for device in self.cluster.devices if device.name in present_names)
        present_links = tuple(link for link in links if link.sender in present_names and link.receiver in present_names)
        cluster = Cluster(self.cluster.name, devices, self.cluster.link, present_links, self.cluster.sites)
        return cluster, Profile({name: self.profiles[name] for name in cluster.names})

    def _like(self, name: str) -> Device:
        """Return a new worker as a device, with the port rates of a known one on such a machine."""
        member = self.session.coordinator.members[name]
        for device in self.cluster.devices:
            if self._machines.get(device.name) == (member.facts.machine, member.facts.compute):
                return msgspec.structs.replace(device, name=name)
        return member.device

    def _profile(self, name: str, plan: Plan) -> DeviceProfile:
        """Return the profile of a worker on such a machine, or measure one."""
        member = self.session.coordinator.members[name]
        machine = (member.facts.machine, member.facts.compute)
        for other, profile in self.profiles.items():
            if self._machines.get(other) == machine:
                self._machines[name] = machine
                return msgspec.structs.replace(profile, device=name)
        share = max(1, plan.micro_batch_size // max(1, len(plan.devices)))
        ladder = tuple(sorted({share, plan.micro_batch_size}))
        measurement = measure_on(
            self.session.coordinator, self.graph, [name], ladder=ladder, seconds=MEASURE_SECONDS,
            kernels=stored_kernels(self.graph, self.session.threads, training=self.training),
            optimizer=self.optimizer, training=self.training,
        )[name]  # fmt: skip
        self._machines[name] = machine
        return msgspec.structs.replace(measurement.profile, device=name)


def chosen_backups(
    plan: Plan, network: Network, cluster: Cluster, seconds: float, configured: int | None = None
) -> int:
    """Return the rounds between two backups: as configured, or so many that their cost is negligible; 0 if no other
    device can hold any."""
    if len(plan.devices) < 2 or configured == 0:
        return 0
    if configured is not None:
        return configured
    work = Schedule(plan, network).lowering.work
    weights = {name: work[name].weights() for name in plan.devices}
    sizes = {
        name: sum(network.weights[weight].bytes for weight in weight_names) for name, weight_names in weights.items()
    }
    slots = 1 + plan.optimizer_slots
    every = rounds_between(slots * max(sizes.values()), float("inf"), seconds)
    stepped = {name: work[name].stepped_weights() for name in plan.devices}
    for device, holder in holders(plan, weights, stepped).items():
        rate = cluster.bytes_per_second_between(device, holder)
        every = max(every, rounds_between(slots * sizes[device], rate, seconds))
    return every
