"""`mh.evaluate`: evaluates a network on held-out data, on the cluster's workers, as a stream of inferences."""

from __future__ import annotations

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

from manyhands.data.given import given, with_labels
from manyhands.data.loader import Prefetcher, example, length
from manyhands.data.order import BatchOrder
from manyhands.facts.cluster import Cluster, LabCluster
from manyhands.facts.keywords import settings_from, takes_settings
from manyhands.facts.plan import Codec, Plan
from manyhands.facts.plan_check import resolve
from manyhands.facts.profile import Profile
from manyhands.facts.summary import Summarized
from manyhands.graph.batching import bound_inputs, refuse_pairs
from manyhands.graph.capture import capture
from manyhands.graph.graph import Graph
from manyhands.graph.labels import check_labels
from manyhands.graph.loss import ignored_class
from manyhands.graph.own_loss import LABELS, OWN_LOSS
from manyhands.graph.piece import Context, Piece
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.trees import Fields, branched, rebuilt
from manyhands.graph.weights import Weights
from manyhands.job.lengths import PaddingOptions, PaddingSettings, padded_to_longest
from manyhands.plans.planning import is_strategy, plan_file, read_plan
from manyhands.plans.planning import plan as make_plan
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.order import Order, RunState
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


def cast(value: Any, floats: torch.dtype) -> Any:
    """Return the value, in its structure, with tensors of floats cast to another type of floats."""
    if isinstance(value, torch.Tensor):
        return value.to(floats) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, floats) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, floats) for item in value)
    return value


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
    keep_outputs: bool = False,
) -> EvaluateResult:
    """Evaluate on the session's workers, by a plan's stages and shares."""
    refuse_pairs(graph)
    stream = resolve(inference_plan(plan), graph.network)
    samples, size = length(data), stream.batch_size
    padded = _Padded(data, samples, size)
    steps = len(padded) // size
    kernels = {name: profile.of(name).kernels for name in stream.devices}
    order = Order(graph=graph, plan=stream, start=RunState(dict(weights)), last_step=steps, kernels=kernels)
    tally = _Tally(graph, loss, samples, size, keep_outputs=keep_outputs)
    with Prefetcher(padded, BatchOrder(len(padded), size, shuffle=False, seed=0), 0, steps) as batches:
        run = StreamRun(session.coordinator, order, _Batches(graph, batches, steps, tally))
        run.prepare()
        start = time.monotonic()
        run.stream()
    return EvaluateResult(samples, tally.loss, tally.accuracy, time.monotonic() - start, tally.output)


class _Batches:
    """A data set as a flow: inputs are sent, targets stay here until their answer comes."""

    def __init__(self, graph: Graph, batches: Iterator[Any], steps: int, tally: _Tally) -> None:
        self.graph, self.batches, self.left, self.tally = graph, batches, steps, tally

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def ready_in(self, size: int) -> float:
        return 0.0 if self.left else math.inf

    def take(self, step: int, size: int) -> Mapping[str, torch.Tensor]:
        step, inputs, targets = next(self.batches)
        check_labels(self.graph, targets, f"The targets of batch {step}")
        self.tally.targets[step] = targets
        self.left -= 1
        return bound_inputs(self.graph, inputs)

    def answered(self, step: int, outputs: dict[str, torch.Tensor]) -> None:
        self.tally.take(step, outputs)

    def check(self) -> None:
        """Do nothing: all answers are needed."""


class _Tally:
    """Adds up losses and right answers."""

    def __init__(
        self, graph: Graph, loss: Callable[..., torch.Tensor] | Literal["own"] | None, samples: int, size: int, *,
        keep_outputs: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.samples, self.size = graph, samples, size
        self.function = self._own_loss if isinstance(loss, str) else loss
        self._penalties: list[torch.Tensor] = []
        self.targets: dict[int, Any] = {}
        """Targets of the batches under way, by step."""
        self._keeps_outputs = keep_outputs
        self._is_whole = keep_outputs or (
            loss is not None and (graph.loss_combination in ("weighted", "whole") or ignored_class(graph) is not None)
        )
        """Whether the loss of all samples does not follow from those of batches: all outputs are kept until the end."""
        self._kept: list[tuple[Any, Any]] = []
        self._loss = 0.0
        self._right = 0
        self._answers = 0

    def take(self, step: int, outputs: dict[str, torch.Tensor]) -> None:
        count = min(self.size, self.samples - step * self.size)
        target = _first(self.targets.pop(step), count)
        output = _first(outputs_of(self.graph, outputs), count)
        self._penalties = [outputs[name] for name in self.graph.penalties]
        if self._is_whole:
            self._kept.append((output, target))
        elif self.function is not None:
            value = self._loss_of(output, target)
            self._loss += value if self.graph.loss_combination == "sum" else value * count
        is_classes = isinstance(target, torch.Tensor) and not target.is_floating_point() and target.dim() == 1
        scores = output.get("logits") if isinstance(output, dict) else output
        if isinstance(scores, torch.Tensor) and scores.dim() == 2 and is_classes:
            self._right += int((scores.argmax(1) == target).sum())
            self._answers += count

    def _loss_of(self, output: Any, target: Any) -> float:
        assert self.function is not None
        floats = next((leaf.dtype for leaf in _leaves(output) if leaf.is_floating_point()), torch.get_default_dtype())
        with torch.no_grad():
            return float(self.function(rebuilt(output), cast(target, floats)))

    def _own_loss(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss that the module computes itself."""
        loss = self.graph.loss
        assert loss is not None, "the graph was captured with its own loss"
        inputs = bind_inputs(loss, ([output, self._penalties] if self._penalties else output, target))
        return Piece(loss, Weights.copied(loss))(inputs, Context(training=False))[loss.outputs[0]]

    @property
    def output(self) -> Any:
        """The outputs of all samples, as the module would return them at once; None: they were not kept."""
        return rebuilt(_joined([output for output, _ in self._kept])) if self._keeps_outputs else None

    @property
    def loss(self) -> float | None:
        if self._kept and self.function is not None:
            return self._loss_of(*(_joined([pair[part] for pair in self._kept]) for part in (0, 1)))
        return self._loss / self.samples if self.function is not None else None

    @property
    def accuracy(self) -> float | None:
        return self._right / self._answers if self._answers else None


def _first(value: Any, count: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:count]
    if isinstance(value, dict):
        return branched(value, lambda item: _first(item, count))
    if isinstance(value, (list, tuple)):
        return type(value)(_first(item, count) for item in value)
    return value


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _joined(parts: list[Any]) -> Any:
    """Return the batches concatenated along the first axis."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        items = {key: _joined([part[key] for part in parts]) for key in parts[0]}
        return parts[0].filled(items) if isinstance(parts[0], Fields) else items
    return type(parts[0])(_joined([part[place] for part in parts]) for place in range(len(parts[0])))


@takes_settings(PaddingSettings)
def evaluate(
    model: nn.Module,
    data: Dataset[Any],
    *,
    loss: Callable[..., torch.Tensor] | Literal["own"] | None = None,
    batch_size: int = 64,
    cluster: Cluster | LabCluster | str | Path | Coordinator | None = None,
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
    data = given(data).data
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
