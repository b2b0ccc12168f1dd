"""Networks, clusters and profiles with numbers made by hand, so that times come out in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.link import Link
from manyhands.facts.network import Layer, Network, Op, TensorSpec, WeightSpec
from manyhands.facts.profile import DeviceProfile, LayerTiming, Profile, Timing
from manyhands.facts.reads import Read, Whole, Window

CHANNELS, ROWS, COLUMNS = 4, 8, 6
MAP_BYTES = 4 * CHANNELS * ROWS * COLUMNS
"""Every tensor of a hand-made chain, for one sample."""
WEIGHT_BYTES = 4 * 100
"""Every layer's weight, unless told otherwise."""
FREE = Link(math.inf, 0.0)


def chain(
    count: int = 4,
    *,
    kernel: int = 3,
    weight_elements: int = 100,
    statistics: Sequence[int] = (),
    skips: Mapping[int, int] | None = None,
    operators_per_layer: int = 1,
) -> Network:
    """A chain of convolution-like layers over maps of 4 x 8 x 6, each with a weight of its own.

    `statistics` names operators with batch statistics; `skips` lets operator a read the output of operator b as well.
    """
    total = count * operators_per_layer
    names = ["x", *(f"t{i}" for i in range(total))]
    shape = (1, CHANNELS, ROWS, COLUMNS)
    tensors = {name: TensorSpec(name, shape, "float32", batch_axis=0, differentiable=name != "x") for name in names}
    weights = {f"w{i}": WeightSpec(f"w{i}", (weight_elements,), "float32", trainable=True) for i in range(total)}
    pad = kernel // 2
    rules = (Window(0), Whole(), Window(2, kernel, 1, pad), Window(3, kernel, 1, pad))
    ops = []
    for i in range(total):
        inputs = [names[i]] + ([f"t{skips[i]}"] if skips and i in skips else [])
        ops.append(
            Op(
                name=f"conv{i}", target="aten.conv2d.default", inputs=tuple(inputs), weights=(f"w{i}",),
                outputs=(f"t{i}",), reads=tuple(Read(name, rules) for name in inputs), macs=1000,
                moved_bytes=2 * MAP_BYTES, saved_bytes=MAP_BYTES, statistics=CHANNELS if i in statistics else 0,
                tiling="norm" if i in statistics else "local",
                derives_from=tuple(inputs) if i in statistics else (),
                channels="dense" if len(inputs) == 1 else "",
            )
        )  # fmt: skip
    layers = tuple(
        _layer(f"layer{i}", i * operators_per_layer, (i + 1) * operators_per_layer, 4 * weight_elements)
        for i in range(count)
    )
    text = f"{count}-{kernel}-{weight_elements}-{tuple(statistics)}-{skips}-{operators_per_layer}"
    return Network("chain", tuple(ops), layers, tensors, weights, ("x",), (names[-1],), "blocks", text)


def summed_network(sizes: Sequence[int], dtype: str) -> Network:
    """A chain whose weights have these many numbers; a sum of gradients is of all of them."""
    made = chain(len(sizes))
    weights = {f"w{i}": WeightSpec(f"w{i}", (size,), dtype, trainable=True) for i, size in enumerate(sizes)}
    made.weights.clear()
    made.weights.update(weights)
    return made


def _layer(name: str, first: int, last: int, weight_bytes: int) -> Layer:
    return Layer(
        name=name, first=first, last=last, macs=1000 * (last - first), parameter_bytes=weight_bytes * (last - first),
        buffer_bytes=0, activation_bytes=MAP_BYTES * (last - first), output_bytes=MAP_BYTES,
        saved_bytes=MAP_BYTES * (last - first), saved_fixed_bytes=0, inputs=(f"t{first - 1}" if first else "x",),
        outputs=(f"t{last - 1}",), weights=tuple(f"w{i}" for i in range(first, last)),
    )  # fmt: skip


def changed(network: Network, op: int, **facts: object) -> Network:
    """The network with other facts of one operator."""
    ops = list(network.ops)
    ops[op] = msgspec.structs.replace(ops[op], **facts)
    other: Network = msgspec.structs.replace(network, ops=tuple(ops))
    layers = (
        msgspec.structs.replace(layer, weights=other.weights_of(layer.first, layer.last)) for layer in network.layers
    )
    return msgspec.structs.replace(other, layers=tuple(layers))


def cluster(names: Sequence[str], link: Link = FREE, *, memory_bytes: float = 10**9, **facts: float) -> Cluster:
    """Equal devices that read and write 1 GB/s of memory (so a step has a length), all pairs joined by `link`."""
    devices = tuple(
        Device(name=name, gflops=1.0, memory_bytes=int(memory_bytes), memory_bytes_per_second=1e9, **facts)  # type: ignore[arg-type]
        for name in names
    )
    return Cluster("made", devices, link)


def profile(network: Network, seconds: Mapping[str, Sequence[tuple[float, float]]]) -> Profile:
    """Forward and backward seconds of one sample, layer by layer, for each device; proportional in samples."""
    return Profile(
        {
            device: DeviceProfile(
                network=network.name,
                fingerprint=network.fingerprint,
                input=network.input_text,
                granularity=network.granularity,
                device=device,
                source="measured",
                layers=tuple(
                    LayerTiming(layer.name, (Timing(1, forward, backward),))
                    for layer, (forward, backward) in zip(network.layers, own, strict=True)
                ),
            )
            for device, own in seconds.items()
        }
    )


def even_profile(network: Network, devices: Sequence[str], forward: float = 0.01, backward: float = 0.02) -> Profile:
    """Every layer takes the same on every device."""
    return profile(network, {device: [(forward, backward)] * len(network.layers) for device in devices})


def step_seconds(layers: int, *, slots: int = 1, weight_bytes: int = WEIGHT_BYTES) -> float:
    """The optimiser's step on a hand-made device: (3 + 2 slots) passes over the weights at 1 GB/s."""
    return layers * weight_bytes * (3 + 2 * slots) / 1e9
