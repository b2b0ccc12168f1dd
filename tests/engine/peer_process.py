"""'a' in a process of its own: python peer_process.py TOKEN ENCRYPTED PORT SILENCE_SECONDS WHAT."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from manyhands.engine.security import Security
from manyhands.engine.tcp import TcpEndpoint
from manyhands.engine.wire import Wire

SIZE = 64 * 2**20
STALL_BYTES = 20 * 2**20


def stall_the_link() -> None:
    """After some bytes the link takes no more, so that a kill comes in the middle of a message for certain."""
    original, total = Wire.write, 0

    def write(self: Wire, buffers: Sequence[memoryview]) -> int:
        nonlocal total
        if total > STALL_BYTES:
            time.sleep(0.001)
            return 0
        count = original(self, buffers)
        total += count
        return count

    Wire.write = write  # type: ignore[method-assign]


def main() -> None:
    token, encrypted, port, silence_seconds, what = sys.argv[1:]
    torch.set_num_threads(1)
    endpoint = TcpEndpoint(
        "a", Security(token, encrypted == "True"), limit_seconds=20, silence_seconds=float(silence_seconds)
    )
    endpoint.mailbox.open(0, {("b", "x"): SIZE})
    endpoint.connect({"b": ("127.0.0.1", int(port))}, 20)
    if what == "echo":
        content = torch.zeros(SIZE, dtype=torch.uint8)
        endpoint.mailbox.receive("b", 0, "x", [content])
        endpoint.send("b", 0, "x", [content])
        endpoint.flush(20)
        endpoint.close()
    elif what == "stall":
        stall_the_link()
        endpoint.send("b", 0, "x", [torch.ones(SIZE, dtype=torch.uint8)])
    if what != "echo":
        time.sleep(60)


if __name__ == "__main__":
    main()
