"""Bulk stands back while a device has urgent messages for others, and goes on when they have left or are lost."""

from __future__ import annotations

import math

import pytest
import torch
from endpoint_pairs import joined, wait_until

from manyhands.facts.link import Link
from manyhands.transport.frames import CHUNK_BYTES
from manyhands.transport.security import Security

RATE = 8_000_000
BULK, URGENT = 8 * CHUNK_BYTES, 8 * CHUNK_BYTES


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_urgent_messages_have_the_port_to_themselves(encrypted: bool) -> None:
    """Meanwhile only the frame that had begun arrives elsewhere, and one beside the last of the urgent message."""
    with joined(Security("the token", encrypted), {"bulk": BULK, "urgent": URGENT}, "a", "b", "c") as (a, b, c):
        a.shape({"b": Link(math.inf, 0.0), "c": Link(math.inf, 0.0)}, RATE)
        a.send("b", 0, "bulk", [zeros(BULK)])
        wait_until(lambda: b.mailbox.received_bytes["a"] > 0)
        a.send("c", 0, "urgent", [zeros(URGENT)], urgent=True)
        before = b.mailbox.received_bytes["a"]
        c.mailbox.receive("a", 0, "urgent", [zeros(URGENT)])
        meanwhile = b.mailbox.received_bytes["a"] - before
        assert meanwhile <= 3 * CHUNK_BYTES, "an even share of the port would be as much as the urgent message"
        b.mailbox.receive("a", 0, "bulk", [zeros(BULK)])  # and then it goes on


def test_bulk_goes_on_when_the_urgent_peer_is_lost() -> None:
    with joined(Security("the token", False), {"bulk": BULK, "urgent": 10**8}, "a", "b", "c") as (a, b, c):
        a.shape({"b": Link(math.inf, 0.0), "c": Link(math.inf, 0.0)}, RATE)
        a.send("c", 0, "urgent", [zeros(10**8)], urgent=True)  # would take 12 s
        a.send("b", 0, "bulk", [zeros(BULK)])
        wait_until(lambda: c.mailbox.received_bytes["a"] > 0)
        assert b.mailbox.received_bytes["a"] == 0
        c.close()
        b.mailbox.receive("a", 0, "bulk", [zeros(BULK)])


def test_without_shaping_everything_arrives() -> None:
    """Over plain loopback, with many of both kinds in a row: nothing is forgotten."""
    sizes = {f"bulk{n}": 400_000 for n in range(8)} | {f"urgent{n}": 300_000 for n in range(8)}
    with joined(Security("the token", False), sizes, "a", "b", "c") as (a, b, c):
        for n in range(8):
            for peer in ("b", "c"):
                a.send(peer, 0, f"bulk{n}", [zeros(400_000)])
                a.send(peer, 0, f"urgent{n}", [zeros(300_000)], urgent=True)
        for end in (b, c):
            for topic, size in sizes.items():
                end.mailbox.receive("a", 0, topic, [zeros(size)])
