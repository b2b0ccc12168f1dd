"""Data that stays where it is: silos of edges and of the server, joined by sample id (SPLIT's cross-silo setting).

Every device has some inputs, or the target, of the same samples in a file of its own. Nobody else sees them, nor does
the coordinator: it learns which samples all have (digests of ids), agrees on an order, and sends rows' numbers.
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
    """Device -> what it has."""
    example: Dataset[Any]
    """Samples as the network takes them, to capture it by; those in silos are made up."""
    samples: Dataset[Any]
    """What is fed: a sample's number stands for whatever is in a silo."""
    fingerprint: str
    """Of the samples, in their order: a run goes on with the same."""
    named: Callable[[Dataset[Any] | None], Dataset[Any] | None] = field(default=lambda data: data)
    """A data set with its inputs by name, as the network is called."""

    @property
    def has_labels_there(self) -> bool:
        return TARGET in self.holders.get(self.server, ())

    @property
    def two(self) -> Two:
        """Where there is one edge."""
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
    """Devices that have their data, and samples that all have.

    Without a cloud, `data` is divided: each device of `silos` gets a file of what it is to have, in a temporary folder,
    and a process that is given this file only. Else who has what is what the workers say (`--silo FILE`). `silos` None:
    the server has the target, or with a cloud, whatever is there.
    """
    with contextlib.ExitStack() as stack:
        if cloud is None:
            wanted = _checked(model, data, silos or {SERVER: (TARGET,)})
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manyhands-silos-")))
            assert data is not None
            files = _divided(model, data, wanted, folder)
            edges = tuple(name for name in wanted if name != SERVER) or (EDGE,)
            slow = dict.fromkeys(edges, edge_slowdown) | {SERVER: server_slowdown}
            session = stack.enter_context(_started(slow, files, folder, threads, silence_seconds, limit_seconds))
            server = SERVER
        else:
            session, edges, server = stack.enter_context(_found(cloud, say, edge_slowdown, threads, silence_seconds))
        holders = _holders(session.coordinator, (*edges, server), silos)
        edges = tuple(name for name in edges if name in holders) or edges[:1]
        found = _agreed(model, data, session, edges, server, holders)
        if say is not None:
            count = length(found.samples)
            say(f"{count:,} samples are with all of {', '.join(holders)}")
        try:
            yield found
        finally:
            session.coordinator.silos = {}


def check_again(coordinator: Coordinator, joined: JoinedSilos, data: Dataset[Any] | None) -> None:
    """Whoever came back must have the same samples; its rows may lie otherwise."""
    fingerprint, rows = agreed(_told(coordinator, tuple(joined.holders), data if _is_read(joined) else None))
    if fingerprint != joined.fingerprint:
        raise BadData(
            "A device came back with other samples than it had.", hint="Start it with the file it had, and resume."
        )
    coordinator.silos = {name: SiloContent(frozenset(own), rows[name]) for name, own in joined.holders.items()}


def _is_read(joined: JoinedSilos) -> bool:
    return isinstance(joined.samples, Samples) and joined.samples.own is not None


# Processes


@contextlib.contextmanager
def _started(
    slow: Mapping[str, float], files: Mapping[str, Path], folder: Path, threads: int, silence_seconds: float,
    limit_seconds: float,
) -> Iterator[Session]:  # fmt: skip
    """A process of this machine for each device, with its own file and no other."""
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
    """Workers that are there: the server is the one called so, or the only one that has no input."""
    if isinstance(cloud, Coordinator):
        members = [member.name for member in cloud.alive()]
        lonely = [
            name for name in members
            if (silo := cloud.members[name].facts.silo) is None or all(_is_target(one.name) for one in silo.arrays)
        ]  # fmt: skip
        server = SERVER if SERVER in members else lonely[0] if len(lonely) == 1 else ""
        if not server:
            raise BadValue(
                f"Which of {', '.join(members) or 'no workers'} joins the others' features?", hint="Name it server."
            )
        edges = tuple(sorted(name for name in members if name != server))  # who joined first is chance
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
    """Who has what, as the workers say it; where `silos` says it too, that much of it and no more."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        silo = coordinator.members[name].facts.silo
        has = tuple(one.name for one in silo.arrays) if silo is not None else ()
        wanted = has if silos is None else tuple(silos.get(name, ()))
        missing = [one for one in wanted if one not in has]
        if missing:
            raise BadValue(
                f"{name} has no {', '.join(missing)}; it has {', '.join(has) or 'no silo'}.",
                hint="Start it with its file: manyhands worker --silo FILE, manyhands split serve --silo FILE",
            )
        if wanted:
            found[name] = wanted
    if not found:
        raise BadValue(
            "No worker has data of its own.",
            hint="Start one with a file: manyhands worker --silo FILE, manyhands split serve --silo FILE",
        )
    return found


# Files


def _checked(model: nn.Module, data: Dataset[Any] | None, silos: Silos) -> dict[str, tuple[str, ...]]:
    """Who is to get what of a data set."""
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
    """Device -> a file of its own; ids are the samples' numbers, unless the data set has `ids`."""
    names = {name for own in silos.values() for name in own}
    rows: dict[str, list[numpy.ndarray]] = {name: [] for name in sorted(names)}
    for index in range(length(data)):
        inputs, target = data[index]
        values = named_inputs(model, inputs) if names - {TARGET} else {}
        for name, own in rows.items():
            own.append(numpy.asarray(target if name == TARGET else values[name]))
    arrays = {name: numpy.stack(own) for name, own in rows.items()}
    files = {device: folder / f"{device}.npz" for device in silos}
    for device, path in files.items():
        write_silo(path, ids_of(data), {name: arrays[name] for name in silos[device]})
    return files


def ids_of(data: Dataset[Any]) -> Sequence[Any]:
    """Of a data set that has none: the samples' numbers."""
    own = getattr(data, "ids", None)
    return range(length(data)) if own is None else list(own)


# Samples


def _told(coordinator: Coordinator, names: Sequence[str], own: Dataset[Any] | None) -> dict[str, bytes]:
    """Digests of everybody's ids; the order is that of the data at hand, or else of the first device's."""
    told = {} if own is None else {COORDINATOR: digests_of(ids_of(own))}
    return told | ask_ids(coordinator, names)


def _agreed(
    model: nn.Module, data: Dataset[Any] | None, session: Session, edges: tuple[str, ...], server: str,
    holders: dict[str, tuple[str, ...]],
) -> JoinedSilos:  # fmt: skip
    coordinator = session.coordinator
    away = {name for own in holders.values() for name in own}
    inputs = sorted(name for name in away if not _is_target(name))
    taken = set(inspect.signature(model.forward).parameters)
    strange = [name for name in inputs if name not in taken]
    if strange:
        raise BadValue(
            f"A silo has {', '.join(strange)}; {type(model).__name__} takes {', '.join(sorted(taken))} and a {TARGET}."
        )
    own = data if _kept_here(model, data, inputs) or TARGET not in away else None
    wanted = {*_required(model), TARGET}
    if own is None and not wanted <= away:
        lacking = ", ".join(sorted(wanted - away))
        raise BadValue(f"No silo has {lacking}, and no data set was given.", hint="Look at the files of --silo.")
    fingerprint, rows = agreed(_told(coordinator, tuple(holders), own))
    coordinator.silos = {name: SiloContent(frozenset(names), rows[name]) for name, names in holders.items()}
    entries: dict[str, TensorEntry] = {}
    for name in holders:
        silo = coordinator.members[name].facts.silo
        assert silo is not None
        for entry in silo.arrays:
            _check_entry(name, entry)
            known = entries.setdefault(entry.name, entry)
            if (known.shape, known.dtype) != (entry.shape, entry.dtype) and entry.name in holders[name]:
                raise BadData(f"{name} has {entry.name} of shape {entry.shape}; another has {known.shape}.")
    count = len(next(iter(rows.values())))
    places = rows.get(COORDINATOR)
    parts = Parts(model, tuple(inputs), TARGET in away, own, places, count)
    return JoinedSilos(
        session, edges, server, holders, Examples(parts, entries), Samples(parts), fingerprint,
        named=lambda given: Named(model, given) if given is not None and inputs else given,
    )  # fmt: skip


def _check_entry(device: str, entry: TensorEntry) -> None:
    """What a worker says of a sample, before memory is taken for one."""
    is_known = entry.dtype in DTYPE_BYTES and all(extent >= 0 for extent in entry.shape)
    if not is_known or math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] > MOST_SAMPLE_BYTES:
        raise BadData(
            f"{device} says that one sample of its {entry.name:.60} is {entry.dtype:.20}{list(entry.shape)[:8]}; at "
            f"most {format_bytes(MOST_SAMPLE_BYTES)} of numbers are taken."
        )


def check_resumed(folder: Path, joined: JoinedSilos) -> None:
    """A run goes on with the samples it had."""
    known = read_config(folder).get("ids")
    if known != joined.fingerprint:
        raise BadValue(
            f"{folder} was trained on other samples, or in another order, than the silos have now.",
            hint="Give the files it had, or start a new run.",
        )


def _required(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in parameters if one.default is one.empty and one.kind in plain]


def _kept_here(model: nn.Module, data: Dataset[Any] | None, away: Sequence[str]) -> set[str]:
    """Inputs that no silo has."""
    if data is None:
        return set()
    return set(named_inputs(model, data[0][0])) - set(away)
