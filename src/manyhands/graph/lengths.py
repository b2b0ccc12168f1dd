"""One network captured at several lengths of its samples: a graph for each, with the same layers and weights.

A plan, the weights and the optimiser's state are of the network; shapes, and with them the size of every message, are
of the graph that a step runs. Which one that is follows from the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch

from manyhands.facts.errors import BadPlan, CaptureFailed
from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, Weight, records_of

_WITH_TOTALS = {"mean", "weighted"}
"""The ways of one loss that ignores a target: the first where no example was ignored (loss.py). Shares are computed
with totals either way."""


@dataclass(frozen=True)
class LengthGraphs:
    """The graphs of a run whose batches have several lengths."""

    graphs: Mapping[int, Graph]
    """Length -> graph, ascending; the plan is made for the longest."""
    first: int
    """The step that `steps` begins with."""
    steps: Sequence[int]
    """The length of each step."""

    def length(self, step: int) -> int | None:
        """Return the length of a step's batch; None for a step that is not in the run."""
        return self.steps[step - self.first] if 0 <= step - self.first < len(self.steps) else None

    @cached_property
    def _macs(self) -> dict[int, int]:
        return {length: sum(op.macs for op in graph.network.ops) for length, graph in self.graphs.items()}

    def work_ratio(self, step: int) -> float:
        """Return how many times as much is computed for the longest batch as for a step's."""
        macs = self._macs[self.length(step) or max(self.graphs)]
        return max(1.0, max(self._macs.values()) / max(1, macs))

    def of_longest(self, step_seconds: Sequence[float]) -> list[float]:
        """Return the times of the steps with the longest batches, of those of all steps."""
        longest = max(self.graphs)
        return [seconds for length, seconds in zip(self.steps, step_seconds) if length == longest]

    @classmethod
    def from_places(cls, graphs: Mapping[int, Graph], first: int, places: bytes) -> LengthGraphs:
        """Return the graphs of steps whose lengths are given as `places` gives them, and checked."""
        ascending = sorted(graphs)
        if max(places, default=0) >= len(ascending):
            raise BadPlan("The job has steps of lengths for which it has no graph.")
        lengths = cls({length: graphs[length] for length in ascending}, first, [ascending[place] for place in places])
        lengths.check()
        return lengths

    def places(self, first: int, last: int) -> bytes:
        """Return for each step from `first` up to `last` which length it has: 0 is the shortest."""
        place = {length: number for number, length in enumerate(self.graphs)}
        return bytes(place[length] for length in self.steps[first - self.first : last - self.first])

    def check(self) -> None:
        """Refuse graphs that are not one network: they may have come over the wire."""
        *shorter, longest = self.graphs
        for length in shorter:
            difference = first_difference(self.graphs[longest], self.graphs[length])
            if difference:
                raise BadPlan(f"The job's graphs of lengths {length} and {longest} are not one network: {difference}.")


def check_one_network(graphs: Mapping[int, Graph]) -> None:
    """Refuse a module that is another network at another length."""
    *shorter, longest = graphs
    for length in shorter:
        difference = first_difference(graphs[longest], graphs[length]) or _other_values(graphs[longest], graphs[length])
        if difference:
            raise CaptureFailed(
                f"The module computes something else with samples of length {length} than of {longest}: {difference}.",
                hint=f"Train with one length, lengths=({longest},), or without Python code that looks at the length.",
            )


def first_difference(graph: Graph, other: Graph) -> str:
    """Return where two graphs differ in more than shapes; empty: nowhere."""
    if graph.granularity != other.granularity or graph.aliases != other.aliases or graph.carried != other.carried:
        return "they are captured in different ways"
    for spec, twin in zip_longest(graph.weights, other.weights):
        if spec != twin:
            weight = spec or twin
            assert weight is not None
            return f"the weight '{weight.name}' is not the same in both"
    if difference := _difference(graph.nodes, other.nodes):
        return difference
    ways = {graph.loss_combination, other.loss_combination}
    if len(ways) > 1 and ways != _WITH_TOTALS:
        return f"their losses combine over samples in different ways: {' and '.join(sorted(ways))}"
    if graph.loss is not None and other.loss is not None:  # both have one, as they combine in some way
        if graph.loss.weights != other.loss.weights:
            return "constants of the loss are not the same in both"
        return _difference(graph.loss.nodes, other.loss.nodes)
    return ""


def _other_values(graph: Graph, other: Graph) -> str:
    """Return which tensor that the code makes has other values: `torch.tensor(x.shape[1])` is a constant of a graph."""
    graphs = [(graph, other)]
    if graph.loss is not None and other.loss is not None:
        graphs.append((graph.loss, other.loss))
    for longest, shorter in graphs:
        for name, tensor in longest.state.items():
            twin = shorter.state[name]
            is_same = tensor.data_ptr() == twin.data_ptr() and tensor.numel() > 0
            if not (is_same or tensor.is_meta or torch.equal(tensor, twin)):
                return f"the tensor '{name}' has other values"
    return ""


def _difference(nodes: Sequence[Node], others: Sequence[Node]) -> str:
    for node, twin in zip_longest(nodes, others):
        if node is None or twin is None or _form(node) != _form(twin):
            shown = node or twin
            assert shown is not None
            where = f" ({shown.where})" if shown.where else ""
            return f"'{shown.name}'{where} is in one of them alone, or another operator in the other"
    return ""


def _form(node: Node) -> tuple[object, ...]:
    """Return what two nodes that differ in shapes alone have in common."""
    weights = tuple(record.name for record in records_of(node) if isinstance(record, Weight))
    return node.name, node.target, node.module, node.updates, weights, len(node.outputs)
