"""The loopback link is really measured, between two processes, and nothing is left behind."""

from __future__ import annotations

import psutil
import pytest

from manyhands.facts.errors import ManyhandsError
from manyhands.profiler import links


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_loopback_is_measured_and_cleaned_up() -> None:
    before = children()
    link = links.measure_loopback(large_bytes=1 << 20)
    assert 1e5 < link.bytes_per_second < 1e12
    assert 1e-7 < link.delay_seconds < 1
    assert children() <= before


def test_a_peer_that_never_comes_is_an_error_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(links.sys, "executable", "/bin/true")
    before = children()
    with pytest.raises(ManyhandsError, match="could not be measured"):
        links.measure_loopback()
    assert children() <= before
