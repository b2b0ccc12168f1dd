"""A cluster in a box: for each device a namespace, a control group and a seat on the cores; and a lab supervisor.

    with Lab.up(played, "pi3x6", source="pi3x6", owned=True) as lab:
        subprocess.run([*lab.words("pi3-1"), "manyhands", "worker", ...])
        lab.cut("pi3-2")

Nothing is left behind: `down` removes everything with the lab's name, whether it is complete or not; a lab that is
owned goes down with its owner. Nothing else of the machine is touched, and no address exists outside the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from types import TracebackType

import msgspec

from manyhands.facts.errors import BadValue, LabError, ManyhandsError
from manyhands.facts.lab import Played
from manyhands.lab import enter, groups, record, supervisor
from manyhands.lab.control_groups import GroupStatistics
from manyhands.lab.record import LabRecord, Process
from manyhands.lab.removal import labs, missing, take_down
from manyhands.lab.spaces import COORDINATOR_SPACE, Spaces

_START_SECONDS = 10.0


def _taken(name: str) -> LabError:
    owner = None
    with contextlib.suppress(ManyhandsError):
        owner = record.load(name).owner
    if owner is not None and owner.is_alive:
        return LabError(
            f"The lab '{name}' is up already: it belongs to process {owner.pid}, and goes down with it.",
            hint="Wait for it, or give yours another name.",
        )
    return LabError(f"The lab '{name}' is up already.", hint=f"Take it down: manyhands lab down {name}")


def _clear_orphan(name: str) -> None:
    """Take down a lab whose owner died before its supervisor could notice it."""
    with contextlib.suppress(ManyhandsError):
        owner = record.load(name).owner
        if owner is not None and not owner.is_alive:
            take_down(name)


class DeviceStatus(msgspec.Struct, frozen=True):
    """The state of a device of a lab now."""

    name: str
    address: str
    share: float
    cores: tuple[int, ...]
    is_cut: bool
    processes: int
    group: GroupStatistics


class Lab:
    """A lab that is up."""

    def __init__(self, entry: LabRecord) -> None:
        self.record, self.name, self.played = entry, entry.name, entry.played
        self.spaces = Spaces(entry.name, entry.played.network, uses_switch=entry.uses_switch)
        self.groups = groups.find()
        self._supervisor: subprocess.Popen[bytes] | None = None
        """The supervisor, where this process started it."""

    @classmethod
    def find(cls, name: str = "") -> Lab:
        """Return the lab of that name, or the only one."""
        if reason := missing():
            raise LabError(f"There can be no lab here: {reason}")
        if not name:
            up = record.names()
            if len(up) > 1:
                raise LabError(f"Several labs are up: {', '.join(up)}.", hint=f"Say which: --lab {up[0]}")
            name = up[0] if up else ""
            if not name:
                raise LabError("No lab is up.", hint="Bring one up: manyhands lab up pi3x6")
        return cls(record.load(record.lab_name(name)))

    @classmethod
    def up(
        cls, played: Played, name: str, *, source: str = "", owned: bool = False, at_full_speed: bool = False
    ) -> Lab:
        """Bring a lab up. `owned`: it goes down with this process. `at_full_speed`: devices are not slowed until
        `settle`."""
        if reason := missing():
            raise LabError(f"There can be no lab here: {reason}")
        name = record.lab_name(name)
        spaces = Spaces(name, played.network)
        entry = LabRecord(name, source or name, played, spaces.uses_switch, Process.of(os.getpid()) if owned else None)
        _clear_orphan(name)
        if Spaces.exists(name) and name not in labs():
            raise LabError(
                f"The network namespaces {', '.join(Spaces.names_of(name)[:3])} are there already, and no lab's.",
                hint="Give it another name: --name",
            )
        if not record.claim(entry):
            raise _taken(name)
        process = None
        try:
            lab = cls(entry)
            if name in lab.groups.labs():
                raise _taken(name)
            for seat in played.seats:
                share = None if at_full_speed else seat.share
                lab.groups.make(name, seat.device, share, seat.memory_bytes)
            lab.spaces.up()
            lab._supervisor = process = _start_supervisor(name)
            lab.record = msgspec.structs.replace(entry, keeper=Process.of(process.pid))
            record.save(lab.record)
        except BaseException:
            if process is not None:
                process.kill()
                process.wait(10)
            take_down(name)
            raise
        return lab

    def down(self) -> None:
        take_down(self.name)
        if self._supervisor is not None:
            self._supervisor.wait(10)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Using it

    def words(self, device: str, *, only_network: bool = False) -> tuple[str, ...]:
        """Return the words to write before a command so that it runs on a device (or in its network only), or as the
        coordinator."""
        if device != COORDINATOR_SPACE:
            self.played.seat(device)
        return enter.words(self.name, device, only_network=only_network)

    def address(self, member: str) -> str:
        return self.spaces.address(member)

    def settle(self) -> None:
        """Set the speeds that the devices are meant to have."""
        for seat in self.played.seats:
            self.groups.set_cpu(self.name, seat.device, seat.share)

    def status(self) -> list[DeviceStatus]:
        return [
            DeviceStatus(
                seat.device, self.spaces.address(seat.device), seat.share, seat.cores, self.spaces.is_cut(seat.device),
                len(self.groups.processes(self.name, seat.device)), self.groups.statistics(self.name, seat.device),
            )
            for seat in self.played.seats
        ]  # fmt: skip

    @property
    def is_supervised(self) -> bool:
        """Whether the lab supervisor is alive: without it nothing passes between devices whose links have a delay."""
        return self.record.keeper is not None and self.record.keeper.is_alive

    # Faults

    def cut(self, device: str) -> None:
        """Pull the device's cable: nothing passes, and no connection is closed."""
        self.played.seat(device)
        self.spaces.cut(device)

    def freeze(self, device: str) -> None:
        """Suspend everything that runs on a device; its connections stay open."""
        self.played.seat(device)
        self.groups.freeze(self.name, device)

    def kill(self, device: str) -> None:
        """Kill everything on a device at once."""
        self.played.seat(device)
        self.groups.kill(self.name, device)

    def slow(self, device: str, factor: float) -> None:
        """Reduce a device to `factor` of its speed."""
        share = self.played.seat(device).share * factor
        if not 0 < factor <= 1:
            raise BadValue(f"{device} cannot get {factor:g} times as fast.", hint="Write 0.5 for half its speed.")
        self.groups.set_cpu(self.name, device, share)

    def heal(self, device: str) -> None:
        """Undo faults: cable in, running, at its own speed. Processes that were killed stay dead."""
        seat = self.played.seat(device)
        self.spaces.heal(device)
        self.groups.thaw(self.name, device)
        self.groups.set_cpu(self.name, device, seat.share)


def _start_supervisor(name: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", "manyhands.lab.supervisor", name]
    with open(record.log_path(name), "wb") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        return _ready(name, process)
    except BaseException:
        process.kill()
        process.wait(10)
        raise


def _ready(name: str, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    assert process.stdout is not None
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        printed = process.stdout.readline() if selector.select(_START_SECONDS) else b""
    if printed.strip() != supervisor.READY.encode():
        reason = record.log_path(name).read_text(errors="replace").strip().splitlines()
        raise LabError(f"The lab supervisor did not start: {reason[-1] if reason else 'it printed nothing'}.")
    return process
