"""Puts a graph's nodes in another order: first what is made from some devices' inputs alone, device after device.

forward     a b a ab b' …       as the module was written
regrouped   a a │ b b' │ ab …   as stages need it, which are runs of nodes
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from manyhands.graph.graph import Graph
from manyhands.graph.nodes import Node, values_of


def regrouped(graph: Graph, groups: Sequence[Collection[str]]) -> Graph:
    """Return the graph with nodes ordered by the group of inputs that they are made from; what has several comes last.

    Inputs may be in several groups: what is made from them alone goes with the first node that reads it.
    """
    places = _places(graph.nodes, groups)
    order = sorted(range(len(places)), key=places.__getitem__)  # as it was within each group
    fields = {field: getattr(graph, field) for field in graph.__struct_fields__}
    return Graph(**{**fields, "nodes": tuple(graph.nodes[index] for index in order)})


def _places(nodes: Sequence[Node], groups: Sequence[Collection[str]]) -> list[int]:
    """Return the group of each node; the number of groups for a node of none."""
    all_groups = frozenset(range(len(groups)))
    made: dict[str, int] = {spec.name: index for index, node in enumerate(nodes) for spec in node.outputs}
    allowed: list[frozenset[int]] = []
    readers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        possible = all_groups
        for name in values_of(node):
            if name in made:
                readers[made[name]].append(index)
                possible &= allowed[made[name]]
            else:
                possible &= frozenset(place for place, group in enumerate(groups) if name in group)
        allowed.append(possible)
    places = [len(groups)] * len(nodes)
    later = len(groups)
    for index in reversed(range(len(nodes))):
        if len(allowed[index]) == 1:
            (places[index],) = allowed[index]
        elif allowed[index]:  # from nothing, or from what several have
            places[index] = min((places[reader] for reader in readers[index]), default=later)
        later = places[index]
    return places
