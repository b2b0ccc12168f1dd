"""The surroundings of a scenario: its folders and, as root, a network, a disk and control groups of its own.

As root every process has a network namespace, joined by a bridge (`lab/spaces.py`): traffic stays inside. Without root
all is on loopback, and the kinds of faults that need the kernel's help are left out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import LabError
from manyhands.facts.link import Link
from manyhands.lab import groups, spaces
from manyhands.lab.spaces import Spaces, entered, run, run_batch
from manyhands_bench.chaos.draw import KINDS

DISK_BYTES = 16 * 2**20
_WHOLE_RATE = "100gbit"


def missing() -> dict[str, str]:
    """Return the facilities that kinds of faults need and that are missing here, each with the reason."""
    network, own_groups = spaces.missing(), groups.missing()
    disk = "" if os.name == "posix" and os.geteuid() == 0 else "A disk of its own needs root (mount)."
    lacking = {"network": network, "groups": own_groups, "disk": disk}
    return {need: why for need, why in lacking.items() if why}


def kinds_skipped() -> dict[str, str]:
    """Return the kinds of faults that cannot be made here, each with the reason."""
    lacking = missing()
    return {name: lacking[kind.needs] for name, kind in KINDS.items() if kind.needs in lacking}


@dataclass
class Place:
    """Folders, network and limits of one scenario."""

    folder: Path
    lab: str
    devices: tuple[str, ...]
    network: Spaces | None = None
    has_groups: bool = False
    _filler: Path = field(init=False)

    def __post_init__(self) -> None:
        self._filler = self.disk / "filler"

    @property
    def disk(self) -> Path:
        """The folder that holds the run folder."""
        return self.folder / "disk"

    def namespace(self, name: str) -> str:
        return self.network.namespace(name) if self.network is not None else ""

    def address(self, name: str) -> str:
        return self.network.address(name) if self.network is not None else "127.0.0.1"

    def group(self, name: str) -> tuple[str, str]:
        return (self.lab, name) if self.has_groups else ("", "")

    # The disk

    def fill_disk(self) -> bool:
        """Write until the disk is full; return whether a write failed for lack of space."""
        size = 2**20
        with open(self._filler, "ab", buffering=0) as file:
            while size:
                try:
                    while file.write(b"\0" * size) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                size //= 4
        try:
            with open(self.disk / "one more", "wb", buffering=0) as file:
                file.write(b"\0" * 4096)
        except OSError as error:
            return error.errno == errno.ENOSPC
        finally:
            (self.disk / "one more").unlink(missing_ok=True)
        return False

    def free_disk(self) -> None:
        self._filler.unlink(missing_ok=True)

    # Links

    def partition(self, device: str, other: str) -> None:
        """Drop every packet between the two devices from now on, in both directions; neither is notified."""
        assert self.network is not None
        for sender, receiver in ((device, other), (other, device)):
            with entered(self.network.namespace(sender)):
                run_batch(
                    "tc",
                    [
                        "qdisc add dev eth0 root handle 1: htb default 1",
                        f"class add dev eth0 parent 1: classid 1:1 htb rate {_WHOLE_RATE}",
                        f"class add dev eth0 parent 1: classid 1:2 htb rate {_WHOLE_RATE}",
                        "qdisc add dev eth0 parent 1:2 handle 2: bfifo limit 1",  # no packet is so short
                        "filter add dev eth0 parent 1: protocol ip prio 1 u32 "
                        f"match ip dst {self.network.address(receiver)}/32 flowid 1:2",
                    ],
                )

    def dropped(self, name: str) -> int:
        """Return the number of packets that the kernel has dropped since the partition."""
        assert self.network is not None
        with entered(self.network.namespace(name)):
            queues = json.loads(run(["tc", "-s", "-json", "qdisc", "show", "dev", "eth0"]) or "[]")
        return sum(int(queue.get("drops", 0)) for queue in queues if queue.get("handle") == "2:")

    def heal(self, *names: str) -> None:
        """Restore the links of these devices."""
        assert self.network is not None
        for name in names:
            with contextlib.suppress(LabError), entered(self.network.namespace(name)):
                run_batch("tc", ["qdisc del dev eth0 root"])

    def slow_down(self, name: str, bytes_per_second: float) -> bool:
        """Limit what leaves this device to that rate; return whether the kernel has the limit."""
        assert self.network is not None
        with entered(self.network.namespace(name)):
            rate = round(8 * bytes_per_second)
            run_batch("tc", [f"qdisc add dev eth0 root handle 1: tbf rate {rate}bit burst 16kb latency 400ms"])
            return "tbf" in run(["tc", "qdisc", "show", "dev", "eth0"])

    def sent(self, name: str) -> int:
        """Return the bytes that went through the slow link so far."""
        assert self.network is not None
        with entered(self.network.namespace(name)):
            queues = json.loads(run(["tc", "-s", "-json", "qdisc", "show", "dev", "eth0"]) or "[]")
        return sum(int(queue.get("bytes", 0)) for queue in queues if queue.get("kind") == "tbf")

    # Memory

    def tighten(self, name: str, spare_bytes: int) -> int:
        """Limit the device's memory to its present use and the spare bytes; return how often the kernel has killed
        there for memory."""
        cgroups = groups.find()
        now = cgroups.statistics(self.lab, name)
        cgroups.make(self.lab, name, None, now.memory_bytes + spare_bytes)
        return now.oom_kills

    def loosen(self, name: str) -> int:
        """Remove the limit; return how often the kernel has killed there for memory."""
        cgroups = groups.find()
        cgroups.make(self.lab, name, None, None)
        return cgroups.statistics(self.lab, name).oom_kills


@contextlib.contextmanager
def place_for(folder: Path, lab: str, devices: tuple[str, ...]) -> Iterator[Place]:
    """Yield a place with whatever this machine allows; all of it is removed afterwards, except for the folder."""
    lacking = missing()
    (folder / "disk").mkdir(parents=True)
    place = Place(folder, lab, devices)
    with contextlib.ExitStack() as undo:
        if "disk" not in lacking:
            size = f"size={DISK_BYTES}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place.disk)], check=True, timeout=30)
            undo.callback(_unmount, place.disk)
        if "network" not in lacking:
            members = tuple(Device(name=name, gflops=1.0, memory_bytes=2**30) for name in devices)
            place.network = Spaces(lab, Cluster("chaos", members, Link(math.inf, 0.0)))
            place.network.up()
            undo.callback(Spaces.down, lab)
        if "groups" not in lacking:
            place.has_groups = True
            undo.callback(groups.find().remove, lab)
            for name in devices:
                groups.find().make(lab, name, None, None)
        yield place


def _unmount(path: Path) -> None:
    """Unmount the disk; its files stay readable, as a copy beside it."""
    copy = path.parent / "run-kept"
    subprocess.run(["cp", "-r", f"{path}/.", str(copy)], check=False, timeout=30, capture_output=True)
    for _ in range(20):
        if subprocess.run(["umount", str(path)], check=False, timeout=30, capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", str(path)], check=False, timeout=30, capture_output=True)
