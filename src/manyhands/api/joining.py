"""How a device is told where to join: addresses and what to compute with, as typed by a person."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

from manyhands.facts.cluster import NAME_HINT
from manyhands.facts.errors import BadValue

if TYPE_CHECKING:
    from manyhands.runtime.coordinator import Coordinator

DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_SLOWDOWN = 1000
EVERY_ADDRESS = {"0.0.0.0": ("192.0.2.1", socket.AF_INET), "::": ("2001:db8::1", socket.AF_INET6)}
"""Where one listens on all of a machine's addresses -> somebody far away, kept for examples (RFC 5737, RFC 3849)."""


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """'192.168.1.5:7077' or '[::1]:7077' -> host and port."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+)(?::(\d{1,5}))?", text.strip())
    port = match.group(2) if match else None
    if match is None or (port is None and default_port is None):
        raise BadValue(f"'{text:.80}' is not an address.", hint="Write HOST:PORT, like 192.168.1.5:7077.")
    if port is not None and int(port) > 65535:
        raise BadValue(f"'{text:.80}': the port is {port}; it must be at most 65535.")
    return match.group(1).strip("[]"), int(port) if port is not None else default_port or 0


def parse_compute(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", text):
        raise BadValue(f"--compute '{text:.40}' is not something to compute with.", hint="Write cpu, cuda or cuda:1.")
    return text


def check_joining(token: str, name: str) -> None:
    """What a worker needs before it knocks."""
    if not token:
        raise BadValue(
            "There is no token; the coordinator printed one with the command to join.",
            hint="Add --token TOKEN, or set MANYHANDS_TOKEN.",
        )
    if name and not DEVICE_NAME.fullmatch(name):
        raise BadValue(f"--name '{name:.80}' cannot name a device.", hint=NAME_HINT)


def check_slowdown(slowdown: float) -> float:
    """How many times slower a device computes, if it can."""
    if not 1 <= slowdown <= MOST_SLOWDOWN:
        raise BadValue(
            f"A slowdown of {slowdown:g}; it must be 1 to {MOST_SLOWDOWN}.", hint="8: everything takes 8 times as long."
        )
    return slowdown


def reachable(host: str) -> str:
    """The address under which others find this machine, where `host` is all of its addresses; else `host` itself.

    It is the one that the default route leaves by: connecting a UDP socket asks for it without sending anything.
    """
    if host not in EVERY_ADDRESS:
        return host
    far_away, family = EVERY_ADDRESS[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far_away, 9))
            found = str(probe.getsockname()[0])
    except OSError:  # no network at all: only this machine can join
        found = ""
    return found if found and found != host else ("127.0.0.1" if family == socket.AF_INET else "::1")


def join_command(coordinator: Coordinator) -> str:
    """What to type on each device, ready to be copied."""
    host, port = coordinator.address[:2]
    host = reachable(host)
    return f"manyhands worker --join {f'[{host}]' if ':' in host else host}:{port} --token {coordinator.token}"
