"""Who may connect: both sides prove that they know the token, over TLS wherever others might listen.

    client                                    server
    preamble: magic, protocol, plain or encrypted, purpose
                                              preamble
    TLS 1.3, if encrypted: the server's certificate is made for this process and vouched for by nobody
    nonce
                                              nonce
    proof = HMAC(token, "client", everything above, the certificate as the client sees it)
                                              verdict, proof = HMAC(token, "server", ...)

Somebody in the middle has another certificate, so the proofs he could pass on do not fit. The token never travels.
"""

from __future__ import annotations

import base64
import datetime
import enum
import functools
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import struct
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field

from manyhands.engine.wire import Broken, EncryptedWire, Wire, read_exactly, write_all
from manyhands.facts.errors import BadValue, Refused

MAGIC = b"manyhand"
PROTOCOL = 1
PREAMBLE = struct.Struct("<8sHBB")
HANDSHAKE_LIMIT_SECONDS = 5.0
OTHER_KIND = "Both must be encrypted, or both plain (only on one machine)."
"""The hint that says that the other kind of connection may do."""
_NONCE_BYTES = 32
_TOKEN_BYTES = 20
_WELCOME, _WRONG_TOKEN = b"+", b"-"


class Purpose(enum.IntEnum):
    """What a port is for, so that one is not taken for the other."""

    CONTROL = 1
    DATA = 2


@dataclass(frozen=True)
class Security:
    """What a connection needs: the token that all devices share, and whether bytes are encrypted."""

    token: str = field(repr=False)
    encrypted: bool
    patience: float = 1.0
    """How many times longer than usual everybody is waited for: where time itself goes slower, in a lab."""

    @property
    def handshake_seconds(self) -> float:
        return HANDSHAKE_LIMIT_SECONDS * self.patience

    def __post_init__(self) -> None:
        if not self.token:
            raise BadValue("The token is empty; it must be a text nobody can guess.", hint="Leave it out to get one.")


def new_token() -> str:
    """160 random bits in groups that can be read out: 'abcd-efgh-...'."""
    text = base64.b32encode(secrets.token_bytes(_TOKEN_BYTES)).decode().lower()
    return "-".join(text[place : place + 4] for place in range(0, len(text), 4))


EVERY_ADDRESS = ("0.0.0.0", "::")
"""Where one listens on all of a machine's addresses."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can be at the other end."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False


# Certificates


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """This process' side of encrypted connections, and its certificate."""
    return _server_side(os.getpid())


@functools.cache
def _server_side(process: int) -> tuple[ssl.SSLContext, bytes]:
    """A context with a certificate of this process alone, and the certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "manyhands")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nothing but data is written after the handshake
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.NamedTemporaryFile(prefix="manyhands-", suffix=".pem") as file:  # 0600; ssl reads paths only
        file.write(secret + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.public_bytes(serialization.Encoding.DER)


@functools.cache
def _client_side() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the token vouches for the certificate, see the proofs
    return context


def prepare(security: Security) -> None:
    """Make the certificate now rather than when somebody waits for it."""
    if security.encrypted:
        server_context()


# Handshakes


def preamble(security: Security, purpose: Purpose) -> bytes:
    return PREAMBLE.pack(MAGIC, PROTOCOL, security.encrypted, purpose)


def _proof(security: Security, role: bytes, transcript: bytes, certificate: bytes) -> bytes:
    content = b"\0".join((b"manyhands", role, transcript, hashlib.sha256(certificate).digest() if certificate else b""))
    return hmac.new(security.token.encode(), content, hashlib.sha256).digest()


def difference(theirs: bytes, security: Security, purpose: Purpose) -> tuple[str, str]:
    """What is wrong with a preamble, and a hint; empty where nothing is."""
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
        names = {int(known): known.name.lower() for known in Purpose}
        message = f"is for {names.get(other_purpose, other_purpose)}, not for {purpose.name.lower()}"
        return message, "Check the port: a worker joins at the coordinator's address."
    return "", ""


def enter(connected: socket.socket, security: Security, purpose: Purpose, where: str, deadline: float) -> Wire:
    """The client's side. Refused says what does not fit; Broken before the server's preamble may be tried again."""
    wire: Wire = Wire(connected, security.patience)
    own = preamble(security, purpose)
    write_all(wire, own, deadline)
    theirs = read_exactly(wire, PREAMBLE.size, deadline)
    problem, hint = difference(theirs, security, purpose)
    if problem:
        raise Refused(f"{where} {problem}.", hint=hint)
    try:
        certificate = b""
        if security.encrypted:
            wire = encrypted = EncryptedWire(connected, _client_side(), is_server=False, patience=security.patience)
            encrypted.shake_hands(deadline)
            certificate = encrypted.peer_certificate
        nonce = secrets.token_bytes(_NONCE_BYTES)
        write_all(wire, nonce, deadline)
        transcript = own + theirs + nonce + read_exactly(wire, _NONCE_BYTES, deadline)
        write_all(wire, _proof(security, b"client", transcript, certificate), deadline)
        verdict = read_exactly(wire, 1, deadline)
        proof = read_exactly(wire, hashlib.sha256().digest_size, deadline) if verdict == _WELCOME else b""
    except Broken as error:
        raise Refused(f"{where} ended the handshake: {error}.", hint="Its log says why.") from error
    if not hmac.compare_digest(proof, _proof(security, b"server", transcript, certificate)):
        if verdict == _WRONG_TOKEN:
            problem = f"{where} refused: the token is not the one it asks for"
        else:
            problem = f"{where} is not to be trusted: it does not know the token itself"
        raise Refused(
            f"{problem}.",
            hint="Copy the token that it printed when it started.",
        )
    return wire


def admit(
    connected: socket.socket, security: Security, purposes: Collection[Purpose], deadline: float
) -> tuple[Wire, Purpose]:
    """The server's side, and which of these purposes the guest has; Refused, Broken or TimeoutError are his matter."""
    wire: Wire = Wire(connected, security.patience)
    theirs = read_exactly(wire, PREAMBLE.size, deadline)
    asked = PREAMBLE.unpack(theirs)[-1]
    purpose = Purpose(asked) if asked in purposes else next(iter(purposes))
    problem, hint = difference(theirs, security, purpose)
    if not theirs.startswith(MAGIC):
        raise Refused(f"A guest {problem}.", hint=hint)
    own = preamble(security, purpose)
    write_all(wire, own, deadline)
    if problem:
        raise Refused(f"A guest {problem}.", hint=hint)
    certificate = b""
    if security.encrypted:
        context, certificate = server_context()
        wire = encrypted = EncryptedWire(connected, context, is_server=True, patience=security.patience)
        encrypted.shake_hands(deadline)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    their_nonce = read_exactly(wire, _NONCE_BYTES, deadline)
    write_all(wire, nonce, deadline)
    transcript = theirs + own + their_nonce + nonce
    proof = read_exactly(wire, hashlib.sha256().digest_size, deadline)
    if not hmac.compare_digest(proof, _proof(security, b"client", transcript, certificate)):
        write_all(wire, _WRONG_TOKEN, deadline)
        raise Refused("A guest has another token.", hint="Copy the token that was printed here at the start.")
    write_all(wire, _WELCOME + _proof(security, b"server", transcript, certificate), deadline)
    return wire, purpose
