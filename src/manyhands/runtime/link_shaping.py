"""Imitates links on a worker: what it sends to a peer leaves at the rate and with the delay of such a link."""

from __future__ import annotations

import math
from collections.abc import Mapping

from manyhands.facts.link import Link
from manyhands.runtime.control_parts import Shape
from manyhands.transport.shaping import STOPPED_BYTES_PER_SECOND
from manyhands.transport.transport import ConnectedEndpoint


class LinkShaping:
    """The links that one endpoint imitates, by peer."""

    def __init__(self, endpoint: ConnectedEndpoint) -> None:
        self._endpoint = endpoint
        self.links: dict[str, Link] = {}
        self.up_bytes_per_second = math.inf

    def shape(self, links: Mapping[str, Shape]) -> None:
        """Imitate these links to these peers from now on; those to other peers stay as they are."""
        for peer, shape in links.items():
            rate = math.inf if shape.bytes_per_second is None else shape.bytes_per_second
            self.links[peer] = Link(max(rate, STOPPED_BYTES_PER_SECOND), shape.delay_seconds)
        self._endpoint.shape(self.links, self.up_bytes_per_second)
