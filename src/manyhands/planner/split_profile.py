"""The profile of a network on an edge and a server: where it may be cut, and the cost of each cut (SPLIT §4.4, §5.2).

The edge's memory is counted as schedule/memory.py counts it: weights, their gradients and the optimiser's state; for
the batch that is being updated, the data of its backward pass; for every batch under way, its inputs, which are
replayed, and what packing has changed of its feature.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec

from manyhands.facts.errors import BadValue
from manyhands.facts.network import Network, TensorSpec
from manyhands.facts.profile import DeviceProfile, LayerTiming, Timing
from manyhands.planner.split import UNPACKED, Bound, Cut, Side, SplitProfile

_ACTIVATIONS = """
relu relu6 leaky_relu prelu elu celu selu gelu silu mish hardswish hardsigmoid hardtanh sigmoid log_sigmoid tanh
softplus softshrink hardshrink threshold softmax log_softmax _softmax _log_softmax lstm gru rnn_tanh rnn_relu embedding
"""
"""A recurrent layer ends with an activation. An embedding has none before it: the paper cuts BI-LSTM and DIN
after it."""
_NORMS = "batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm"
_PRODUCTS = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul bmm mm mv dot addmm baddbmm einsum
scaled_dot_product_attention bilinear
"""
SETTLING = frozenset(f"{_ACTIVATIONS} {_NORMS}".split())
PRODUCTS = frozenset(_PRODUCTS.split())
"""Operators that multiply. With a weight, their output is not activated. Among activations one activated factor is
enough: squeeze-and-excite, attention, Dice."""


def candidate_cuts(network: Network, shared: Collection[str] = ()) -> tuple[int, ...]:
    """Return the layers before which a network may be cut, ends not included. All that crosses must last have been
    activated or normalised (§4.5), looking through pooling, drop-out, shapes and sums; no weight is used on both sides;
    and no input crosses, because data stays, unless it is named in `shared`. If activations allow no cut, all others
    are allowed."""
    settled = dict.fromkeys(network.inputs, False) | dict.fromkeys(shared, True)
    for op in network.ops:
        name = op.target.split(".")[1] if "." in op.target else op.target
        before = [settled[tensor] for tensor in op.inputs]
        if name in SETTLING or (name in PRODUCTS and op.weights):
            is_settled = name in SETTLING
        else:
            is_settled = any(before) if name in PRODUCTS or name == "mul" else all(before)
        settled.update(dict.fromkeys(op.outputs, is_settled))
    raw = _raw(network, shared)
    possible = [layer for layer in range(1, len(network.layers)) if _is_possible(network, layer, raw)]
    activated = [layer for layer in possible if all(settled[tensor.name] for tensor in network.cut(layer))]
    return tuple(activated or possible)


def _raw(network: Network, shared: Collection[str]) -> set[str]:
    """Return the inputs that must stay, and what is made of them without a weight."""
    raw = set(network.inputs) - set(shared)
    for op in network.ops:
        if not op.weights and op.inputs and all(tensor in raw for tensor in op.inputs):
            raw.update(op.outputs)
    return raw


def _is_possible(network: Network, layer: int, raw: Collection[str]) -> bool:
    position = network.layers[layer].first
    carried = {*network.crossing(position), *_read_after(network, position)}
    if any(name in raw for name in carried):
        return False
    written = {name for op in network.ops for name in op.writes}
    used_twice = set(network.weights_of(0, position)) & set(network.weights_of(position, len(network.ops)))
    return not any(network.weights[name].trainable or name in written for name in used_twice)


def _read_after(network: Network, position: int) -> list[str]:
    """Return the network's inputs that operators from a position on read."""
    return [name for name in network.inputs if any(reader >= position for reader in network.readers.get(name, ()))]


def split_profile(
    network: Network,
    edge: DeviceProfile,
    server: DeviceProfile,
    batch_size: int,
    *,
    cuts: Sequence[int] | None = None,
    shared: Collection[str] = (),
    edge_side: Side = "upstream",
    optimizer_slots: int = 1,
    step_bytes_per_second: tuple[float, float] = (math.inf, math.inf),
    least_bits: Mapping[int, int] | int = 8,
) -> SplitProfile:
    """Return the profile of a network on two devices. Without `cuts`: all candidates, and everything at the edge.

    `batch_size` is that of a mini-batch. What is frozen follows from the network: nothing returns to a cut before which
    no tensor has a gradient. `step_bytes_per_second`: the rates at which the optimisers of edge and server read and
    write memory. `least_bits`: by cut, or for all; a cut it does not name is not packed. What the network does not
    decide (the edge's memory, packing, phases) keeps its default; the caller replaces it.
    """
    upstream, downstream = (edge, server) if edge_side == "upstream" else (server, edge)
    rates = step_bytes_per_second if edge_side == "upstream" else step_bytes_per_second[::-1]
    for profile in (upstream, downstream):
        profile.check_matches(network)
    count = len(network.layers)
    alone = count if edge_side == "upstream" else 0
    layers = sorted({*candidate_cuts(network, shared), alone}) if cuts is None else sorted({*cuts})
    seconds = [
        [profile.layer_seconds(layer, batch_size) for layer in range(count)] for profile in (upstream, downstream)
    ]
    trained, state = _weights_by_layer(network, optimizer_slots)

    def times(side: int, first: int, last: int) -> tuple[float, float]:
        step = sum(trained[first:last]) * (3 + 2 * optimizer_slots) / rates[side]
        side_seconds = seconds[side][first:last]
        return sum(ahead for ahead, _ in side_seconds), sum(back for _, back in side_seconds) + step

    def cut(layer: int) -> Cut:
        crossing = [] if layer in (0, count) else _crossing(network, layer)
        returned = sum(tensor.bytes_for(batch_size) for tensor in crossing if tensor.differentiable)
        ahead, back = times(0, 0, layer)
        packed = [tensor for tensor in crossing if tensor.dtype.startswith(("float", "bfloat"))]
        one_batch, further = _edge_bytes(network, layer, batch_size, optimizer_slots, edge_side, crossing)
        return Cut(
            layer=layer,
            upstream_forward_seconds=ahead,
            upstream_backward_seconds=back if returned or layer == count else 0.0,
            downstream_forward_seconds=times(1, layer, count)[0],
            downstream_backward_seconds=times(1, layer, count)[1],
            feature_bytes=sum(4 * math.prod(tensor.shape_for(batch_size)) for tensor in packed),
            plain_bytes=sum(tensor.bytes_for(batch_size) for tensor in crossing if tensor not in packed),
            returned_bytes=returned,
            edge_bytes=one_batch,
            history_bytes=further,
            least_bits=least_bits if isinstance(least_bits, int) else least_bits.get(layer, UNPACKED),
        )

    return SplitProfile(
        network=network.name, fingerprint=network.fingerprint, batch_size=batch_size, edge_side=edge_side,
        cuts=tuple(map(cut, layers)), layer_bytes=tuple(state),
    )  # fmt: skip


def slowed(profile: DeviceProfile, slowdown: float) -> DeviceProfile:
    """Return the profile of a device that takes `slowdown` times as long for everything."""
    if not 0 < slowdown < math.inf:
        raise BadValue(f"A device {slowdown} times as slow; it must be finite and > 0.")
    layers = []
    for layer in profile.layers:
        ladder = (
            Timing(timing.samples, timing.forward_seconds * slowdown, timing.backward_seconds * slowdown)
            for timing in layer.ladder
        )
        layers.append(LayerTiming(layer.layer, tuple(ladder)))
    return msgspec.structs.replace(profile, layers=tuple(layers))


def _crossing(network: Network, layer: int) -> list[TensorSpec]:
    """Return the tensors that a cut carries, with the inputs that are read after it."""
    inputs = _read_after(network, network.layers[layer].first)
    return [*network.cut(layer), *(network.tensors[name] for name in inputs)]


def _weights_by_layer(network: Network, optimizer_slots: int) -> tuple[list[float], list[float]]:
    """Return, for each layer, its trained bytes and all bytes that travel with it. A weight counts where it is first
    used."""
    counted: set[str] = set()
    trained, state = [], []
    for layer in network.layers:
        weights = [network.weights[name] for name in layer.weights if name not in counted]
        counted.update(layer.weights)
        trained.append(float(sum(weight.bytes for weight in weights if weight.trainable)))
        state.append(float(sum(weight.bytes * (1 + optimizer_slots if weight.trainable else 1) for weight in weights)))
    return trained, state


def _edge_bytes(
    network: Network, cut: int, samples: int, optimizer_slots: int, side: Side, crossing: Sequence[TensorSpec]
) -> tuple[float, float]:
    """Return the edge's memory with one batch under way, and what every further batch adds."""
    layers = network.layers[:cut] if side == "upstream" else network.layers[cut:]
    if not layers:
        return 0.0, 0.0
    first, last = layers[0].first, layers[-1].last
    ops = network.ops[first:last]
    weights = [network.weights[name] for name in network.weights_of(first, last)]
    static = sum(weight.bytes * (2 + optimizer_slots if weight.trainable else 1) for weight in weights)
    saved = sum(op.saved_bytes * samples + op.saved_fixed_bytes for op in ops)
    trained = [sum(network.weights[name].bytes for name in op.weights if network.weights[name].trainable) for op in ops]
    works = [op.moved_bytes * samples + weight_bytes for op, weight_bytes in zip(ops, trained)]
    read = {name for op in ops for name in op.inputs if name in network.inputs}
    held = sum(network.tensors[name].bytes_for(samples) for name in read | {tensor.name for tensor in crossing})
    scored = 0
    if layers[-1].last == len(network.ops):
        scored = network.loss_bytes * samples
        saved += network.gradient_bytes_of_outputs(samples)
    most = max(*works, scored, optimizer_slots * max(trained), sum(tensor.bytes_for(samples) for tensor in crossing))
    return static + saved + held + most, held if crossing else 0.0


def parse_phases(text: str) -> tuple[tuple[int, Bound], ...]:
    """Parse '5', or '4@0,5@8': 4 from epoch 0, 5 from epoch 8. 'none' means no bound."""
    phases: list[tuple[int, Bound]] = []
    for part in text.split(","):
        word, _, epoch = part.strip().partition("@")
        if not (word.isdecimal() or word == "none") or not (epoch or "0").isdecimal():
            raise BadValue(f"'{part:.40}' is not a K and an epoch.", hint="Write: 5, or 4@0,5@8, or none")
        phases.append((int(epoch or 0), None if word == "none" else int(word)))
    starts = [epoch for epoch, _ in phases]
    if starts[0] != 0 or any(not a < b for a, b in zip(starts, starts[1:])):
        raise BadValue(f"'{text:.80}': phases must begin at epoch 0 and increase.", hint="Write: 4@0,5@8")
    return tuple(phases)
