"""The bytes that a device holds while it works through its actions (ASTEROID Eq. 3, action by action).

static      weights, their gradients, the optimiser's state, buffers
held        what each micro-batch in flight keeps for its backward pass, and what it received
workspace   the inputs and outputs of the operator being computed; on the way back its weights' new gradients, which are
            added to those of earlier micro-batches; in the optimiser's step, what it computes a weight's change with;
            in the loss, all that it makes of the network's outputs

A received tensor that its reader also saves counts twice: the sum may be too large by that, never too small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import prod

from manyhands.facts.network import DTYPE_BYTES, Network, Op, WeightSpec
from manyhands.facts.plan import Plan
from manyhands.schedule.actions import Action, Backward, Discard, Forward, Loss, Message, Receive, Send, Step
from manyhands.schedule.geometry import StageGeometry
from manyhands.schedule.recomputation import entering, recomputed_spans


class DeviceMemory:
    """The memory of one device, followed through its actions. `peak_bytes` is the most it held at once."""

    def __init__(self, plan: Plan, network: Network, geometries: Sequence[StageGeometry], device: str) -> None:
        self.is_training = plan.is_training
        self._plan, self._network = plan, network
        self.stages = {geometry.index: _StageBytes(plan, network, geometry, device) for geometry in geometries}
        self.static_bytes = _static_bytes(plan, network, geometries, device)
        self._received: dict[tuple[int, int], int] = defaultdict(int)
        self._history: dict[tuple[int, int], float] = {}
        """(stage, micro-batch) -> bytes that are kept for the forward pass, or layers of it, to be run again."""
        self._errors: dict[tuple[str, int, int], int] = {}
        """(receiver, stage, micro-batch) -> bytes of the errors of what was packed for it."""
        self._output_gradients: dict[tuple[int, int], int] = {}
        """(stage, micro-batch) -> bytes of the gradients that its loss has left, until its backward pass begins."""
        self.held_bytes = 0.0
        self.peak_bytes: float = self.static_bytes
        self.peak_action: Action | None = None
        self.micro_batches_held = 0
        self.most_micro_batches_held = 0

    def act(self, action: Action) -> float:
        """Follow one action, and return the most bytes held during it."""
        now = self.static_bytes + self.held_bytes
        if isinstance(action, Receive) and action.message.kind in ("value", "input", "halo", "partial", "output"):
            size = self._unpacked_bytes(action.message)
            self._received[action.message.stage, action.message.micro_batch] += size
            self.held_bytes += size
            packed = action.message.bytes if size > action.message.bytes else 0  # both are there while it is unpacked
            now = self.static_bytes + self.held_bytes + packed
        elif isinstance(action, Receive):
            message = action.message
            now += self._unpacked_bytes(message)
            if message.kind == "gradient":
                self.held_bytes -= self._errors.pop((action.source, message.stage, message.micro_batch), 0)
        elif isinstance(action, Send):
            self._keep_error(action)
            now = self.static_bytes + self.held_bytes
        elif isinstance(action, Forward) and action.part != "rim":
            stage = self.stages[action.stage]
            saved, workspace = stage.range(action.first, action.last) if action.part != "sum" else (0.0, 0.0)
            is_first = action.first == stage.first and action.part not in ("again", "sum")
            if is_first and stage is next(iter(self.stages.values())):
                self.micro_batches_held += 1
                self.most_micro_batches_held = max(self.most_micro_batches_held, self.micro_batches_held)
            if not stage.runs_backward:
                now += workspace
                if action.last == stage.last and action.part not in ("interior", "partial"):
                    self._release(action.stage, action.micro_batch)
            elif action.part == "ahead":
                kept = stage.kept_bytes(action.first) + is_first * stage.input_bytes
                key = action.stage, action.micro_batch
                self._history[key] = self._history.get(key, 0.0) + kept
                self.held_bytes += kept
                now = self.static_bytes + self.held_bytes + workspace
            else:
                self.held_bytes += saved
                now = self.static_bytes + self.held_bytes + workspace
        elif isinstance(action, Loss):
            stage = self.stages[action.stage]
            now += stage.loss_bytes
            self._output_gradients[action.stage, action.micro_batch] = stage.output_gradient_bytes
            self.held_bytes += stage.output_gradient_bytes
        elif isinstance(action, Backward) and action.part not in ("weights", "rim"):
            stage = self.stages[action.stage]
            if action.last == stage.last:  # what the loss has left is now among what the first operator works with
                self.held_bytes -= self._output_gradients.pop((action.stage, action.micro_batch), 0)
                now = self.static_bytes + self.held_bytes
            saved, workspace = stage.range(action.first, action.last, backward=True)
            now += workspace
            self.held_bytes -= saved
            if action.first == stage.backward_first:
                self._release(action.stage, action.micro_batch)
        elif isinstance(action, Discard) and self.stages[action.stage].runs_backward:
            self._release(action.stage, action.micro_batch)
        elif isinstance(action, Step):
            now += self.stages[action.stage].step_bytes
        if now > self.peak_bytes:
            self.peak_bytes, self.peak_action = now, action
        return now

    def _unpacked_bytes(self, message: Message) -> int:
        """Return the bytes that a message takes where it is read: a codec packs it only for the transfer."""
        codec = self._plan.stages[message.stage].codec
        if codec.bits == 32 or message.kind not in ("value", "gradient"):
            return message.bytes
        tensors = self._network.tensors
        return sum(part.box.volume * DTYPE_BYTES[tensors[part.tensor].dtype] for part in message.parts)

    def _keep_error(self, action: Send) -> None:
        """Hold what packing has changed until the gradient is back (SPLIT Alg. 1)."""
        message, codec = action.message, self._plan.stages[action.message.stage].codec
        if self.is_training and message.kind == "value" and codec.bits < 32 and codec.error_feedback:
            tensors = self._network.tensors
            if any(tensors[part.tensor].differentiable for part in message.parts):
                size = self._unpacked_bytes(message)
                self._errors[action.to, message.stage, message.micro_batch] = size
                self.held_bytes += size

    def _release(self, stage: int, micro_batch: int) -> None:
        kept = (self._received, self._history, self._output_gradients)
        self.held_bytes -= sum(each.pop((stage, micro_batch), 0) for each in kept)
        if stage == next(iter(self.stages)):
            self.micro_batches_held -= 1


class _StageBytes:
    """The bytes that a stage takes on a device: for good, per micro-batch in flight, and while an operator runs."""

    def __init__(self, plan: Plan, network: Network, geometry: StageGeometry, device: str) -> None:
        self.first, self.last = geometry.first, geometry.last
        self.runs_backward, self.backward_first = geometry.runs_backward, geometry.backward_first
        parts, samples = geometry.fractions(device), plan.micro_batch_size
        saved = [
            op.saved_bytes * samples * part + op.saved_fixed_bytes if part and index >= self.backward_first else 0.0
            for index, (op, part) in enumerate(zip(geometry.ops, parts), self.first)
        ]
        self._saved = list(accumulate(saved, initial=0.0))
        entered = entering(network, geometry.first, recomputed_spans(geometry))
        share = samples * (parts[0] if parts else 0.0)
        self._kept = {
            span[0]: sum(_tensor_bytes(network, name, 1) * share for name in names) for span, names in entered.items()
        }
        self._workspace = [op.moved_bytes * op.work_samples(samples) * part for op, part in zip(geometry.ops, parts)]
        weights = [_trained_bytes(network, op, geometry, device) for op in geometry.ops]
        is_added = plan.micro_batches > 1 and plan.order != "replay"
        self._backward = [work + size * is_added for work, size in zip(self._workspace, weights)]
        self.step_bytes = plan.optimizer_slots * max(weights, default=0)
        read = {name for op in geometry.ops for name in op.inputs if name in network.inputs}
        self.input_bytes = float(sum(_tensor_bytes(network, name, samples) for name in read))
        """The bytes that come in of a micro-batch."""
        has_loss = geometry.is_last and plan.is_training and device in geometry.loss_devices
        scored = geometry.sample_count(device) if has_loss else 0
        self.loss_bytes = network.loss_bytes * scored
        self.output_gradient_bytes = network.gradient_bytes_of_outputs(scored) if scored else 0
        """The bytes of what the loss leaves for the backward pass of a micro-batch."""

    def kept_bytes(self, first: int) -> float:
        """Return the bytes of what the layers that are run again from operator `first` keep until then."""
        return self._kept.get(first, 0.0)

    def range(self, first: int, last: int, *, backward: bool = False) -> tuple[float, float]:
        """Return the bytes that operators [first, last) keep for backward, and the most that any of them works with."""
        low, high = first - self.first, last - self.first
        workspace = self._backward if backward else self._workspace
        return self._saved[high] - self._saved[low], max(workspace[low:high], default=0.0)


def _tensor_bytes(network: Network, name: str, samples: int) -> int:
    tensor = network.tensors[name]
    return prod(tensor.shape_for(samples)) * DTYPE_BYTES[tensor.dtype]


def _trained_bytes(network: Network, op: Op, geometry: StageGeometry, device: str) -> float:
    weights = (network.weights[name] for name in op.weights)
    return sum(weight.bytes * weight_part(geometry, device, weight) for weight in weights if weight.trainable)


def _static_bytes(plan: Plan, network: Network, geometries: Sequence[StageGeometry], device: str) -> int:
    """Return the bytes of a device's weights and all that belongs to them; of one that several of its stages read it
    has one copy."""
    parts: dict[str, float] = {}
    for geometry in geometries:
        for name in network.weights_of(geometry.first, geometry.last):
            part = weight_part(geometry, device, network.weights[name])
            parts[name] = max(part, parts.get(name, 0.0))
    weights = ((network.weights[name], part) for name, part in parts.items())
    return round(sum(weight.bytes * weight_copies(plan, weight) * part for weight, part in weights))


def weight_part(geometry: StageGeometry, device: str, weight: WeightSpec) -> float:
    """Return the fraction of a weight that a device keeps: by channels, what its channels need; otherwise all of it."""
    box = geometry.weight_box(device, weight.name)
    return 1.0 if box is None or not weight.elements else box.volume / weight.elements


def weight_copies(plan: Plan, weight: WeightSpec) -> int:
    """Return how many tensors of a weight's size are kept.

    They are the weight and, if it is trained, its gradient and the optimiser's state.
    """
    return 2 + plan.optimizer_slots if weight.trainable and plan.is_training else 1
