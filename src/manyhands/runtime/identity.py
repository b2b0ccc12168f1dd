"""Identifies this machine, and the interface by which it is reached."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import socket

import msgspec

from manyhands.facts.errors import BadValue

_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_NO_ADDRESS = "00:00:00:00:00:00"
_DIGEST_CHARACTERS = 16


class Identity(msgspec.Struct, frozen=True):
    """The facts that distinguish workers of the same name, as digests: ids of machines are private."""

    process: str = ""
    """A random id of the worker's process: it stays the same when the worker reconnects."""
    machine: str = ""
    """Digest of the system's id and the network card: it differs for a copied SD card in another machine."""
    system: str = ""
    """Digest of the system's id alone: it is the same for a copied SD card."""


def own_identity(process: str, local_host: str) -> Identity:
    """Return the identity of this worker, which connects from this address."""
    system = _system_id()
    return Identity(process, _digest(system, _card(local_host)), _digest(system) if system else "")


def _system_id() -> str:
    for path in _ID_FILES:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if system_id := file.read(200).decode(errors="replace").strip():
                return system_id
    return ""


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(("manyhands", *texts)).encode()).hexdigest()[:_DIGEST_CHARACTERS]


# Interfaces


def addresses() -> dict[str, str]:
    """Return the addresses at which others may reach this machine, with their interfaces, which are up.

    Loopback addresses and those that need a scope are left out.
    """
    import psutil

    states = psutil.net_if_stats()
    interfaces = {}
    for interface, interface_addresses in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        for address in interface_addresses:
            if address.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            parsed = ipaddress.ip_address(address.address.partition("%")[0])
            if not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified):
                interfaces[address.address] = interface
    return interfaces


def interface_address(interface: str, like: str = "") -> str:
    """Return the address of this interface; BadValue, with those that there are, where it has none.

    `like`: an address of the family that is preferred; else IPv4 is. An address that is valid on one network only comes
    with its scope.
    """
    import psutil

    wanted, usable = 6 if ":" in like else 4, [socket.AF_INET, socket.AF_INET6]
    states, candidates = psutil.net_if_stats(), {}
    for name, entries in psutil.net_if_addrs().items():
        if name not in states or states[name].isup:
            candidates[name] = [entry.address for entry in entries if entry.family in usable]

    def rank(host: str) -> tuple[bool, bool]:
        address = ipaddress.ip_address(host.partition("%")[0])
        return address.is_link_local, address.version != wanted

    if addresses_there := sorted(candidates.get(interface, []), key=rank):
        is_local = (
            ipaddress.ip_address(addresses_there[0].partition("%")[0]).is_link_local and ":" in addresses_there[0]
        )
        return f"{addresses_there[0].partition('%')[0]}%{interface}" if is_local else addresses_there[0]
    listed = ", ".join(f"{name} ({sorted(hosts, key=rank)[0]})" for name, hosts in candidates.items() if hosts)
    problem = "has no address" if interface in candidates else "is not up" if interface in states else "is not here"
    raise BadValue(
        f"The interface '{interface:.40}' {problem}.", hint=f"Those that are up: {listed or 'none'}. See: ip address"
    )


def interface_of(address: str) -> str:
    """Return the interface that has this address; empty where none has."""
    import psutil

    for interface, interface_addresses in psutil.net_if_addrs().items():
        if any(candidate.address.partition("%")[0] == address.partition("%")[0] for candidate in interface_addresses):
            return interface
    return "lo" if address.startswith("127.") else ""


def _card(address: str) -> str:
    """Return the hardware address of the card that has this address; empty where there is none."""
    import psutil

    entries = psutil.net_if_addrs().get(interface_of(address), [])
    hardware = [entry.address for entry in entries if entry.family == psutil.AF_LINK and entry.address != _NO_ADDRESS]
    return hardware[0] if hardware else ""
