"""Two sites behind routers that translate addresses (nftables, masquerade), and an internet between them.

    s1a  s1b                        s2a  s2b           192.168.1.2 and .3 at both sites
       \\ /                             \\ /
    router1  .11                  router2  .12         masquerade: nothing is let in that was not asked for
         \\                           /
          +------- bridge -----------+                 the internet: 10.N.N.0/24
                   |        \\
       coordinator .1        hub .20                   both can be reached by everybody
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SITES = {1: ("s1a", "s1b"), 2: ("s2a", "s2b")}
DEVICES = tuple(name for names in SITES.values() for name in names)
HUB = "hub"

ROOT_ONLY = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(
        shutil.which("ip") is None or shutil.which("nft") is None, reason="there is no `ip` or no `nft` command here"
    ),
]
_RULES = """
table ip nat {
    chain out { type nat hook postrouting priority srcnat; oifname "wan" masquerade; }
}
table ip gate {
    chain in { type filter hook input priority 0; iifname "wan" ct state new drop; }
    chain through { type filter hook forward priority 0; iifname "wan" ct state new drop; }
}
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class NatSites:
    """The namespaces, and the workers in them."""

    number: int
    mark: str
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return f"10.214.{self.number}.1"

    def space(self, name: str) -> str:
        return f"mhn-{self.number}-{name}"

    @property
    def bridge(self) -> str:
        return f"mhn{self.number}"

    def up(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{self.address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for name, last in (("router1", 11), ("router2", 12), (HUB, 20)):
            self._plug_in(name, f"10.214.{self.number}.{last}", "wan")
        for site, names in SITES.items():
            self._site(f"router{site}", names)

    def _plug_in(self, name: str, address: str, device: str) -> None:
        ip("netns", "add", self.space(name))
        near = f"mhn{self.number}{name[0]}{name[-1]}"
        ip("link", "add", near, "type", "veth", "peer", "name", device, "netns", self.space(name))
        ip("link", "set", near, "master", self.bridge, "up")
        self._up(name, device, f"{address}/24")

    def _up(self, name: str, device: str, address: str) -> None:
        space = self.space(name)
        ip("-n", space, "address", "add", address, "dev", device)
        ip("-n", space, "link", "set", device, "up")
        ip("-n", space, "link", "set", "lo", "up")

    def _site(self, router: str, names: tuple[str, ...]) -> None:
        space = self.space(router)
        ip("-n", space, "link", "add", "lan", "type", "bridge")
        self._up(router, "lan", "192.168.1.1/24")
        for last, name in enumerate(names, start=2):
            ip("netns", "add", self.space(name))
            ip("-n", space, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", self.space(name))
            ip("-n", space, "link", "set", name, "master", "lan", "up")
            self._up(name, "eth0", f"192.168.1.{last}/24")
            ip("-n", self.space(name), "route", "add", "default", "via", "192.168.1.1")
        inside = ["ip", "netns", "exec", space]
        subprocess.run([*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True, capture_output=True)
        subprocess.run([*inside, "nft", "-f", "-"], input=_RULES.encode(), check=True, capture_output=True)

    def start(self, name: str, port: int, token: str, logs: Path, *options: str) -> None:
        """Start a worker by the command that a person types there."""
        words = [
            "ip", "netns", "exec", self.space(name), sys.executable, "-m", "manyhands", "worker",
            "--join", f"{self.address}:{port}", "--token", token, "--name", name, "--threads", "1", "--wait", "20",
            "--patience", "3",
            *options,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MANYHANDS_MARK": self.mark}
        with open(logs / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def down(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for name in (*DEVICES, "router1", "router2", HUB):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", self.space(name))
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", self.bridge)


@contextlib.contextmanager
def nat_sites(mark: str) -> Iterator[NatSites]:
    """Two sites for as long as they are needed."""
    sites = NatSites(os.getpid() % 250, mark)
    try:
        try:
            sites.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"sites behind routers cannot be made here: {error.stderr}")
        yield sites
    finally:
        sites.down()
