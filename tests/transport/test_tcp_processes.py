"""The TCP engine between processes, and what the other one sees when one is killed or frozen."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from endpoint_pairs import wait_until, with_peer
from peer_process import SIZE

from manyhands.facts.errors import WorkerLost
from manyhands.transport.security import Security


@pytest.mark.slow
@pytest.mark.quick("encrypted")
def test_there_and_back(security: Security) -> None:
    with with_peer(security, "echo", 10) as (b, _):
        content = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
        into = torch.zeros_like(content)
        b.send("a", 0, "x", [content])
        b.mailbox.receive("a", 0, "x", [into])
        assert torch.equal(content, into)
        assert b.sent_bytes["a"] == b.mailbox.received_bytes["a"] == SIZE


@pytest.mark.quick(every=2)
def test_a_peer_killed_in_the_middle_of_a_message(security: Security) -> None:
    with with_peer(security, "stall", 30) as (b, process):
        into = torch.zeros(SIZE, dtype=torch.uint8)
        killed: list[float] = []

        def kill() -> None:
            wait_until(lambda: b.mailbox.received_bytes["a"] > SIZE // 4, 30)
            os.kill(process, signal.SIGKILL)
            killed.append(time.monotonic())

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(WorkerLost, match="a was lost: its connection to b broke"):
            b.mailbox.receive("a", 0, "x", [into])
        noticed = time.monotonic()
        thread.join()
        assert noticed - killed[0] < 15  # silence is noticed after 30
        assert SIZE // 4 < b.mailbox.received_bytes["a"] < SIZE, "the fault came in the middle"


@pytest.mark.slow
@pytest.mark.parametrize(
    "security",
    [pytest.param(False, id="plain"), pytest.param(True, id="encrypted", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_frozen_peer(security: Security) -> None:
    with with_peer(security, "wait", 1.5) as (b, process):
        time.sleep(2.0)
        assert b.is_connected("a"), "a peer with nothing to say is alive"
        os.kill(process, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(WorkerLost, match=r"a was lost: .*\(silent for \d+\.\d s\)"):
            b.mailbox.receive("a", 0, "x", [torch.zeros(SIZE, dtype=torch.uint8)])
        assert 1.0 < time.monotonic() - start < 15
        os.kill(process, signal.SIGCONT)
