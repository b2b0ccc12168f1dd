"""The sum of gradients of workers that compute on one GPU: it never leaves the GPU.

The hops are those of sums by messages (schedule/reduction.py), and the order of the terms, too, so the bits are the
same. Only projections (projections.py) are fetched, once before the sum and once after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from manyhands.executor.flat_row import FlatRow
from manyhands.executor.gpu_peers import DESCRIPTOR_BYTES, GpuPeers
from manyhands.executor.gpu_projections import projected
from manyhands.executor.projections import SumRecord
from manyhands.facts.network import Network
from manyhands.schedule.actions import Reduce
from manyhands.schedule.reduction import chunk_points, gradient_rounds, topic
from manyhands.transport.endpoint import Endpoint


class GpuSums:
    """Adds up gradients among workers on one GPU."""

    def __init__(self, endpoint: Endpoint, network: Network, peers: GpuPeers) -> None:
        self._endpoint, self._network, self._peers = endpoint, network, peers
        self._row = FlatRow()

    def takes(self, reduce: Reduce) -> bool:
        """Return whether a sum is among workers on this GPU alone."""
        return self._peers.takes(reduce)

    def sum(self, reduce: Reduce, step: int, gradients: Sequence[torch.Tensor]) -> SumRecord:
        """Add up gradients in place, and return this device's record of the sum."""
        endpoint, peers, device = self._endpoint, self._peers, self._endpoint.name
        row, laid_out = self._row.filled(reduce, gradients, peers.torch_device)
        points = chunk_points(reduce, self._network)
        chunks = [row[first:last] for first, last in pairwise(points)]
        before = projected([[chunk] for chunk in chunks])
        received: list[torch.Tensor] = []
        formed: list[torch.Tensor] = []
        for number, hops in enumerate(gradient_rounds(reduce.devices, reduce.places)):
            named = [(hop, topic(reduce, number, hop.first)) for hop in hops if device in (hop.source, hop.target)]
            for hop, name in named:
                if hop.source == device:
                    descriptor = peers.described(row[points[hop.first] : points[hop.last]])
                    endpoint.send(hop.target, step, name, [descriptor])
            added: dict[int, None] = {}
            for hop, name in named:
                if hop.target != device:
                    continue
                mine = row[points[hop.first] : points[hop.last]]
                arrived = torch.empty(DESCRIPTOR_BYTES, dtype=torch.uint8)
                endpoint.mailbox.receive(hop.source, step, name, [arrived])
                other = peers.opened(arrived, mine.shape, mine.dtype)
                if hop.adds:
                    offset = points[hop.first]
                    for chunk in range(hop.first, hop.last):
                        received.append(other[points[chunk] - offset : points[chunk + 1] - offset])
                        added[chunk] = None
                    mine.add_(other)
                else:
                    mine.copy_(other)
            formed += [chunks[chunk].clone() for chunk in added]
        of_received, of_formed = (projected([[row] for row in rows]) for rows in (received, formed))
        after = projected([[chunk] for chunk in chunks])
        laid_out.take_from(row)
        return SumRecord(
            reduce.stage, reduce.first, reduce.last, reduce.micro_batch, tuple(total for total, _ in before),
            tuple(norm for _, norm in before), tuple(total for total, _ in of_received),
            tuple(total for total, _ in of_formed), tuple(total for total, _ in after),
            tied=reduce.weights[0] if reduce.weights else "",
        )  # fmt: skip
