"""A graph from the wire is checked once by each process, and anew where anything in it differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.facts.errors import BadGraph
from manyhands.graph.capture import capture
from manyhands.graph.document import to_document
from manyhands.graph.graph import Graph
from manyhands.runtime import received_graph
from manyhands.runtime.received_graph import graph_of


@pytest.fixture
def graph() -> Graph:
    return capture(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), torch.zeros(2, 3))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that were checked, in a process that has not checked any."""
    graphs: list[Graph] = []
    check_graph = received_graph.check_graph
    monkeypatch.setattr(received_graph, "check_graph", lambda graph: (graphs.append(graph), check_graph(graph)))
    monkeypatch.setattr(received_graph, "_checked", type(received_graph._checked)())
    return graphs


def test_the_same_document_is_checked_once(graph: Graph, checked: list[Graph]) -> None:
    document = to_document(graph)
    first, second = graph_of(document, graph.network), graph_of(copy.deepcopy(document), graph.network)
    assert len(checked) == 1
    assert first is not second  # each job has a loss's state of its own
    assert second.nodes == first.nodes


def test_a_changed_document_is_checked_and_refused_each_time(graph: Graph, checked: list[Graph]) -> None:
    document = to_document(graph)
    graph_of(document, graph.network)
    wrong = copy.deepcopy(document)
    wrong["weights"][0]["shape"][0] += 1
    for _ in range(2):
        with pytest.raises(BadGraph):
            graph_of(wrong, graph.network)
    assert len(checked) == 3


@pytest.mark.parametrize(("one", "other"), [(None, float("inf")), (0, 0.0), (0, False), (0.0, -0.0), ("1", 1)])
def test_values_that_differ_have_different_digests(one: Any, other: Any) -> None:
    assert received_graph._digest({"scale": one}) != received_graph._digest({"scale": other})


def test_the_oldest_digest_is_forgotten_first(
    graph: Graph, checked: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(received_graph, "MOST_DIGESTS", 2)
    documents = [{**to_document(graph), "name": name} for name in "abc"]
    for document in documents:
        graph_of(document, None)
    graph_of(documents[2], None)
    assert len(checked) == 3
    graph_of(documents[0], None)
    assert len(checked) == 4
