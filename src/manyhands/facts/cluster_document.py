"""The document in which a person describes a cluster, read field by field and written back.

`path` is the place in the document that an error names: devices[1].kind. See `cluster` for an example.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from manyhands.facts.catalogue import CATALOGUE, catalogue_key
from manyhands.facts.device import COMPUTE, COMPUTE_HINT, DEVICE_NAME, MOST_OF_ANYTHING, NAME_HINT, Device
from manyhands.facts.errors import BadFile, BadValue, UnknownName, did_you_mean
from manyhands.facts.link import DirectedLink, Link
from manyhands.facts.site import Site
from manyhands.facts.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_rate, parse_seconds

MOST_DEVICES = 10_000
UNLIMITED = "unlimited"
UNLISTED_KINDS = ("custom", "local")  # kinds whose numbers do not come from the catalogue
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2  # lists within lists are cut short


def _show(value: object) -> str:
    """Return a short repr: a document may hold anything, of any size."""
    with contextlib.suppress(ValueError):
        return _SHORT.repr(value)
    return "a number of thousands of digits"


def read_mapping(value: object, path: str, fields: Iterable[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        problem = "is missing or empty" if value is None else f"{_show(value)} is not a set of 'field: value'"
        raise BadFile(f"{path or 'cluster'}: {problem}.", hint=f"Fields: {', '.join(fields)}")
    for key in value:
        if key not in fields:
            shown = _show(key).strip("'")
            where = f"{path}.{shown}" if path else shown
            raise UnknownName(f"{where}: there is no such field.", hint=did_you_mean(shown, fields))
    return value


def read_list(value: object, path: str, example: str) -> list[object]:
    if not isinstance(value, list):
        problem = "is missing" if value is None else f"{_show(value)} is not a list"
        raise BadFile(f"{path}: {problem}.", hint=f"Write it like {path}: [{example}]")
    return value


def read_text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise BadValue(f"{path}: {_show(value)} must be a text.", hint="Put it in quotes.")
    return value


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise BadValue(f"{path}: {_show(value)} must be true or false.")
    return value


def _amount(value: object, path: str, parse: Callable[[float | str, str], float], *, zero: bool = False) -> float:
    """Return a quantity, read by one of units.py's parsers, within generous limits."""
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
    if not isinstance(value, str) or (value and not DEVICE_NAME.fullmatch(value)):
        raise BadValue(f"{path}: {_show(value)} cannot name a device.", hint=NAME_HINT)
    return value


def _count(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DEVICES:
        raise BadValue(f"{path}: {_show(value)} must be a whole number from 1 to {MOST_DEVICES}.")
    return value


def _exact(value: float, write: Callable[[float], str], parse: Callable[[str], float], unit: str) -> str:
    """Return a number the way a person writes it if nothing is lost, else every digit."""
    if value == math.inf:
        return UNLIMITED
    return write(value) if parse(write(value)) == value else f"{value!r} {unit}"


_write_rate = partial(_exact, write=format_rate, parse=parse_rate, unit="B/s")
_write_seconds = partial(_exact, write=format_seconds, parse=parse_seconds, unit="s")
_write_size = partial(_exact, write=format_bytes, parse=parse_bytes, unit="B")


# field in the document: (field of Device, reader, writer)
def _compute(value: object, path: str) -> str:
    text = read_text(value, path)
    if not COMPUTE.fullmatch(text):
        raise BadFile(f"{path}: '{text:.40}' is not something to compute with.", hint=COMPUTE_HINT)
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
    "site": ("site", _host, str),
    "copy_time": ("copy_seconds_per_gigabyte", _seconds, _write_seconds),
    "message_time": ("message_seconds", _seconds, _write_seconds),
    "round_time": ("round_seconds", _seconds, _write_seconds),
    "compute": ("compute", _compute, str),
    "gpu": ("gpu", _host, str),
    "estimated": ("estimated", _flag, bool),
    "source": ("source", read_text, str),
}


def read_devices(raw: object, path: str) -> Iterator[Device]:
    """Yield the devices of one entry: one, or `count` of them numbered from 1."""
    entry = read_mapping(raw, path, ("name", "kind", "count", "port", *_DEVICE))
    written_kind = read_text(entry.get("kind", "custom"), f"{path}.kind")
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
        facts["memory_bytes"] -= facts.pop("reserved_bytes")
        port = facts.pop("port_bytes_per_second")
        facts.update(up_bytes_per_second=port, down_bytes_per_second=port)
        fields_by_hand = [field for field in entry if field in _DEVICE or field == "port"]
        facts["source"] += f" Given by hand: {', '.join(fields_by_hand)}." if fields_by_hand else ""
    if "port" in entry:
        port = _rate(entry["port"], f"{path}.port")
        facts.update(up_bytes_per_second=port, down_bytes_per_second=port)
    for field, (attribute, read, _) in _DEVICE.items():
        if field in entry:
            facts[attribute] = read(entry[field], f"{path}.{field}")
    name = entry.get("name", written_kind)
    if not isinstance(name, str) or not DEVICE_NAME.fullmatch(name):
        raise BadValue(f"{path}.name: {_show(name)} cannot name a device.", hint=NAME_HINT)
    for numbered in numbered_names(entry, name, path):
        yield Device(name=numbered, kind=kind, **facts)


def write_device(device: Device) -> dict[str, object]:
    document: dict[str, object] = {"name": device.name, "kind": device.kind}
    return document | {field: write(getattr(device, attribute)) for field, (attribute, _, write) in _DEVICE.items()}


def write_link(link: Link) -> dict[str, object]:
    return {"rate": _write_rate(link.bytes_per_second), "delay": _write_seconds(link.delay_seconds)}


def read_link(entry: Mapping[str, object], path: str) -> Link:
    for field in ("rate", "delay"):
        if field not in entry:
            raise BadFile(f"{path}.{field}: is missing.", hint="Write it like link: {rate: 100 Mbit/s, delay: 1 ms}")
    return Link(_rate(entry["rate"], f"{path}.rate"), _seconds(entry["delay"], f"{path}.delay"))


_SITE = ("name", "count", "rate", "up", "down", "delay", "link", "within")


def read_sites(raw: object, path: str) -> Iterator[Site]:
    """Yield the sites of one entry: one, or `count` of them numbered from 1."""
    entry = read_mapping(raw, path, _SITE)
    name = _host(entry.get("name"), f"{path}.name")
    if not name:
        raise BadFile(f"{path}.name: is missing.", hint="Write it like sites: [{name: paris, rate: 100 Mbit/s}]")
    rates = {way: _rate(entry.get(way, entry.get("rate", UNLIMITED)), f"{path}.{way}") for way in ("up", "down")}
    link = None
    if entry.get("link") is not None:
        link = read_link(read_mapping(entry["link"], f"{path}.link", ("rate", "delay")), f"{path}.link")
    delay = _seconds(entry.get("delay", 0), f"{path}.delay")
    within = _host(entry.get("within", ""), f"{path}.within")
    for numbered in numbered_names(entry, name, path):
        yield Site(numbered, rates["up"], rates["down"], delay, link, within)


def numbered_names(entry: Mapping[str, object], name: str, path: str) -> list[str]:
    """Return the names that an entry stands for: its own, or that many numbered from 1."""
    if "count" not in entry:
        return [name]
    return [f"{name}-{number}" for number in range(1, _count(entry["count"], f"{path}.count") + 1)]


def write_site(site: Site) -> dict[str, object]:
    document: dict[str, object] = {
        "name": site.name,
        "up": _write_rate(site.up_bytes_per_second),
        "down": _write_rate(site.down_bytes_per_second),
        "delay": _write_seconds(site.delay_seconds),
    }
    if site.link is not None:
        document["link"] = write_link(site.link)
    return {**document, "within": site.within} if site.within else document


def in_each_site(raw: object, groups: Mapping[str, Sequence[str]]) -> list[object]:
    """Return an entry of devices as one for each site, where it names sites that were written with a count."""
    names = groups.get(str(raw.get("site"))) if isinstance(raw, dict) else None
    if names is None or not isinstance(raw, dict):
        return [raw]
    name = raw.get("name", raw.get("kind", "custom"))
    return [{**raw, "site": site, "name": f"{site}.{name}"} for site in names]


def read_override(
    raw: object, path: str, default: Mapping[str, object], names: Collection[str]
) -> Iterator[DirectedLink]:
    """Yield the link of one entry, in one direction or both. Fields that it leaves out are as in the default link."""
    entry = read_mapping(raw, path, ("from", "to", "between", "rate", "delay", "relay"))
    link = read_link({**default, **entry}, path)
    relay = read_text(entry["relay"], f"{path}.relay") if "relay" in entry else ""
    if relay and not DEVICE_NAME.fullmatch(relay):
        raise BadValue(f"{path}.relay: {_show(relay)} cannot name a device.", hint=NAME_HINT)
    ends = {f"{path}.from": entry.get("from"), f"{path}.to": entry.get("to")}
    if "between" in entry:
        pair = read_list(entry["between"], f"{path}.between", "laptop, nano")
        ends = {f"{path}.between[{index}]": end for index, end in enumerate(pair)}
    if len(ends) != 2 or ("between" in entry and ("from" in entry or "to" in entry)):
        hint = "Write {from: a, to: b, rate: ...} for one direction, {between: [a, b], rate: ...} for both."
        raise BadFile(f"{path}: a link has two ends.", hint=hint)
    for where, end in ends.items():
        if not isinstance(end, str) or end not in names:
            hint = did_you_mean(_show(end).strip("'"), names)
            raise UnknownName(f"{where}: there is no device called {_show(end)}.", hint=hint)
    sender, receiver = (str(end) for end in ends.values())
    yield DirectedLink(sender, receiver, link, relay)
    if "between" in entry:
        yield DirectedLink(receiver, sender, link, relay)
