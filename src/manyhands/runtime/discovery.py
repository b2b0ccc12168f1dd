"""Lets workers find a coordinator on the local network by multicast DNS, without knowing its address.

    with Announcer(("0.0.0.0", 7077), token, "resnet50"): ...      # `manyhands train --listen` does
    with Lookout() as lookout:                                    # `manyhands worker` without --join does
        lookout.wait(1.0)
        lookout.seen()

Everybody on the network can read an announcement: the address, versions, the name of the run, and two marks, both
salted. By one mark, a worker recognises a coordinator whose key it knows. By the other, a worker that knows the token
sees that it fits: each guess costs an attacker one scrypt, the mark has only 24 bits, and it is made only of tokens
that manyhands generated (160 bits). A token that a person chose gets no mark, because it could be guessed. Marks can
rule a coordinator out, but vouch for nothing. Proofs are exchanged when the worker connects (transport.proofs).

MANYHANDS_DISCOVERY: `off`, or the address of the one interface to use (192.168.1.5; 127.0.0.1 in tests). A coordinator
that only this machine can reach is announced only if that interface is loopback.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadValue
from manyhands.facts.hosts import host_and_port
from manyhands.facts.version import __version__
from manyhands.runtime.control import PROTOCOL
from manyhands.runtime.identity import addresses
from manyhands.transport.security import EVERY_ADDRESS, is_loopback, is_made

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_manyhands._tcp.local."
PROBE = "_manyhands-probe._tcp.local."
"""The service that the doctor announces to test whether it receives itself: no worker looks for it."""
VARIABLE = "MANYHANDS_DISCOVERY"
MOST_SEEN = 64
"""How many announcements are considered: anybody may send any number."""
_LIFE_SECONDS = 120
"""How long the announcement of a killed process stays valid for others."""
_LOOK_SECONDS = 5.0
"""How often the announcer checks whether the addresses of this machine have changed."""
_CLOSE_SECONDS = 4.0
_ASK_MILLISECONDS = 300
_MOST_ASKED = 3
"""Requests in one call of `seen`: announcers that do not answer must not use up the time for the others."""
_LONGEST_TITLE = 60
_NO_VERSION = re.compile(r"[^0-9A-Za-z.+-]")
"""Characters that no version contains: the version appears in a command that people are told to type."""


def interface_asked() -> str | None:
    """Return the address of the one interface to use; empty: all; None: nothing is announced or looked for."""
    setting = os.environ.get(VARIABLE, "").strip()
    if setting.lower() in ("off", "0", "no"):
        return None
    try:
        return str(ipaddress.ip_address(setting)) if setting else ""
    except ValueError as error:
        raise BadValue(
            f"{VARIABLE} is '{setting:.60}'; it must be off, or the address of one of this machine's interfaces.",
            hint=f"Like this: {VARIABLE}=192.168.1.5. Leave it out to use all of them.",
        ) from error


@functools.lru_cache(MOST_SEEN)
def mark_of(token: str, salt: str) -> str:
    """Return the mark by which a worker sees whether its token fits."""
    return hashlib.scrypt(token.encode(), salt=f"manyhands {salt}".encode(), n=2**14, r=8, p=1, dklen=3).hex()


def key_mark_of(public: bytes, salt: str) -> str:
    """Return the mark by which a worker recognises a coordinator whose key it knows; to others it is a new number."""
    return hashlib.sha256(b"manyhands key mark\0" + salt.encode() + b"\0" + public).hexdigest()[:32]


@dataclass(frozen=True)
class Announcement:
    """A coordinator as it has announced itself; nothing in it is verified."""

    instance: str
    hosts: tuple[str, ...]
    port: int
    version: str
    protocol: int
    title: str
    """The name of its run."""
    machine: str
    salt: str
    mark: str
    """The mark of its token; empty for a token that a person chose, which the mark would help to guess."""
    key_mark: str = ""
    """The mark of its key."""

    def fits(self, token: str, known_keys: Collection[bytes] = ()) -> bool:
        """Return whether the coordinator may be a trusted one: its key is known, or this token may be its own."""
        if any(hmac.compare_digest(self.key_mark.encode(), key_mark_of(key, self.salt).encode()) for key in known_keys):
            return True
        if not token:
            return False
        if not self.mark or not is_made(token):
            return not self.mark and not is_made(token)
        return hmac.compare_digest(self.mark.encode(), mark_of(token, self.salt).encode())

    @property
    def is_same_version(self) -> bool:
        return (self.version, self.protocol) == (__version__, PROTOCOL)

    @property
    def text(self) -> str:
        """A description for people."""
        where = ", ".join(host_and_port(host, self.port) for host in self.hosts)
        return f"{self.title or 'a run'} on {self.machine or '?'} at {where} (manyhands {self.version or '?'})"


def announced(info: ServiceInfo) -> Announcement | None:
    """Return a service as an announcement; None where it cannot be read."""
    texts = {
        key.decode(errors="replace"): _printable((value or b"").decode(errors="replace"))
        for key, value in list(info.properties.items())[:16]
    }
    hosts = tuple(info.parsed_addresses()[:8])
    if not hosts or not info.port:
        return None
    protocol = texts.get("protocol", "")
    return Announcement(
        instance=info.name, hosts=hosts, port=info.port, version=_NO_VERSION.sub("?", texts.get("version", ""))[:20],
        protocol=int(protocol) if protocol.isascii() and protocol.isdigit() and len(protocol) < 9 else -1,
        title=texts.get("run", ""), machine=texts.get("machine", ""), salt=texts.get("salt", ""),
        mark=texts.get("mark", ""), key_mark=texts.get("key", ""),
    )  # fmt: skip


def _printable(text: str) -> str:
    """Return a text that is safe to print on a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:_LONGEST_TITLE])


def can_announce(host: str, interface: str | None) -> bool:
    """Return whether a listener on this address may be announced: others can reach it, or a test requests it."""
    return interface is not None and (not is_loopback(host) or (bool(interface) and is_loopback(interface)))


def hosts_of(host: str, interface: str) -> tuple[str, ...]:
    """Return the addresses to announce for a listening address; none where only this machine could use them."""
    if not can_announce(host, interface):
        return ()
    if host.lower() == "localhost":
        return ("127.0.0.1",)
    if host not in EVERY_ADDRESS:
        with contextlib.suppress(ValueError):
            return (str(ipaddress.ip_address(host)),)
        return ()
    if interface:
        return (interface,)
    return tuple(address for address in sorted(addresses()) if host == "::" or ":" not in address)


class Announcer:
    """A thread that announces a coordinator's address on the network for as long as it is open.

    When this machine gets another address, it is announced anew. That nothing can be announced is reported, but is no
    error.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        title: str = "",
        report: Callable[[str], None] = lambda text: None,
        interface: str | None = "",
        service: str = SERVICE,
        *,
        public: bytes = b"",
    ) -> None:
        """`interface`: see `interface_asked`. `public`: this device's key."""
        self._public = public
        self._service = service
        self._address, self._token, self._title, self._report = address, token, title, report
        self.salt = secrets.token_hex(4)
        self.is_announced = threading.Event()
        self._closing = threading.Event()
        self._interface = interface or ""
        self._thread = threading.Thread(target=self._run, name="coordinator announcer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Announcer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        interface, problem = self._interface, ""
        opened: Zeroconf | None = None
        announced_hosts: tuple[str, ...] = ()
        try:
            while not self._closing.is_set():
                try:
                    hosts = hosts_of(self._address[0], interface)
                    if hosts != announced_hosts and opened is not None:
                        outdated, opened = opened, None
                        outdated.close()
                    if hosts and opened is None:
                        opened, announced_hosts = self._announce(hosts, interface), hosts
                        problem = ""
                except Exception as error:  # no multicast here, or not now: --join works without it
                    if str(error) != problem:
                        self._report(f"Workers cannot find this coordinator by themselves ({error}): give --join.")
                    problem = str(error)
                self._closing.wait(_LOOK_SECONDS)
        finally:
            if opened is not None:
                with contextlib.suppress(Exception):
                    opened.close()  # announces that it has gone

    def _announce(self, hosts: Sequence[str], interface: str) -> Zeroconf:
        from zeroconf import ServiceInfo

        machine = _printable(socket.gethostname())[:40]
        info = ServiceInfo(
            self._service, f"{machine.replace('.', '-')} {self.salt}.{self._service}", port=self._address[1],
            parsed_addresses=list(hosts), server=f"manyhands-{self.salt}.local.", host_ttl=_LIFE_SECONDS,
            other_ttl=_LIFE_SECONDS,
            properties={
                "version": __version__, "protocol": str(PROTOCOL), "run": _printable(self._title), "machine": machine,
                "salt": self.salt, "mark": mark_of(self._token, self.salt) if is_made(self._token) else "",
                "key": key_mark_of(self._public, self.salt) if self._public else "",
            },
        )  # fmt: skip
        opened = _open(interface or ("" if self._address[0] in EVERY_ADDRESS else self._address[0]))
        try:
            opened.register_service(info, cooperating_responders=True)  # the salt makes its name unique
        except BaseException:
            opened.close()
            raise
        self.is_announced.set()
        return opened

    def close(self) -> None:
        """Withdraw the announcement; end the thread and close its descriptors."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)


class Lookout:
    """Looks for coordinators for as long as it is open. OSError where there is no network to look on."""

    def __init__(self, service: str = SERVICE) -> None:
        from zeroconf import Error, ServiceBrowser

        self._service = service
        self._change = threading.Condition()
        self._names: dict[str, None] = {}
        """The names of services, in the order they appeared."""
        interface = interface_asked()
        if interface is None:
            raise BadValue(f"{VARIABLE} is off: coordinators are not looked for.", hint="Give --join HOST:PORT.")
        try:
            self._opened = _open(interface)
            try:
                self._browser = ServiceBrowser(self._opened, service, handlers=[self._changed])
            except BaseException:
                self._opened.close()
                raise
        except Error as error:  # its thread may not begin in time on a very busy machine
            raise OSError(f"multicast DNS: {error!r}") from error

    def __enter__(self) -> Lookout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        from zeroconf import ServiceStateChange

        del zeroconf, service_type
        with self._change:
            if state_change is ServiceStateChange.Removed:
                self._names.pop(name, None)
            elif len(self._names) < MOST_SEEN:
                self._names[name] = None
            self._change.notify_all()

    def wait(self, limit_seconds: float) -> None:
        """Wait until a service appears or goes, or the limit has passed."""
        with self._change:
            self._change.wait(limit_seconds)

    def seen(self) -> list[Announcement]:
        """Return the announcements of the coordinators that are there now, the latest first."""
        from zeroconf import ServiceInfo

        with self._change:
            names = list(self._names)
        announcements, request_count = [], 0
        for name in reversed(names):
            info = ServiceInfo(self._service, name)
            with contextlib.suppress(Exception):  # whatever was sent, a bad announcement is ignored
                is_whole = info.load_from_cache(self._opened)
                if not is_whole and request_count < _MOST_ASKED:
                    request_count += 1
                    is_whole = info.request(self._opened, _ASK_MILLISECONDS)
                if is_whole and (announcement := announced(info)) is not None:
                    announcements.append(announcement)
        return announcements

    def close(self) -> None:
        """End every thread and close every descriptor."""
        for end in (self._browser.cancel, self._opened.close):
            with contextlib.suppress(Exception):  # zeroconf may be too busy: it is no longer needed
                end()


def _open(interface: str) -> Zeroconf:
    """Open multicast DNS on one interface, or on all of them: by IPv6 too, where this machine has it."""
    from zeroconf import InterfaceChoice, IPVersion, Zeroconf

    if interface:
        version = IPVersion.V6Only if ":" in interface else IPVersion.V4Only
        return Zeroconf(interfaces=[interface], ip_version=version)
    if any(":" in address for address in addresses()):
        with contextlib.suppress(OSError, RuntimeError):
            return Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.All)
    return Zeroconf(interfaces=InterfaceChoice.All)
