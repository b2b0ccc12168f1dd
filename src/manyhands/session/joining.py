"""Parses and prints how a device joins a coordinator: addresses, and what to compute with, as typed by a person."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from manyhands.facts.cluster import Cluster, preset
from manyhands.facts.device import COMPUTE, COMPUTE_HINT, NAME_HINT
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.hosts import host_and_port
from manyhands.facts.presets import PRESETS
from manyhands.transport.security import check_token

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator

LISTEN_VARIABLE = "MANYHANDS_LISTEN"
"""The environment variable that holds the address where a cluster's devices join, if none is given."""
DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_SLOWDOWN = 1000
MOST_WAIT_SECONDS = 7 * 86400.0
EVERY_ADDRESS = {"0.0.0.0": ("192.0.2.1", socket.AF_INET), "::": ("2001:db8::1", socket.AF_INET6)}
"""Wildcard address -> a distant address reserved for documentation (RFC 5737, RFC 3849), and its address family."""


class JoinPoint(NamedTuple):
    """The address where the devices of a cluster join, and the token that they must know; empty: the default."""

    listen: str = ""
    token: str = ""


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return host and port of an address such as '192.168.1.5:7077' or '[::1]:7077'."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(?::(\d{1,5}))?", text.strip())
    port = match.group(2) if match else None
    if match is None or (port is None and default_port is None):
        hint = "Write HOST:PORT, like 192.168.1.5:7077, or [fd00::5]:7077."
        raise BadValue(f"'{text:.80}' is not an address.", hint=hint)
    if port is not None and int(port) > 65535:
        raise BadValue(f"'{text:.80}': the port is {port}; it must be at most 65535.")
    return match.group(1).strip("[]"), int(port) if port is not None else default_port or 0


def listen_on(interface: str, listen: str = "") -> str:
    """Return the address at which to listen on an interface, like tailscale0, with the port of `listen`, if it has one;
    refuse another address beside it."""
    from manyhands.runtime.identity import interface_address

    host, port = parse_address(listen, 0) if listen else ("", 0)
    address = interface_address(interface, host)
    if host and host not in EVERY_ADDRESS and host != address:
        raise BadValue(
            f"--interface {interface} has {address}; --listen says {host}.",
            hint=f"Leave out --listen, or write --listen 0.0.0.0:{port or 7077}.",
        )
    return host_and_port(address, port) if port else f"[{address}]" if ":" in address else address


def parse_devices(text: str) -> tuple[int, int | None]:
    """Return how many devices to begin with and how many to use at most (None: any that join later).

    '4' means 4 devices and any that join later; '2:6' means to begin with 2 and use up to 6.
    """
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text.strip())
    if match is None or (match.group(2) and int(match.group(2)) < int(match.group(1))):
        raise BadValue(
            f"--devices is '{text:.40}'; it must be a number, or so many to begin with and so many at most.",
            hint="Write 4, or 2:6.",
        )
    return int(match.group(1)), int(match.group(2)) if match.group(2) else None


def refuse_preset(cluster: Cluster, listen: str = "") -> None:
    """Refuse to wait for the devices of a preset unless an address to listen on was given.

    A preset describes devices to plan with; naming one is no request to open a port on this machine.
    """
    if listen or os.environ.get(LISTEN_VARIABLE) or cluster.name not in PRESETS or cluster != preset(cluster.name):
        return
    names = ", ".join(cluster.names[:3]) + (" ..." if len(cluster.names) > 3 else "")
    raise BadValue(
        f"{cluster.name} is a preset: devices to plan with ({names}), none of which is here.",
        hint=f"To simulate it: manyhands plan --cluster {cluster.name}\n"
        f"To play it on this machine: --lab {cluster.name} in place of --cluster {cluster.name} (as root), or "
        f"manyhands lab up {cluster.name}\n"
        "To wait for real devices of these names: add --listen 0.0.0.0:7077",
    )


def parse_compute(text: str) -> str:
    if not COMPUTE.fullmatch(text):
        raise BadValue(f"--compute '{text:.40}' is not something to compute with.", hint=COMPUTE_HINT)
    return text


def check_joining(token: str, name: str, *, is_known: bool = False) -> None:
    """Check what a worker needs before it connects: a token and a valid name.

    `is_known`: it has joined a coordinator before, whose key it knows, and needs no token.
    """
    if token:
        check_token(token)
    elif not is_known:
        raise BadValue(
            "This device knows no token; the coordinator printed one with the command to join.",
            hint="Give it once: --token-file FILE, MANYHANDS_TOKEN, or --token TOKEN (which others can see in `ps`). "
            "After that the devices know each other's keys.",
        )
    if name and not DEVICE_NAME.fullmatch(name):
        raise BadValue(f"--name '{name:.80}' cannot name a device.", hint=NAME_HINT)


def check_slowdown(slowdown: float) -> float:
    """Return `slowdown`, how many times slower a device computes; refuse one out of range."""
    if not 1 <= slowdown <= MOST_SLOWDOWN:
        raise BadValue(
            f"A slowdown of {slowdown:g}; it must be 1 to {MOST_SLOWDOWN}.", hint="8: everything takes 8 times as long."
        )
    return slowdown


def check_wait(seconds: float) -> float:
    """Return `seconds`, how long a worker tries to reach its coordinator; refuse a value out of range."""
    if not 0 < seconds <= MOST_WAIT_SECONDS:
        raise BadValue(
            f"--wait is {seconds:g}; it must be more than 0 and at most {MOST_WAIT_SECONDS:g} seconds.",
            hint="For a worker that waits for ever: --stay.",
        )
    return seconds


def reachable(host: str) -> str:
    """Return the address at which others reach this machine, if `host` means all its addresses; else `host` itself.

    It is the address that the default route uses: connecting a UDP socket reveals it without sending anything.
    Without such a route it is the first address that this machine has. `::` means IPv4 addresses too.
    """
    if host not in EVERY_ADDRESS:
        return host
    far_away, family = EVERY_ADDRESS[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far_away, 9))
            address = str(probe.getsockname()[0])
        if address and address != host:
            return address
    except OSError:
        pass
    from manyhands.runtime.identity import addresses

    own_addresses = [address for address in addresses() if (":" in address) == (family == socket.AF_INET6)]
    if family == socket.AF_INET6 and not own_addresses:
        return reachable("0.0.0.0")
    nowhere = "127.0.0.1" if family == socket.AF_INET else "::1"  # no network at all: only this machine can join
    return own_addresses[0] if own_addresses else nowhere


def join_text(coordinator: Coordinator, more: str = "") -> str:
    """Return what to type on each device. It contains the token only if both stdout and stderr are a terminal."""
    host, port = coordinator.address[:2]
    host = reachable(host)
    text = f"  manyhands worker --join {host_and_port(host, port)}{more}\n{token_text(coordinator.token)}"
    if coordinator.is_announced:
        text += f"\nOne that has joined before needs neither token nor address: manyhands worker{more}"
    return text


def token_text(token: str) -> str:
    """Return a line that tells where to find the token that new devices need.

    On a terminal it is the token itself; never in a file or a pipe, which others may read.
    """
    from manyhands.runtime.shared_token import known_token, token_path

    if is_at_terminal():
        return f"The token, which a new device asks for: {token}"
    try:
        is_kept = known_token() == token
    except BadFile:
        is_kept = False
    if is_kept:
        return f"The token, which a new device asks for, is in {token_path()} (it is shown only on a terminal)."
    return "The token, which a new device asks for, is the one that was given here (it is shown only on a terminal)."


def is_at_terminal() -> bool:
    """Return whether output goes to a terminal: people see it, and it is stored nowhere."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


SERVICE_WORDS = (
    "name", "join", "interface", "compute", "threads", "slots", "data-port", "advertise", "health-port", "grace",
    "silo", "wait", "slowdown",
)  # fmt: skip


def service_unit(options: Mapping[str, str], program: Sequence[str], *, confine: bool = True) -> str:
    """Return a systemd unit for a worker that runs whenever the device is on; `options`: what was typed, by name."""
    typed = [] if confine else ["--no-confine"]
    typed += ["--relay"] if options.get("relay") else []
    typed += [word for name in SERVICE_WORDS if options.get(name) for word in (f"--{name}", options[name])]
    command = " ".join(_quoted(word) for word in (*program, "worker", "--stay", *typed))
    hidden = [path for path in (*program, options.get("silo", "")) if path.startswith(("/home/", "/root/"))]
    note = (
        f"# {hidden[0]!r} is in a home, which this service does not see: install elsewhere, as in /opt\n"
        if hidden
        else ""
    )
    return note + _UNIT.format(command=command)


def _quoted(word: str) -> str:
    """Return `word` quoted for systemd's command lines, in which % and $ are special."""
    if any(not sign.isprintable() for sign in word):
        raise BadValue(f"{word!r:.80} cannot be written into a unit file.")
    safe = word.replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[^\s\"'\\\\;]+", safe):
        return safe
    return '"' + safe.replace("\\", "\\\\").replace('"', '\\"') + '"'


_UNIT = """\
# /etc/systemd/system/manyhands-worker.service, made by: manyhands worker --print-service
[Unit]
Description=manyhands worker
Wants=network-online.target
After=network-online.target

[Service]
# MANYHANDS_TOKEN=... stands in this file, which only root need be able to read
EnvironmentFile=-/etc/manyhands/worker.env
ExecStart={command}
Restart=always
RestartSec=10
# asked to stop, it hands over what others need first
TimeoutStopSec=60
SuccessExitStatus=143
# a user of its own, and a folder of its own to write in
DynamicUser=yes
StateDirectory=manyhands
Environment=MANYHANDS_HOME=/var/lib/manyhands HOME=/var/lib/manyhands PYTHONUNBUFFERED=1
WorkingDirectory=/var/lib/manyhands
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
ProtectClock=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
# others on the device go first
Nice=5

[Install]
WantedBy=multi-user.target
"""
