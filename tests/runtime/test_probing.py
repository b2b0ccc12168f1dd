"""Probes: every byte announced arrives, and numbers follow from what was timed."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from manyhands.runtime import probing
from manyhands.transport.switchboard import Switchboard


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("extent", [replace(probing.WHOLE, alone_seconds=0.02), probing.QUICK], ids=["whole", "quick"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_everybody_gets_what_was_announced(count: int, extent: probing.Extent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "LARGE_BYTES", 90_001)
    monkeypatch.setattr(probing, "PAIR_BYTES", 70_001)
    names = [f"d{number}" for number in range(count)]
    board = Switchboard(names)
    found: dict[str, probing.Probe] = {}
    for name in names:
        board.endpoints[name].mailbox.open(0, probing.expected(names, name))
    threads = [
        threading.Thread(
            target=lambda name=name: found.update({name: probing.run(board.endpoints[name], names, extent)})
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found) == set(names)
    for name in names:
        endpoint = board.endpoints[name]
        rounds, small_rounds = extent.large + 1, extent.small
        announced = probing.expected(names, name)
        small = sum(size for (_, topic), size in announced.items() if topic == "small")
        large = sum(size for (_, topic), size in announced.items() if topic in ("gather", "spread"))
        again = sum(size for (_, topic), size in announced.items() if topic == "start")
        alone = sum(size for (_, topic), size in announced.items() if topic in ("ping", "pong", "much", "came"))
        meetings = len(probing.tournament(names)) * extent.pair
        planned = small_rounds * (3 * again + probing.PIECES * small) + rounds * (large + again)
        planned += extent.pair * alone + meetings * again
        assert sum(endpoint.mailbox.received_bytes.values()) == planned
        assert endpoint.mailbox.refused == 0
        assert found[name].large_seconds > 0
        assert found[name].lost_seconds >= 0
        assert set(found[name].links) == set(names) - {name}
        assert all(link.bytes_per_second > 0 and link.delay_seconds > 0 for link in found[name].links.values())


def test_the_slowest_is_known_to_everybody() -> None:
    names = ["d0", "d1", "d2"]
    board = Switchboard(names)
    for name in names:
        board.endpoints[name].mailbox.open(0, probing.expected(names, name))
    own = {"d0": 0.25, "d1": 1.75, "d2": 0.5}
    found: dict[str, float] = {}

    def ask(name: str) -> None:
        exchange = probing._Exchange(board.endpoints[name], names)
        found[name] = exchange.largest(0, own[name])

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(names, 1.75)


@pytest.mark.parametrize("count", range(2, 10))
def test_everybody_meets_everybody_once_and_nobody_two_at_a_time(count: int) -> None:
    names = [f"d{number}" for number in range(count)]
    rounds = probing.tournament(names)
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
    for pairs in rounds:
        assert len({name for pair in pairs for name in pair}) == 2 * len(pairs)
    assert len(rounds) == count - 1 + count % 2


def test_numbers_follow_from_what_was_timed() -> None:
    """Of 8 MB over two devices each sends and receives 8 MB; two delays are not the port's fault."""
    delay, rate, lost = probing.Probe(small_seconds=0.001, large_seconds=0.010, lost_seconds=0.004).of(2)
    assert delay == 0.001
    assert rate == pytest.approx(8e6 / 0.008)
    assert lost == pytest.approx(0.004 / 16e6)
