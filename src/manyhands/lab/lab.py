"""A cluster in a box: one namespace, one group of processes and one seat on the cores for each device, and a keeper.

    with Lab.up(played, "pi3x6", source="pi3x6", owned=True) as lab:
        subprocess.run([*lab.words("pi3-1"), "manyhands", "worker", ...])
        lab.cut("pi3-2")

Nothing is left behind: `down` removes what bears the lab's name, whether it is all there or not; a lab that is owned
goes down with its owner. Nothing else of the machine is touched, and no address exists outside of the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from types import TracebackType

import msgspec

from manyhands.facts.errors import BadValue, LabError, ManyhandsError
from manyhands.facts.lab import Played
from manyhands.lab import enter, groups, keeper, record, spaces
from manyhands.lab.groups import GroupStatistics
from manyhands.lab.record import Process, Record
from manyhands.lab.spaces import Spaces

DESK = enter.DESK
_KEEPER_SECONDS = 10.0


def missing() -> str:
    """Why there can be no lab here; empty where there can."""
    return spaces.missing() or groups.missing()


def labs() -> list[str]:
    """Every lab of which anything is there."""
    found = set(record.names())
    if not missing():
        found |= groups.find().labs()  # made after the record and before namespaces, removed before both
    return sorted(found)


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
    """A lab whose owner died before its keeper could see it."""
    with contextlib.suppress(ManyhandsError):
        owner = record.load(name).owner
        if owner is not None and not owner.is_alive:
            take_down(name)


def take_down(name: str) -> None:
    """Remove whatever there is of a lab: processes, groups, namespaces, record. Does not mind if nothing is."""
    if name not in labs():  # namespaces of that name, if any, are not ours
        return
    with contextlib.suppress(ManyhandsError, ProcessLookupError):
        own = record.load(name).keeper
        if own is not None and own.is_alive and own.pid != os.getpid():
            os.kill(own.pid, signal.SIGTERM)
            _wait_for_end(own)
    groups.find().remove(name)
    Spaces.down(name)
    record.forget(name)


def _wait_for_end(process: Process, limit_seconds: float = 2.0) -> None:
    end = time.monotonic() + limit_seconds
    while process.is_alive and time.monotonic() < end:
        time.sleep(0.005)
    if process.is_alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


class DeviceStatus(msgspec.Struct, frozen=True):
    """A device of a lab, now."""

    name: str
    address: str
    share: float
    cores: tuple[int, ...]
    is_cut: bool
    processes: int
    group: GroupStatistics


class Lab:
    """A lab that is up."""

    def __init__(self, known: Record) -> None:
        self.known, self.name, self.played = known, known.name, known.played
        self.spaces = Spaces(known.name, known.played.network, uses_switch=known.uses_switch)
        self.groups = groups.find()
        self._keeper: subprocess.Popen[bytes] | None = None
        """Where this process brought it up."""

    @classmethod
    def find(cls, name: str = "") -> Lab:
        """The lab of that name, or the only one."""
        if why := missing():
            raise LabError(f"There can be no lab here: {why}")
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
        """Bring it up. `owned`: it goes down with this process. `at_full_speed`: until `settle`."""
        if why := missing():
            raise LabError(f"There can be no lab here: {why}")
        name = record.lab_name(name)
        made = Spaces(name, played.network)
        known = Record(name, source or name, played, made.uses_switch, Process.of(os.getpid()) if owned else None)
        _clear_orphan(name)
        if Spaces.exists(name) and name not in labs():
            raise LabError(
                f"The network namespaces {', '.join(Spaces.names_of(name)[:3])} are there already, and no lab's.",
                hint="Give it another name: --name",
            )
        if not record.claim(known):
            raise _taken(name)
        keeper_process = None
        try:
            lab = cls(known)
            if name in lab.groups.labs():
                raise _taken(name)
            for seat in played.seats:
                share = None if at_full_speed else seat.share
                lab.groups.make(name, seat.device, share, seat.memory_bytes)
            lab.spaces.up()
            lab._keeper = keeper_process = _start_keeper(name)
            lab.known = msgspec.structs.replace(known, keeper=Process.of(keeper_process.pid))
            record.save(lab.known)
        except BaseException:
            if keeper_process is not None:
                keeper_process.kill()
                keeper_process.wait(10)
            take_down(name)
            raise
        return lab

    def down(self) -> None:
        take_down(self.name)
        if self._keeper is not None:
            self._keeper.wait(10)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Using it

    def words(self, device: str, *, only_network: bool = False) -> tuple[str, ...]:
        """What to write before a command so that it runs on a device (or in its network only), or at the desk."""
        if device != DESK:
            self.played.seat(device)
        return enter.words(self.name, device, only_network=only_network)

    def address(self, member: str) -> str:
        return self.spaces.address(member)

    def settle(self) -> None:
        """Devices get as slow as they are meant to be."""
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
    def is_kept(self) -> bool:
        """Whether the keeper is alive: without it nothing passes between devices whose links have a delay."""
        return self.known.keeper is not None and self.known.keeper.is_alive

    # Faults

    def cut(self, device: str) -> None:
        """Its cable is pulled: nobody is told."""
        self.played.seat(device)
        self.spaces.cut(device)

    def freeze(self, device: str) -> None:
        """Nothing on it runs any more, and its connections stay open."""
        self.played.seat(device)
        self.groups.freeze(self.name, device)

    def kill(self, device: str) -> None:
        """Everything on it dies at once."""
        self.played.seat(device)
        self.groups.kill(self.name, device)

    def slow(self, device: str, factor: float) -> None:
        """So much of its speed is left."""
        share = self.played.seat(device).share * factor
        if not 0 < factor <= 1:
            raise BadValue(f"{device} cannot get {factor:g} times as fast.", hint="Write 0.5 for half its speed.")
        self.groups.set_cpu(self.name, device, share)

    def heal(self, device: str) -> None:
        """Cable in, running, at its own speed. What was killed stays dead."""
        seat = self.played.seat(device)
        self.spaces.heal(device)
        self.groups.thaw(self.name, device)
        self.groups.set_cpu(self.name, device, seat.share)


def _start_keeper(name: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-P", "-m", "manyhands.lab.keeper", name]
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
        said = process.stdout.readline() if selector.select(_KEEPER_SECONDS) else b""
    if said.strip() != keeper.READY.encode():
        reason = record.log_path(name).read_text(errors="replace").strip().splitlines()
        raise LabError(f"The lab's keeper did not start: {reason[-1] if reason else 'it said nothing'}.")
    return process
