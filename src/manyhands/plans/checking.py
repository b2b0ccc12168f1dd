"""Checks of a network before anything is planned: whether it is captured, which ways of sharing apply, what is in the
way of the others, and what a training step takes.

A way of sharing applies if the checks that every plan passes accept a plan of it for two devices: nothing here decides
by itself what a stage can do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from manyhands.facts.errors import BadPlan, CaptureFailed
from manyhands.facts.network import Network, Op
from manyhands.facts.plan import ByChannels, BySamples, ByTiles, Order, Plan, Single, Stage
from manyhands.facts.plan_check import resolve
from manyhands.planner.channel_plans import UNDIVIDED, channel_groups
from manyhands.plans.local_profiles import known_times
from manyhands.plans.networks import capture_model
from manyhands.schedule.checker import check
from manyhands.schedule.lowering import Lowering
from manyhands.schedule.policy import Schedule
from manyhands.schedule.tileable import tileable_layers

WAYS = ("single", "samples", "pipeline", "tiles", "channels")
BATCH_SIZES = (1, 32)
"""The batch sizes for which memory and times are stated."""
OPTIMIZER_SLOTS = 1
"""Tensors that the optimizer is assumed to keep for a weight: one, as SGD with momentum does; Adam keeps two."""
LEAST_DIVIDED = 0.01
"""With less of the arithmetic than this in operators that channels divide, sharing by channels divides nothing."""
NEARLY_ALL = 0.99
_DEVICES = ("first", "second")


@dataclass(frozen=True)
class SharingObstacle:
    """The operator that is in the way of sharing a network."""

    operator: str
    target: str
    layer: str
    where: str
    """The line of the module, as FILE:LINE; else the path of the child module."""


@dataclass(frozen=True)
class SharingCheck:
    """Whether a network can be shared in one way."""

    by: str
    applies: bool
    extent: str
    """The part of the network that can, in words; empty if none can."""
    layers: int
    """The number of layers that can."""
    reason: str = ""
    """The reason why the rest cannot, or a note on how it applies."""
    obstacle: SharingObstacle | None = None


@dataclass(frozen=True)
class TrainingNeeds:
    """The memory and time of a training step on one device, at one batch size."""

    batch_size: int
    peak_bytes: int | None
    """Weights, gradients, optimizer and activations; None where such a batch cannot be trained."""
    reason: str = ""
    forward_seconds: float | None = None
    step_seconds: float | None = None


@dataclass(frozen=True)
class NetworkCheck:
    """The possible ways of sharing a network, its sizes and needs; of a network that is not captured, the refusal."""

    model: str
    is_captured: bool
    refusal: str = ""
    """The reason why it is not captured, with the line of the module."""
    hint: str = ""
    exit_code: int = 0
    input: str = ""
    layers: int = 0
    operators: int = 0
    parameters: int = 0
    trainable: int = 0
    macs: int = 0
    weight_bytes: int = 0
    """Parameters and buffers."""
    activation_bytes: int = 0
    """The bytes that all operators make, for one sample."""
    saved_bytes: int = 0
    """The bytes that are kept for the backward pass, for one sample."""
    sharing: tuple[SharingCheck, ...] = ()
    training: tuple[TrainingNeeds, ...] = ()
    times_source: str = ""
    """Either measured or estimated; empty where nothing is stored of this machine."""
    times_note: str = ""

    def sharing_by(self, way: str) -> SharingCheck:
        return next(entry for entry in self.sharing if entry.by == way)


def check_model(model: str, input_shape: tuple[int, ...] | None = None, granularity: str = "blocks") -> NetworkCheck:
    """Return the check of a model by name, which is captured first."""
    try:
        graph = capture_model(model, input_shape, granularity)
    except CaptureFailed as error:
        return refused(model, error)
    return check_network(graph.network)


def refused(model: str, error: CaptureFailed) -> NetworkCheck:
    """Return the check of a model that could not be captured."""
    return NetworkCheck(model, False, error.message, error.hint, error.exit_code)


def check_network(network: Network) -> NetworkCheck:
    """Return the check of a captured network."""
    weights, layers = network.weights.values(), network.layers
    training, source, note = _training_needs(network)
    return NetworkCheck(
        model=network.name,
        is_captured=True,
        input=network.input_text,
        layers=len(layers),
        operators=len(network.ops),
        parameters=network.parameter_count,
        trainable=sum(weight.elements for weight in weights if weight.trainable),
        macs=network.macs,
        weight_bytes=sum(weight.bytes for weight in weights),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        saved_bytes=sum(layer.saved_bytes for layer in layers),
        sharing=(_single(network), _samples(network), _pipeline(network), _tiles(network), _channels(network)),
        training=training,
        times_source=source,
        times_note=note,
    )


# Ways of sharing


def _single(network: Network) -> SharingCheck:
    refusal = _refusal(network, [_alone(network)])
    count = 0 if refusal else len(network.layers)
    return SharingCheck("single", not refusal, _extent(network, count), count, refusal)


def _samples(network: Network) -> SharingCheck:
    half = max(BATCH_SIZES) // 2
    everything = (0, len(network.layers))
    refusal = _refusal(network, [Stage(everything, _DEVICES, BySamples((half, half)))], max(BATCH_SIZES))
    if not refusal:
        return SharingCheck("samples", True, _extent(network, everything[1]), everything[1])
    mixing = [op for op in network.ops if op.mixes_samples]
    held_up = {network.layer_of_op[network.op_index[op.name]] for op in mixing}
    count = everything[1] - len(held_up) if mixing else 0
    return SharingCheck("samples", False, "", count, refusal, _obstacle(network, mixing))


def _pipeline(network: Network) -> SharingCheck:
    count = len(network.layers)
    if count < 2:
        return SharingCheck("pipeline", False, "", 0, "it has one layer only, and a layer is not divided")
    refusals = [
        _refusal(network, [Stage((0, cut), ("first",)), Stage((cut, count), ("second",))]) for cut in range(1, count)
    ]
    possible = refusals.count("")
    reasons = [refusal for refusal in refusals if refusal]
    mixing = [op for op in network.ops if op.mixes_samples]
    if possible and mixing:
        op = mixing[0]
        reasons.append(f"one micro-batch at a time: {op.name} ({op.target}, {op.where or op.module}) mixes samples")
    extent = f"{possible} of {count - 1} places to cut" if possible else ""
    return SharingCheck(
        "pipeline", possible > 0, extent, count if possible else 0, reasons[0] if reasons else "",
        _obstacle(network, mixing),
    )  # fmt: skip


def _tiles(network: Network) -> SharingCheck:
    count = len(network.layers)
    last, blocking = tileable_layers(network)
    obstacle = _obstacle(network, [blocking] if blocking is not None else [])
    if not last:
        where = f": {_text(blocking)} cannot be cut" if blocking is not None else ""
        reason = f"its first layer makes no maps with rows and columns{where}"
        return SharingCheck("tiles", False, "", 0, reason, obstacle)
    stages = [Stage((0, last), _DEVICES, ByTiles((1.0, 1.0), (1.0,)))]
    if last < count:
        stages.append(Stage((last, count), ("first",)))
    refusal = _refusal(network, stages, order="sequential", is_lowered=True)
    if refusal:
        return SharingCheck("tiles", False, "", 0, refusal, obstacle)
    done = sum(layer.macs for layer in network.layers[:last])
    end = "" if last == count else "what follows has no maps with rows and columns"
    if last < count and blocking is not None:
        end = f"{_text(blocking)} needs all of a map in one place"
    return SharingCheck("tiles", True, _extent(network, last, done), last, end, obstacle)


def _channels(network: Network) -> SharingCheck:
    computing = [op for op in network.ops if op.macs]
    divided = [op for op in computing if op.channels in ("dense", "grouped")]
    whole = sorted((op for op in computing if op.channels not in ("dense", "grouped")), key=lambda op: -op.macs)
    obstacle = _obstacle(network, whole)
    done = sum(op.macs for op in divided)
    if done < LEAST_DIVIDED * network.macs or not divided:
        rest = f": {_text(whole[0])} runs whole" if whole else ""
        reason = f"{'hardly any' if divided else 'no'} operator can be divided by its channels{rest}"
        return SharingCheck("channels", False, "", 0, reason, obstacle)
    total = channel_groups(network)
    each = max(1, total // 2) if total > 1 else UNDIVIDED
    stage = Stage((0, len(network.layers)), _DEVICES, ByChannels((max(each, total - each), each)))
    refusal = _refusal(network, [stage], order="stream", is_lowered=True)
    if refusal:
        return SharingCheck("channels", False, "", 0, refusal, obstacle)
    layers = {network.layer_of_op[network.op_index[op.name]] for op in divided}
    notes = ["for inference only"]
    if total == 1 and any("conv" in op.target for op in divided):
        notes.append("its channels meet at every convolution (decoupled:NAME makes groups of them)")
    if whole:
        notes.append(f"{_text(whole[0])} runs whole on every device")
    return SharingCheck("channels", True, _extent(network, len(layers), done), len(layers), "; ".join(notes), obstacle)


def _alone(network: Network) -> Stage:
    return Stage((0, len(network.layers)), ("first",), Single())


def _plan(network: Network, stages: list[Stage], batch_size: int, order: Order) -> Plan:
    return Plan(network.name, batch_size, tuple(stages), order=order, optimizer_slots=OPTIMIZER_SLOTS)


def _refusal(
    network: Network, stages: list[Stage], batch_size: int = 2, *, order: Order = "1f1b", is_lowered: bool = False
) -> str:
    """Return why a plan of these stages is refused; empty: it is not. `is_lowered`: some of the checks are made where
    the boxes of a stage are computed."""
    try:
        plan = resolve(_plan(network, stages, batch_size, order), network)
        if is_lowered:
            Lowering(plan, network)
    except BadPlan as error:
        return error.message
    return ""


def _obstacle(network: Network, ops: Iterable[Op]) -> SharingObstacle | None:
    """Return the first of some operators."""
    for op in ops:
        layer = network.layers[network.layer_of_op[network.op_index[op.name]]].name
        return SharingObstacle(op.name, op.target, layer, op.where or op.module)
    return None


def _text(op: Op) -> str:
    place = op.where or op.module
    where = place if ":" in place else f"layer {place}"
    return f"{op.name} ({op.target}{f', {where}' if place else ''})"


def _extent(network: Network, layers: int, macs: int | None = None) -> str:
    """Return how much of the network some layers are, in words."""
    count = len(network.layers)
    if not layers:
        return ""
    text = f"all {count} layers" if layers == count else f"{layers} of {count} layers"
    if macs is None or not network.macs or macs == network.macs:
        return text
    part = macs / network.macs
    return f"{text}, {'over 99%' if part > NEARLY_ALL else f'{part:.0%}'} of the arithmetic"


# Memory and time


def _training_needs(network: Network) -> tuple[tuple[TrainingNeeds, ...], str, str]:
    """Return what training steps of one device take, where their times come from, and that in a sentence."""
    times = known_times(network)
    needs = []
    for batch_size in BATCH_SIZES:
        peak, reason = _peak_bytes(network, batch_size)
        forward = step = None
        if times is not None:
            passes = [times[0].layer_seconds(layer, batch_size) for layer in range(len(network.layers))]
            forward = sum(ahead for ahead, _ in passes)
            step = forward + sum(back for _, back in passes) if peak is not None else None
        needs.append(TrainingNeeds(batch_size, peak, reason, forward, step))
    if times is None:
        note = f"Times: this machine was not measured. To measure it: manyhands profile --model {network.name}"
        return tuple(needs), "", note
    return tuple(needs), times[0].source, times[1]


def _peak_bytes(network: Network, batch_size: int) -> tuple[int | None, str]:
    """Return the most bytes that one device holds in a training step; or why there is no such step."""
    try:
        plan = resolve(_plan(network, [_alone(network)], batch_size, "1f1b"), network)
    except BadPlan as error:
        return None, error.message
    return round(check(Schedule(plan, network)).peak_bytes["first"]), ""
