"""The refusals of what a captured module may not do, with hints on what to write instead."""

from __future__ import annotations

from typing import Any

from manyhands.facts.errors import CaptureFailed
from manyhands.graph import ops
from manyhands.graph.conversion import Conversion
from manyhands.graph.custom_functions import INCOMING
from manyhands.graph.nodes import Argument, Node, values_of
from manyhands.graph.random_ops import RANDOM_CALLS
from manyhands.graph.replacements import advice
from manyhands.graph.sizes import at
from manyhands.graph.source_lines import line_of


def refuse_nonlinear_backward(nodes: list[Node]) -> None:
    """Refuse a custom function whose gradient is not linear in the incoming gradient (custom_functions.py)."""
    for node in nodes:
        if node.target == "aten.full_like.default" and node.arguments[1] == INCOMING:
            raise CaptureFailed(
                "The backward of an autograd function is not linear in the gradient that it gets, so shares of a batch "
                f"would not add up.{at(node.where)}",
                hint="Scaling, masking and reversing a gradient can be captured; clipping or normalising one cannot: "
                "each device has the gradient of its own samples only.",
            )


def refuse_unfit_randomness(node: Node, state: Conversion) -> None:
    """Refuse a random operator whose mask cannot be drawn sample by sample: each sample's rows must lie together."""
    random = RANDOM_CALLS.get(node.target)
    if random is None or not random.draws(node, training=True):
        return
    spec = node.outputs[0]
    if spec.pairs_samples or any(state.specs[name].pairs_samples for name in values_of(node)):
        raise CaptureFailed(
            f"{node.target} draws for every two samples, which no counter of samples numbers.{at(node.where)}",
            hint="Draw for each sample by itself, before samples meet.",
        )
    if any(name in state.outers for name in (spec.name, *values_of(node))):
        raise CaptureFailed(
            f"{node.target} draws for an axis that holds the samples interleaved, not batch first.{at(node.where)}",
            hint="Drop before merging axes, or merge them batch first: (batch, steps, ...) to (batch * steps, ...).",
        )
    if node.target == "aten.feature_dropout.default" and (spec.batch_axis or 0) > 1:
        raise CaptureFailed(
            f"{node.target} drops whole features of a tensor whose batch is axis {spec.batch_axis}.{at(node.where)}",
            hint="Bring the batch to the front (axis 0) first.",
        )


def refuse_hidden_randomness(target: str, arguments: tuple[Argument, ...], where: str) -> None:
    if target in ops.RECURRENT:
        dropout = arguments[5]
        if isinstance(dropout, float) and dropout > 0 and arguments[4] > 1:
            raise CaptureFailed(
                f"A recurrent layer draws dropout (p={dropout}) inside one operator, which no share could repeat."
                f"{at(where)}",
                hint="Use one nn.LSTM(num_layers=1) per layer with nn.Dropout between them.",
            )


def off_list(target: str, node: Any) -> CaptureFailed:
    return CaptureFailed(
        f"The operator {target.split('.')[1]} ({target}) is none of those that manyhands runs.{at(line_of(node))}",
        hint=advice(target),
    )
