"""Metrics of held-out data: losses, right answers and what the user gives, added up as predictions come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from manyhands.facts.errors import BadValue
from manyhands.facts.precision import FLOAT32
from manyhands.graph.graph import Graph
from manyhands.graph.loss import ignored_classes
from manyhands.graph.piece import Context, Piece
from manyhands.graph.precision import under
from manyhands.graph.tape import bind_inputs, outputs_of
from manyhands.graph.trees import Fields, branched, rebuilt
from manyhands.graph.weights import Weights

LOSS, ACCURACY = "loss", "accuracy"
RESERVED = (LOSS, ACCURACY, "step", "epoch", "samples", "seconds")
"""Names that a user's metric may not have: they are computed in any case, or are columns of validation.csv."""


@runtime_checkable
class RunningMetric(Protocol):
    """A metric that is fed batch by batch, as those of torchmetrics are."""

    def update(self, predictions: Any, targets: Any, /) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


Metric = RunningMetric | Callable[[Any, Any], Any]
"""A running metric, or a function of all predictions and targets that returns a number, or a dict of numbers."""


def check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Refuse what is no metric, and names that cannot be columns or are taken."""
    if not isinstance(metrics, Mapping):
        raise BadValue(
            f"metrics is a {type(metrics).__name__}; it must be a dict.", hint='Write metrics={"top5": function}.'
        )
    for name, metric in metrics.items():
        is_name = isinstance(name, str) and name and name.isprintable() and name == name.strip()
        if not is_name or any(character in name for character in ',"/'):
            raise BadValue(f"{name!r} cannot be a metric's name.", hint="Use letters, digits, - and _.")
        if name in RESERVED:
            raise BadValue(f"A metric cannot be called '{name}': that name is taken.", hint="Give it another name.")
        if isinstance(metric, type) or not (isinstance(metric, RunningMetric) or callable(metric)):
            kind = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise BadValue(
                f"The metric '{name}' is {kind}; it must be a function of (predictions, targets), or an object with "
                "update, compute and reset.",
                hint=f"Write {metric.__name__}()." if isinstance(metric, type) else "",
            )


def has_accuracy(graph: Graph, targets: Any) -> bool:
    """Return whether a network's outputs for these targets are scores of classes, so that it has an accuracy."""
    tree = graph.output_tree
    scores = tree.get("logits") if isinstance(tree, dict) else tree
    spec = graph.network.tensors.get(scores) if isinstance(scores, str) else None
    return spec is not None and len(spec.shape_for(2)) == 2 and _are_classes(targets)


class MetricTally:
    """Adds up what is known of the predictions so far. `metrics` are reset when it begins.

    `is_incomplete`: a target is of a class that the loss ignores, and no predictions were kept: the loss is not known,
    and it has to begin anew with `keeps_all`.
    """

    def __init__(
        self, graph: Graph, loss: Callable[..., torch.Tensor] | Literal["own"] | None, samples: int, size: int,
        metrics: Mapping[str, Metric] | None = None, precision: str = FLOAT32, *, keeps_outputs: bool = False,
    ) -> None:  # fmt: skip
        """`precision`: the one that the graph was captured in; the loss is computed in it too. `keeps_outputs`: the
        outputs of all samples are wanted."""
        self._keeps_outputs = keeps_outputs
        self.graph, self.samples, self.size, self.precision = graph, samples, size, precision
        self.function = self._own_loss if isinstance(loss, str) else loss
        self.metrics = dict(metrics or {})
        self.failure: BadValue | None = None
        """The error of a metric that raised; nothing is added up from then on."""
        self._ignored = frozenset(ignored_classes(graph)) if loss is not None else frozenset[int]()
        self._functions = [name for name, metric in self.metrics.items() if not isinstance(metric, RunningMetric)]
        self.begin(keeps_all=keeps_outputs or bool(self._functions) or graph.loss_combination in ("weighted", "whole"))

    def begin(self, *, keeps_all: bool) -> None:
        """Begin anew. `keeps_all`: keep all predictions and targets, as a function needs them, or a loss that does not
        follow from those of batches."""
        self.keeps_all, self.is_incomplete = keeps_all, False
        self.targets: dict[int, Any] = {}
        """Targets of the batches under way, by their numbers."""
        self._penalties: list[torch.Tensor] = []
        self._kept: list[tuple[Any, Any]] = []
        self._loss = 0.0
        self._right = 0
        self._answers = 0
        for name, metric in self.metrics.items():
            if isinstance(metric, RunningMetric):
                self._guarded(name, metric.reset)

    def take(self, number: int, outputs: dict[str, torch.Tensor]) -> None:
        """Add the outputs for a batch; those for the padding of the last one are left out."""
        count = min(self.size, self.samples - number * self.size)
        target = _first(self.targets.pop(number), count)
        output = _first(outputs_of(self.graph, outputs), count)
        self._penalties = [outputs[name] for name in self.graph.penalties]
        if self.keeps_all:
            self._kept.append((output, target))
        elif self._ignored and self._holds_ignored(target):
            self.is_incomplete = True
        if self.function is not None and not self._needs_all and not self.is_incomplete:
            value = self._loss_of(output, target)
            self._loss += value if self.graph.loss_combination == "sum" else value * count
        scores = output.get("logits") if isinstance(output, dict) else output
        if isinstance(scores, torch.Tensor) and scores.dim() == 2 and _are_classes(target):
            self._right += int((scores.argmax(1) == target).sum())
            self._answers += count
        for name, metric in self.metrics.items():
            if isinstance(metric, RunningMetric) and self.failure is None:
                self._guarded(name, metric.update, rebuilt(output), target)

    def results(self) -> dict[str, float]:
        """Return every metric by name; one that computes several gives NAME/PART for each of them."""
        numbers: dict[str, float] = {}
        if self.loss is not None:
            numbers[LOSS] = self.loss
        if self.accuracy is not None:
            numbers[ACCURACY] = self.accuracy
        predictions, targets = (_joined_part(self._kept, part) for part in (0, 1)) if self._functions else (None, None)
        for name, metric in self.metrics.items():
            if self.failure is not None:
                break
            if isinstance(metric, RunningMetric):
                value = self._guarded(name, metric.compute)
            else:
                value = self._guarded(name, metric, rebuilt(predictions), targets)
            if self.failure is None:
                numbers |= self._numbers(name, value)
        return numbers

    def _guarded(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a metric returns; where it raises, keep the error that names it."""
        try:
            with torch.no_grad():
                return call(*arguments)
        except Exception as error:
            self.failure = BadValue(f"The metric '{name}' raised {type(error).__name__}: {error!s:.300}")
            self.failure.__cause__ = error
            return None

    def _numbers(self, name: str, value: Any) -> dict[str, float]:
        if isinstance(value, Mapping):
            parts = {f"{name}/{key}": _number(part) for key, part in value.items()}
            return {key: part for key, part in parts.items() if part is not None}
        number = _number(value)
        if number is None:
            self.failure = BadValue(
                f"The metric '{name}' returned a {type(value).__name__}; it must be a number, or a dict of numbers.",
                hint="Return a float, or a tensor of one element.",
            )
            return {}
        return {name: number}

    def _loss_of(self, output: Any, target: Any) -> float:
        assert self.function is not None
        floats = next((leaf.dtype for leaf in _leaves(output) if leaf.is_floating_point()), torch.get_default_dtype())
        if self.precision != FLOAT32:
            floats = torch.float32  # autocast itself casts what the loss reads
        with torch.no_grad(), under(FLOAT32 if self.function == self._own_loss else self.precision):
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
        return rebuilt(_joined_part(self._kept, 0)) if self._keeps_outputs else None

    @property
    def loss(self) -> float | None:
        if self.function is None:
            return None
        if self._needs_all:
            return self._loss_of(*(_joined_part(self._kept, part) for part in (0, 1)))
        return self._loss / self.samples

    @property
    def _needs_all(self) -> bool:
        """Whether the loss of all samples does not follow from those of batches."""
        return self.keeps_all and (self.graph.loss_combination in ("weighted", "whole") or bool(self._ignored))

    def _holds_ignored(self, target: Any) -> bool:
        """Return whether a mean over these targets leaves some out, so that it is not one of as many as there are."""
        return any(bool((leaf.long() == number).any()) for leaf in _leaves(target) for number in self._ignored)

    @property
    def accuracy(self) -> float | None:
        return self._right / self._answers if self._answers else None


def cast(value: Any, floats: torch.dtype) -> Any:
    """Return the value, in its structure, with tensors of floats cast to another type of floats."""
    if isinstance(value, torch.Tensor):
        return value.to(floats) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast(item, floats) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, floats) for item in value)
    return value


def _are_classes(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and not target.is_floating_point() and target.dim() == 1


def _number(value: Any) -> float | None:
    """Return a value as a number; None: it is none."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    try:
        return float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        return None


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


def _joined_part(pairs: list[tuple[Any, Any]], part: int) -> Any:
    return _joined([pair[part] for pair in pairs])


def _joined(parts: list[Any]) -> Any:
    """Return the batches concatenated along the first axis."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        items = {key: _joined([part[key] for part in parts]) for key in parts[0]}
        return parts[0].filled(items) if isinstance(parts[0], Fields) else items
    return type(parts[0])(_joined([part[place] for part in parts]) for place in range(len(parts[0])))


def text_of(numbers: Mapping[str, float]) -> str:
    """Return metrics as a person reads them."""
    return ", ".join(f"{name} {_shown(name, value)}" for name, value in numbers.items())


def _shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name == ACCURACY and math.isfinite(value) else f"{value:.4g}"
