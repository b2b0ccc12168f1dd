"""The engine for tests keeps the same promises as the one for networks."""

from __future__ import annotations

import threading

import pytest
import torch

from manyhands.facts.errors import WorkerLost
from manyhands.transport.frames import CHUNK_BYTES
from manyhands.transport.switchboard import Switchboard


@pytest.mark.parametrize("count", [0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_a_message_of_several_tensors(count: int) -> None:
    board = Switchboard(["a", "b"])
    a, b = board.endpoints["a"], board.endpoints["b"]
    parts = [torch.randint(0, 255, (count,), dtype=torch.uint8), torch.arange(3.0)]
    for endpoint in (a, b):
        endpoint.mailbox.open(0, {("a", "x"): count + 12})
    a.send("b", 0, "x", parts)
    found = [torch.zeros_like(part) for part in parts]
    b.mailbox.receive("a", 0, "x", found)
    assert all(torch.equal(*pair) for pair in zip(parts, found))
    assert a.sent_bytes["b"] == b.mailbox.received_bytes["a"] == count + 12
    a.flush(1)


def test_a_device_dies_in_the_middle_of_its_second_message() -> None:
    board = Switchboard(["a", "b"])
    a, b = board.endpoints["a"], board.endpoints["b"]
    size = 2 * CHUNK_BYTES
    for endpoint in (a, b):
        endpoint.mailbox.open(0, {("a", "x"): size, ("a", "y"): size})
    content = torch.ones(size, dtype=torch.uint8)
    into = torch.zeros_like(content)
    b.mailbox.post("a", 0, "y", [into])
    board.fail_after("a", 2)
    thread = threading.Thread(target=lambda: [a.send("b", 0, topic, [content]) for topic in "xy"])
    thread.start()
    b.mailbox.receive("a", 0, "x", [torch.empty_like(content)])
    with pytest.raises(WorkerLost, match="a was lost"):
        b.mailbox.receive("a", 0, "y", [into])
    thread.join()
    assert 0 < into.sum() < size
    with pytest.raises(WorkerLost):
        a.mailbox.check()
