"""Keeps this device's key, and the keys of the devices that it has met.

    FOLDER/device-key      this device's private key; made when it is first needed
    FOLDER/devices.json    which devices have joined, in which roles, and since when
    FOLDER/audit.jsonl     the audit log: see `audit`

FOLDER is that of `shared_token`; only the owner can read the three files (mode 0600). One user account on one machine
is one device, whatever it does: its coordinators and workers trust each other by their common key.

The first time two devices meet, the token vouches for both keys, and each remembers the other's, with its role. From
then on the keys are enough. A name belongs to the key that joined under it first. A key that was revoked stays out even
with the token; one that was forgotten may join again with the token, as if it had never joined.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from manyhands.facts.errors import BadFile, BadValue, Refused
from manyhands.runtime.private_files import read_private, write_private
from manyhands.runtime.shared_token import config_folder
from manyhands.transport.keys import Credentials, DeviceKey, Pinned, Role, fingerprint, new_private_key

KEY_FILE = "device-key"
BOOK_FILE = "devices.json"
THIS_DEVICE = "this device"
VERSION = 1
_LOCK_FILE = "devices.lock"
_PRIVATE_BYTES = 32
_MOST_BYTES = 8 * 2**20
_MOST_DEVICES = 10_000
_MOST_NAMES = 64
"""How many names one key may have: a device may have several workers, and change its name from time to time."""
_SEEN_SECONDS = 60.0
"""The resolution of `last_seen`: within this time the file is not written again for another connection."""


class KnownDevice(msgspec.Struct, forbid_unknown_fields=True):
    """The record of one key."""

    key: str
    """The public key, in hexadecimal digits."""
    names: list[str]
    roles: list[str]
    first_joined: str
    last_seen: str
    revoked: str = ""
    """When the key was revoked; empty: it was not."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(bytes.fromhex(self.key))

    @property
    def name(self) -> str:
        return self.names[0]


class _Book(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    devices: list[KnownDevice] = []


class DeviceBook:
    """The devices that this one knows, as they are in its file at the moment. See `transport.keys.KeyBook`."""

    def __init__(self, folder: Path, own_key: bytes = b"") -> None:
        """`own_key`: this device's public key, which is trusted in both roles and is not in the file."""
        self.path = folder / BOOK_FILE
        self._own = own_key
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._devices: dict[str, KnownDevice] = {}

    def devices(self) -> list[KnownDevice]:
        """Return all devices, in the order they joined. BadFile where the file is not a device book."""
        with self._lock:
            return list(self._read().values())

    def find(self, public: bytes) -> Pinned | None:
        if public == self._own:
            return Pinned(THIS_DEVICE, frozenset(Role))
        with self._lock:
            device = self._read().get(public.hex())
        if device is None:
            return None
        roles = frozenset(role for role in Role if role.text in device.roles)
        return Pinned(device.name, roles, bool(device.revoked))

    def is_taken(self, name: str, public: bytes) -> bool:
        with self._lock:
            return any(name in device.names and device.key != public.hex() for device in self._read().values())

    def join(self, public: bytes, name: str, role: Role) -> bool:
        if public == self._own:
            return False
        with self._change() as devices:
            other = next(
                (device for device in devices.values() if name in device.names and device.key != public.hex()), None
            )
            if other is not None:
                raise changed_key(name, other, public)
            device, now = devices.get(public.hex()), _now()
            if device is None:
                if len(devices) >= _MOST_DEVICES:
                    raise BadValue(
                        f"{self.path}: knows {len(devices)} devices; no more are remembered.",
                        hint="Forget some: manyhands devices forget NAME",
                    )
                devices[public.hex()] = KnownDevice(public.hex(), [name], [role.text], now, now)
                return True
            if name not in device.names:
                device.names = [*device.names[-_MOST_NAMES + 1 :], name]
            elif _seconds_between(device.last_seen, now) < _SEEN_SECONDS:
                return False
            device.last_seen = now
            return False

    def revoke(self, name: str) -> KnownDevice:
        """Revoke a device's key: from now on it may not join, with or without the token. Return its record."""
        with self._change() as devices:
            device = _named(devices, name)
            device.revoked = device.revoked or _now()
            return device

    def forget(self, name: str) -> KnownDevice:
        """Remove a device, as if it had never joined, and return its record. With the token it may join again."""
        with self._change() as devices:
            device = _named(devices, name)
            return devices.pop(device.key)

    def allow(self, name: str, role: Role) -> KnownDevice:
        """Allow a device to act in this role too, and return its record."""
        with self._change() as devices:
            device = _named(devices, name)
            if role.text not in device.roles:
                device.roles = [*device.roles, role.text]
            return device

    def public_keys(self, role: Role) -> list[bytes]:
        """Return the public keys of the devices that may act in this role, including this device."""
        keys = [
            bytes.fromhex(device.key) for device in self.devices() if role.text in device.roles and not device.revoked
        ]
        return [*([self._own] if self._own else []), *keys]

    def _read(self) -> dict[str, KnownDevice]:
        """Return the devices by key, reading the file if it has changed. The caller holds the lock."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._stamp, self._devices = None, {}
            return self._devices
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from error
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if stamp != self._stamp:
            self._devices, self._stamp = _decoded(self.path), stamp
        return self._devices

    @contextlib.contextmanager
    def _change(self) -> Iterator[dict[str, KnownDevice]]:
        """Yield the devices for changes, and write them when the block ends if they changed. One process at a time."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self.path.with_name(_LOCK_FILE), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadFile(f"{self.path}: cannot be written: {error.strerror or error}.") from error
        with self._lock, open(descriptor, "rb"):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            devices = _decoded(self.path)
            before = _encoded(devices)
            yield devices
            if (after := _encoded(devices)) != before:
                try:
                    write_private(self.path, after, replace=True)
                except OSError as error:
                    raise BadFile(f"{self.path}: cannot be written: {error.strerror or error}.") from error


def _named(devices: dict[str, KnownDevice], name: str) -> KnownDevice:
    """Return the device with this name or fingerprint. BadValue where there is none."""
    for device in devices.values():
        if name in device.names or name == device.fingerprint:
            return device
    known_names = ", ".join(sorted(known_name for device in devices.values() for known_name in device.names)[:20])
    raise BadValue(
        f"No device called '{name:.80}' has joined; known devices: {known_names or 'none yet'}.",
        hint="The list: manyhands devices",
    )


def changed_key(name: str, device: KnownDevice, public: bytes) -> Refused:
    """Return the error for a device that tries to join under a name that belongs to another key."""
    shown = fingerprint(public) if public else "none"
    return Refused(
        f"{name:.64} has joined before with the key {device.fingerprint}; this one shows {shown}.",
        hint=f"If it was set up anew: manyhands devices forget {device.name:.64}, then let it join with the token. If "
        "these are two devices, give one another name.",
    )


def _decoded(path: Path) -> dict[str, KnownDevice]:
    try:
        content = read_private(path, _MOST_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if content is None:
        return {}
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        book = msgspec.json.decode(content, type=_Book)
        _check(book)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise _unreadable(path, str(error)) from error
    return {device.key: device for device in book.devices}


def _check(book: _Book) -> None:
    if book.version != VERSION:
        raise ValueError(f"version {book.version}; this manyhands reads {VERSION}")
    for device in book.devices:
        if len(bytes.fromhex(device.key)) != _PRIVATE_BYTES or device.key != device.key.lower():
            raise ValueError(f"'{device.key:.80}' is not a key")
        if not device.names or not all(name.isprintable() and 0 < len(name) <= 200 for name in device.names):
            raise ValueError("a device without a proper name")


def _encoded(devices: dict[str, KnownDevice]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_Book(VERSION, list(devices.values()))), indent=1) + b"\n"


def _unreadable(path: Path, why: str) -> BadFile:
    return BadFile(
        f"{path}: the list of known devices cannot be read: {why:.200}.",
        hint=f"Until it can, nobody is let in by a key. To begin anew: rm {path}; then each device joins by the token.",
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _seconds_between(first: str, second: str) -> float:
    try:
        return (datetime.datetime.fromisoformat(second) - datetime.datetime.fromisoformat(first)).total_seconds()
    except (ValueError, TypeError):
        return _SEEN_SECONDS


# This device's own key


def own_key(folder: Path, *, make: bool = True) -> DeviceKey | None:
    """Return this device's key; None where there is none and `make` is false. OSError where it cannot be stored."""
    path = folder / KEY_FILE
    private_key = _private_key(path)
    if private_key is None and make:
        with contextlib.suppress(FileExistsError):  # made by another process that started at the same moment
            write_private(path, new_private_key().hex().encode() + b"\n", replace=False)
        private_key = _private_key(path)
    return DeviceKey(private_key) if private_key is not None else None


def _private_key(path: Path) -> bytes | None:
    try:
        content = read_private(path, 200)
        private_key = bytes.fromhex(content.decode().strip()) if content is not None else None
    except ValueError:
        private_key = b""
    if private_key is not None and len(private_key) != _PRIVATE_BYTES:
        raise BadFile(
            f"{path}: is not this device's key.",
            hint=f"Without it others no longer know this device: rm {path}, and join anew with the token.",
        )
    return private_key


def own_credentials(
    role: Role, report: Callable[[str], None] = lambda text: None, folder: Path | None = None
) -> Credentials | None:
    """Return the credentials with which this device connects; None, after a report, where its key cannot be stored.

    Without a key, no other device knows it, and it needs the token every time. `folder`: in place of this user's.
    """
    folder = folder or config_folder()
    try:
        key = own_key(folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        report(f"This device's key cannot be kept in {folder} ({reason}): the token is needed every time.")
        return None
    assert key is not None, "it was to be made"
    return Credentials(key, role, DeviceBook(folder, key.public))


def worker_credentials() -> Credentials | None:
    return own_credentials(Role.WORKER)


def knows_any(role: Role) -> bool:
    """Return whether this device has met one of this role before, and may need no token. Does not make a key."""
    return any(role.text in device.roles and not device.revoked for device in DeviceBook(config_folder()).devices())
