"""The devices, and the links between them: frozen facts, read from what a person writes.

    name: home
    devices:
      - {name: laptop, kind: laptop}
      - {kind: pi4, count: 2}                                  # pi4-1, pi4-2
      - {name: nano, kind: jetson-nano, memory: 3 GB, gflops: 60, port: 100 Mbit/s}
    link: {rate: 100 Mbit/s, delay: 1 ms}                      # any pair not named below
    links:
      - {from: laptop, to: pi4-1, rate: 1 Gbit/s}              # one direction
      - {between: [laptop, nano], delay: 2 ms}             # both; rate as above

Device fields and their units are the table `_DEVICE` below; what is left out comes from the catalogue.
"""

from __future__ import annotations

import contextlib
import math
import re
import reprlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.facts.catalogue import CATALOGUE, catalogue_key
from manyhands.facts.errors import BadFile, BadValue, UnknownName, did_you_mean, unknown
from manyhands.facts.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:
    from manyhands.facts.lab import LabCluster

MOST_DEVICES = 10_000
MOST_OF_ANYTHING = 1e18  # FLOP/s in billions, bytes, seconds, watts: beyond this it is a slip of the pen
UNLIMITED = "unlimited"
UNLISTED_KINDS = ("custom", "local")  # kinds whose numbers do not come from the catalogue
NAME_HINT = "Use 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit; quote a bare number."
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # lists within lists are cut short
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Link(msgspec.Struct, frozen=True):
    """One direction between two devices: a rate, and the one-way delay before the first byte arrives."""

    bytes_per_second: float
    delay_seconds: float

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            raise BadValue(f"A link's rate is {self.bytes_per_second} B/s; it must be > 0.")
        if not 0 <= self.delay_seconds < math.inf:
            raise BadValue(f"A link's delay is {self.delay_seconds} s; it must be finite and >= 0.")

    def seconds(self, byte_count: float) -> float:
        """From the first byte sent to the last received, on an idle link."""
        return self.delay_seconds + byte_count / self.bytes_per_second


HERE = Link(math.inf, 0.0)  # from a device to itself


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: how fast it trains, what it holds, what it draws, and the port that all its traffic shares."""

    name: str
    kind: str = "custom"  # a key of the catalogue, "local" or "custom"
    gflops: float  # sustained in float32 training; 1 multiply-accumulate = 2 FLOP
    memory_bytes: int
    memory_bytes_per_second: float = 5e9
    cores: int = 1
    operator_seconds: float = 50e-6  # fixed cost of starting one operator
    watts_active: float = 0.0  # while computing
    watts_idle: float = 0.0
    watts_transfer: float = 0.0  # added while sending or receiving
    up_bytes_per_second: float = math.inf
    down_bytes_per_second: float = math.inf
    host: str = ""  # the device whose port it shares, as one of several workers there; empty: its own
    copy_seconds_per_gigabyte: float = 0.0  # of computing lost to sending or receiving; 0: other cores see to it
    message_seconds: float = 0.0  # of computing lost to each message sent or received, however small
    compute: str = "cpu"  # what a worker on it computes with: cpu, cuda or cuda:1
    estimated: bool = True  # False once the numbers were measured on this very device
    source: str = ""  # where the numbers come from

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadValue(f"'{self.name:.80}' cannot name a device.", hint=NAME_HINT)
        if self.host and not _NAME.fullmatch(self.host):
            raise BadValue(f"{self.name}: host '{self.host:.80}' cannot name a device.", hint=NAME_HINT)
        for field in ("gflops", "memory_bytes", "memory_bytes_per_second", "cores"):
            self._check(field, above_zero=True)
        for field in ("operator_seconds", "copy_seconds_per_gigabyte", "message_seconds"):
            self._check(field, above_zero=False)
        for field in ("watts_active", "watts_idle", "watts_transfer"):
            self._check(field, above_zero=False)
        for field in ("up_bytes_per_second", "down_bytes_per_second"):
            self._check(field, above_zero=True, most=math.inf)

    @property
    def host_name(self) -> str:
        """Whose port its traffic passes. Between devices of one host there is no port."""
        return self.host or self.name

    def _check(self, field: str, *, above_zero: bool, most: float = MOST_OF_ANYTHING) -> None:
        value = getattr(self, field)
        if not (value > 0 or (value == 0 and not above_zero)) or not value <= most:
            sign = ">" if above_zero else ">="
            raise BadValue(f"{self.name}: {field} is {value}; it must be {sign} 0 and <= {most:g}.")


class DirectedLink(msgspec.Struct, frozen=True):
    """The link from one device to another, where it differs from the cluster's default."""

    sender: str
    receiver: str
    link: Link


class Cluster(msgspec.Struct, frozen=True, dict=True):
    """Devices in order, the link between any two, and the pairs where it differs."""

    name: str
    devices: tuple[Device, ...]
    link: Link = HERE
    links: tuple[DirectedLink, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MOST_DEVICES:
            raise BadValue(f"devices: there are {len(self.devices)}; there must be 1 to {MOST_DEVICES}.")
        seen: set[str] = set()
        for device in self.devices:
            if device.name in seen:
                hint = "Give each its own name, or write one entry with a count."
                raise BadValue(f"devices: two devices have the name '{device.name}'.", hint=hint)
            seen.add(device.name)
        pairs: set[tuple[str, str]] = set()
        for one in self.links:
            for end in (one.sender, one.receiver):
                if end not in seen:
                    raise unknown("device", end, seen)
            pair = (one.sender, one.receiver)
            if pair in pairs or one.sender == one.receiver:
                what = "is written twice" if pair in pairs else "leads back to itself"
                raise BadValue(f"links: the link from '{one.sender}' to '{one.receiver}' {what}.")
            pairs.add(pair)
        if any(device.host for device in self.devices):
            self._check_hosts()

    def _check_hosts(self) -> None:
        """What the devices of one host share, they give one rate: its port, and its link to another host."""
        ports: dict[str, Device] = {}
        for device in self.devices:
            first = ports.setdefault(device.host_name, device)
            for field in ("up_bytes_per_second", "down_bytes_per_second"):
                if getattr(device, field) != getattr(first, field):
                    hint = f"Write the whole port's rate for each device of {device.host_name}."
                    raise BadValue(
                        f"devices: '{first.name}' and '{device.name}' share one port; {field} differs.", hint=hint
                    )
        sizes = Counter(device.host_name for device in self.devices)
        written: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for one in self.links:
            hosts = self.device(one.sender).host_name, self.device(one.receiver).host_name
            if hosts[0] != hosts[1]:
                written[hosts].append(one.link.bytes_per_second)
        for (a, b), rates in written.items():
            left_out = [self.link.bytes_per_second] if len(rates) < sizes[a] * sizes[b] else []
            if len({*rates, *left_out}) > 1:
                hint = "Write it with the same rate for every pair of their devices."
                raise BadValue(f"links: from {a} to {b} there is one link, but its rate differs.", hint=hint)

    # Built at the first question, so that a thousand devices cost a dictionary and not a search.

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], Link]:
        return {(one.sender, one.receiver): one.link for one in self.links}

    def device(self, name: str) -> Device:
        found = self._by_name.get(name)
        if found is None:
            raise unknown("device", name, self.names)
        return found

    def link_between(self, sender: str, receiver: str) -> Link:
        """The link from `sender` to `receiver`. To itself a device moves nothing: no limit, no delay."""
        link = self._by_pair.get((sender, receiver))
        if link is not None:
            return link
        same = self.device(sender) is self.device(receiver)
        return HERE if same else self.link

    def bytes_per_second_between(self, sender: str, receiver: str) -> float:
        """What one transfer alone gets: the least of the link, the sender's port up and the receiver's port down.

        Inside a host it passes no port.
        """
        rate, a, b = self.link_between(sender, receiver).bytes_per_second, self.device(sender), self.device(receiver)
        return rate if a.host_name == b.host_name else min(rate, a.up_bytes_per_second, b.down_bytes_per_second)

    def with_link(self, link: Link, pair: tuple[str, str] | None = None) -> Cluster:
        """The same devices with another default link, or with another link from pair[0] to pair[1]."""
        if pair is None:
            return Cluster(self.name, self.devices, link, self.links)
        kept = tuple(one for one in self.links if (one.sender, one.receiver) != pair)
        return Cluster(self.name, self.devices, self.link, (*kept, DirectedLink(*pair, link)))

    def with_devices(self, name: str, devices: tuple[Device, ...]) -> Cluster:
        """Other devices, joined by the same default link."""
        return Cluster(name, devices, self.link)

    def without(self, name: str) -> Cluster:
        """The cluster after `name` has left."""
        gone = self.device(name)
        devices = tuple(device for device in self.devices if device is not gone)
        links = tuple(one for one in self.links if name not in (one.sender, one.receiver))
        return Cluster(self.name, devices, self.link, links)

    @classmethod
    def local(
        cls,
        count: int,
        *,
        gflops: float = 50.0,
        memory_bytes: int = 4 * 10**9,
        memory_bytes_per_second: float = 10e9,
        cores: int = 1,
        operator_seconds: float = 20e-6,
        bytes_per_second: float = 3e9,
        delay_seconds: float = 60e-6,
        estimated: bool = True,
        gpus: int = 0,
    ) -> Cluster:
        """`count` workers on this machine, the first `gpus` of them each on a GPU, joined by loopback."""
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DEVICES:
            raise BadValue(f"local: {count!r} workers asked for; it must be 1 to {MOST_DEVICES}.")
        devices = tuple(
            Device(
                name=f"local-{number}", kind="local", gflops=gflops, memory_bytes=memory_bytes,
                memory_bytes_per_second=memory_bytes_per_second, cores=cores, operator_seconds=operator_seconds,
                estimated=estimated, source="A worker on this machine.",
                compute=f"cuda:{number - 1}" if number <= gpus else "cpu",
            )
            for number in range(1, count + 1)
        )  # fmt: skip
        return cls(f"local:{count}", devices, Link(bytes_per_second, delay_seconds))

    @staticmethod
    def lab(
        cluster: Cluster | str,
        *,
        scale: float | None = None,
        slots: int = 1,
        traces: Mapping[str, str] | None = None,
    ) -> LabCluster:
        """A cluster, or the preset of that name, to be played on this machine: mh.train(..., cluster=Cluster.lab(...)).

        `scale`: everything so many times slower than in life. `slots`: workers on each device. `traces`: device ->
        file of recorded rates, which its port follows.
        """
        from manyhands.facts.lab import LabCluster
        from manyhands.facts.presets import preset

        real = preset(cluster) if isinstance(cluster, str) else cluster
        return LabCluster(real, scale, slots, tuple((traces or {}).items()))

    @classmethod
    def from_dict(cls, raw: object) -> Cluster:
        """The cluster in a document a person wrote; see the top of this file. An error names the field's path."""
        document = _mapping(raw, "", ("name", "devices", "link", "links"))
        entries = _list(document.get("devices"), "devices", "{kind: pi4, count: 2}")
        read = (device for index, entry in enumerate(entries) for device in _read_devices(entry, f"devices[{index}]"))
        devices = tuple(islice(read, MOST_DEVICES + 1))
        unlinked = cls(_text(document.get("name", "cluster"), "name"), devices)  # duplicates are found here
        lone = len(devices) == 1 and "link" not in document
        default = _write_link(HERE) if lone else _mapping(document.get("link"), "link", ("rate", "delay"))
        link = _read_link(default, "link")
        links: list[DirectedLink] = []
        for index, entry in enumerate(_list(document.get("links", []), "links", "{from: a, to: b, rate: 1 Gbit/s}")):
            links.extend(_read_override(entry, f"links[{index}]", default, unlinked))
        return cls(unlinked.name, devices, link, tuple(links))

    def to_dict(self) -> dict[str, object]:
        """A plain document that `from_dict` reads back to an equal cluster."""
        links = [{"from": one.sender, "to": one.receiver, **_write_link(one.link)} for one in self.links]
        devices = [_write_device(device) for device in self.devices]
        document: dict[str, object] = {"name": self.name, "devices": devices, "link": _write_link(self.link)}
        return {**document, "links": links} if links else document


# ---- Reading and writing what a person writes. `path` is where in the document: devices[1].kind


def _show(value: object) -> str:
    """A short repr: a document may hold anything, of any size."""
    with contextlib.suppress(ValueError):
        return _SHORT.repr(value)
    return "a number of thousands of digits"


def _mapping(value: object, path: str, known: Iterable[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        what = "is missing or empty" if value is None else f"{_show(value)} is not a set of 'field: value'"
        raise BadFile(f"{path or 'cluster'}: {what}.", hint=f"Fields: {', '.join(known)}")
    for key in value:
        if key not in known:
            shown = _show(key).strip("'")
            where = f"{path}.{shown}" if path else shown
            raise UnknownName(f"{where}: there is no such field.", hint=did_you_mean(shown, known))
    return value


def _list(value: object, path: str, example: str) -> list[object]:
    if not isinstance(value, list):
        what = "is missing" if value is None else f"{_show(value)} is not a list"
        raise BadFile(f"{path}: {what}.", hint=f"Write it like {path}: [{example}]")
    return value


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise BadValue(f"{path}: {_show(value)} must be a text.", hint="Put it in quotes.")
    return value


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise BadValue(f"{path}: {_show(value)} must be true or false.")
    return value


def _amount(value: object, path: str, parse: Callable[[float | str, str], float], *, zero: bool = False) -> float:
    """A quantity through one of units.py's parsers, within limits nobody will miss."""
    amount = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            amount = parse(value, path) if len(str(value)) <= 60 else math.nan
    if not (amount > 0 or (amount == 0 and zero)) or not amount <= MOST_OF_ANYTHING:
        raise BadValue(f"{path}: {_show(value)} must be {'>=' if zero else '>'} 0 and <= {MOST_OF_ANYTHING:g}.")
    return amount


def _plain(value: float | str, path: str) -> float:
    return float(value)


_finite_rate = partial(_amount, parse=parse_rate)
_seconds = partial(_amount, parse=parse_seconds, zero=True)
_size = partial(_amount, parse=parse_bytes)
_speed = partial(_amount, parse=_plain)
_watts = partial(_amount, parse=_plain, zero=True)


def _rate(value: object, path: str) -> float:
    return math.inf if value == UNLIMITED else _finite_rate(value, path)


def _host(value: object, path: str) -> str:
    if not isinstance(value, str) or (value and not _NAME.fullmatch(value)):
        raise BadValue(f"{path}: {_show(value)} cannot name a device.", hint=NAME_HINT)
    return value


def _count(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DEVICES:
        raise BadValue(f"{path}: {_show(value)} must be a whole number from 1 to {MOST_DEVICES}.")
    return value


def _exact(value: float, write: Callable[[float], str], parse: Callable[[str], float], unit: str) -> str:
    """The way a person writes it if nothing is lost, else every digit."""
    if value == math.inf:
        return UNLIMITED
    return write(value) if parse(write(value)) == value else f"{value!r} {unit}"


_write_rate = partial(_exact, write=format_rate, parse=parse_rate, unit="B/s")
_write_seconds = partial(_exact, write=format_seconds, parse=parse_seconds, unit="s")
_write_size = partial(_exact, write=format_bytes, parse=parse_bytes, unit="B")


# field in the document: (field of Device, reader, writer)
def _compute(value: object, path: str) -> str:
    text = _text(value, path)
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", text):
        raise BadFile(f"{path}: '{text:.40}' is not something to compute with.", hint="Write cpu, cuda or cuda:1.")
    return text


_DEVICE: dict[str, tuple[str, Callable[[object, str], object], Callable[[Any], object]]] = {
    "gflops": ("gflops", _speed, float),
    "memory": ("memory_bytes", _size, _write_size),
    "memory_rate": ("memory_bytes_per_second", _finite_rate, _write_rate),
    "cores": ("cores", _count, int),
    "operator_time": ("operator_seconds", _seconds, _write_seconds),
    "watts_active": ("watts_active", _watts, float),
    "watts_idle": ("watts_idle", _watts, float),
    "watts_transfer": ("watts_transfer", _watts, float),
    "up": ("up_bytes_per_second", _rate, _write_rate),
    "down": ("down_bytes_per_second", _rate, _write_rate),
    "host": ("host", _host, str),
    "copy_time": ("copy_seconds_per_gigabyte", _seconds, _write_seconds),
    "message_time": ("message_seconds", _seconds, _write_seconds),
    "compute": ("compute", _compute, str),
    "estimated": ("estimated", _flag, bool),
    "source": ("source", _text, str),
}


def _read_devices(raw: object, path: str) -> Iterator[Device]:
    """The devices of one entry: one, or `count` of them numbered from 1."""
    entry = _mapping(raw, path, ("name", "kind", "count", "port", *_DEVICE))
    written_kind = _text(entry.get("kind", "custom"), f"{path}.kind")
    facts: dict[str, Any] = {}
    if written_kind in UNLISTED_KINDS:
        kind = written_kind
        for needed in ("gflops", "memory"):
            if needed not in entry:
                hint = f"Write {needed}, or a kind from the catalogue: {', '.join(CATALOGUE)}"
                raise BadFile(f"{path}.{needed}: is missing, and kind '{kind}' does not say it.", hint=hint)
    else:
        kind = catalogue_key(written_kind, f"{path}.kind")
        facts = msgspec.structs.asdict(CATALOGUE[kind])
        del facts["title"]
        port = facts.pop("port_bytes_per_second")
        facts.update(up_bytes_per_second=port, down_bytes_per_second=port)
        given = [field for field in entry if field in _DEVICE or field == "port"]
        facts["source"] += f" Given by hand: {', '.join(given)}." if given else ""
    if "port" in entry:
        port = _rate(entry["port"], f"{path}.port")
        facts.update(up_bytes_per_second=port, down_bytes_per_second=port)
    for field, (attribute, read, _) in _DEVICE.items():
        if field in entry:
            facts[attribute] = read(entry[field], f"{path}.{field}")
    name = entry.get("name", written_kind)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadValue(f"{path}.name: {_show(name)} cannot name a device.", hint=NAME_HINT)
    count = _count(entry["count"], f"{path}.count") if "count" in entry else None
    for numbered in [name] if count is None else [f"{name}-{number}" for number in range(1, count + 1)]:
        yield Device(name=numbered, kind=kind, **facts)


def _write_device(device: Device) -> dict[str, object]:
    document: dict[str, object] = {"name": device.name, "kind": device.kind}
    return document | {field: write(getattr(device, attribute)) for field, (attribute, _, write) in _DEVICE.items()}


def _write_link(link: Link) -> dict[str, object]:
    return {"rate": _write_rate(link.bytes_per_second), "delay": _write_seconds(link.delay_seconds)}


def _read_link(entry: Mapping[str, object], path: str) -> Link:
    for field in ("rate", "delay"):
        if field not in entry:
            raise BadFile(f"{path}.{field}: is missing.", hint="Write it like link: {rate: 100 Mbit/s, delay: 1 ms}")
    return Link(_rate(entry["rate"], f"{path}.rate"), _seconds(entry["delay"], f"{path}.delay"))


def _read_override(raw: object, path: str, default: Mapping[str, object], cluster: Cluster) -> Iterator[DirectedLink]:
    """The link of one entry, in one direction or both. What it leaves out is as in the default link."""
    entry = _mapping(raw, path, ("from", "to", "between", "rate", "delay"))
    link = _read_link({**default, **entry}, path)
    ends = {f"{path}.from": entry.get("from"), f"{path}.to": entry.get("to")}
    if "between" in entry:
        pair = _list(entry["between"], f"{path}.between", "laptop, nano")
        ends = {f"{path}.between[{index}]": end for index, end in enumerate(pair)}
    if len(ends) != 2 or ("between" in entry and ("from" in entry or "to" in entry)):
        hint = "Write {from: a, to: b, rate: ...} for one direction, {between: [a, b], rate: ...} for both."
        raise BadFile(f"{path}: a link has two ends.", hint=hint)
    for where, end in ends.items():
        if not isinstance(end, str) or end not in cluster._by_name:
            hint = did_you_mean(_show(end).strip("'"), cluster.names)
            raise UnknownName(f"{where}: there is no device called {_show(end)}.", hint=hint)
    sender, receiver = (str(end) for end in ends.values())
    yield DirectedLink(sender, receiver, link)
    if "between" in entry:
        yield DirectedLink(receiver, sender, link)
