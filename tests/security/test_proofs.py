"""What a handshake gives away, and whom it lets in: tokens that are recorded, keys that are known, revoked, changed."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from manyhands.facts.errors import ManyhandsError, Refused, TimedOut
from manyhands.transport import proofs
from manyhands.transport.channel import Listener, connect
from manyhands.transport.keys import (
    Credentials,
    DeviceKey,
    Pinned,
    Role,
    fingerprint,
    is_signed,
    key_of,
    new_private_key,
)
from manyhands.transport.pake import KeyExchange
from manyhands.transport.security import PREAMBLE, DeviceSecurity, Purpose, Security, new_secret, preamble
from manyhands.transport.wire import Wire, read_exactly, write_all

TOKEN = "kettle-9"
HERE = "127.0.0.1"


class Book:
    """Keys in memory."""

    def __init__(self) -> None:
        self.known: dict[bytes, Pinned] = {}

    def find(self, public: bytes) -> Pinned | None:
        return self.known.get(public)

    def join(self, public: bytes, name: str, role: Role) -> bool:
        raise AssertionError("a handshake remembers nobody")

    def public_keys(self, role: Role) -> list[bytes]:
        raise AssertionError("nobody is looked for")

    def is_taken(self, name: str, public: bytes) -> bool:
        raise AssertionError("names come after the handshake")


class Someone:
    """A device: a key, a role, and whom it knows."""

    def __init__(self, role: Role) -> None:
        self.key, self.book, self.role = DeviceKey(new_private_key()), Book(), role

    def security(self, token: str = TOKEN) -> DeviceSecurity:
        return DeviceSecurity(token, True, credentials=Credentials(self.key, self.role, self.book))

    def pin(self, other: Someone, name: str, *roles: Role, is_revoked: bool = False) -> None:
        self.book.known[other.key.public] = Pinned(name, frozenset(roles), is_revoked)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    proofs.DIALLED.reset()
    yield
    proofs.DIALLED.reset()


def meets(client: Security, server: Security) -> tuple[bytes, bytes]:
    """The keys that each end sees of the other; Refused where the client is told why not."""
    listener = Listener(HERE, 0, server)
    try:
        channel = connect(*listener.address, client, 5, once=True)
        other = listener.accept(5)
        assert other is not None
        found = channel.peer_key, other.peer_key
        channel.close()
        other.close()
        return found
    finally:
        listener.close()


def failures(client: Security, server: Security) -> list[ManyhandsError]:
    """What the server thinks of a client that fails."""
    listener = Listener(HERE, 0, server)
    told: list[ManyhandsError] = []
    is_told = threading.Event()
    listener.tell_of_failures(lambda origin, error: (told.append(error), is_told.set()))  # type: ignore[func-returns-value]
    try:
        with pytest.raises(Refused):
            connect(*listener.address, client, 5, once=True)
        assert is_told.wait(5)
        return told
    finally:
        listener.close()


# Nothing to try tokens on


class Recorder:
    """A server that does not know the token. It takes a guess, plays the whole exchange, and records everything."""

    def __init__(self, guess: str, wanted: proofs.Proof = proofs.Proof.BY_TOKEN) -> None:
        self.guess, self.wanted = guess, wanted
        self.heard = b""
        self.transcript = b""
        self.exchange: KeyExchange | None = None
        self.point = self.proof = b""

    def play(self, connected: socket.socket) -> None:
        wire, end = Wire(connected), time.monotonic() + 5
        try:
            own = preamble(Security(self.guess, False), Purpose.CONTROL)
            theirs = self._read(wire, PREAMBLE.size, end)
            write_all(wire, own, end)
            hello = self._read(wire, proofs.CLIENT_HELLO.size, end)
            answer = proofs.SERVER_HELLO.pack(bytes(32), self.wanted, 0)
            write_all(wire, answer, end)
            if self.wanted != proofs.Proof.BY_TOKEN:
                self._read(wire, 32, end)
                return
            self.point = self._read(wire, 33, end)
            self.exchange = KeyExchange(self.guess, is_client=False)
            write_all(wire, self.exchange.message, end)
            self.proof = self._read(wire, 32, end)
            self.transcript = theirs + own + hello + answer + self.point + self.exchange.message
        except Exception:
            return
        finally:
            wire.close()

    def _read(self, wire: Wire, size: int, end: float) -> bytes:
        found = read_exactly(wire, size, end)
        self.heard += found
        return found

    def explains(self, candidate: str) -> bool:
        """Whether the recorded proof is what this token would have made of it, as far as this server can compute."""
        assert self.exchange is not None
        side = self.exchange._side
        group = side.params.group
        scalar = group.password_to_scalar(candidate.encode())
        theirs = group.bytes_to_element(self.point[1:]).add(side.params.M.scalarmult(-scalar))
        shared = theirs.scalarmult(side.xy_scalar).to_bytes()
        from spake2.spake2 import finalize_SPAKE2

        key = finalize_SPAKE2(
            b"manyhands client", b"manyhands server", self.point[1:], self.exchange.message[1:], shared,
            candidate.encode(),
        )  # fmt: skip
        handshake = proofs.Handshake(None, self.transcript, b"", 0.0)  # type: ignore[arg-type]
        return hmac.compare_digest(handshake.proof(key, b"client"), self.proof)


class Rogue(Recorder):
    """The same at a port, for one client."""

    def __init__(self, guess: str, wanted: proofs.Proof = proofs.Proof.BY_TOKEN) -> None:
        super().__init__(guess, wanted)
        self._server = socket.create_server((HERE, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        connected, _ = self._server.accept()
        self._server.close()
        self.play(connected)


def test_a_recorded_exchange_says_nothing_about_other_tokens() -> None:
    """The server's one guess was wrong: from then on the right token is no more likely than any other."""
    rogue = Rogue("kettle-1")
    with pytest.raises(TimedOut, match="ended the handshake"):
        connect(*rogue.address, Security(TOKEN, False), 5, once=True)
    rogue.thread.join(10)
    assert rogue.proof, "it was given all that a server gets"
    assert not any(rogue.explains(f"kettle-{number}") for number in range(10)), "9 is right, and does not fit either"
    for content in (rogue.transcript, hashlib.sha256(rogue.transcript).digest()):
        assert hmac.new(TOKEN.encode(), content, hashlib.sha256).digest() not in rogue.heard


def test_the_one_guess_that_a_server_has() -> None:
    """The check above can succeed: it does for the token that the server used."""
    rogue = Rogue(TOKEN)
    with pytest.raises(TimedOut, match="ended the handshake"):
        connect(*rogue.address, Security(TOKEN, False), 5, once=True)
    rogue.thread.join(10)
    assert rogue.explains(TOKEN)
    assert not rogue.explains("kettle-1")


def test_no_server_gets_an_hmac_of_what_was_typed() -> None:
    rogue = Rogue("kettle-1", proofs.Proof.BY_SECRET)
    with pytest.raises(Refused, match="the token is not the one it asks for"):
        connect(*rogue.address, Security(TOKEN, False), 5, once=True)
    rogue.thread.join(10)
    assert len(rogue.heard) == PREAMBLE.size + proofs.CLIENT_HELLO.size, "and nothing more"


def test_a_server_that_asks_again_and_again_gets_a_few_guesses() -> None:
    """A worker that stays dials for ever: one who takes the coordinator's address has one guess for each."""
    server = socket.create_server((HERE, 0))
    guesses = []

    def run() -> None:
        for _ in range(8):
            rogue = Recorder("kettle-1")
            rogue.play(server.accept()[0])
            guesses.append(bool(rogue.proof))

    thread = threading.Thread(target=run)
    thread.start()
    for number in range(8):
        with pytest.raises(TimedOut, match="ended the handshake" if number < 5 else "none is sent for"):
            connect(*server.getsockname(), Security(TOKEN, False), 5, once=True)
    thread.join(10)
    server.close()
    assert guesses == [True] * 5 + [False] * 3


@pytest.mark.slow
def test_wrong_tokens_are_limited_and_told_of() -> None:
    listener = Listener(HERE, 0, Security(TOKEN, False))
    told: list[str] = []
    listener.tell_of_failures(lambda origin, error: told.append(f"{origin} {type(error).__name__}"))
    try:
        for number in range(5):
            with pytest.raises(Refused, match="not the one it asks for"):
                connect(*listener.address, Security(f"kettle-{number}", False), 5, once=True)
            proofs.DIALLED.reset()
        with pytest.raises(TimedOut, match="answered, but it takes no token for 1 s: too many wrong ones came"):
            connect(*listener.address, Security(TOKEN, False), 0.5, once=True)
        connect(*listener.address, Security(TOKEN, False), 5).close()  # it waits, and is let in
    finally:
        listener.close()
    assert told[:5] == ["127.0.0.1 WrongProof"] * 5


def test_secrets_of_a_run_are_not_limited() -> None:
    """They cannot be guessed: somebody who tries keeps nobody else out."""
    own = Security(new_secret(), False)
    listener = Listener(HERE, 0, own)
    try:
        for _ in range(50):
            with pytest.raises(Refused, match="not the one it asks for"):
                connect(*listener.address, Security(new_secret(), False), 5, once=True)
        connect(*listener.address, own, 5, once=True).close()
    finally:
        listener.close()


# Keys


def test_each_end_sees_the_others_key() -> None:
    worker, coordinator = Someone(Role.WORKER), Someone(Role.COORDINATOR)
    assert meets(worker.security(), coordinator.security()) == (coordinator.key.public, worker.key.public)
    assert meets(Security(TOKEN, True), coordinator.security()) == (coordinator.key.public, b"")
    assert meets(worker.security(), Security(TOKEN, True)) == (b"", worker.key.public)


def test_those_who_know_each_other_need_no_token() -> None:
    worker, coordinator = Someone(Role.WORKER), Someone(Role.COORDINATOR)
    worker.pin(coordinator, "desk", Role.COORDINATOR)
    coordinator.pin(worker, "pi", Role.WORKER)
    assert meets(worker.security(""), coordinator.security("another token")) == (
        coordinator.key.public, worker.key.public,
    )  # fmt: skip
    assert meets(worker.security("a third token"), coordinator.security("another token"))
    coordinator.book.known.clear()
    with pytest.raises(Refused, match="does not know this device's key any more, and asks for the token"):
        meets(worker.security(""), coordinator.security())
    assert meets(worker.security(), coordinator.security())


def test_one_who_knows_only_the_public_key_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, coordinator, thief = Someone(Role.WORKER), Someone(Role.COORDINATOR), Someone(Role.WORKER)
    coordinator.pin(worker, "pi", Role.WORKER)
    thief.pin(coordinator, "desk", Role.COORDINATOR)
    thief.key.public = worker.key.public
    assert isinstance(failures(thief.security(), coordinator.security())[0], proofs.WrongProof)
    assert isinstance(failures(thief.security(""), coordinator.security())[0], proofs.WrongProof)
    coordinator.book.known.clear()
    assert isinstance(failures(thief.security(), coordinator.security())[0], proofs.WrongProof)


def test_a_server_with_another_key_is_nobody() -> None:
    """It has the address of the one that is known, and cannot have its certificate."""
    worker, coordinator, impostor = Someone(Role.WORKER), Someone(Role.COORDINATOR), Someone(Role.COORDINATOR)
    worker.pin(coordinator, "desk", Role.COORDINATOR)
    impostor.pin(worker, "pi", Role.WORKER)
    with pytest.raises(Refused, match="asks for the token"):
        meets(worker.security(""), impostor.security())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_revoked_key_is_refused_even_with_the_token(is_known: bool) -> None:
    worker, coordinator = Someone(Role.WORKER), Someone(Role.COORDINATOR)
    if is_known:
        worker.pin(coordinator, "desk", Role.COORDINATOR)
    coordinator.pin(worker, "pi", Role.WORKER, is_revoked=True)
    with pytest.raises(Refused, match="this device's key was revoked there"):
        meets(worker.security(), coordinator.security())
    found = failures(worker.security(), coordinator.security())[0]
    assert isinstance(found, proofs.KeyRefused)
    assert found.public == worker.key.public
    assert "pi is refused: its key was revoked here" in found.message


def test_a_server_whose_key_was_revoked_is_refused() -> None:
    worker, coordinator = Someone(Role.WORKER), Someone(Role.COORDINATOR)
    worker.pin(coordinator, "desk", Role.COORDINATOR, is_revoked=True)
    with pytest.raises(Refused, match=r"is desk, whose key .* was revoked on this device") as caught:
        meets(worker.security(), coordinator.security())
    assert "manyhands devices forget desk" in caught.value.hint


def test_a_workers_key_cannot_act_as_coordinator() -> None:
    """In either direction: it listens as if it was one, or dials a worker that listens."""
    victim, worker = Someone(Role.WORKER), Someone(Role.WORKER)
    victim.pin(worker, "pi", Role.WORKER)
    worker.role = Role.COORDINATOR
    with pytest.raises(
        Refused, match="pi, whose key is known here as a worker: it may not act as a coordinator"
    ) as found:
        meets(victim.security(), worker.security())
    assert "manyhands devices allow pi coordinator" in found.value.hint
    with pytest.raises(Refused, match="knows this device's key in another role"):
        meets(worker.security(), victim.security())
    told = failures(worker.security(), victim.security())[0]
    assert told.message == "pi is refused: its key is known here as a worker, and it came as a coordinator."
    assert "manyhands devices allow pi coordinator" in told.hint
    victim.pin(worker, "pi", Role.WORKER, Role.COORDINATOR)
    assert meets(victim.security(), worker.security())
    assert meets(worker.security(), victim.security())


def test_two_workers_do_not_work_for_each_other() -> None:
    with pytest.raises(Refused, match="another role"):
        meets(Someone(Role.WORKER).security(), Someone(Role.WORKER).security())


def test_keys() -> None:
    one, other = DeviceKey(new_private_key()), DeviceKey(new_private_key())
    signature = one.sign(b"words")
    assert is_signed(one.public, signature, b"words")
    assert not is_signed(one.public, signature, b"other words")
    assert not is_signed(other.public, signature, b"words")
    assert not is_signed(bytes(32), signature, b"words")
    assert not is_signed(b"", signature, b"words")
    assert key_of(one.server_side[1]) == one.public
    assert key_of(b"no certificate") == b""
    assert len(fingerprint(one.public)) == 39
    assert fingerprint(one.public) != fingerprint(other.public)
