"""Decides which peers may connect: both sides prove who they are, over TLS wherever others might eavesdrop.

    client                                    server
    preamble: magic, protocol, plain or encrypted, purpose
                                              preamble
    TLS 1.3, if encrypted: the server's certificate is its device's own, or made for this process
    proofs: see `proofs`

There are three proofs: by a secret that a program drew for one run, by the token that people type (a PAKE, so that
nobody can try tokens on a recorded handshake), and by the devices' keys, once they have joined by the token.
Nothing that would be of use to others is sent.
"""

from __future__ import annotations

import base64
import enum
import functools
import ipaddress
import os
import re
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from manyhands.facts.errors import BadValue, Refused
from manyhands.facts.hosts import plain_host
from manyhands.transport.keys import Credentials, certified_context, key_of
from manyhands.transport.limiter import ProofLimiter
from manyhands.transport.proofs import Handshake, Knowledge, demand, prove
from manyhands.transport.wire import Broken, EncryptedWire, Wire, read_exactly, write_all

MAGIC = b"manyhand"
PROTOCOL = 2
PREAMBLE = struct.Struct("<8sHBB")
HANDSHAKE_LIMIT_SECONDS = 5.0
OTHER_KIND = "Both must be encrypted, or both plain (only on one machine)."
"""The hint that says that the other kind of connection may work."""
SHORTEST_TOKEN = 8
"""With a PAKE and a rate limiter, 8 characters drawn at random are out of reach: see `limiter`."""
_FEWEST_SIGNS = 5
"""The fewest different characters in a token that a person chose."""
_TOKEN_BYTES = 20
_SECRET_BYTES = 32
_MADE = re.compile(r"[a-z2-7]{4}(-[a-z2-7]{4}){7}")
_SECRET = re.compile(r"run-[a-z2-7]{52}")


class Purpose(enum.IntEnum):
    """The purpose of a port, so that one is not taken for the other."""

    CONTROL = 1
    DATA = 2
    RELAY = 3


@dataclass(frozen=True)
class Security:
    """The terms of a connection: the token that all devices share, and whether bytes are encrypted."""

    token: str = field(repr=False)
    encrypted: bool
    timeout_factor: float = 1.0
    """The factor by which all timeouts are longer than usual: where time itself goes slower, in a lab."""
    credentials: ClassVar[Credentials | None] = None
    """This device's key and those it knows: see `DeviceSecurity`. Never sent."""

    @property
    def handshake_seconds(self) -> float:
        return HANDSHAKE_LIMIT_SECONDS * self.timeout_factor

    @property
    def is_secret(self) -> bool:
        """Whether the token was drawn by a program for one run: an HMAC with it gives nothing away."""
        return is_secret(self.token)

    @property
    def is_known(self) -> bool:
        """False only for a `LaterSecurity` whose secret has not come yet."""
        return True

    @property
    def knowledge(self) -> Knowledge:
        """The token and keys that the proofs need; TimeoutError where the secret has not come in time."""
        return Knowledge(self.token, self.is_secret, self.credentials)

    def __post_init__(self) -> None:
        check_token(self.token)


@dataclass(frozen=True)
class LaterSecurity(Security):
    """The security of a run whose secret has not come yet; handshakes that need it wait for it.

    A worker listens for its peers before it joins, and receives the run's secret when it is admitted; a peer may be
    quicker to connect.
    """

    _told: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert not self.token, "it comes later"

    def settle(self, secret: str) -> None:
        """Set the secret, which has come."""
        if not is_secret(secret):
            raise Refused("The coordinator gave no secret for connections to other workers.")
        object.__setattr__(self, "token", secret)
        self._told.set()

    @property
    def is_known(self) -> bool:
        return self._told.is_set()

    @property
    def knowledge(self) -> Knowledge:
        if not self._told.wait(self.handshake_seconds):
            raise TimeoutError
        return super().knowledge


@dataclass(frozen=True)
class DeviceSecurity(Security):
    """The security of a device with a key of its own, which others may know: then it needs no token to connect."""

    credentials: Credentials | None = field(default=None, repr=False, compare=False)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if self.token or self.credentials is None:
            check_token(self.token)


def check_token(token: str) -> None:
    """Refuse a token that could be guessed."""
    if not token:
        raise BadValue("The token is empty; it must be a text nobody can guess.", hint="Leave it out to get one.")
    if len(token) < SHORTEST_TOKEN or len(set(token)) < _FEWEST_SIGNS:
        raise BadValue(
            f"The token has {len(token)} characters, {len(set(token))} of them different; it must have at least "
            f"{SHORTEST_TOKEN}, and {_FEWEST_SIGNS} different ones.",
            hint="Leave it out to have one made, or choose a longer one: MANYHANDS_TOKEN=$(openssl rand -hex 16)",
        )


def new_token() -> str:
    """Return 160 random bits in groups that can be read out: 'abcd-efgh-...'."""
    text = base64.b32encode(secrets.token_bytes(_TOKEN_BYTES)).decode().lower()
    return "-".join(text[place : place + 4] for place in range(0, len(text), 4))


def new_secret() -> str:
    """Return 256 random bits for one run of programs that pass it on to each other: nobody types it."""
    return "run-" + base64.b32encode(secrets.token_bytes(_SECRET_BYTES)).decode().lower().rstrip("=")


def is_made(token: str) -> bool:
    """Return whether a token looks like those that `new_token` makes, with more bits than anybody can try."""
    return _MADE.fullmatch(token) is not None


def is_secret(token: str) -> bool:
    """Return whether a token looks like those that `new_secret` makes."""
    return _SECRET.fullmatch(token) is not None


EVERY_ADDRESS = ("0.0.0.0", "::")
"""Hosts that stand for all of a machine's addresses."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can be at the other end."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain_host(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


# Certificates


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """Return the TLS context of this process's side of encrypted connections, and its certificate."""
    return _server_side(os.getpid())


@functools.cache
def _server_side(process: int) -> tuple[ssl.SSLContext, bytes]:
    """Return a context with a certificate for this process alone, and the certificate."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return certified_context(ec.generate_private_key(ec.SECP256R1()))


@functools.cache
def _client_side() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the proofs vouch for the certificate
    return context


def _own_side(security: Security) -> tuple[ssl.SSLContext, bytes]:
    """Return the TLS context with the device's own certificate where it has one; else with this process's, which
    browsers can read too."""
    if security.credentials is not None and not security.is_secret:
        return security.credentials.key.server_side
    return server_context()


def prepare(security: Security) -> None:
    """Make the certificate now rather than when a peer waits for it."""
    if security.encrypted:
        _own_side(security)


# Handshakes


class CutOff(Broken):
    """A server of the right kind has ended the handshake, or fallen silent, without a word: as one does that has more
    peers than it can handle. A refusal is said."""


def preamble(security: Security, purpose: Purpose) -> bytes:
    return PREAMBLE.pack(MAGIC, PROTOCOL, security.encrypted, purpose)


def difference(theirs: bytes, security: Security, purpose: Purpose) -> tuple[str, str]:
    """Return what is wrong with a preamble, and a hint; empty where nothing is."""
    magic, protocol, encrypted, other_purpose = PREAMBLE.unpack(theirs)
    if magic != MAGIC:
        return f"is no manyhands: it begins with {magic!r}, not {MAGIC!r}", "Check the host and port."
    if protocol != PROTOCOL:
        return f"speaks protocol {protocol}, this side {PROTOCOL}", "Install the same version of manyhands on both."
    if bool(encrypted) != security.encrypted:
        kind = {False: "plain", True: "encrypted"}
        message = f"is {kind[bool(encrypted)]}, this side {kind[security.encrypted]}"
        return message, OTHER_KIND
    if other_purpose != purpose:
        names = {int(member): member.name.lower() for member in Purpose}
        message = f"is for {names.get(other_purpose, other_purpose)}, not for {purpose.name.lower()}"
        return message, "Check the port: a worker joins at the coordinator's address."
    return "", ""


def enter(connected: socket.socket, security: Security, purpose: Purpose, where: str, deadline: float) -> Wire:
    """Run the client's side and return the wire. Refused says what does not match, which lasts. Broken and TimeoutError
    may be tried again, CutOff and TakesNoProofs later."""
    wire: Wire = Wire(connected, security.timeout_factor)
    ours = preamble(security, purpose)
    write_all(wire, ours, deadline)
    theirs = read_exactly(wire, PREAMBLE.size, deadline)
    problem, hint = difference(theirs, security, purpose)
    if problem:
        raise Refused(f"{where} {problem}.", hint=hint)
    try:
        certificate = b""
        if security.encrypted:
            wire = encrypted = EncryptedWire(
                connected, _client_side(), is_server=False, timeout_factor=security.timeout_factor
            )
            encrypted.shake_hands(deadline)
            certificate = encrypted.peer_certificate
        handshake = Handshake(wire, ours + theirs, certificate, deadline)
        wire.peer_key = prove(handshake, security.knowledge, where, key_of(certificate) if certificate else b"")
    except Broken as error:
        raise CutOff(f"it ended the handshake: {error}") from error
    except TimeoutError as error:
        raise CutOff("it did not go on with the handshake") from error
    return wire


def admit(
    connected: socket.socket,
    securities: Mapping[Purpose, Security],
    deadline: float,
    limiter: ProofLimiter,
) -> tuple[Wire, Purpose]:
    """Run the server's side; return the wire and which of these purposes the client has.

    Refused, Broken or TimeoutError end this client's connection only.
    """
    purpose, security = next(iter(securities.items()))
    wire: Wire = Wire(connected, security.timeout_factor)
    theirs = read_exactly(wire, PREAMBLE.size, deadline)
    wanted_purpose = PREAMBLE.unpack(theirs)[-1]
    if wanted_purpose in securities:
        purpose = Purpose(wanted_purpose)
        security = securities[purpose]
    problem, hint = difference(theirs, security, purpose)
    if not theirs.startswith(MAGIC):
        raise Refused(f"A peer {problem}.", hint=hint)
    ours = preamble(security, purpose)
    write_all(wire, ours, deadline)
    if problem:
        raise Refused(f"A peer {problem}.", hint=hint)
    certificate = b""
    if security.encrypted:
        context, certificate = _own_side(security)
        wire = encrypted = EncryptedWire(connected, context, is_server=True, timeout_factor=security.timeout_factor)
        encrypted.shake_hands(deadline)
    handshake = Handshake(wire, theirs + ours, certificate, deadline)
    wire.peer_key = demand(handshake, security.knowledge, origin_of(connected), limiter)
    return wire, purpose


def origin_of(connected: socket.socket) -> str:
    """Return the address of the other end; empty where it has none."""
    name = connected.getpeername()
    return plain_host(str(name[0])) if isinstance(name, tuple) else ""
