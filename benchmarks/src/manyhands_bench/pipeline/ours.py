"""Our side of the comparison with PyTorch: connected workers, the captured network, a batch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from manyhands.data.preload import Preload
from manyhands.facts.cluster import Cluster
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.plan import BUCKET_BYTES, BySamples, Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.graph.graph import Graph
from manyhands.job.evaluation import captured
from manyhands.models.registry import ZOO, build, loss_function
from manyhands.plans import planning as public
from manyhands.profiler.kernels import Choice, choose_kernels
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.run import Run
from manyhands.session.measuring import measure
from manyhands.session.session import Session
from manyhands.simulator.simulate import simulate
from manyhands.training.tuning import Trials, fastest_in_trial, same_batches
from manyhands_bench.pipeline.torch_setting import LEARNING_RATE, MOMENTUM, TorchSetting
from manyhands_bench.same_batch import SameBatch

OPTIMIZER = Optimizer("SGD", lr=LEARNING_RATE, momentum=MOMENTUM)


WARM_UP_STEPS = 2
"""Steps at the start of every block that do not count."""


_LADDER = (1, 2, 4, 8)


@dataclass
class Ours:
    """Our side: connected workers, the captured network, a batch."""

    session: Session
    setting: TorchSetting
    data: SameBatch = field(init=False)
    graph: Graph = field(init=False)
    choice: Choice = field(default_factory=Choice)

    preload: Preload = field(init=False)
    """The batch, resident in our workers, as it is in PyTorch's processes."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.data = SameBatch(self.setting.model, self.setting.shape, self.setting.samples)
        self.preload = Preload.of(self.data)
        module, loss = build(self.setting.model), loss_function(ZOO[self.setting.model].loss)
        self.graph = captured(module, self.data, loss, granularity="blocks", name=self.setting.model)

    def choose_kernels(self, samples: int, seconds: float) -> None:
        """Choose the fastest kernels for `samples` samples and one thread, by whole steps on one core."""
        before, threads = os.sched_getaffinity(0), torch.get_num_threads()
        os.sched_setaffinity(0, {min(before)})
        try:
            self.choice = choose_kernels(self.graph, samples, threads=1, seconds=seconds)
        finally:
            os.sched_setaffinity(0, before)
            torch.set_num_threads(threads)

    def measure(self, seconds: float, ladder: Sequence[int] = _LADDER) -> tuple[Cluster, Profile]:
        """Return the cluster and its profile as they are now, for these numbers of samples."""
        sizes = tuple(size for size in ladder if size <= self.setting.samples)
        return measure(
            self.session, self.graph, self.setting.samples, optimizer=OPTIMIZER, seconds=seconds, refresh=True,
            ladder=sizes, kernels=self.choice.kernels,
        )  # fmt: skip

    def plans(self, cluster: Cluster, profile: Profile, micro_batches: int | None = None) -> list[Plan]:
        """Return plans as our planner ranks them; each device normalises over its own samples, as PyTorch's ways do."""
        planned = public.plan(
            self.graph.network, cluster, batch_size=self.setting.samples, strategy="pipeline",
            micro_batches=micro_batches, batch_norm="local", optimizer_slots=1, profile=profile,
        )  # fmt: skip
        return [planned.plan, *planned.runners_up]

    def tuned(self, plans: Sequence[Plan]) -> Trials:
        """Return the plans with their seconds in a trial, the fastest first, as `train(tune=...)` does."""
        return fastest_in_trial(
            self.session.coordinator, self.graph, plans, OPTIMIZER,
            dict.fromkeys(self.session.cluster.names, self.choice.kernels),
            self.preload, is_preloaded=True,
        )  # fmt: skip

    def two_stages(self, cut: int) -> Plan:
        """Return a plan by hand: two stages, one device each."""
        first, second = self.session.cluster.names[:2]
        stages = Stage((0, cut), (first,)), Stage((cut, len(self.graph.network.layers)), (second,))
        plan = Plan(
            self.graph.name, self.setting.samples, stages, micro_batches=self.setting.micro_batches, batch_norm="local"
        )
        return resolve(plan, self.graph.network)

    def predicted(self, plan: Plan, cluster: Cluster, profile: Profile) -> float:
        return simulate(plan, self.graph.network, cluster, profile, keep_spans=False).seconds

    def seconds(self, plan: Plan, steps: int) -> float:
        """Return the median seconds of a round."""
        return statistics.median(self.step_seconds(plan, steps))

    def step_seconds(self, plan: Plan, steps: int, warm_up_steps: int = WARM_UP_STEPS) -> Sequence[float]:
        """Return the seconds of every round after those that warm up, as the coordinator sees them end."""
        whole = steps + warm_up_steps
        order = Order(
            graph=self.graph, plan=plan, start=RunState(dict(self.graph.state)), last_step=whole,
            optimizer=OPTIMIZER, kernels=dict.fromkeys(plan.devices, self.choice.kernels), preload=self.preload,
        )  # fmt: skip
        run = Run(self.session.coordinator, order)
        run.prepare()
        return run.run(same_batches(self.preload, whole, is_preloaded=True)).step_seconds[warm_up_steps:]


def steady(seconds: Sequence[float]) -> float:
    """Return the median seconds of a step, without those that warm up."""
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def plan_text(plan: Plan) -> str:
    """Return stages, devices, shares, micro-batches and order in one line."""
    stages = []
    for stage in plan.stages:
        names = "+".join(stage.devices)
        shares = f" ({'+'.join(map(str, stage.share.samples))})" if isinstance(stage.share, BySamples) else ""
        stages.append(f"[{stage.layers[0]}, {stage.layers[1]}) on {names}{shares}")
    buckets = f", buckets of {plan.bucket_bytes / 1e6:.3g} MB" if plan.bucket_bytes != BUCKET_BYTES else ""
    return f"{' | '.join(stages)}; {plan.micro_batches} micro-batches, {plan.order}{buckets}"
