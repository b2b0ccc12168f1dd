"""The cost of packing a feature on this machine (SPLIT Fig. 11): a line over its size, measured once and kept.

packing      upstream, with the error that is kept for the gradient: a constant and so much for each byte
unpacking    downstream, for each byte
feedback     upstream, correcting the gradient that comes back, for each byte

Bytes are those of the feature at 32 bits. Measured at 8 bits, as the paper does; other widths are within a third of it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import torch

from manyhands.executor.codec import pack, unpack
from manyhands.facts.decode import converted
from manyhands.facts.errors import BadFile, BadValue, ManyhandsError
from manyhands.files.documents import cache_folder, read_document, write_document
from manyhands.profiler.clock import TimedTrial, Timer, interleave, stopwatch
from manyhands.profiler.this_machine import Machine, identify
from manyhands.profiler.threads import with_threads

VERSION = 1
BITS = 8
SMALL_BYTES, LARGE_BYTES = 64_000, 4_000_000
_REFRESH = "Delete it; it is measured again when it is needed."


class PackingCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The codec's seconds, per byte."""

    packing_seconds: float
    packing_seconds_per_byte: float
    unpacking_seconds_per_byte: float
    feedback_seconds_per_byte: float
    machine: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        for name in ("packing_seconds", *_PER_BYTE):
            if not 0 <= getattr(self, name) < 1:
                raise BadValue(f"{name} is {getattr(self, name)}; it must be from 0 to below 1.")

    def between(self, upstream_slowdown: float = 1.0, downstream_slowdown: float = 1.0) -> dict[str, float]:
        """Return the costs by the names under which `split_profile` takes them, on sides that are so many times slower
        than this."""
        return {
            "packing_seconds": self.packing_seconds * upstream_slowdown,
            "packing_seconds_per_byte": self.packing_seconds_per_byte * upstream_slowdown,
            "unpacking_seconds_per_byte": self.unpacking_seconds_per_byte * downstream_slowdown,
            "feedback_seconds_per_byte": self.feedback_seconds_per_byte * upstream_slowdown,
        }


_PER_BYTE = ("packing_seconds_per_byte", "unpacking_seconds_per_byte", "feedback_seconds_per_byte")


def measure_packing(threads: int | None = None, *, seconds: float = 1.0, timer: Timer = stopwatch) -> PackingCost:
    """Measure the codec on this machine with so many threads (None: as torch is set), in about `seconds`."""
    machine = identify(threads)
    with with_threads(machine.threads):
        trials = [*_trials("small", SMALL_BYTES), *_trials("large", LARGE_BYTES)]
        measured = interleave(trials, repeats=25, least_repeats=3, seconds=seconds, timer=timer)

    def line(operation: str) -> tuple[float, float]:
        """Return the line through both sizes: a constant, and seconds per byte."""
        small, large = measured.median(f"{operation} small"), measured.median(f"{operation} large")
        per_byte = max(0.0, large - small) / (LARGE_BYTES - SMALL_BYTES)
        return max(0.0, small - per_byte * SMALL_BYTES), per_byte

    packing, per_byte = line("pack")
    return PackingCost(packing, per_byte, line("unpack")[1], line("feed back")[1], machine.text)


def _trials(size: str, byte_count: int) -> list[TimedTrial]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(byte_count // 4, generator=generator).relu_()
    gradient = torch.randn(byte_count // 4, generator=generator).mul_(0.01)
    error, packed = torch.empty_like(data), pack(data, BITS)

    def feed_back() -> None:
        gradient.copy_(gradient - (error * gradient).mul_(gradient))

    return [
        TimedTrial(f"pack {size}", lambda: pack(data, BITS, error)),
        TimedTrial(f"unpack {size}", lambda: unpack(packed, tuple(data.shape), data.dtype, BITS, "cpu")),
        TimedTrial(f"feed back {size}", feed_back),
    ]


def packing_path(machine: Machine, folder: Path | None = None) -> Path:
    return (folder or cache_folder() / "packing") / f"{machine.slug}.json"


def packing_cost(threads: int | None = None, *, refresh: bool = False, folder: Path | None = None) -> PackingCost:
    """Return the cost stored for this machine, or measure it now and store it."""
    path = packing_path(identify(threads), folder)
    if path.exists() and not refresh:
        return _load(path)
    cost = measure_packing(threads)
    with contextlib.suppress(BadFile):  # the measurement is worth more than the cache
        write_document(path, msgspec.to_builtins(cost))
    return cost


def _load(path: Path) -> PackingCost:
    raw = read_document(path)
    version = raw.get("version") if isinstance(raw, dict) else None
    if version is not None and version != VERSION:
        raise BadFile(f"{path}: has version {version}; this program reads version {VERSION}.", hint=_REFRESH)
    try:
        return converted(raw, PackingCost)
    except msgspec.ValidationError as error:
        raise BadFile(f"{path}: is not what packing costs: {error!s:.300}.", hint=_REFRESH) from error
    except ManyhandsError as error:
        raise BadFile(f"{path}: {error.message}", hint=_REFRESH) from error
