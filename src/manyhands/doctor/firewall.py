"""The firewall of this machine, and the commands that open it. Commands are only shown; a person decides to run
them."""

from __future__ import annotations

import ipaddress
import shutil
from pathlib import Path

from manyhands.runtime.reachability import FAILED, NO_HOST, NO_MEMBER, NO_ROUTE, REFUSED, ProbeAnswer

TOOLS = ("ufw", "firewalld", "nftables")
_FREE_PORTS = (32768, 60999)
"""The ports that Linux hands out when a process asks for any: workers listen for data on one of them."""


def free_ports(kernel: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    try:
        first, last = kernel.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return _FREE_PORTS


def firewall_here(root: Path = Path("/")) -> str:
    """Return the firewall that is switched on, as far as any user can see; empty if there is none or it cannot be
    seen."""
    try:
        if "ENABLED=yes" in (root / "etc/ufw/ufw.conf").read_text():
            return "ufw"
    except OSError:
        pass
    if (root / "run/firewalld").is_dir():
        return "firewalld"
    if (root / "run/systemd/units/invocation:nftables.service").is_symlink() or (
        root == Path("/") and shutil.which("nft") and (root / "sys/fs/cgroup/system.slice/nftables.service").is_dir()
    ):
        return "nftables"
    return ""


def opening(source: str, port: int | None, tool: str = "") -> list[str]:
    """Return what to type on a machine that `source` cannot reach: for one port, or for any port that a worker may
    take.

    `tool`: the firewall there, where it is known; else a line for each.
    """
    first, last = (port, port) if port is not None else free_ports()
    family = "ipv6" if _is_version_6(source) else "ipv4"
    ports = f"{first}" if first == last else f"{first}-{last}"
    rich = f"rule family={family} source address={source} port port={ports} protocol=tcp accept"
    shown = ports.replace("-", ":")
    commands = {
        "ufw": f"sudo ufw allow proto tcp from {source} to any port {shown}",
        "firewalld": f"sudo firewall-cmd --permanent --add-rich-rule='{rich}' && sudo firewall-cmd --reload",
        "nftables": f"sudo nft insert rule inet filter input {'ip6' if family == 'ipv6' else 'ip'} saddr {source} "
        f"tcp dport {ports} accept",
    }
    return [commands[tool]] if tool in commands else [commands[name] for name in TOOLS]


def _is_version_6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def remedy(answer: ProbeAnswer, source: str, source_host: str, target: str, tool: str = "", *, fixed_port: bool) -> str:
    """Return what to do about a device that could not be reached, by the outcome of the reachability probe."""
    where = f"{answer.host}:{answer.port}"
    if answer.outcome == NO_HOST:
        return f"{answer.host} is not known to {source}: write its address in place of its name."
    if answer.outcome == NO_ROUTE:
        return f"{source} has no way to {answer.host}: are both in one network? On {source}: ping {answer.host}"
    if answer.outcome == FAILED:
        return f"On {source}: ping {answer.host}"
    commands = "\n".join(opening(source_host, answer.port if fixed_port else None, tool))
    if answer.outcome == NO_MEMBER:
        return (
            f"A firewall of {target} drops or rejects what comes to {where}, or there is no way to it.\n"
            f"On {source}, for what the network says: ping {answer.host}; manyhands doctor --join {where}\n"
            f"On {target}, one of:\n{commands}"
        )
    if answer.outcome == REFUSED:
        return f"No process listens at {where}, or a firewall of {target} rejects it. On {target}, one of:\n{commands}"
    return f"A firewall drops what comes to {where}, or {target} is off. On {target}, one of:\n{commands}"
