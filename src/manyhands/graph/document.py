"""Conversion between a graph and a plain document (dicts, lists, texts, numbers), for disk and wire.

Input is assumed to be hostile: document_reader.py checks it before anything is allocated, check.py before it is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.graph.check import check_graph, check_state
from manyhands.graph.document_reader import LOSS_PREFIX, VERSION, read_document
from manyhands.graph.graph import Graph

if TYPE_CHECKING:
    import torch


def to_document(graph: Graph) -> dict[str, Any]:
    """Return the graph as a document, without its weights' values."""
    encoded = msgspec.json.encode(
        {
            "version": VERSION,
            "name": graph.name,
            "granularity": graph.granularity,
            "inputs": graph.inputs,
            "input_tree": graph.input_tree,
            "output_tree": graph.output_tree,
            "nodes": graph.nodes,
            "weights": graph.weights,
            "aliases": graph.aliases,
        }
    )
    document: dict[str, Any] = msgspec.json.decode(encoded)  # lists, not tuples: just what a reader will see
    document["loss"] = None if graph.loss is None else to_document(graph.loss)
    document["loss_combination"] = graph.loss_combination
    if graph.penalties:
        document["penalties"] = list(graph.penalties)
    if graph.carried:
        document["carried"] = list(graph.carried)
    return document


def state_of(graph: Graph) -> dict[str, torch.Tensor]:
    """Return the weights' values of the graph and its loss, in one dict."""
    state = dict(graph.state)
    if graph.loss is not None:
        state.update({LOSS_PREFIX + name: tensor for name, tensor in graph.loss.state.items()})
    return state


def from_document(document: object, state: Mapping[str, torch.Tensor]) -> Graph:
    """Return the graph that a document and its weights stand for, or raise BadGraph saying what is wrong with them."""
    graph = read_document(document)
    check_state(graph, state)
    loss = graph.loss
    if loss is not None:
        loss_state = {name.removeprefix(LOSS_PREFIX): t for name, t in state.items() if name.startswith(LOSS_PREFIX)}
        loss = msgspec.structs.replace(loss, state=loss_state)
    main = {spec.name: state[spec.name] for spec in graph.weights}
    graph = msgspec.structs.replace(graph, state=main, loss=loss)
    check_graph(graph)
    return graph
