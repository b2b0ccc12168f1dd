"""The functions behind `import manyhands as mh`: plan and simulate by name or by value."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Unpack, get_args

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.decode import decode
from manyhands.facts.errors import BadPlan, BadValue, OutOfMemory, unknown
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.facts.network import Network
from manyhands.facts.plan import BatchNorm, Order, Plan, WarmUp
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import DeviceProfile, Profile, estimate_cluster
from manyhands.files.documents import read_document, write_document
from manyhands.planner.inference import INFERENCE_STRATEGIES
from manyhands.planner.placing import best_placed, placed
from manyhands.planner.strategies import choose, is_strategy_name, plan_by_name, strategy_names
from manyhands.planner.task import BEST, Best, PlanCandidate, Task, TileOptions
from manyhands.plans.inference import plan_for
from manyhands.plans.planned import Planned
from manyhands.plans.settings import PlanOptions, PlanSettings
from manyhands.plans.simulating import cluster_of, network_of, simulate
from manyhands.schedule.actions import print_schedule
from manyhands.schedule.policy import Schedule
from manyhands.simulator.result import Simulation

SLOW = 8.0
"""How many times as long as all before it another strategy is likely to take to plan."""


@takes_settings(PlanSettings)
def plan(
    network: Network | str,
    cluster: Cluster | str | Path,
    *,
    batch_size: int = 32,
    strategy: str = "auto",
    micro_batches: int | None = None,
    profile: Profile | None = None,
    objective: str | None = None,
    home: str = "",
    best: str = "throughput",
    **options: Unpack[PlanOptions],
) -> Planned:
    """Return a plan by strategy. `auto` prices every candidate with the simulator and takes the best that fits in
    memory.

    Without a profile, times are estimated from the device catalogue. `best`: what a plan for training is to be good
    at: throughput, latency of a batch, memory (the largest peak of any device) or energy (joules a sample of the
    devices that take part; others are taken to be off). `objective`: latency or throughput, for inference
    (inference.py): batch size, order and the like are then chosen too; `home` is the device that has the inputs. None:
    training. `options`: the fields of `PlanSettings`.
    """
    settings = settings_from(PlanSettings, "plan", options)
    network, cluster = network_of(network), cluster_of(cluster)
    if objective is not None:
        return plan_for(network, cluster, profile, objective=objective, strategy=strategy, home=home)
    profile = profile or estimate_cluster(network, cluster)
    if batch_size < 1:
        raise BadPlan(f"batch_size is {batch_size}; it must be at least 1.")
    if micro_batches is not None and (micro_batches < 1 or batch_size % micro_batches):
        divisors = ", ".join(str(n) for n in range(1, min(batch_size, 10_000) + 1) if batch_size % n == 0)
        raise BadPlan(f"micro_batches is {micro_batches}; it must divide batch_size = {batch_size}: {divisors:.200}.")
    task = Task(
        network, cluster, profile, batch_size, micro_batches, order_named(settings.order), settings.optimizer_slots,
        settings.batch_norm, settings.warm_up, settings.tiles or TileOptions(), best=best_named(best, cluster),
        gradient_norm=settings.gradient_norm,
    )  # fmt: skip
    prices = Prices(task)
    if strategy != "auto":
        ranked = plan_by_name(strategy, task, prices)
        plans = [prices.whole(candidate.plan) for candidate in ranked if candidate.plan is not None]
        plans[0] = prices.best_whole(plans[0])
        return Planned(plans[0], [], tuple(plans[1:]), best=task.best)
    start, was_over = time.thread_time(), False

    def is_over() -> bool:
        nonlocal was_over
        was_over = was_over or SLOW * (time.thread_time() - start) > settings.within_seconds
        return was_over

    ranked = choose(task, prices, is_over=is_over)
    best_plan = ranked[0].plan
    if best_plan is None:
        reasons = "\n".join(f"  {candidate.name}: {candidate.reason}" for candidate in ranked)
        hints = {candidate.name: candidate.hint for candidate in ranked}
        raise BadPlan(
            f"No plan of {network.name} with batch size {batch_size} fits cluster {cluster.name}:\n{reasons}",
            hint=hints.get("pipeline", "") or ranked[0].hint,  # no device needs less memory than in a pipeline
        )
    ranked = [prices.scored(candidate) for candidate in ranked]
    others = tuple(candidate.plan for candidate in ranked[1:] if candidate.plan is not None)
    return Planned(prices.best_whole(best_plan), ranked, others, is_partial=was_over, best=task.best)


class Prices:
    """Prices of plans by the objective, simulated once per plan."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._outcomes: dict[bytes, Simulation | OutOfMemory] = {}

    def __call__(self, plan: Plan) -> float:
        return self._price(self.simulated(plan))

    def _price(self, result: Simulation) -> float:
        if self.task.best == "memory":
            return max(device.peak_bytes for device in result.devices.values())
        return result.joules_per_sample if self.task.best == "energy" else result.seconds

    def simulated(self, plan: Plan) -> Simulation:
        """Return the simulation of one round, within every device's memory."""
        return self._simulated(self.whole(plan))

    def _simulated(self, plan: Plan) -> Simulation:
        key, task = msgspec.json.encode(plan), self.task
        if key not in self._outcomes:
            try:
                self._outcomes[key] = simulate(
                    plan, task.network, task.cluster, task.profile, keep_spans=False, within_memory=True
                )
            except OutOfMemory as error:
                self._outcomes[key] = error
        outcome = self._outcomes[key]
        if isinstance(outcome, OutOfMemory):
            raise outcome
        return outcome

    def whole(self, plan: Plan) -> Plan:
        """Return a strategy's plan with what strategies do not decide: whether the gradients' norm is exchanged, and
        the groups that sums go through."""
        return placed(msgspec.structs.replace(plan, gradient_norm=self.task.gradient_norm), self.task.cluster)

    def best_whole(self, plan: Plan) -> Plan:
        """Return a strategy's plan as `whole` does, with the groups that make it best."""
        return best_placed(self.whole(plan), self.task.cluster, lambda other: self._price(self._simulated(other)))

    def scored(self, candidate: PlanCandidate) -> PlanCandidate:
        """Return a candidate with the seconds of a step, beside the score it was chosen by."""
        if candidate.plan is None:
            return candidate
        candidate = replace(candidate, plan=self.whole(candidate.plan))
        if self.task.best not in ("memory", "energy"):
            return candidate
        assert candidate.plan is not None
        seconds = self.simulated(candidate.plan).seconds
        return replace(candidate, seconds=seconds, score=candidate.seconds)


def best_named(name: str, cluster: Cluster) -> Best:
    """Return an objective of training by its name."""
    for objective in BEST:
        if name == objective:
            if name == "energy" and not all(device.watts_active for device in cluster.devices):
                unknown_watts = [device.name for device in cluster.devices if not device.watts_active]
                raise BadValue(
                    f"Energy is asked for, but the watts of {', '.join(unknown_watts[:4])} are unknown.",
                    hint="Write watts_active, watts_idle and watts_transfer for every device in the cluster's file, or "
                    "use kinds of the catalogue (manyhands devices).",
                )
            return objective
    raise unknown("objective", name, BEST)


def read_plan(path: str | Path, network: Network, cluster: Cluster | None = None) -> Plan:
    """Read and check a plan from a JSON or YAML file."""
    try:
        return resolve(Plan.from_dict(read_document(path)), network, cluster)
    except BadPlan as error:
        raise BadPlan(f"{path}: {error.message}", hint=error.hint) from error


def network_named_in(path: str | Path) -> str:
    """Return the network that a plan file is for."""
    document = read_document(path)
    name = document.get("network") if isinstance(document, dict) else None
    if not isinstance(name, str):
        raise BadPlan(f"{path}: network is {name!r:.40}; it must name the network the plan is for.")
    return name


def is_strategy(name: str, objective: str | None = None) -> bool:
    """Return whether a name is a strategy: for training, or with an objective for inference."""
    return is_strategy_name(name) if objective is None else name in INFERENCE_STRATEGIES


def refuse_beside_plan(file: Path, options: dict[str, object]) -> None:
    """Refuse options that a plan file decides: they would be ignored."""
    conflicting = [option for option, value in options.items() if value is not None]
    if conflicting:
        raise BadValue(
            f"{' and '.join(conflicting)} cannot be given beside {file}, which decides that.", hint="Edit the file."
        )


def run_folder(job: str, network: Network, cluster: Cluster) -> Path:
    """Return the default folder of a run's files; names are made fit for a folder."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", f"{network.name}-{cluster.name}").replace("..", "_")
    return Path("runs") / f"{job}-{plain[:100]}"


def plan_file(name: str, objective: str | None = None) -> Path:
    """Return the plan file that a user named; a name that is neither a file nor a strategy is an error."""
    path = Path(name)
    if not path.exists() and path.suffix not in (".yaml", ".yml", ".json"):
        raise unknown("plan file or strategy", name, strategy_names() if objective is None else INFERENCE_STRATEGIES)
    return path


def order_named(name: str) -> Order:
    """Return an order by its name."""
    orders: dict[str, Order] = {order: order for order in get_args(Order)}
    if name not in orders:
        raise unknown("order", name, orders)
    return orders[name]


def batch_norm_named(name: str) -> BatchNorm:
    """Return a batch-norm mode by its name."""
    ways: dict[str, BatchNorm] = {way: way for way in get_args(BatchNorm)}
    if name not in ways:
        raise unknown("way of batch norm", name, ways)
    return ways[name]


def warm_up_named(name: str) -> WarmUp:
    """Return a warm-up policy by its name."""
    policies: dict[str, WarmUp] = {policy: policy for policy in get_args(WarmUp)}
    if name not in policies:
        raise unknown("warm-up policy", name, policies)
    return policies[name]


def parse_ladder(text: str) -> tuple[int, ...] | None:
    """Parse batch sizes: '1,2,4' -> (1, 2, 4); empty: the default ladder."""
    if not text:
        return None
    try:
        ladder = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        ladder = (0,)
    if ladder[0] < 1:
        raise BadValue(f"'{text}' is not a list of batch sizes.", hint="Write it like 1,2,4,8.")
    return ladder


def read_profiles(text: str, network: Network, cluster: Cluster, others: Profile | None = None) -> Profile:
    """Read profiles from 'pi4-1=pi.json,nano=nano.json'; a file without a device is for every device that has none.

    `others`: of devices that no file is for; None: they are estimated.
    """
    by_device: dict[str, DeviceProfile] = {}
    fallback: DeviceProfile | None = None
    for part in text.split(","):
        device, _, path = part.rpartition("=")
        device_profile = decode(read_document(path), DeviceProfile, path)
        device_profile.check_matches(network)
        if device:
            by_device[cluster.device(device).name] = device_profile
        else:
            fallback = device_profile
    others = others or estimate_cluster(network, cluster)
    return Profile({name: by_device.get(name) or fallback or others.of(name) for name in cluster.names})


def schedule_text(plan: Plan, network: Network) -> str:
    """Return every device's actions, one per line."""
    schedule = Schedule(resolve(plan, network), network)
    if not schedule.is_fixed:
        raise BadPlan(f"The order '{plan.order}' is decided as messages arrive; it has no list in advance.")
    return print_schedule(schedule.actions)


def write_simulation(folder: Path, plan: Plan, network: Network, cluster: Cluster, result: Simulation) -> list[Path]:
    """Write plan.yaml, cluster.yaml, trace.json and, if pictures can be drawn, timeline.png to a folder."""
    from manyhands.observe.figures import are_plots_here
    from manyhands.observe.timeline import draw_timeline
    from manyhands.observe.trace import trace_events

    title = f"{network.name} on {cluster.name}, simulated: {result.seconds:.4g} s a step"
    files = [folder / name for name in ("plan.yaml", "cluster.yaml", "trace.json")]
    write_document(files[0], plan.to_dict())
    write_document(files[1], cluster.to_dict())
    write_document(files[2], trace_events(result.spans, title=title))
    if are_plots_here():
        notes = {name: f"{1 - result.idle_part(name):.0%} busy" for name in result.devices}
        file = folder / "timeline.png"
        files.append(draw_timeline(result.spans, list(result.devices), result.seconds, file, title=title, notes=notes))
    return files
