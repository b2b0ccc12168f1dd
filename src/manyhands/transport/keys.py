"""A device's own key: an Ed25519 pair, the certificate made of it, and the keys that it knows of other devices.

The private key never leaves its device. The certificate is only a wrapper: no authority vouches for it, and what is
remembered of another device (pinned) is its public key. TLS 1.3 proves that the server has the key of its certificate;
the client proves the same by a signature inside the connection (see `proofs`).
"""

from __future__ import annotations

import datetime
import enum
import functools
import hashlib
import ssl
import tempfile
from dataclasses import dataclass, field
from typing import Protocol

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
NO_KEY = bytes(PUBLIC_BYTES)
"""Sent by a device that has no key: one that could not keep it."""
_FINGERPRINT_CHARACTERS = 32
_CONTEXT = b"manyhands device key\0"
"""A prefix of everything that is signed, so that no signature made for another purpose is valid."""


class Role(enum.IntEnum):
    """The role of a device in a run; a key is trusted for one of these, or for both."""

    COORDINATOR = 1
    WORKER = 2

    @property
    def other(self) -> Role:
        return Role.WORKER if self is Role.COORDINATOR else Role.COORDINATOR

    @property
    def text(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Pinned:
    """The facts remembered of a device's key."""

    name: str
    roles: frozenset[Role]
    is_revoked: bool = False


class KeyBook(Protocol):
    """The keys that this device remembers."""

    def find(self, public: bytes) -> Pinned | None:
        """Return what is known of a key now; None: nothing."""

    def join(self, public: bytes, name: str, role: Role) -> bool:
        """Remember that the owner of a key has joined under this name. Return whether it is new; Refused where the name
        belongs to another key."""

    def public_keys(self, role: Role) -> list[bytes]:
        """Return the keys of the devices that may act in this role."""

    def is_taken(self, name: str, public: bytes) -> bool:
        """Return whether a name belongs to another key than this."""


class DeviceKey:
    """This device's key pair."""

    def __init__(self, private: bytes) -> None:
        """Load the key from `private`: 32 bytes, as `new_private_key` makes them."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, content: bytes) -> bytes:
        return self._key.sign(_CONTEXT + content)

    @functools.cached_property
    def server_side(self) -> tuple[ssl.SSLContext, bytes]:
        """The TLS context and certificate of connections in which this device is the server."""
        return certified_context(self._key)


@dataclass(frozen=True)
class Credentials:
    """The key and role with which this device connects or listens, and the keys it knows."""

    key: DeviceKey = field(repr=False)
    role: Role
    book: KeyBook = field(repr=False)


def new_private_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes_raw()


def is_signed(public: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether the owner of this public key has signed the content."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _CONTEXT + content)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(public: bytes) -> str:
    """Return 128 bits of a key's SHA-256 in groups that can be read out: '3f2a-91c0-...'."""
    text = hashlib.sha256(public).hexdigest()[:_FINGERPRINT_CHARACTERS]
    return "-".join(text[place : place + 4] for place in range(0, len(text), 4))


def key_of(certificate: bytes) -> bytes:
    """Return the device key in a certificate; empty where it has none, like a throw-away one, or cannot be read."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except (ValueError, UnsupportedAlgorithm):
        return b""
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b""


def certified_context(key: object) -> tuple[ssl.SSLContext, bytes]:
    """Return a server's TLS context with a certificate that this private key has signed for itself, and the
    certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    assert isinstance(key, (ed25519.Ed25519PrivateKey, ec.EllipticCurvePrivateKey))
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
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
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
