"""The search for the place where numbers stopped being finite, as far as one device can tell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from manyhands.executor.codec import NoRange
from manyhands.executor.in_flight import InFlightMicroBatches
from manyhands.facts.errors import DataNotFinite, NotFinite
from manyhands.facts.network import Network
from manyhands.schedule.actions import Message, Part


class NumberDiagnosis:
    """Watches numbers that are sent and received, and finds the layer where the first non-finite ones began."""

    def __init__(self, network: Network, device: str, in_flight: InFlightMicroBatches) -> None:
        self.network, self.device, self.in_flight = network, device, in_flight
        self.is_training = in_flight.plan.is_training
        self.first_source = ""
        """The device that the first non-finite numbers of this round came from."""

    def begin_round(self) -> None:
        self.first_source = ""

    def watch_rows(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Do the same with the rows of devices, this one's among them: its own numbers come before those of others."""
        if not self.is_training or self.first_source or _are_finite([*rows.values()]):
            return
        for source in sorted(rows, key=lambda name: name != self.device):
            self.watch(source, [rows[source]])

    def watch(self, source: str, tensors: Iterable[torch.Tensor]) -> None:
        """Remember where the first non-finite numbers of a round came from: a device that has them from another is not
        their cause."""
        if self.is_training and not self.first_source and not all(map(_is_finite, tensors)):
            self.first_source = source

    def loss_error(self, micro_batch: int, number: float) -> NotFinite:
        """Return the error of a loss that is not finite."""
        tensor = self._first_tensor(micro_batch)
        where = "the loss itself: every layer's output is finite" if tensor is None else self._place_of(tensor)
        step = self.in_flight.step_of(micro_batch)
        message = f"The loss is {number} at step {step}, on {self.device}; it began in {where}."
        if tensor is not None and tensor not in self.network.producer:
            return DataNotFinite(message, hint="Fix the data of that step.")
        return NotFinite(message, hint="Lower the learning rate, or look at the data of that step.")

    def late_loss_error(self, step: int, number: float) -> NotFinite:
        """Return the error of a loss that is not finite, noticed when its tensors were gone already."""
        return NotFinite(
            f"The loss is {number} at step {step}, on {self.device}.",
            hint="Lower the learning rate, or look at the data of that step. With exact=True (--exact) a GPU waits for "
            "each loss, and the layer is named where it began.",
        )

    def packing_error(self, message: Message, part: Part, bits: int, error: NoRange) -> NotFinite:
        """Return the error of a box that has no range to be packed in."""
        subject = "The gradient of" if message.kind == "gradient" else "What is sent of"
        tensor = self._first_tensor(message.micro_batch)
        began = "" if tensor is None else f"; it began in {self._place_of(tensor)}"
        return NotFinite(
            f"{subject} '{part.tensor}' cannot be packed in {bits} bits at step {self.in_flight.step}, on {self.device}"
            f": {error}{began}.",
            hint="Lower the learning rate, or look at the data of that step. Features that hold infinities on "
            "purpose go as they are: codec: {bits: 32}, or cut the network elsewhere.",
        )

    def layer(self, step: int) -> str:
        """Return the layer of this device where numbers stopped being finite in a round that was interrupted; empty:
        none."""
        if step != self.in_flight.step:
            return ""
        for number in self.in_flight.numbers():
            tensor = self._first_tensor(number)
            if tensor is not None and tensor in self.network.producer:
                return self._layer_of(tensor)
        return ""

    def _place_of(self, tensor: str) -> str:
        if tensor in self.network.producer:
            return f"layer {self._layer_of(tensor)} ({tensor})"
        return f"the input '{tensor}': the data holds a number that is not finite"

    def _first_tensor(self, micro_batch: int) -> str | None:
        for stage, runner in self.in_flight.runners.items():
            tensor = runner.first_not_finite(micro_batch, self.in_flight.context(stage, micro_batch))
            if tensor is not None:
                return tensor
        return None

    def _layer_of(self, tensor: str) -> str:
        return self.network.layers[self.network.layer_of_op[self.network.producer[tensor]]].name


def _are_finite(rows: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers of some rows of one length are finite; the product of two rows, or the sum of more,
    shows it, unless it overflows itself."""
    if not rows[0].dtype.is_floating_point:
        return True
    shown = torch.dot(rows[0], rows[-1]) if len(rows) <= 2 else torch.stack([*rows]).sum()
    return math.isfinite(float(shown))


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite; their sum shows it, unless it overflows itself."""
    if not tensor.dtype.is_floating_point or math.isfinite(float(tensor.sum())):
        return True
    return bool(torch.isfinite(tensor).all())
