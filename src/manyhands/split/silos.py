"""Data that stays where it is: silos of edges and of the server, joined by sample id (SPLIT's cross-silo setting).

Every device has some inputs, or the target, of the same samples in a file of its own. No other device sees them, nor
does the coordinator: it learns which samples all have (by digests of ids), agrees on an order, and sends row numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from manyhands.data.loader import length
from manyhands.data.silo import TARGET, SiloContent, agreed, digests_of, write_silo
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.network import DTYPE_BYTES
from manyhands.facts.units import format_bytes
from manyhands.runtime.assembly import JOIN_SECONDS
from manyhands.runtime.control_parts import TensorEntry
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.heartbeats import heartbeat_interval
from manyhands.runtime.measuring import ask_ids
from manyhands.runtime.processes import WorkerProcess
from manyhands.runtime.record import read_config
from manyhands.session.session import Say, Session
from manyhands.split.session import EDGE, LOCAL_SILENCE_SECONDS, SERVER, Cloud, Two, open_two
from manyhands.split.silo_samples import Examples, Named, Parts, Samples, named_inputs

Silos = Mapping[str, Sequence[str]]
"""Device -> the inputs that it has, by name, or "target"."""
MOST_SAMPLE_BYTES = 2**28


@dataclass(frozen=True)
class JoinedSilos:
    """Devices with data of their own, and what the coordinator knows of the samples that all of them have."""

    session: Session
    edges: tuple[str, ...]
    server: str
    holders: dict[str, tuple[str, ...]]
    """Device -> the inputs that it has, or "target"."""
    example: Dataset[Any]
    """Samples as the network takes them, to capture it by; those in silos are made up."""
    samples: Dataset[Any]
    """The samples that are fed: a sample's number stands for whatever is in a silo."""
    fingerprint: str
    """The fingerprint of the samples in their order: a resumed run must have the same."""
    named: Callable[[Dataset[Any] | None], Dataset[Any] | None] = field(default=lambda data: data)
    """Returns a data set with its inputs by name, as the network is called."""

    @property
    def has_labels_there(self) -> bool:
        return TARGET in self.holders.get(self.server, ())

    @property
    def two(self) -> Two:
        """The two ends, where there is one edge."""
        return Two(self.session, self.edges[0], self.server)


@contextlib.contextmanager
def joined(
    model: nn.Module,
    data: Dataset[Any] | None,
    silos: Silos | None,
    *,
    cloud: Cloud | Two | Coordinator | None = None,
    edge_slowdown: float = 1.0,
    server_slowdown: float = 1.0,
    threads: int = 1,
    say: Say | None = None,
    silence_seconds: float = LOCAL_SILENCE_SECONDS,
    limit_seconds: float = JOIN_SECONDS,
) -> Iterator[JoinedSilos]:
    """Yield devices that have their data, and the samples that all of them have.

    Without a cloud, `data` is divided: each device of `silos` gets a file of what it is to have, in a temporary folder,
    and a process that is given only this file. With a cloud, the workers say what each has (`--silo FILE`). `silos`
    None: the server has the target or, with a cloud, the devices have whatever their files hold.
    """
    with contextlib.ExitStack() as stack:
        if cloud is None:
            assigned = _checked(model, data, silos or {SERVER: (TARGET,)})
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-silos-")))
            assert data is not None
            files = _divided(model, data, assigned, folder)
            edges = tuple(name for name in assigned if name != SERVER) or (EDGE,)
            slow = dict.fromkeys(edges, edge_slowdown) | {SERVER: server_slowdown}
            session = stack.enter_context(_started(slow, files, folder, threads, silence_seconds, limit_seconds))
            server = SERVER
        else:
            session, edges, server = stack.enter_context(_found(cloud, say, edge_slowdown, threads, silence_seconds))
        holders = _holders(session.coordinator, (*edges, server), silos)
        edges = tuple(name for name in edges if name in holders) or edges[:1]
        result = _agreed(model, data, session, edges, server, holders)
        if say is not None:
            count = length(result.samples)
            say(f"{count:,} samples are with all of {', '.join(holders)}")
        try:
            yield result
        finally:
            session.coordinator.silos = {}


def check_again(coordinator: Coordinator, joined: JoinedSilos, data: Dataset[Any] | None) -> None:
    """Check that a device that came back has the same samples; its rows may be in another order."""
    fingerprint, rows = agreed(_told(coordinator, tuple(joined.holders), data if _is_read(joined) else None))
    if fingerprint != joined.fingerprint:
        raise BadData(
            "A device came back with other samples than it had.", hint="Start it with the file it had, and resume."
        )
    coordinator.silos = {name: SiloContent(frozenset(inputs), rows[name]) for name, inputs in joined.holders.items()}


def _is_read(joined: JoinedSilos) -> bool:
    return isinstance(joined.samples, Samples) and joined.samples.own is not None


# Processes


@contextlib.contextmanager
def _started(
    slow: Mapping[str, float], files: Mapping[str, Path], folder: Path, threads: int, silence_seconds: float,
    limit_seconds: float,
) -> Iterator[Session]:  # fmt: skip
    """Yield a session with a process of this machine for each device, with its own file and no other."""
    with Coordinator(
        logs=folder / "workers",
        heartbeat_timeout_seconds=silence_seconds,
        heartbeat_seconds=heartbeat_interval(silence_seconds),
    ) as coordinator:
        workers = [
            WorkerProcess((name,), slowdown=factor, silo=str(files[name]) if name in files else "")
            for name, factor in slow.items()
        ]
        coordinator.wanted = set(slow)
        coordinator.start_workers(workers, threads, limit_seconds)
        yield _session(coordinator, tuple(slow), threads)


def _session(coordinator: Coordinator, names: Sequence[str], threads: int) -> Session:
    devices = tuple(coordinator.members[name].device for name in names)
    cluster = Cluster.local(1).with_devices("silos", devices)
    return Session(coordinator, cluster, False, threads, has_links=True, kind="split-")


@contextlib.contextmanager
def _found(
    cloud: Cloud | Two | Coordinator, say: Say | None, edge_slowdown: float, threads: int, silence_seconds: float
) -> Iterator[tuple[Session, tuple[str, ...], str]]:
    """Yield a session of workers that have joined, the edges and the server.

    The server is the worker called so, or the only one that has no input.
    """
    if isinstance(cloud, Coordinator):
        members = [member.name for member in cloud.alive()]
        lonely = [
            name for name in members
            if (silo := cloud.members[name].facts.silo) is None or all(_is_target(array.name) for array in silo.arrays)
        ]  # fmt: skip
        server = SERVER if SERVER in members else lonely[0] if len(lonely) == 1 else ""
        if not server:
            raise BadValue(
                f"Which of {', '.join(members) or 'no workers'} joins the others' features?", hint="Name it server."
            )
        edges = tuple(sorted(name for name in members if name != server))  # the order of joining is chance
        if not edges:
            raise BadValue(f"Only {server} has joined.", hint="On each edge: manyhands worker --silo FILE --name NAME")
        yield _session(cloud, (*edges, server), 0), edges, server
    elif isinstance(cloud, Two):
        yield cloud.session, (cloud.edge,), cloud.server
    else:
        with open_two(
            cloud, edge_slowdown=edge_slowdown, threads=threads, say=say, silence_seconds=silence_seconds
        ) as two:
            yield two.session, (two.edge,), two.server


def _is_target(name: str) -> bool:
    return name == TARGET or name.startswith(f"{TARGET}.")


def _holders(coordinator: Coordinator, names: Sequence[str], silos: Silos | None) -> dict[str, tuple[str, ...]]:
    """Return what each device has, as the workers say; where `silos` says it too, that much of it and no more."""
    holders: dict[str, tuple[str, ...]] = {}
    for name in names:
        silo = coordinator.members[name].facts.silo
        has = tuple(array.name for array in silo.arrays) if silo is not None else ()
        inputs = has if silos is None else tuple(silos.get(name, ()))
        missing = [input_name for input_name in inputs if input_name not in has]
        if missing:
            raise BadValue(
                f"{name} has no {', '.join(missing)}; it has {', '.join(has) or 'no silo'}.",
                hint="Start it with its file: manyhands worker --silo FILE, manyhands split serve --silo FILE",
            )
        if inputs:
            holders[name] = inputs
    if not holders:
        raise BadValue(
            "No worker has data of its own.",
            hint="Start one with a file: manyhands worker --silo FILE, manyhands split serve --silo FILE",
        )
    return holders


# Files


def _checked(model: nn.Module, data: Dataset[Any] | None, silos: Silos) -> dict[str, tuple[str, ...]]:
    """Return which device is to get which parts of a data set."""
    if data is None or not length(data):
        raise BadValue("There is no data to divide among the silos.", hint="Give a data set, or workers with silos.")
    inputs, target = data[0]
    has = set(named_inputs(model, inputs))
    if TARGET in has:
        raise BadValue(f"{type(model).__name__} has an input called {TARGET}; that is what silos call the loss'.")
    if not isinstance(target, (torch.Tensor, int, float)):
        raise BadValue(f"Targets are a {type(target).__name__}; one that is in a silo must be a tensor.")
    for device, names in silos.items():
        strange = [name for name in names if name not in {*has, TARGET}]
        if strange or isinstance(names, str) or not names:
            raise BadValue(
                f"silos['{device}'] is {names!r:.80}; it must name some of {', '.join(sorted(has))}, {TARGET}.",
                hint=f'Write silos={{"edge-a": ("{min(has)}",), "server": ("target",)}}.',
            )
    if SERVER not in silos and len(silos) < 2:
        raise BadValue("A split with silos has a server, and one edge or more.", hint='Name "server", or two edges.')
    return {device: tuple(names) for device, names in silos.items()}


def _divided(
    model: nn.Module, data: Dataset[Any], silos: Mapping[str, tuple[str, ...]], folder: Path
) -> dict[str, Path]:
    """Write a file of its own for each device, and return device -> file.

    Ids are the samples' numbers, unless the data set has `ids`.
    """
    names = {name for inputs in silos.values() for name in inputs}
    rows: dict[str, list[numpy.ndarray]] = {name: [] for name in sorted(names)}
    for index in range(length(data)):
        inputs, target = data[index]
        values = named_inputs(model, inputs) if names - {TARGET} else {}
        for name, column in rows.items():
            column.append(numpy.asarray(target if name == TARGET else values[name]))
    arrays = {name: numpy.stack(column) for name, column in rows.items()}
    files = {device: folder / f"{device}.npz" for device in silos}
    for device, path in files.items():
        write_silo(path, ids_of(data), {name: arrays[name] for name in silos[device]})
    return files


def ids_of(data: Dataset[Any]) -> Sequence[Any]:
    """Return the ids of a data set; of one that has none, the samples' numbers."""
    ids = getattr(data, "ids", None)
    return range(length(data)) if ids is None else list(ids)


# Samples


def _told(coordinator: Coordinator, names: Sequence[str], data: Dataset[Any] | None) -> dict[str, bytes]:
    """Return digests of every device's ids; the order is that of the data at hand, or else of the first device's."""
    digests = {} if data is None else {COORDINATOR: digests_of(ids_of(data))}
    return digests | ask_ids(coordinator, names)


def _agreed(
    model: nn.Module, data: Dataset[Any] | None, session: Session, edges: tuple[str, ...], server: str,
    holders: dict[str, tuple[str, ...]],
) -> JoinedSilos:  # fmt: skip
    coordinator = session.coordinator
    away = {name for names in holders.values() for name in names}
    inputs = sorted(name for name in away if not _is_target(name))
    parameters = set(inspect.signature(model.forward).parameters)
    strange = [name for name in inputs if name not in parameters]
    if strange:
        raise BadValue(
            f"A silo has {', '.join(strange)}; {type(model).__name__} takes {', '.join(sorted(parameters))} "
            f"and a {TARGET}."
        )
    at_hand = data if _kept_here(model, data, inputs) or TARGET not in away else None
    required = {*_required(model), TARGET}
    if at_hand is None and not required <= away:
        lacking = ", ".join(sorted(required - away))
        raise BadValue(f"No silo has {lacking}, and no data set was given.", hint="Look at the files of --silo.")
    fingerprint, rows = agreed(_told(coordinator, tuple(holders), at_hand))
    coordinator.silos = {name: SiloContent(frozenset(names), rows[name]) for name, names in holders.items()}
    entries: dict[str, TensorEntry] = {}
    for name in holders:
        silo = coordinator.members[name].facts.silo
        assert silo is not None
        for entry in silo.arrays:
            _check_entry(name, entry)
            earlier = entries.setdefault(entry.name, entry)
            if (earlier.shape, earlier.dtype) != (entry.shape, entry.dtype) and entry.name in holders[name]:
                raise BadData(f"{name} has {entry.name} of shape {entry.shape}; another has {earlier.shape}.")
    count = len(next(iter(rows.values())))
    places = rows.get(COORDINATOR)
    parts = Parts(model, tuple(inputs), TARGET in away, at_hand, places, count)
    return JoinedSilos(
        session, edges, server, holders, Examples(parts, entries), Samples(parts), fingerprint,
        named=lambda dataset: Named(model, dataset) if dataset is not None and inputs else dataset,
    )  # fmt: skip


def _check_entry(device: str, entry: TensorEntry) -> None:
    """Check what a worker says of a sample, before memory is allocated for one."""
    is_known = entry.dtype in DTYPE_BYTES and all(extent >= 0 for extent in entry.shape)
    if not is_known or math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] > MOST_SAMPLE_BYTES:
        raise BadData(
            f"{device} says that one sample of its {entry.name:.60} is {entry.dtype:.20}{list(entry.shape)[:8]}; at "
            f"most {format_bytes(MOST_SAMPLE_BYTES)} of numbers are taken."
        )


def check_resumed(folder: Path, joined: JoinedSilos) -> None:
    """Check that a run goes on with the samples it had."""
    stored = read_config(folder).get("ids")
    if stored != joined.fingerprint:
        raise BadValue(
            f"{folder} was trained on other samples, or in another order, than the silos have now.",
            hint="Give the files it had, or start a new run.",
        )


def _required(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [entry.name for entry in parameters if entry.default is entry.empty and entry.kind in plain]


def _kept_here(model: nn.Module, data: Dataset[Any] | None, away: Sequence[str]) -> set[str]:
    """Return the inputs that no silo has."""
    if data is None:
        return set()
    return set(named_inputs(model, data[0][0])) - set(away)
