"""`mh.evaluate`: evaluates a network on held-out data, on the cluster's workers, as a stream of inferences."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

import msgspec
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.given import with_labels
from manyhands.data.held_out import samples_of
from manyhands.data.loader import Prefetcher, example, length
from manyhands.data.order import BatchOrder
from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.facts.plan import Codec, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.precision import FLOAT32
from manyhands.facts.profile import Profile
from manyhands.facts.ray_cluster import RayCluster
from manyhands.facts.summary import Summarized
from manyhands.graph.batching import bound_inputs, refuse_pairs
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.graph.own_loss import LABELS, OWN_LOSS
from manyhands.job.lengths import PaddingOptions, PaddingSettings, padded_to_longest
from manyhands.job.metrics import MetricTally, cast
from manyhands.plans.planning import is_strategy, plan_file, read_plan
from manyhands.plans.planning import plan as make_plan
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import Order, RunState
from manyhands.runtime.outcome import RunHooks
from manyhands.runtime.stream_run import StreamRun
from manyhands.session.measuring import measure
from manyhands.session.opening import expect_session, open_session
from manyhands.session.session import Say, Session

EXAMPLE_SAMPLES = 4


@dataclass(frozen=True, repr=False)
class EvaluateResult(Summarized):
    """Loss and accuracy over a data set."""

    samples: int
    loss: float | None
    """The mean over all samples, if a loss was given."""
    accuracy: float | None
    """The part of samples whose largest output is the target, if targets are class numbers."""
    seconds: float
    output: Any = field(default=None, repr=False)
    """What the model returned for all samples, where that was asked for."""

    def summary(self) -> dict[str, str]:
        facts = {"samples": f"{self.samples:,}"}
        if self.loss is not None:
            facts["loss"] = f"{self.loss:.4g}"
        if self.accuracy is not None:
            facts["accuracy"] = f"{self.accuracy:.1%}"
        return facts

    @property
    def line(self) -> str:
        """The summary in one line."""
        return ", ".join(f"{label} {value}" for label, value in self.summary().items())


class _Padded(Dataset[Any]):
    """A data set padded to whole batches by repeating its last sample; the outputs of the padding are discarded."""

    def __init__(self, data: Dataset[Any], samples: int, batch_size: int) -> None:
        self.data, self.samples = data, samples
        self.length = math.ceil(samples / batch_size) * batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.data[min(index, self.samples - 1)]


def captured(
    model: nn.Module,
    data: Dataset[Any],
    loss: Callable[..., torch.Tensor] | Literal["own"] | None,
    *,
    granularity: str,
    name: str,
) -> Graph:
    """Return the graph of a model and its loss for this data; floats are cast to the model's own type."""
    inputs, targets = example(data, EXAMPLE_SAMPLES)
    floats = floats_of(model)
    inputs = cast(inputs, floats)
    if loss is None:
        return capture(model, inputs, granularity=granularity, name=name)
    return capture(model, inputs, loss=loss, target=cast(targets, floats), granularity=granularity, name=name)


def floats_of(model: nn.Module) -> torch.dtype:
    """Return the floating-point type in which a model computes."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def inference_plan(plan: Plan) -> Plan:
    """Return the same stages and shares as a stream: one micro-batch after another, forward only, nothing packed."""
    return msgspec.structs.replace(
        plan, order="stream", batch_size=plan.micro_batch_size, micro_batches=1, homes={}, warm_up="2(P-p)-1",
        stages=tuple(msgspec.structs.replace(stage, codec=Codec()) for stage in plan.stages),
    )  # fmt: skip


def evaluate_in(
    session: Session,
    graph: Graph,
    plan: Plan,
    weights: Mapping[str, torch.Tensor],
    data: Dataset[Any],
    loss: Callable[..., torch.Tensor] | Literal["own"] | None,
    profile: Profile,
    *,
    precision: str = FLOAT32,
    keep_outputs: bool = False,
) -> EvaluateResult:
    """Evaluate on the session's workers, by a plan's stages and shares. `precision`: the one that the graph was
    captured in; the loss is computed in it too."""
    stream = resolve(inference_plan(plan), graph.network)
    kernels = {name: profile.of(name).kernels for name in stream.devices}
    order = Order(graph=graph, plan=stream, start=RunState(dict(weights)), last_step=0, kernels=kernels)
    tally = MetricTally(graph, loss, length(data), stream.batch_size, precision=precision, keeps_outputs=keep_outputs)
    seconds, _ = streamed(session.coordinator, order, data, tally)
    return EvaluateResult(tally.samples, tally.loss, tally.accuracy, seconds, tally.output)


def streamed(
    coordinator: Coordinator, order: Order, data: Dataset[Any], tally: MetricTally, *, since: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[float, bool]:  # fmt: skip
    """Evaluate a data set in one generation, whose order has a stream's plan, and return how many seconds it took and
    whether it was completed. The tally then holds the results.

    `since`: the generation with which the job began whose state the devices hold, and from which they take the weights.
    """
    seconds, is_complete = _streamed_once(coordinator, order, data, tally, since, should_stop)
    if is_complete and tally.is_incomplete:
        tally.begin(keeps_all=True)
        again, is_complete = _streamed_once(coordinator, order, data, tally, since, should_stop)
        seconds += again
    return seconds, is_complete


def _streamed_once(
    coordinator: Coordinator, order: Order, data: Dataset[Any], tally: MetricTally, since: int | None,
    should_stop: Callable[[], bool],
) -> tuple[float, bool]:  # fmt: skip
    refuse_pairs(order.graph)
    size, first = order.plan.batch_size, order.first_step
    padded = _Padded(data, tally.samples, size)
    count = len(padded) // size
    order = dataclasses.replace(order, last_step=first + count)
    with Prefetcher(padded, BatchOrder(len(padded), size, shuffle=False, seed=0), 0, count) as batches:
        flow = _Batches(first, batches, count, tally)
        run = StreamRun(coordinator, order, flow, RunHooks(should_pause=should_stop), since=since)
        run.prepare()
        start = time.monotonic()
        run.stream()
    return time.monotonic() - start, flow.is_over


class _Batches:
    """A data set as a flow: inputs are sent, targets stay here until their answer comes."""

    def __init__(self, first: int, batches: Iterator[Any], count: int, tally: MetricTally) -> None:
        """`first`: the step under which the first batch travels."""
        self.first, self.batches, self.left, self.tally = first, batches, count, tally

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def ready_in(self, size: int) -> float:
        return 0.0 if self.left else math.inf

    def take(self, step: int, size: int) -> Mapping[str, torch.Tensor]:
        number, inputs, targets = next(self.batches)
        graph = self.tally.graph
        check_labels(graph, targets, f"The targets of batch {number}")
        self.tally.targets[step - self.first] = targets
        self.left -= 1
        return bound_inputs(graph, inputs)

    def answered(self, step: int, outputs: dict[str, torch.Tensor]) -> None:
        self.tally.take(step - self.first, outputs)

    def check(self) -> None:
        """Do nothing: all answers are needed."""


@takes_settings(PaddingSettings)
def evaluate(
    model: nn.Module,
    data: Dataset[Any],
    *,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None = None,
    batch_size: int = 64,
    cluster: Cluster | LabCluster | RayCluster | str | Path | Coordinator | None = None,
    plan: Plan | str | Path = "samples",
    granularity: str = "blocks",
    name: str = "",
    say: Say | None = None,
    **padding: Unpack[PaddingOptions],
) -> EvaluateResult:
    """Return loss and accuracy of `model` on `data`, in evaluation mode, computed by the cluster. The model is
    unchanged. `loss` is a function of (output, target), or "own" for the loss that the model's forward returns.
    `lengths` and `pad` are as in `mh.train`; here all samples are padded to the longest length that any of them needs.
    """
    data = samples_of(data)
    if loss == OWN_LOSS:
        data = with_labels(data, LABELS)
    data = padded_to_longest(data, settings_from(PaddingSettings, "mh.evaluate", padding))
    expect_session(cluster)
    graph = captured(model, data, loss, granularity=granularity, name=name)
    network = msgspec.structs.replace(graph.network, loss_combination="mean")  # it is computed here, not by workers
    size = min(batch_size, length(data))
    with open_session(cluster, say=say) as session:
        machines, profile = measure(session, graph, size, say=say)
        if isinstance(plan, Plan):
            chosen = plan
        elif is_strategy(str(plan)):
            chosen = make_plan(
                network, machines, batch_size=size, strategy=str(plan), profile=profile, optimizer_slots=0
            ).plan
        else:
            chosen = read_plan(plan_file(str(plan)), network, machines)
        return evaluate_in(session, graph, resolve(chosen, network, machines), graph.state, data, loss, profile)
