"""Plain documents as typed facts, from several threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from manyhands.facts.decode import converted


def test_types_are_worked_out_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once crash msgspec: here whoever works one out takes long, and notes how many do."""
    busy, most, asked = 0, 0, []
    decoder = msgspec.msgpack.Decoder

    def slowly(kind: Any) -> Any:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        asked.append(kind)
        time.sleep(0.01)
        busy -= 1
        return decoder(kind)

    kinds = [msgspec.defstruct(f"Kind{number}", [("a", int)]) for number in range(4)]
    monkeypatch.setattr(msgspec.msgpack, "Decoder", slowly)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda kind: converted({"a": 1}, kind), kinds))
    assert [one.a for one in made] == [1] * 4
    assert most == 1
    assert sorted(map(id, asked)) == sorted(map(id, kinds))
    converted({"a": 2}, kinds[0])
    assert len(asked) == 4, "once for each"
