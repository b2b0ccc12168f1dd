"""Validation while a job goes on: held-out data evaluated at certain steps, with the weights as they are then.

Every step before is done everywhere and none after it has begun. The same devices then run the plan's stages forward as
a stream, with the weights that they hold: nothing is sent to the coordinator but predictions. Training goes on from the
state that was kept meanwhile, so its weights are those of a run without validation, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils.data import Dataset

from manyhands.data.loader import example, length
from manyhands.executor.messages import runs_here
from manyhands.facts.errors import BadData, BadPlan, BadValue
from manyhands.facts.network import Network
from manyhands.facts.plan import Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.precision import FLOAT32
from manyhands.graph.batching import bound_inputs, refuse_pairs
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.job.evaluation import inference_plan, streamed
from manyhands.job.metrics import ACCURACY, LOSS, Metric, MetricTally, has_accuracy
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import Order
from manyhands.runtime.state import Located


@dataclass(frozen=True)
class Validated:
    """The results of one validation."""

    steps_done: int
    """The steps after which the weights were evaluated."""
    epoch: int
    """The epoch of the last of them."""
    samples: int
    seconds: float
    metrics: Mapping[str, float]
    """loss, accuracy where targets are class numbers, and those of `metrics=`."""


@dataclass(frozen=True)
class HeldOut:
    """The data of a job's validations, when they are, and what is computed."""

    data: Dataset[Any]
    every: int | None
    """Steps between two of them; None: they are at the end of every epoch."""
    metrics: Mapping[str, Metric]

    def interval(self, steps_per_epoch: int) -> int:
        """Return the number of steps between two validations."""
        return steps_per_epoch if self.every is None else self.every

    def check(self, steps: int, steps_per_epoch: int) -> None:
        """Refuse an interval that is longer than the run."""
        if self.interval(steps_per_epoch) > steps:
            every = self.every if self.every is not None else f"'epoch', {steps_per_epoch} steps"
            raise BadValue(
                f"validate_every is {every}; the run has {steps} steps: it would never be validated.",
                hint=f"Write validate_every={steps}, or train for longer.",
            )

    def check_fits(self, graph: Graph, sample: Dataset[Any]) -> None:
        """Refuse held-out data that is empty, or built otherwise than `sample`, the data that is trained on."""
        if not length(self.data):
            raise BadData("The held-out data set is empty.", hint="Leave validate out.")
        refuse_pairs(graph)
        inputs, targets = example(self.data, 1)
        trained_on = example(sample, 1)
        bound_inputs(graph, inputs)
        for part, mine, others in (("input", inputs, trained_on[0]), ("target", targets, trained_on[1])):
            if _form(mine) != _form(others):
                raise BadData(
                    f"The {part} of a sample of the held-out data is {_text(mine)}; that of the training data is "
                    f"{_text(others)}.",
                    hint="Give held-out data of the same shape: the same crop, the same transform.",
                )
        check_labels(graph, targets, "The targets of the held-out data")

    def metric_names(self, graph: Graph) -> tuple[str, ...]:
        """Return the names of the results, in their order."""
        _, targets = example(self.data, 1)
        accuracy = (ACCURACY,) if has_accuracy(graph, targets) else ()
        return (LOSS, *accuracy, *self.metrics)


class JobValidation:
    """The validations of one job: see `runtime.validating.Validation`."""

    def __init__(
        self, coordinator: Coordinator, held_out: HeldOut, graph: Graph,
        loss: Callable[..., torch.Tensor] | Literal["own"], *, steps: int, steps_per_epoch: int, validated: int,
        report: Callable[[Validated, BadValue | None], None], should_stop: Callable[[], bool], precision: str = FLOAT32,
    ) -> None:  # fmt: skip
        """`steps`: those of the whole run. `validated`: the steps done at the last validation before this run.
        `report` is given the results, and the error of a metric that raised."""
        self.coordinator, self.held_out, self.graph, self.loss = coordinator, held_out, graph, loss
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self.interval = held_out.interval(steps_per_epoch)
        self._validated, self._report, self._should_stop, self.precision = validated, report, should_stop, precision
        self._keeps_all = False
        """Whether the loss of the last validation needed all predictions: the next one will, too."""

    def next_after(self, steps_done: int) -> int | None:
        step = (max(steps_done, self._validated) // self.interval + 1) * self.interval
        return step if step <= self.steps else None

    def is_due(self, steps_done: int) -> bool:
        return steps_done % self.interval == 0 and steps_done > self._validated and not self._should_stop()

    def evaluate(self, order: Order, since: int) -> None:
        """Evaluate, and report the results once they are complete."""
        steps_done, data, forward = order.first_step, self.held_out.data, forward_order(order, self.graph)
        tally = MetricTally(
            self.graph, self.loss, length(data), forward.plan.batch_size, self.held_out.metrics,
            self.precision,
        )  # fmt: skip
        if self._keeps_all and not tally.keeps_all:
            tally.begin(keeps_all=True)
        seconds, is_complete = streamed(
            self.coordinator, forward, data, tally, since=since, should_stop=self._should_stop
        )
        if not is_complete:
            return
        self._keeps_all = tally.keeps_all
        results = tally.results()
        if tally.failure is None:
            self._validated = steps_done
        epoch = (steps_done - 1) // self.steps_per_epoch
        self._report(Validated(steps_done, epoch, tally.samples, seconds, results), tally.failure)


def forward_order(order: Order, graph: Graph) -> Order:
    """Return the order of a stream on the devices of a training's order, with the weights where that begins with them.

    A `StreamRun` with the training's `since` follows it, and leaves the state that the devices hold as it is.
    """
    located = order.located or Located.at_coordinator(order.start)
    return Order(
        graph=graph, plan=resolve(inference_plan(order.plan), graph.network), start=order.start, last_step=0,
        kernels=order.kernels, wait_limit_seconds=order.wait_limit_seconds, located=located.of_weights(),
    )  # fmt: skip


def check_plan(plan: Plan, network: Network, interval: int, first_step: int) -> None:
    """Refuse a plan whose stages cannot evaluate, or whose rounds would be cut by a validation."""
    runs_here(resolve(inference_plan(plan), network), network)
    rounds = plan.steps_per_round
    if rounds > 1 and (interval % rounds or first_step % rounds):
        raise BadPlan(
            f"A round of this plan has {rounds} steps: a validation every {interval} steps would cut one, and the "
            "steps after it would differ from those of a run without validation.",
            hint=f"Write validate_every={max(1, interval // rounds) * rounds}.",
        )


def _form(value: Any) -> Any:
    """Return the shape of every tensor in a batch of one sample, and whether it holds floats."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.is_floating_point()
    if isinstance(value, dict):
        return {key: _form(part) for key, part in value.items()}
    return [_form(part) for part in value] if isinstance(value, (list, tuple)) else type(value)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape[1:])}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else type(value).__name__
