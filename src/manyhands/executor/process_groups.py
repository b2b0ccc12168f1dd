"""Process groups of torch.distributed: formed for one generation, waited for with a limit, and ended at any moment.

Devices that form sums together have a group for each purpose, since a group takes its collectives in the order in which
its members begin them:

    store of the coordinator ──addresses──▶ a group for each (gradients or rows, stage, devices) ──▶ closed with the run

Gloo (on processors) and NCCL (between GPUs) wait in native code, and only until a limit of their own. Here a thread
waits for them a moment at a time, and looks at its mailbox in between: whatever ends a wait for a message ends this
one. A group that was left waiting is ended by shutting its connections (gloo), or by its own `abort` (NCCL).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from manyhands.facts.collective_terms import CollectiveTerms
from manyhands.facts.collectives import GLOO, NCCL, NCCL_VARIABLES
from manyhands.facts.errors import BadSchedule, ManyhandsError, NotInstalled, Refused, TimedOut, WorkerLost
from manyhands.schedule.actions import Action, Reduce
from manyhands.transport.library_sockets import Place, listening, shut
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.security import is_loopback

_library: Any = distributed
"""The library, of whose names many are exported at run time alone."""
LOOK_SECONDS = 0.05
"""The time for which a thread waits inside the library before it looks at its mailbox."""
_GPU_LOOK_SECONDS = 1e-4
_END_SECONDS = 5.0
_STAMP_DIGITS, _STAMP_BASE = 4, 16
STAMP_NUMBERS = _STAMP_DIGITS * _STAMP_BASE
"""Numbers that a sum has at its end, by which the devices see that all of them formed the same one."""
_ROWS = list(range(_STAMP_DIGITS))
_STAMP_BYTES = 4
_listening = threading.Lock()
"""Held while gloo begins to listen: its address is the one that was not there before."""


class NoGroups(WorkerLost):
    """Process groups that could not be formed; the message is the network's answer, and for this device alone."""

    is_before_proof = True


class GroupKey(NamedTuple):
    """The purpose of a group, and its members in order."""

    what: str
    stage: int
    devices: tuple[str, ...]

    @classmethod
    def of(cls, reduce: Reduce) -> GroupKey:
        return cls("gradients" if reduce.what == "gradients" else "rows", reduce.stage, reduce.devices)

    def __str__(self) -> str:
        return f"{self.what} of stage {self.stage} among {', '.join(self.devices)}"


class Hosts(NamedTuple):
    """The two ends of a device's connection to the coordinator: no others are taken from anybody's message."""

    here: str
    coordinator: str


def keys_of(actions: Iterable[Action]) -> tuple[GroupKey, ...]:
    """Return the groups that a device's actions need, in the order in which every device forms its groups."""
    return tuple(sorted({GroupKey.of(action) for action in actions if isinstance(action, Reduce)}))


def available_backends() -> tuple[str, ...]:
    """Return the backends that PyTorch has here: NCCL only where it cannot end the process (confinement.py)."""
    if not distributed.is_available():
        return ()
    is_calm = all(os.environ.get(name) == value for name, value in NCCL_VARIABLES.items())
    has = {GLOO: distributed.is_gloo_available(), NCCL: distributed.is_nccl_available() and is_calm}
    return tuple(name for name, is_there in has.items() if is_there)


class ProcessGroups:
    """The process groups of one device in one generation."""

    def __init__(
        self, mailbox: Mailbox, terms: CollectiveTerms, hosts: Hosts, generation: int, keys: Sequence[GroupKey],
        torch_device: str,
    ) -> None:  # fmt: skip
        self._mailbox, self._terms, self._generation, self._keys = mailbox, terms, generation, keys
        self._hosts = hosts
        self._torch_device = torch.device(torch_device)
        self._groups: dict[GroupKey, Any] = {}
        self._here: set[Place] = set()
        """The addresses at which the library listens here."""
        self._there: set[Place] = set()
        """Those of the other devices."""
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def name(self) -> str:
        """The device's name."""
        return self._mailbox.name

    def backend_of(self, key: GroupKey) -> str:
        """Return the library's backend that moves a group's numbers."""
        return NCCL if set(key.devices) <= set(self._terms.gpu_devices) else GLOO

    def device_of(self, key: GroupKey) -> torch.device:
        """Return where a group's tensors must lie."""
        return self._torch_device if self.backend_of(key) == NCCL else torch.device("cpu")

    # Forming

    def form(self, limit_seconds: float) -> None:
        """Form all groups; return when every member of each has come. Meant for a thread of its own: an interruption
        cannot end it, though it lasts no longer than the limit, and `close` makes it fail."""
        if not self._keys:
            return
        if not is_loopback(self._hosts.here) and not self._terms.trusts_network:
            raise Refused("Process groups are not encrypted: on this network the coordinator must trust it expressly.")
        wanted = {self.backend_of(key) for key in self._keys}
        if missing := sorted(wanted - set(available_backends())):
            raise NotInstalled(
                f"The PyTorch of {self._mailbox.name}, {torch.__version__}, has no {missing[0]}.",
                hint="Install a build of PyTorch that has it, or leave out --collectives.",
            )
        limit = timedelta(seconds=limit_seconds)
        try:
            store = _library.TCPStore(
                self._hosts.coordinator, self._terms.store_port, None, False, limit, wait_for_workers=False
            )
            device = self._gloo_device(store) if GLOO in wanted else None
            for key in self._keys:
                prefix = _library.PrefixStore(f"{self._generation}/{key}", store)
                rank = key.devices.index(self._mailbox.name)
                if self.backend_of(key) == NCCL:
                    group = _nccl_group(prefix, rank, len(key.devices), limit)
                else:
                    group = _gloo_group(prefix, rank, len(key.devices), limit, device)
                self._add(key, group)
        except RuntimeError as error:
            raise NoGroups(_line(error)) from error

    def _gloo_device(self, store: Any) -> Any:
        """Return gloo's end of connections, after all devices have told each other where they listen."""
        name = self._mailbox.name
        with _listening:
            before = listening()
            device = _library.ProcessGroupGloo.create_device(hostname=self._hosts.here)
            self._here = {place for place in listening() - before if place[0] == self._hosts.here}
        store.set(f"{self._generation}/at {name}", "\n".join(f"{port} {host}" for host, port in sorted(self._here)))
        for other in sorted({other for key in self._keys for other in key.devices} - {name}):
            lines = store.get(f"{self._generation}/at {other}").decode().splitlines()
            self._there |= {(host, int(port)) for port, host in (line.split(" ", 1) for line in lines)}
        return device

    def _add(self, key: GroupKey, group: Any) -> None:
        with self._lock:
            self._groups[key] = group
            is_late = self._is_closed
        if is_late:
            self.close()
            raise WorkerLost("The run ended while its process groups were formed.")

    # Collectives

    def all_reduce(self, key: GroupKey, numbers: torch.Tensor, name: str) -> None:
        """Add up `numbers` among a group's devices, in place, in the library's order. The last STAMP_NUMBERS of them
        are the stamp's: they say afterwards whether all devices have added up `name`."""
        stamp = numbers[-STAMP_NUMBERS:].view(_STAMP_DIGITS, _STAMP_BASE)
        places = _digits(name)
        stamp.zero_()
        stamp[_ROWS, places] = 1
        options = _library.AllreduceOptions()
        options.timeout = self._limit
        self._finish(key, [self._group(key).allreduce([numbers], options)], name)
        stamp = stamp.cpu()
        if stamp[_ROWS, places].tolist() != [len(key.devices)] * _STAMP_DIGITS:
            raise self.wrong_stamp(key, name)

    def wrong_stamp(self, key: GroupKey, name: str) -> ManyhandsError:
        """Return the error of a collective whose numbers are not those of `name` on all devices."""
        if self.backend_of(key) == NCCL:  # it completes collectives that broke, too
            return WorkerLost(f"The process group for {key} broke in '{name}'.")
        return BadSchedule(
            f"The devices of a process group formed different sums together; here it was '{name}'.",
            hint="Leave out --collectives: built-in messages say what they belong to.",
        )

    def begin_all_gather(self, key: GroupKey, row: torch.Tensor, name: str) -> AllGather:
        """Begin to give a row of numbers to all devices of a group, and to receive theirs."""
        place = self.device_of(key)
        data = row.detach().contiguous().reshape(-1).view(torch.uint8).to(place)
        mine = torch.cat([_stamp_bytes(name).to(place), data])
        rows = [torch.empty_like(mine) for _ in key.devices]
        options = _library.distributed_c10d.AllgatherOptions()
        options.timeout = self._limit
        return AllGather(self, key, self._group(key).allgather([rows], [mine], options), rows, name)

    @property
    def _limit(self) -> timedelta:
        """The library's own limit: a little longer than the one that a thread waits here."""
        return timedelta(seconds=min(self._mailbox.limit_seconds + _END_SECONDS, 1e6))

    def _group(self, key: GroupKey) -> Any:
        with self._lock:
            if self._is_closed:
                raise WorkerLost("The process groups are closed: the run has ended.")
            return self._groups[key]

    def _finish(self, key: GroupKey, works: list[Any], name: str) -> None:
        """Wait for a collective, the only one of the list, which is emptied; interrupted, or without one of its
        devices, the wait ends as one for a message does. No error keeps the collective, and its group, alive."""
        work = works.pop()
        others = tuple(device for device in key.devices if device != self._mailbox.name)
        has_ended = _gpu_has_ended if self.backend_of(key) == NCCL else _has_ended
        limit_seconds = self._mailbox.limit_seconds
        until = time.monotonic() + limit_seconds
        with self._mailbox.waiting(others):
            try:
                while not has_ended(work):
                    self._mailbox.check(others)
                    if time.monotonic() > until:
                        raise TimedOut(
                            f"{self._mailbox.name} has waited {limit_seconds:g} s for '{name}' in the process group of "
                            f"{', '.join(key.devices)}.",
                            hint="A device is connected but does not get there: see its events in the run folder.",
                        )
            except RuntimeError as error:
                self._mailbox.check(others)
                reason = error.with_traceback(None)
                raise WorkerLost(f"The process group for {key} broke in '{name}': {_line(error)}") from reason
            finally:
                del work
        self._mailbox.check()

    # The end

    def close(self) -> None:
        """End all groups, whatever they wait for; returns at once. May be called from any thread, more than once."""
        with self._lock:
            self._is_closed = True
            groups = dict(self._groups)
            self._groups.clear()
        if self._here:
            shut(self._here, self._there)
        if not groups:
            return
        for key, group in groups.items():
            if self.backend_of(key) == NCCL:
                with contextlib.suppress(RuntimeError):
                    group.abort()
        # the library's destructors wait for the threads of their groups
        threading.Thread(target=groups.clear, name="closing process groups", daemon=True).start()


class AllGather:
    """An all-gather under way."""

    def __init__(self, groups: ProcessGroups, key: GroupKey, work: Any, rows: list[torch.Tensor], name: str) -> None:
        self._groups, self._key, self._works, self._rows, self._name = groups, key, [work], rows, name

    def finish(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Wait for the rows of all devices, and return them in the order of the devices."""
        self._groups._finish(self._key, self._works, self._name)
        stamp = _stamp_bytes(self._name)
        if any(not torch.equal(row[:_STAMP_BYTES].cpu(), stamp) for row in self._rows):
            raise self._groups.wrong_stamp(self._key, self._name)
        return [row[_STAMP_BYTES:].clone().view(dtype) for row in self._rows]


def _gloo_group(store: Any, rank: int, size: int, limit: timedelta, device: Any) -> Any:
    options: Any = _library.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], 1, limit
    return _library.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, limit: timedelta) -> Any:
    options: Any = _library.ProcessGroupNCCL.Options()
    options._timeout = limit
    return _library.ProcessGroupNCCL(store, rank, size, options)


def _has_ended(work: Any) -> bool:
    """Return whether a collective of gloo has ended, after waiting for a moment; raise what went wrong in it."""
    moment = timedelta(seconds=LOOK_SECONDS)
    try:
        work.wait(moment)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(moment)
    return True


def _gpu_has_ended(work: Any) -> bool:
    """Return whether a collective of NCCL has ended, well or not. Its own `wait` is not called: it makes the GPU wait,
    which a collective that broke would keep from ending."""
    if work.is_completed():
        return True
    time.sleep(_GPU_LOOK_SECONDS)
    return False


def _digits(name: str) -> list[int]:
    number = zlib.crc32(name.encode())
    return [number // _STAMP_BASE**place % _STAMP_BASE for place in range(_STAMP_DIGITS)]


def _stamp_bytes(name: str) -> torch.Tensor:
    return torch.tensor(list(zlib.crc32(name.encode()).to_bytes(_STAMP_BYTES, "big")), dtype=torch.uint8)


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300]
