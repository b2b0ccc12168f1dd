"""Plans for small networks: stages of shares of samples, and tiles before the last pooling."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from harness import plan_for, shared
from manyhands.facts.plan import ByTiles, Plan, Stage
from manyhands.graph.graph import Graph


def staged(graph: Graph, cuts: Sequence[int], shares: Sequence[Sequence[int]], **options: Any) -> Plan:
    ends = [0, *cuts, len(graph.network.layers)]
    stages = [shared(*between, *own) for between, own in zip(pairwise(ends), shares, strict=True)]
    micro_batches = options.get("micro_batches", 1)
    return plan_for(graph, stages, batch_size=sum(shares[0]) * micro_batches, **options)


def tiled(graph: Graph, share: ByTiles, tail: str, **options: Any) -> Plan:
    """Maps on tiles t0, t1, ..., and from the last pooling on one device."""
    end, last = graph.network.find_layer("avg_pool2d"), len(graph.network.layers)
    devices = tuple(f"t{number}" for number in range(len(share.rows) * len(share.columns)))
    stages = [Stage((0, end), devices, share), Stage((end, last), (tail,))]
    return plan_for(graph, stages, batch_size=4, order="sequential", **options)
