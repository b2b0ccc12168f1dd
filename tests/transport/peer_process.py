"""'a' in a process of its own: python peer_process.py TOKEN ENCRYPTED HOST PORT HEARTBEAT_TIMEOUT_SECONDS WHAT."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from manyhands.transport.security import Security
from manyhands.transport.shared_memory import FillingRing
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.wire import Wire

SIZE = 64 * 2**20
STALL_BYTES = 20 * 2**20


TOPICS = 24
LARGEST = 3 * 2**20


def stall_the_link() -> None:
    """After some bytes neither the link nor memory in common takes more, so that a kill comes in the middle."""
    original_write, original_put, total = Wire.write, FillingRing.put, 0

    def write(self: Wire, buffers: Sequence[memoryview]) -> int:
        nonlocal total
        if total > STALL_BYTES:
            time.sleep(0.001)
            return 0
        count = original_write(self, buffers)
        total += count
        return count

    def put(self: FillingRing, views: Sequence[memoryview], length: int) -> int:
        nonlocal total
        place = original_put(self, views, length) if total <= STALL_BYTES else -1
        total += length if place >= 0 else 0
        return place

    Wire.write = write  # type: ignore[method-assign]
    FillingRing.put = put  # type: ignore[method-assign]


def random_messages(seed: int) -> dict[str, torch.Tensor]:
    """The same on both sides: sizes from nothing to a few chunks."""
    dice = torch.Generator().manual_seed(seed)
    sizes = [int(LARGEST ** (torch.rand(1, generator=dice).item())) - 1 for _ in range(TOPICS)]
    return {
        f"r{number}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=dice)
        for number, size in enumerate(sizes)
    }


def exchange(endpoint: TcpEndpoint, peer: str, own: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Both ways at once, some posted and some not; AssertionError where a byte differs."""
    into = {topic: torch.zeros_like(content) for topic, content in theirs.items()}
    for number, topic in enumerate(theirs):
        if number % 3:
            endpoint.mailbox.post(peer, 0, topic, [into[topic]])
    for number, (topic, content) in enumerate(own.items()):
        cut = len(content) // 3
        endpoint.send(peer, 0, topic, [content[:cut], content[cut:]], urgent=number % 5 == 0)
    for topic, content in theirs.items():
        endpoint.mailbox.receive(peer, 0, topic, [into[topic]])
        assert torch.equal(into[topic], content), topic
    endpoint.flush(20)


def main() -> None:
    token, encrypted, host, port, silence_seconds, what = sys.argv[1:]
    torch.set_num_threads(1)
    endpoint = TcpEndpoint(
        "a", Security(token, encrypted == "True"), limit_seconds=20, silence_seconds=float(silence_seconds)
    )
    theirs = random_messages(1)
    endpoint.mailbox.open(0, {("b", "x"): SIZE} | {("b", topic): len(one) for topic, one in theirs.items()})
    endpoint.connect({"b": (host, int(port))}, 20)
    if what == "echo":
        content = torch.zeros(SIZE, dtype=torch.uint8)
        endpoint.mailbox.receive("b", 0, "x", [content])
        endpoint.send("b", 0, "x", [content])
        endpoint.flush(20)
        endpoint.close()
    elif what == "random":
        exchange(endpoint, "b", random_messages(0), theirs)
        endpoint.send("b", 0, "right", [torch.ones(1, dtype=torch.uint8)])
    elif what == "stall":
        stall_the_link()
        endpoint.send("b", 0, "x", [torch.ones(SIZE, dtype=torch.uint8)])
    if what != "echo":
        time.sleep(60)


if __name__ == "__main__":
    main()
