"""One of the processes that form sums together for `manyhands bench collectives`.

It reads commands as lines of JSON from its standard input, and answers with lines that begin with '@':

    {"name", "secret"}                       →  its address
    {"addresses", "store_port"}              →  null, once it is connected
    {"way", "bytes"}                         →  null, once it expects the others' messages, and groups are formed
    {"rounds"}                               →  the seconds of each round, whether the last went through groups, and
                                                whether all sums were right; where the way is chosen by measurement,
                                                the round after the choice is the last
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from manyhands.executor.collectives import Collectives
from manyhands.executor.messages import expected_messages
from manyhands.executor.process_groups import GroupKey, Hosts, ProcessGroups
from manyhands.executor.reducer import Reducer
from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.collectives import AUTO, BUILTIN
from manyhands.facts.network import Network, WeightSpec
from manyhands.facts.plan import BUCKET_BYTES
from manyhands.schedule.actions import Reduce
from manyhands.transport.security import Security
from manyhands.transport.tcp import TcpEndpoint

HERE = "127.0.0.1"
CONNECT_SECONDS = 60.0
LIMIT_SECONDS = 120.0
NUMBER_BYTES = 4


class Member:
    """A process with an endpoint and process groups, as a worker has them."""

    def __init__(self, name: str, secret: str) -> None:
        self.endpoint = TcpEndpoint(name, Security(secret, encrypted=False), host=HERE)
        self.endpoint.mailbox.limit_seconds = LIMIT_SECONDS
        self._devices: tuple[str, ...] = ()
        self._terms = CollectiveTerms(AUTO, 0, trusts_network=False)
        self._generation = 0
        self._sums: tuple[Network, list[Reduce], Collectives | None] | None = None

    def connect(self, addresses: Mapping[str, Any], store_port: int) -> None:
        """Connect to the others. Their groups are formed by the first sums of each kind."""
        self._devices = tuple(addresses)
        self._terms = CollectiveTerms(AUTO, store_port, trusts_network=False)
        self.endpoint.connect({name: (host, port) for name, (host, port) in addresses.items()}, CONNECT_SECONDS)

    def open(self, way: str, total_bytes: int) -> None:
        """Get ready for rounds that add up so many bytes each: no other may begin before all are."""
        self._generation += 1
        name, box = self.endpoint.name, self.endpoint.mailbox
        network, sums = buckets(self._devices, total_bytes)
        collectives = None
        if way != BUILTIN:
            keys = [GroupKey.of(sums[0])]
            groups = ProcessGroups(box, self._terms, Hosts(HERE, HERE), self._generation, keys, "cpu")
            collectives = Collectives(groups, is_measured=way == AUTO, first_step=0, stride=1)
        box.open(self._generation, expected_messages(sums, name, network))
        if collectives is not None:
            collectives.groups.form(CONNECT_SECONDS)
        self._sums = network, sums, collectives

    def rounds(self, rounds: int) -> dict[str, Any]:
        """Add up gradients in each round, in buckets as training does; return the seconds of each round, whether the
        last went through groups, and whether all sums were right."""
        assert self._sums is not None
        name, box = self.endpoint.name, self.endpoint.mailbox
        network, sums, collectives = self._sums
        reducer = Reducer(self.endpoint, network, lambda *_: None, collectives)
        gradients = [torch.full((each.bytes // NUMBER_BYTES,), 1.0 + self._devices.index(name)) for each in sums]
        wanted = sum(range(1, len(self._devices) + 1))
        seconds, is_right, is_grouped = [], True, False
        try:
            for step in range(rounds):
                if step and collectives is not None and collectives.is_measured and not collectives.is_trying:
                    break
                box.begin_step(step)
                before = collectives.counts.total() if collectives is not None else 0
                for gradient in gradients:
                    gradient.fill_(1.0 + self._devices.index(name))
                start = time.perf_counter()
                for each, gradient in zip(sums, gradients):
                    reducer.start(each, step, [gradient])
                reducer.wait()
                seconds.append(time.perf_counter() - start)
                is_right = is_right and all(bool((gradient == wanted).all()) for gradient in gradients)
                reducer.take_records()
                is_grouped = collectives is not None and collectives.counts.total() > before
        finally:
            if collectives is not None:
                collectives.close()
            reducer.close()
        return {"seconds": seconds, "torch": is_grouped, "right": is_right}


def buckets(devices: tuple[str, ...], total_bytes: int) -> tuple[Network, list[Reduce]]:
    """Return the sums of a round whose gradients have so many bytes, and a network with their weights."""
    sizes = [min(BUCKET_BYTES, total_bytes - first) for first in range(0, total_bytes, BUCKET_BYTES)]
    names = [f"w{number}" for number in range(len(sizes))]
    weights = {
        name: WeightSpec(name, (size // NUMBER_BYTES,), "float32", trainable=True) for name, size in zip(names, sizes)
    }
    network = Network("sums", (), (), {}, weights, (), (), "blocks", "sums")
    return network, [Reduce(0, "gradients", 0, 1, devices, size, weights=(name,)) for name, size in zip(names, sizes)]


def main() -> None:
    """Serve one parent."""
    torch.set_num_threads(1)
    beginning = json.loads(sys.stdin.readline())
    member = Member(beginning["name"], beginning["secret"])
    _answer(list(member.endpoint.address))
    peers = json.loads(sys.stdin.readline())
    member.connect(peers["addresses"], peers["store_port"])
    _answer(None)
    for line in sys.stdin:
        command = json.loads(line)
        if "way" in command:
            member.open(command["way"], command["bytes"])
            _answer(None)
        else:
            _answer(member.rounds(command["rounds"]))
    member.endpoint.close()


def _answer(value: object) -> None:
    print(f"@{json.dumps(value)}", flush=True)


if __name__ == "__main__":
    main()
