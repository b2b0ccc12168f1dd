"""The time that layers take on a device: measured over a ladder of batch sizes, or estimated and marked so.

Time is not linear in the batch size (ASTEROID Fig. 6), so each layer keeps a few measured points and reads between
them. Kernels (memory format, oneDNN or native, threads) are the fastest that were measured for each operator.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import combinations, pairwise
from statistics import NormalDist, mean, median
from typing import Literal

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.network import Network, Op

Source = Literal["measured", "estimated"]


class Timing(msgspec.Struct, frozen=True):
    """The seconds of one layer at one batch size."""

    samples: int
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise BadValue(f"A timing is for {self.samples} samples; it must be >= 1.")
        for seconds in (self.forward_seconds, self.backward_seconds):
            if not 0 <= seconds < math.inf:
                raise BadValue(f"A layer took {seconds} s for {self.samples} samples; it must be finite and >= 0.")


class LayerTiming(msgspec.Struct, frozen=True):
    """The ladder of one layer, by increasing batch size."""

    layer: str
    ladder: tuple[Timing, ...]

    def __post_init__(self) -> None:
        if not self.ladder or not is_increasing(self.ladder):
            sizes = ", ".join(str(timing.samples) for timing in self.ladder) or "none"
            raise BadValue(f"Layer '{self.layer}' has timings for {sizes} samples; they must increase.")


class Kernel(msgspec.Struct, frozen=True):
    """The way in which an operator is run: its tensors' memory format, oneDNN where PyTorch can or native code, threads
    (0: all)."""

    channels_last: bool = False
    onednn: bool = True
    threads: int = 0
    product: bool = False
    """Whether a convolution of single pixels is computed as one product of matrices."""
    packed: bool = False
    """Whether a convolution at rest has its weight laid out once for oneDNN, which PyTorch does in every call."""

    @property
    def is_plain(self) -> bool:
        """Whether it sets none of PyTorch's flags."""
        return self.onednn and not self.threads

    def __str__(self) -> str:
        way = "product" if self.product else "packed" if self.packed else "oneDNN" if self.onednn else "native"
        parts = ["channels_last" if self.channels_last else "contiguous", way]
        return "+".join([*parts, f"{self.threads}t"] if self.threads else parts)


class Corrected(msgspec.Struct, frozen=True):
    """A record that a profile was corrected by what runs took, and when last (ISO 8601)."""

    runs: int
    steps: int
    last: str


class DeviceProfile(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """The profile of one network on one device."""

    network: str
    fingerprint: str
    input: str
    granularity: str
    device: str
    source: Source
    layers: tuple[LayerTiming, ...]
    kernels: dict[str, Kernel] = {}
    """Operator -> the fastest kernel measured; absent: PyTorch's default."""
    peak_bytes: dict[str, int] = {}
    """Batch size (as text) -> peak tensor bytes of a training step, where measured."""
    machine: str = ""
    repeats: int = 0
    spread: float = 0.0
    """The difference between whole steps, as a part of the usual one (a standard deviation)."""
    corrected: Corrected | None = None
    """The correction of the profile; None if it is as measured or estimated."""
    launch_seconds: tuple[tuple[float, float], ...] = ()
    """For each layer, what Python takes to launch its kernels on a GPU, forward and backward, whatever the batch size;
    empty: kernels take no launching. A GPU that computes a whole round alone launches it as one graph instead."""
    host_copy_seconds: float = 0.0
    """What it takes a GPU to copy a small tensor to the machine's memory or from there, once it is computed; 0: it
    computes in the machine's memory."""
    host_copy_seconds_per_gigabyte: float = 0.0
    """And what each further gigabyte takes."""
    is_coarse: bool = False
    """Whether it was measured in little time, before a run's first step: a thorough measurement replaces it."""
    version: int = 1

    def check_matches(self, network: Network) -> None:
        """Refuse another graph or granularity than the one that was profiled."""
        same_layers = [timed.layer for timed in self.layers] == [layer.name for layer in network.layers]
        if self.fingerprint != network.fingerprint or not same_layers:
            raise BadFile(
                f"The profile of {self.network} ({self.input}, {len(self.layers)} {self.granularity}, "
                f"{self.fingerprint}) does not belong to {network.name} ({network.input_text}, {len(network.layers)} "
                f"{network.granularity}, {network.fingerprint}).",
                hint=f"Measure it: manyhands profile --model {network.name}",
            )

    @cached_property
    def ladders(self) -> tuple[tuple[Timing, ...], ...]:
        return tuple(layer.ladder for layer in self.layers)

    def together(self, devices: int) -> float:
        """Return how many times as long as the usual step the slowest of so many takes, which wait for each other."""
        return 1.0 + self.spread * _largest_of(devices)

    def layer_seconds(self, layer: int, samples: float) -> tuple[float, float]:
        """Return forward and backward seconds of a layer for a (possibly fractional) number of samples."""
        ladder = self.ladders[layer]
        if samples <= 0:
            return (0.0, 0.0)
        return _interpolate(ladder, samples)


@cache
def _largest_of(count: int) -> float:
    """Return the expected largest of some standard normal numbers (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def spread_of(seconds: Sequence[float]) -> float:
    """Return the `DeviceProfile.spread` for steps that took so long, with which two together take as long as the slower
    one of two of these does on average."""
    if len(seconds) < 2:
        return 0.0
    slower = mean(max(pair) for pair in combinations(seconds, 2))
    return max(0.0, slower / median(seconds) - 1.0) / _largest_of(2)


def _interpolate(ladder: tuple[Timing, ...], samples: float) -> tuple[float, float]:
    """Return the seconds on the straight line between two points; below the first in proportion, beyond the last by the
    last slope, if it rises; noise may make it fall, but more samples never take less time."""
    place = bisect_left(ladder, samples, key=lambda timing: timing.samples)
    if place < len(ladder) and ladder[place].samples == samples:
        return (ladder[place].forward_seconds, ladder[place].backward_seconds)
    if place == 0 or len(ladder) == 1:
        part = samples / ladder[0].samples
        return (ladder[0].forward_seconds * part, ladder[0].backward_seconds * part)
    low, high = ladder[min(place, len(ladder) - 1) - 1], ladder[min(place, len(ladder) - 1)]
    part = (samples - low.samples) / (high.samples - low.samples)
    forward = low.forward_seconds + part * (high.forward_seconds - low.forward_seconds)
    backward = low.backward_seconds + part * (high.backward_seconds - low.backward_seconds)
    if place == len(ladder):
        return (max(forward, high.forward_seconds), max(backward, high.backward_seconds))
    return (max(forward, 0.0), max(backward, 0.0))


class Profile(msgspec.Struct, frozen=True, dict=True):
    """The profiles of a cluster's devices, by device name."""

    devices: dict[str, DeviceProfile]

    def __hash__(self) -> int:
        return id(self)

    def of(self, device: str) -> DeviceProfile:
        if device not in self.devices:
            raise BadValue(f"There is no profile of device '{device}'.", hint="Run: manyhands profile")
        return self.devices[device]

    @property
    def is_estimated(self) -> bool:
        return any(profile.source == "estimated" for profile in self.devices.values())


ESTIMATE_LADDER = (1, 2, 4, 8, 16, 32, 64)


def op_seconds(op: Op, device: Device, samples: float) -> float:
    """Return a roofline estimate of an operator's forward pass: limited by arithmetic or by memory, plus its launch."""
    samples = op.work_samples(samples)
    compute = 2 * op.macs * samples / (device.gflops * 1e9)
    memory = op.moved_bytes * samples / device.memory_bytes_per_second
    return max(compute, memory) + device.operator_seconds


def estimate(network: Network, device: Device) -> DeviceProfile:
    """Return a profile computed from the catalogue's numbers, marked as estimated."""
    layers = []
    for layer in network.layers:
        run = [op for op in network.ops[layer.first : layer.last] if op.moved_bytes or op.macs]
        ladder = []
        for samples in ESTIMATE_LADDER:
            seconds = [op_seconds(op, device, samples) for op in run]
            backward = sum(passes * forward for passes, forward in zip(map(network.backward_passes, run), seconds))
            ladder.append(Timing(samples, sum(seconds), backward))
        layers.append(LayerTiming(layer.name, tuple(ladder)))
    return DeviceProfile(
        network=network.name,
        fingerprint=network.fingerprint,
        input=network.input_text,
        granularity=network.granularity,
        device=device.kind,
        source="estimated",
        layers=tuple(layers),
        machine=device.source,
    )


def estimate_cluster(network: Network, cluster: Cluster) -> Profile:
    """Return estimated profiles of every device; devices with the same numbers share one."""
    profiles: dict[Device, DeviceProfile] = {}
    by_name: dict[str, DeviceProfile] = {}
    for device in cluster.devices:
        key = msgspec.structs.replace(device, name="any", host="", site="")
        if key not in profiles:
            profiles[key] = estimate(network, device)
        by_name[device.name] = profiles[key]
    return Profile(by_name)


def is_increasing(ladder: tuple[Timing, ...]) -> bool:
    return all(low.samples < high.samples for low, high in pairwise(ladder))
