"""Probes: every byte announced arrives, and numbers follow from what was timed."""

from __future__ import annotations

import threading

import pytest

from manyhands.engine.inprocess import Switchboard
from manyhands.runtime import probing


@pytest.mark.parametrize("count", [2, 3])
def test_everybody_gets_what_was_announced(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "LARGE_BYTES", 90_001)
    monkeypatch.setattr(probing, "ALONE_SECONDS", 0.02)
    names = [f"d{number}" for number in range(count)]
    board = Switchboard(names)
    found: dict[str, probing.Probe] = {}
    for name in names:
        board.endpoints[name].mailbox.open(0, probing.expected(names, name))
    threads = [
        threading.Thread(target=lambda name=name: found.update({name: probing.run(board.endpoints[name], names)}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found) == set(names)
    for name in names:
        endpoint = board.endpoints[name]
        rounds = probing.REPEATS + 1
        announced = probing.expected(names, name)
        small = sum(size for (_, topic), size in announced.items() if topic in ("start", "small"))
        large = sum(size for (_, topic), size in announced.items() if topic in ("gather", "spread"))
        again = sum(size for (_, topic), size in announced.items() if topic == "start")
        assert sum(endpoint.mailbox.received_bytes.values()) == rounds * (small + large + again)
        assert endpoint.mailbox.refused == 0
        assert found[name].large_seconds > 0
        assert found[name].lost_seconds >= 0


def test_numbers_follow_from_what_was_timed() -> None:
    """Of 8 MB over two devices each sends and receives 8 MB; two delays are not the port's fault."""
    delay, rate, lost = probing.Probe(small_seconds=0.001, large_seconds=0.010, lost_seconds=0.004).of(2)
    assert delay == 0.001
    assert rate == pytest.approx(8e6 / 0.008)
    assert lost == pytest.approx(0.004 / 16e6)
