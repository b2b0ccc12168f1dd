"""Workers of one name: those that come back are themselves, others are told apart, or refused with the fix."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from manyhands.facts.errors import Refused
from manyhands.facts.version import __version__
from manyhands.runtime import admission
from manyhands.runtime.control import PROTOCOL, Message, decode_from_coordinator, encode
from manyhands.runtime.control_messages import Hello, Refusal, Welcome
from manyhands.runtime.control_parts import Facts
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.identity import Identity, interface_of, own_identity
from manyhands.runtime.joining import Joining
from manyhands.runtime.member import Lost, MemberJoined
from manyhands.runtime.service import serve
from manyhands.runtime.worker import Worker
from manyhands.transport.channel import Channel, Listener, connect
from manyhands.transport.security import Security
from manyhands.transport.transport import TcpTransport

FIRST = Identity("process-1", "machine-1", "card")
CLONE = Identity("process-2", "machine-2", "card")
STRANGER = Identity("process-3", "machine-3", "another card")
BESIDE = Identity("process-4", "machine-1", "card")
"""Another worker on the first one's machine."""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with Coordinator(on_event=SAID.append) as found:
        yield found
    for channel in OPEN:
        channel.close()
    OPEN.clear()
    SAID.clear()


OPEN: list[Channel] = []
SAID: list[str] = []


def hello(identity: Identity, name: str = "pi", *, is_named: bool = False) -> Hello:
    facts = Facts("a machine", 4, 4, 10**9, "2.6")
    return Hello(__version__, PROTOCOL, name, "127.0.0.1", 1, facts, identity, is_named)


def greet(coordinator: Coordinator, said: Hello | bytes) -> tuple[Channel, Message]:
    channel = connect(*coordinator.address, coordinator.security, 5.0)
    OPEN.append(channel)
    channel.send(said if isinstance(said, bytes) else encode(said))
    data = channel.receive(5.0)
    assert data is not None
    return channel, decode_from_coordinator(data)


def called(coordinator: Coordinator, one: Hello) -> str:
    """The name that a worker ends up with when it does as it is told."""
    _, answer = greet(coordinator, one)
    if isinstance(answer, Refusal):
        assert answer.name, answer.reason
        _, answer = greet(coordinator, msgspec.structs.replace(one, name=answer.name))
    assert isinstance(answer, Welcome)
    return answer.name


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("identity", "why", "fix"),
    [
        (CLONE, "its SD card or disk is a copy", "systemd-machine-id-setup"),
        (STRANGER, "from 127.0.0.1.", "hostnamectl set-hostname"),
        (BESIDE, "the same machine", "--name NAME"),
        (Identity(), "from 127.0.0.1.", "--name NAME"),
    ],
    ids=["clone", "stranger", "beside", "unknown"],
)
def test_one_that_has_anothers_name_is_told_what_to_be_called(
    coordinator: Coordinator, identity: Identity, why: str, fix: str
) -> None:
    assert called(coordinator, hello(FIRST)) == "pi"
    _, answer = greet(coordinator, hello(identity))
    assert isinstance(answer, Refusal)
    assert answer.name == "pi-2"
    assert why in answer.reason
    assert fix in answer.hint
    assert called(coordinator, hello(identity)) == "pi-2"
    assert called(coordinator, hello(Identity("process-9", "machine-9", "card"))) == "pi-3"
    assert any("pi from 127.0.0.1 is called pi-2 here" in text and why in text for text in SAID), "both are told"


def test_a_name_given_by_hand_is_not_changed(coordinator: Coordinator) -> None:
    called(coordinator, hello(FIRST))
    _, answer = greet(coordinator, hello(CLONE, is_named=True))
    assert isinstance(answer, Refusal)
    assert not answer.name
    assert "--name NAME" in answer.hint


def test_where_names_are_given_a_clone_is_refused_with_those_that_are_free(coordinator: Coordinator) -> None:
    coordinator.wanted = {"pi", "edge", "cloud"}
    called(coordinator, hello(FIRST))
    called(coordinator, hello(STRANGER, "cloud", is_named=True))
    _, answer = greet(coordinator, hello(CLONE))
    assert isinstance(answer, Refusal)
    assert not answer.name
    assert "still free (edge): manyhands worker --name" in answer.hint
    assert set(coordinator.members) == {"pi", "cloud"}


def test_one_that_comes_back_before_it_is_missed_is_itself(coordinator: Coordinator) -> None:
    old, _ = greet(coordinator, hello(FIRST))
    assert called(coordinator, hello(FIRST)) == "pi"
    events = [coordinator.next_event(5.0) for _ in range(3)]
    assert [type(event[1]) for event in events if event] == [MemberJoined, Lost, MemberJoined]
    assert set(coordinator.members) == {"pi"}
    assert not coordinator.members["pi"].is_lost
    with contextlib.suppress(Exception):
        while old.receive(5.0) is not None:
            pass
        pytest.fail("the old connection is still there")


def lose(coordinator: Coordinator, channel: Channel, name: str) -> None:
    channel.close()
    while (event := coordinator.next_event(5.0)) is not None:
        if event[0] == name and isinstance(event[1], Lost):
            return
    pytest.fail(f"{name} was not lost")


def test_a_lost_one_has_its_name_until_it_is_back(coordinator: Coordinator) -> None:
    first, _ = greet(coordinator, hello(FIRST))
    lose(coordinator, first, "pi")
    assert called(coordinator, hello(CLONE)) == "pi-2", "the first one may come back"
    assert called(coordinator, hello(FIRST)) == "pi"
    assert called(coordinator, hello(BESIDE)) == "pi-3"


def test_a_machine_that_was_started_again_has_its_name_back(coordinator: Coordinator) -> None:
    first, _ = greet(coordinator, hello(FIRST))
    lose(coordinator, first, "pi")
    assert called(coordinator, hello(msgspec.structs.replace(FIRST, process="after a reboot"))) == "pi"


def test_one_that_was_renamed_is_called_so_again(coordinator: Coordinator) -> None:
    greet(coordinator, hello(FIRST))
    assert called(coordinator, hello(CLONE)) == "pi-2"
    channel, answer = greet(coordinator, hello(CLONE, "pi-2"))  # before it was missed
    assert isinstance(answer, Welcome)
    lose(coordinator, channel, "pi-2")
    assert called(coordinator, hello(CLONE)) == "pi-2", "as its process is known"
    lose(coordinator, OPEN[-1], "pi-2")
    assert called(coordinator, hello(msgspec.structs.replace(CLONE, process="another"))) == "pi-2", "as its machine is"


def test_two_workers_of_one_host_work_side_by_side(coordinator: Coordinator) -> None:
    """As typed twice: both join, each says as whom and through which interface, and both end with the coordinator."""
    words: list[list[str]] = [[], []]
    threads = []
    for place in range(2):
        joining = Joining(*coordinator.address, coordinator.token)
        run = threading.Thread(
            target=serve, args=(joining, words[place].append), kwargs={"transport": TcpTransport()}, daemon=True
        )
        run.start()
        threads.append(run)
        coordinator.wait_for(place + 1, 20)
    host = socket.gethostname()
    assert set(coordinator.members) == {host, f"{host}-2"}
    coordinator.close()
    for run in threads:
        run.join(10)
        assert not run.is_alive()
    where = "{}:{}".format(*coordinator.address)
    assert f"Joined {where} as {host} through lo (127.0.0.1). Ctrl-C leaves." in words[0]
    assert f"Joined {where} as {host}-2 through lo (127.0.0.1). Ctrl-C leaves." in words[1]
    assert f"This one is called {host}-2 there" in words[1][0]
    assert all("has ended the run" in said[-1] for said in words)


# Other versions


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b'{"type":"hello","version":"9.0","protocol":99,"who":{}}', "runs manyhands 9.0; the coordinator runs"),
        (b'{"type":"greeting","version":"9.0","protocol":99}', "runs manyhands 9.0; the coordinator runs"),
        (f'{{"type":"hello","version":"{__version__}","protocol":99}}'.encode(), f"{__version__} with protocol 99"),
        (b'{"type":"hello","version":9,"protocol":"x"}', "cannot be read"),
        (b"\x80\x04pickle", "cannot be read"),
    ],
)
def test_a_hello_of_another_protocol_is_answered(coordinator: Coordinator, said: bytes, reason: str) -> None:
    _, answer = greet(coordinator, said)
    assert isinstance(answer, Refusal)
    assert reason in answer.reason
    if "runs" in reason:
        assert f"pip install manyhands=={__version__}" in answer.hint


def test_a_worker_is_told_by_a_coordinator_of_another_version(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "__version__", "9.0")
    with pytest.raises(Refused, match=rf"runs manyhands {__version__}; the coordinator runs 9\.0") as found:
        serve(Joining(*coordinator.address, coordinator.token, "pi"), transport=TcpTransport())
    assert found.value.exit_code == 12
    assert found.value.hint == "On that device: pip install manyhands==9.0"


def test_an_answer_that_cannot_be_read_is_no_mystery() -> None:
    security = Security("the secret", encrypted=False)
    listener = Listener("127.0.0.1", 0, security)
    try:
        worker = Worker(Joining(*listener.address, "the secret", "pi", limit_seconds=5.0), TcpTransport())
        channel = listener.accept(5.0)
        assert channel is not None
        channel.send(b'{"type":"willkommen"}')
        with pytest.raises(Refused, match=f"sent what manyhands {__version__} cannot read") as found:
            worker.run()
        assert "same version" in found.value.hint
        channel.close()
    finally:
        listener.close()


def test_identities_tell_processes_and_interfaces() -> None:
    one, other = own_identity("a", "127.0.0.1"), own_identity("b", "127.0.0.1")
    assert one.process != other.process
    assert (one.machine, one.system) == (other.machine, other.system)
    with contextlib.suppress(FileNotFoundError), open("/etc/machine-id") as file:
        assert file.read().strip() not in repr(one), "which is nobody else's business"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
