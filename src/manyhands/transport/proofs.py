"""The proofs by which two ends of a connection show who they are, once the preambles and TLS are done.

    client                                    server
    hello: nonce, role, public key, whether it knows the server's key
                                              hello: nonce, which of the three proofs it wants

    BY_SECRET: a secret that a program drew for one run (256 bits)
    HMAC(secret, "client", transcript)
                                              verdict, HMAC(secret, "server", transcript)
    BY_TOKEN: a token that people type. SPAKE2 derives a key from it, so that a transcript is of no use for guessing
    point
                                              point
    HMAC(key, "client", transcript), signature
                                              verdict, HMAC(key, "server", transcript)
    BY_KEY: both know each other's key from a join by token
    signature
                                              verdict

The transcript is every byte sent before, and the server's certificate as each end sees it. A man in the middle has
another certificate, so no proof that it relays is valid. The signature is the client's, over the transcript; the
server's key is in its certificate, and TLS has proven it.

Client certificates are not used because Python's `ssl` accepts one only if a CA that it trusts has signed it, before
the program can look the key up. A signature over fresh nonces and the server's certificate, inside the connection,
proves the same, and a refusal can say what is wrong.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.facts.errors import Refused
from manyhands.transport.keys import NO_KEY, SIGNATURE_BYTES, Credentials, Role, fingerprint, is_signed
from manyhands.transport.limiter import Limited, ProofLimiter
from manyhands.transport.pake import MESSAGE_BYTES, KeyExchange, NotAgreed
from manyhands.transport.wire import Wire, read_exactly, write_all

NONCE_BYTES = 32
DIGEST_BYTES = 32
NO_POINT = bytes(MESSAGE_BYTES)
"""Sent in place of the server's point where it accepts no proofs at present."""
CLIENT_HELLO = struct.Struct("<32sBB32s")
SERVER_HELLO = struct.Struct("<32sBI")
_ROLES = {int(role): role for role in Role}
DIALLED = ProofLimiter(total=100.0)
"""Limits the proofs that this process gives to servers: a server that poses as another gets one guess per connection
too."""


class Proof(enum.IntEnum):
    """The proof that the server asks for; LATER: none, it accepts no proofs of the token for some seconds."""

    BY_SECRET = 1
    BY_TOKEN = 2
    BY_KEY = 3
    LATER = 4


class ProofVerdict(enum.IntEnum):
    """The server's answer to a proof."""

    WELCOME = 1
    WRONG = 2
    REVOKED = 3
    WRONG_ROLE = 4


class WrongToken(Refused):
    """The server expects another token than this device's."""


class WrongProof(Refused):
    """A peer has proven knowledge of another token than this device's."""


class KeyRefused(Refused):
    """A peer has shown a key that is known, but revoked or not allowed in this role."""

    def __init__(self, message: str, public: bytes, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.public = public


class TakesNoProofs(Exception):
    """No proof of the token is accepted now, or none is sent; it may be tried again after `seconds`."""

    def __init__(
        self, seconds: float, reason: str = "it takes no token for {:.0f} s: too many wrong ones came"
    ) -> None:
        super().__init__(reason.format(seconds))
        self.seconds = seconds


@dataclass(frozen=True)
class Knowledge:
    """The secrets and keys that one end brings: see `security.Security`."""

    token: str
    is_secret: bool
    """Whether a program drew the token, for one run."""
    credentials: Credentials | None


@dataclass
class Handshake:
    """One connection on which proofs are exchanged."""

    wire: Wire
    transcript: bytes
    """All bytes exchanged so far, beginning with the preambles."""
    certificate: bytes
    """The server's certificate; empty where the connection is plain."""
    deadline: float

    def write(self, data: bytes) -> None:
        write_all(self.wire, data, self.deadline)

    def read(self, size: int) -> bytes:
        return read_exactly(self.wire, size, self.deadline)

    def record(self, *more: bytes) -> None:
        self.transcript += b"".join(more)

    @property
    def digest(self) -> bytes:
        """The hash of the transcript and the certificate."""
        certificate = hashlib.sha256(self.certificate).digest() if self.certificate else b""
        return hashlib.sha256(b"manyhands\0" + certificate + b"\0" + self.transcript).digest()

    def proof(self, key: bytes, side: bytes) -> bytes:
        return hmac.new(key, side + b"\0" + self.digest, hashlib.sha256).digest()


# The client


def prove(handshake: Handshake, knowledge: Knowledge, where: str, server_key: bytes) -> bytes:
    """Run the client's side and return the server's key, empty where it has none. Refused says what does not match.

    `server_key`: the key in the server's certificate.
    """
    credentials = knowledge.credentials
    is_known = _check_server(credentials, server_key, where)
    public = credentials.key.public if credentials is not None else NO_KEY
    role = credentials.role if credentials is not None else 0
    hello = CLIENT_HELLO.pack(secrets.token_bytes(NONCE_BYTES), role, is_known, public)
    handshake.write(hello)
    answer = handshake.read(SERVER_HELLO.size)
    handshake.record(hello, answer)
    _, demanded, seconds = SERVER_HELLO.unpack(answer)
    if demanded == Proof.LATER:
        raise TakesNoProofs(max(1, min(seconds, 3600)))
    if demanded == Proof.BY_KEY and is_known:
        assert credentials is not None, "it is how the key is known"
        handshake.write(credentials.key.sign(handshake.digest))
        _obey(handshake.read(1), where)
    elif demanded == Proof.BY_SECRET and knowledge.is_secret:  # never with a typed token: it could be guessed
        key = knowledge.token.encode()
        handshake.write(handshake.proof(key, b"client"))
        _check_answer(handshake, key, where)
    elif demanded == Proof.BY_TOKEN and knowledge.token:
        _prove_token(handshake, knowledge, where)
    elif demanded == Proof.BY_TOKEN:
        raise Refused(
            f"{where} does not know this device's key{' any more' if is_known else ''}, and asks for the token.",
            hint="Give it once, as it was printed there: --token-file FILE, MANYHANDS_TOKEN, or type it when asked.",
        )
    else:
        raise _wrong_token(where)
    return server_key


def _check_server(credentials: Credentials | None, server_key: bytes, where: str) -> bool:
    """Return whether the server's key is known. KeyRefused where it is revoked or not allowed in the server's role."""
    pinned = credentials.book.find(server_key) if credentials is not None and server_key else None
    if credentials is None or pinned is None:
        return False
    name, server_role = pinned.name, credentials.role.other
    if pinned.is_revoked:
        raise KeyRefused(
            f"{where} is {name}, whose key {fingerprint(server_key)} was revoked on this device.", server_key,
            hint=f"To let it in again: manyhands devices forget {name}, then join with the token.",
        )  # fmt: skip
    if server_role not in pinned.roles:
        raise KeyRefused(
            f"{where} is {name}, whose key is known here as a {_roles(pinned.roles)}: it may not act as a "
            f"{server_role.text}.",
            server_key, hint=f"If it should: manyhands devices allow {name} {server_role.text}",
        )  # fmt: skip
    return True


def _roles(roles: frozenset[Role]) -> str:
    return " and a ".join(sorted(role.text for role in roles)) or "stranger"


def _prove_token(handshake: Handshake, knowledge: Knowledge, where: str) -> None:
    exchange = KeyExchange(knowledge.token, is_client=True)
    handshake.write(exchange.message)
    point = handshake.read(MESSAGE_BYTES)
    if point == NO_POINT:
        raise TakesNoProofs(1.0)
    handshake.record(exchange.message, point)
    try:
        key = exchange.key(point)
        with DIALLED.attempt(where) as attempt:
            signature = (
                knowledge.credentials.key.sign(handshake.digest) if knowledge.credentials else bytes(SIGNATURE_BYTES)
            )
            handshake.write(handshake.proof(key, b"client") + signature)
            _check_answer(handshake, key, where)
            attempt.succeeded()
    except NotAgreed as error:
        raise Refused(f"{where} is not to be trusted: it does not know the token itself ({error}).") from error
    except Limited as error:
        raise TakesNoProofs(
            error.seconds, "it has not proven the token too often: none is sent for {:.0f} s"
        ) from error


def _check_answer(handshake: Handshake, key: bytes, where: str) -> None:
    _obey(handshake.read(1), where)
    if not hmac.compare_digest(handshake.read(DIGEST_BYTES), handshake.proof(key, b"server")):
        raise Refused(
            f"{where} is not to be trusted: it does not know the token itself.",
            hint="Copy the token that it printed when it started.",
        )


def _obey(verdict: bytes, where: str) -> None:
    code = verdict[0]
    if code == ProofVerdict.WELCOME:
        return
    if code == ProofVerdict.REVOKED:
        raise Refused(
            f"{where} refused: this device's key was revoked there.",
            hint="There: manyhands devices forget NAME. Then join here with the token.",
        )
    if code == ProofVerdict.WRONG_ROLE:
        raise Refused(
            f"{where} refused: it knows this device's key in another role.",
            hint="There: manyhands devices (shows the role), then manyhands devices allow NAME ROLE",
        )
    raise _wrong_token(where)


def _wrong_token(where: str) -> WrongToken:
    return WrongToken(
        f"{where} refused: the token is not the one it asks for.",
        hint="Copy the token that it printed when it started.",
    )


# The server


def demand(handshake: Handshake, knowledge: Knowledge, origin: str, limiter: ProofLimiter) -> bytes:
    """Run the server's side and return the client's key, empty where it has none.

    WrongProof and KeyRefused say why a client is not admitted.
    """
    hello = handshake.read(CLIENT_HELLO.size)
    _, role, knows_us, public = CLIENT_HELLO.unpack(hello)
    credentials = knowledge.credentials
    pinned = credentials.book.find(public) if credentials is not None and public != NO_KEY else None
    if knowledge.is_secret:
        demanded = Proof.BY_SECRET
    else:
        demanded = Proof.BY_KEY if pinned is not None and knows_us else Proof.BY_TOKEN

    def answer(proof: Proof, seconds: float = 0.0) -> None:
        sent = SERVER_HELLO.pack(secrets.token_bytes(NONCE_BYTES), proof, min(3600, int(seconds + 0.999)))
        handshake.write(sent)
        handshake.record(hello, sent)

    if demanded == Proof.BY_SECRET:
        answer(demanded)
        key = knowledge.token.encode()
        if not hmac.compare_digest(handshake.read(DIGEST_BYTES), handshake.proof(key, b"client")):
            raise _turned_away(handshake)
        handshake.write(bytes([ProofVerdict.WELCOME]) + handshake.proof(key, b"server"))
        return b""
    if demanded == Proof.BY_KEY:
        answer(demanded)
        if not is_signed(public, handshake.read(SIGNATURE_BYTES), handshake.digest):
            raise _turned_away(handshake)
        confirmation = b""
    else:
        try:
            confirmation = _demand_token(handshake, knowledge, public, answer, origin, limiter)
        except Limited as error:
            raise Refused(f"A peer came while no tokens are taken: {error}.") from error
    if credentials is not None and public != NO_KEY:
        _judge(handshake, credentials, public, role)
    handshake.write(bytes([ProofVerdict.WELCOME]) + confirmation)
    return public if public != NO_KEY else b""


def _demand_token(
    handshake: Handshake,
    knowledge: Knowledge,
    public: bytes,
    answer: Callable[[Proof, float], None],
    origin: str,
    limiter: ProofLimiter,
) -> bytes:
    """Check that the client knows the token and has the key that it shows; return this side's own proof."""
    try:
        limiter.check(origin)
    except Limited as error:
        answer(Proof.LATER, error.seconds)
        raise
    answer(Proof.BY_TOKEN, 0.0)
    point = handshake.read(MESSAGE_BYTES)  # a client without a token disconnects here, and is not charged
    try:
        return _confirmed(handshake, knowledge, public, point, origin, limiter)
    except Limited:  # another guess has failed since
        handshake.write(NO_POINT)
        raise


def _confirmed(
    handshake: Handshake, knowledge: Knowledge, public: bytes, point: bytes, origin: str, limiter: ProofLimiter
) -> bytes:
    """Run the exchange itself, which is charged to the client's address until it has succeeded."""
    with limiter.attempt(origin) as attempt:
        exchange = KeyExchange(knowledge.token, is_client=False)
        handshake.write(exchange.message)
        handshake.record(point, exchange.message)
        try:
            key = exchange.key(point)
        except NotAgreed as error:
            raise _turned_away(handshake) from error
        proof, signature = handshake.read(DIGEST_BYTES), handshake.read(SIGNATURE_BYTES)
        if not hmac.compare_digest(proof, handshake.proof(key, b"client")):
            raise _turned_away(handshake)
        if public != NO_KEY and not is_signed(public, signature, handshake.digest):
            raise _turned_away(handshake)
        attempt.succeeded()
    return handshake.proof(key, b"server")


def _judge(handshake: Handshake, credentials: Credentials, public: bytes, role: int) -> None:
    """Refuse a client that has proven its key where the key is revoked or has another role.

    The key is looked up after the proof, so that nobody else learns of it and no false entry gets into the audit log.
    """
    pinned = credentials.book.find(public)
    acts_as, client_role = _ROLES.get(role), credentials.role.other
    if pinned is not None and pinned.is_revoked:
        handshake.write(bytes([ProofVerdict.REVOKED]))
        raise KeyRefused(f"{pinned.name} is refused: its key was revoked here.", public)
    if acts_as != client_role:
        handshake.write(bytes([ProofVerdict.WRONG_ROLE]))
        raise KeyRefused(f"A peer did not come as a {client_role.text}, the only role that is admitted here.", public)
    if pinned is not None and client_role not in pinned.roles:
        handshake.write(bytes([ProofVerdict.WRONG_ROLE]))
        raise KeyRefused(
            f"{pinned.name} is refused: its key is known here as a {_roles(pinned.roles)}, and it came as a "
            f"{client_role.text}.",
            public,
            hint=f"If it should: manyhands devices allow {pinned.name} {client_role.text}",
        )


def _turned_away(handshake: Handshake) -> WrongProof:
    handshake.write(bytes([ProofVerdict.WRONG]))
    return WrongProof("A peer has another token.", hint="Copy the token that was printed here at the start.")
