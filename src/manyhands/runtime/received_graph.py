"""Graphs that come over the wire: each is checked by every process that receives it, once for all that are the same."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec

from manyhands.facts.network import Network
from manyhands.graph.check import check_graph
from manyhands.graph.document_reader import read_document
from manyhands.graph.graph import Graph

MOST_DIGESTS = 256
"""Digests that are remembered; the oldest is forgotten first."""

_checked: OrderedDict[bytes, None] = OrderedDict()
"""The digests of documents whose graphs this process has checked."""


def graph_of(document: dict[str, Any], network: Network | None) -> Graph:
    """Return a graph from the wire, checked like one from a file, with the description that came with it.

    No new description is made. A worker does not trust a sender to have checked the graph: a wrong argument can end a
    process in native code. What a worker has checked before, it has measured or run; it is known by a digest that the
    worker itself makes of all that the document says.
    """
    graph = read_document(document)
    digest = _digest(document)
    if digest not in _checked:
        check_graph(graph)
        _checked[digest] = None
        while len(_checked) > MOST_DIGESTS:
            _checked.popitem(last=False)
    graph.__dict__["network"] = network
    return graph


def _digest(document: dict[str, Any]) -> bytes:
    """Return the digest of a document. MessagePack tells infinities and NaN from nothing, which JSON does not."""
    return hashlib.sha256(msgspec.msgpack.encode(document)).digest()
