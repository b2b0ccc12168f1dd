"""Measures what a step costs beside its layers, once for a machine and a number of workers, by a short training.

It takes a second or two, which the first step need not wait for: until there is time, costs are the usual ones.

A small network with batch norm is measured as any other is, and then trained on all workers as a run would train it:
fed, summed up, updated, reported. What its layers and the delays of links do not explain are costs of the step.

    step       forward, statistics, forward, ..., loss, backward, ..., sums, update, report
    statistics           ##########                                                             message_seconds each
    the rest   what is left when layers, messages and delays are taken off                      round_seconds

The workers share the cores with each other and with the coordinator: what one of them waits for a core, or for another
that is late for the same reason, is part of these costs, as it will be of every step. What other programs took from
them meanwhile is not, as far as that can be told.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from manyhands.executor.log import DeviceLog
from manyhands.facts.cluster import Cluster
from manyhands.facts.network import Network
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BySamples, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.models.tiny import tiny
from manyhands.plans.local_profiles import StepCosts, keep_step_costs, stored_step_costs, with_costs
from manyhands.runtime.measuring import measure_quickly_on
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import Outcome
from manyhands.runtime.run import Run
from manyhands.session.session import Session, usable_cores
from manyhands.simulator.simulate import simulate

SAMPLES = 8
"""Of each worker in a step: layers take as long as exchanges, and leave as little of these in the caches as those of a
larger network."""
SHAPE, CLASSES = (1, 16, 16), 10
LAYER_SECONDS = 0.25
"""The limit for measuring the network's layers."""
WARM_UP, TRACED, COUNTED = 2, 4, 7
"""Steps that do not count, those whose actions are recorded, and those that are timed without that."""
_LEAST_OWN = 0.2
"""The least part of the machine's time that may have been this run's: with less, there is nothing to be told."""
USUAL = StepCosts(message_seconds=2e-4, round_seconds=1e-2)
"""Of processors with a few workers, before they have been measured."""
MEASURING_SECONDS = 3.0
"""How long measuring is likely to take."""
_OPTIMIZER = Optimizer("SGD", lr=0.0, momentum=0.9)


def are_costs_known(session: Session, cluster: Cluster) -> bool:
    """Return whether what a step costs so many local workers has been measured on this machine."""
    return stored_step_costs(cluster, session.threads) is not None


def with_known_step_costs(session: Session, cluster: Cluster) -> Cluster:
    """Return the cluster of local workers with what a step costs beside its layers, as stored, else as usual."""
    return with_costs(cluster, stored_step_costs(cluster, session.threads) or USUAL)


def with_step_costs(session: Session, cluster: Cluster, *, refresh: bool = False) -> Cluster:
    """Return the cluster of local workers with what a step costs beside its layers, as stored or measured now."""
    costs = None if refresh else stored_step_costs(cluster, session.threads)
    if costs is None:
        costs = measure_step_costs(session, cluster)
        keep_step_costs(costs, cluster, session.threads)
    return with_costs(cluster, costs)


def measure_step_costs(session: Session, cluster: Cluster) -> StepCosts:
    """Train the small network for some steps on the cluster's workers, which are alike, and return what these cost."""
    graph = _captured()
    plan = _plan(graph.network, cluster)
    layer_seconds = _layer_seconds(session, graph, cluster)
    last = WARM_UP + TRACED + COUNTED
    order = Order(
        graph=graph, plan=plan, start=RunState(dict(graph.state)), last_step=last, optimizer=_OPTIMIZER,
        trace_steps=range(WARM_UP, WARM_UP + TRACED), is_aside=True,
    )  # fmt: skip
    run = Run(session.coordinator, order)
    run.prepare()
    inputs, targets = torch.ones(plan.batch_size, *SHAPE), torch.zeros(plan.batch_size, dtype=torch.int64)
    use = MachineUse.since_now(session.coordinator.local.running().values() if session.is_local else ())
    outcome = run.run((step, inputs, targets) for step in range(last))
    fills_cores = session.is_local and len(cluster.names) * max(1, session.threads) >= usable_cores()
    part = use.own_part() if fills_cores else 1.0
    return costs_of(outcome, plan, graph.network, cluster, layer_seconds, part)


@dataclass(frozen=True)
class MachineUse:
    """The use of the machine's cores by this process and some workers since a moment."""

    processes: tuple[psutil.Process, ...]
    own_seconds: float
    busy_seconds: float
    idle_seconds: float

    @classmethod
    def since_now(cls, workers: Iterable[int]) -> MachineUse:
        """Return the use since now; `workers`: their process ids."""
        processes = (psutil.Process(), *map(psutil.Process, workers))
        return cls(processes, _computed(processes), *_busy_and_idle())

    def own_part(self) -> float:
        """Return the part of the time since then that was left to this run, on cores that it shares with others' work:
        what they took and no idle core could have given counts as theirs."""
        busy, idle = _busy_and_idle()
        busy_seconds, idle_seconds = busy - self.busy_seconds, max(0.0, idle - self.idle_seconds)
        others_seconds = busy_seconds - (_computed(self.processes) - self.own_seconds)
        taken_seconds = max(0.0, others_seconds - idle_seconds)
        total_seconds = busy_seconds + idle_seconds
        return max(_LEAST_OWN, 1.0 - taken_seconds / total_seconds) if total_seconds > 0 else 1.0


def _computed(processes: Iterable[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _busy_and_idle() -> tuple[float, float]:
    times = psutil.cpu_times()
    idle_seconds = float(times.idle + getattr(times, "iowait", 0.0))
    return float(sum(times) - getattr(times, "guest", 0.0)) - idle_seconds, idle_seconds


def _captured() -> Graph:
    inputs, targets = torch.zeros(2, *SHAPE), torch.zeros(2, dtype=torch.int64)
    return capture(tiny(CLASSES), inputs, loss=nn.functional.cross_entropy, target=targets, name="step-costs")


def _layer_seconds(session: Session, graph: Graph, cluster: Cluster) -> float:
    """Return the seconds of all layers on a worker, forward and backward, measured as those of other networks are."""
    alone = session.is_local and session.threads == 1
    reports = measure_quickly_on(
        session.coordinator, graph, cluster.names, ladder=(SAMPLES,), seconds=LAYER_SECONDS, kernels={},
        optimizer=_OPTIMIZER, alone=alone,
    )  # fmt: skip
    crowd = max(1.0, len(cluster.names) / usable_cores()) if alone else 1.0
    profiles = [report.profile for report in reports.values()]
    return crowd * statistics.median(sum(map(sum, map(_only_rung, p.ladders))) for p in profiles)


def _only_rung(ladder: tuple[Timing, ...]) -> tuple[float, float]:
    return ladder[0].forward_seconds, ladder[0].backward_seconds


def _plan(network: Network, cluster: Cluster) -> Plan:
    count = len(cluster.names)
    share = BySamples((SAMPLES,) * count) if count > 1 else Single()
    stage = Stage((0, len(network.layers)), cluster.names, share)
    return resolve(Plan(network.name, SAMPLES * count, (stage,), optimizer_slots=1), network)


def costs_of(
    outcome: Outcome, plan: Plan, network: Network, cluster: Cluster, layer_seconds: float, own_part: float = 1.0
) -> StepCosts:
    """Return the costs with which the simulation of a run takes as long as the run did, where its layers take so long.

    `own_part`: the run's part of all that the machine computed meanwhile.
    """
    each = _message_seconds(outcome.logs, cluster, own_part)
    step = own_part * statistics.median(outcome.step_seconds[-COUNTED:])
    profile = _profile(network, layer_seconds)
    priced = with_costs(cluster, StepCosts(each, 0.0))
    planned = simulate(plan, network, priced, Profile(dict.fromkeys(plan.devices, profile)), keep_spans=False)
    return StepCosts(each, max(0.0, step - planned.seconds))


def _message_seconds(logs: Mapping[str, DeviceLog], cluster: Cluster, own_part: float) -> float:
    """Return the seconds of each message that a device sends or receives for an exchange of statistics, beside the
    link's delay."""
    gathers = [
        span.end - span.start
        for log in logs.values() for span in log.spans
        if span.kind == "reduce" and span.track == "compute"
    ]  # fmt: skip
    if not gathers:
        return 0.0
    gather = own_part * statistics.median(gathers)
    return max(0.0, gather - cluster.link.delay_seconds) / (2 * (len(cluster.names) - 1))


def _profile(network: Network, seconds: float) -> DeviceProfile:
    """Return a profile in which all layers together take so long, for a worker's samples."""
    each = Timing(SAMPLES, seconds / (2 * len(network.layers)), seconds / (2 * len(network.layers)))
    return DeviceProfile(
        network=network.name, fingerprint=network.fingerprint, input=network.input_text,
        granularity=network.granularity, device="local", source="measured",
        layers=tuple(LayerTiming(layer.name, (each,)) for layer in network.layers),
    )  # fmt: skip
