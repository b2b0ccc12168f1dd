"""How pairs of workers are connected: who dials whom, and which relay, from what is known of who reaches whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from manyhands.executor.messages import COORDINATOR
from manyhands.runtime.member import Member
from manyhands.runtime.routes import Routes, WayBetween, is_behind


def member(name: str, own: str, seen: str = "", *, is_relay: bool = False, is_invited: bool = False) -> Member:
    channel, facts = SimpleNamespace(peer_host=seen or own), SimpleNamespace(is_relay=is_relay)
    made: Any = Member(name, channel, (own, 4000), None, facts, None)  # type: ignore[arg-type]
    made.invitation = object() if is_invited else None
    return made  # type: ignore[no-any-return]


def routes(*members: Member, is_active: bool = True) -> Routes:
    return Routes({one.name: one for one in members}, is_active=is_active)


A, B = member("a", "192.168.1.2", "203.0.113.1"), member("b", "192.168.1.2", "203.0.113.2")


def shut(between: Routes, first: str = "a", second: str = "b") -> Routes:
    between.note(first, second, is_open=False)
    between.note(second, first, is_open=False)
    return between


def test_workers_of_one_network_cost_nothing() -> None:
    found = routes(member("a", "10.0.0.1"), member("b", "10.0.0.2"), member("c", "::ffff:10.0.0.3", "10.0.0.3"))
    assert not found.unknown(["a", "b", "c"])
    assert found.between("a", "b") is None


@pytest.mark.parametrize(("own", "seen", "behind"), [
    ("192.168.1.2", "203.0.113.1", True), ("10.0.0.1", "10.0.0.1", False), ("::1", "::1", True),
    ("127.0.0.1", "127.0.0.1", True), ("fd00::1", "fd00:0::1", False), ("fe80::1%eth0", "fe80::1%eth0", False),
])  # fmt: skip
def test_who_is_behind_a_router(own: str, seen: str, behind: bool) -> None:
    assert is_behind(member("a", own, seen)) is behind


def test_pairs_in_doubt_are_probed_once() -> None:
    found = routes(A, B, member("c", "10.0.0.1"))
    assert [(one.name, other.name) for one, other in found.unknown(["c", "b", "a"])] == [
        ("a", "b"), ("a", "c"), ("b", "c"),
    ]  # fmt: skip
    shut(found)
    assert [(one.name, other.name) for one, other in found.unknown("abc")] == [("a", "c"), ("b", "c")]
    assert not routes(A, B, is_active=False).unknown("ab")


def test_who_reaches_the_other_one_connects() -> None:
    found = routes(A, B)
    found.note("a", "b", is_open=False)
    found.note("b", "a", is_open=True)
    assert found.between("a", "b") == found.between("b", "a") == WayBetween("b")
    found.note("a", "b", is_open=True)
    assert found.between("a", "b") is None, "as any two"


def test_the_order_of_relays() -> None:
    """First who offers it, then the coordinator, then any whom both reach; not one behind another router."""
    c, d = member("c", "10.0.0.1"), member("d", "10.0.0.2", is_relay=True)
    hidden, invited = member("e", "192.168.1.9", "203.0.113.9", is_relay=True), member("f", "1.1.1.1", is_invited=True)
    found = shut(routes(A, B, c, hidden, invited, d))
    taken = []
    while relay := found.relay("a", "b"):
        assert found.between("b", "a") == WayBetween("a", relay)
        taken.append(relay)
        is_more = found.give_up([("b", "a")])
        assert is_more == bool(found.relay("a", "b"))
    assert taken == ["d", COORDINATOR, "c"]
    assert found.between("a", "b") is None
    assert not found.give_up([("a", "b")]), "there is no other way: who cannot be reached is evicted"


def test_a_relay_that_is_lost_is_followed_by_another() -> None:
    d = member("d", "10.0.0.2", is_relay=True)
    found = shut(routes(A, B, d))
    assert found.relayed(["a", "b", "d"]) == {("a", "b"): "d"}
    d.is_lost = True
    assert found.relay("a", "b") == COORDINATOR
    back = member("d", "10.0.0.2", is_relay=True)
    found._members = {"a": A, "b": B, "d": back}
    assert found.relay("a", "b") == "d", "another process of its name is another relay"


def test_pairs_that_fail_to_connect_are_probed_then_relayed() -> None:
    found = routes(member("a", "10.0.0.1"), member("b", "10.0.0.2"))
    assert found.give_up([("a", "b")]), "they are asked first"
    assert [(one.name, other.name) for one, other in found.unknown("ab")] == [("a", "b")]
    found.note("a", "b", is_open=True)
    found.note("b", "a", is_open=True)
    assert found.between("a", "b") is None
    assert found.give_up([("a", "b")]), "a probe came through and the connection did not"
    assert found.relay("a", "b") == COORDINATOR
    assert not found.give_up([("a", "b")])


def test_where_all_are_on_one_machine_nothing_is_tried() -> None:
    assert not routes(A, B, is_active=False).give_up([("a", "b")])


def test_invited_workers_are_left_alone() -> None:
    found = routes(member("a", "10.0.0.1"), member("b", "10.0.0.2", is_invited=True))
    found.suspect("ab")
    assert not found.unknown("ab")
    assert not found.give_up([("a", "b")])


def test_what_is_known_of_the_lost_is_forgotten() -> None:
    a, b, c = member("a", "10.0.0.1", "1.1.1.1"), member("b", "10.0.0.2", "2.2.2.2"), member("c", "10.0.0.3")
    found = shut(routes(a, b, c))
    a.is_lost = True
    shut(found, "b", "c")
    assert len(found._reaches) == 2
