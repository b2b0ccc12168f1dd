"""One device's work: the actions of one forward pass, one backward pass, and the end of a round, as templates.

Messages and boxes are the same for every micro-batch, so they are computed once (lowering.py) and numbered per
micro-batch here. An order (orders.py) or a policy (policy.py) then decides which pass comes next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from manyhands.facts.boxes import Box
from manyhands.schedule.actions import Action, Await, Backward, Forward, Loss, Message, Receive, Reduce, Send, Step
from manyhands.schedule.geometry import StageGeometry


@dataclass
class DeviceWork:
    """The templates of one device. Micro-batch numbers are filled in by its methods."""

    device: str
    geometries: list[StageGeometry] = field(default_factory=list)
    """The geometries of the stages that the device works in, in order; none: it only has inputs."""
    before: list[Action] = field(default_factory=list)
    """Sends of the inputs that this device has and others read."""
    forward_actions: list[Action] = field(default_factory=list)
    backward_actions: list[Action] = field(default_factory=list)
    last_backward_actions: list[Action] = field(default_factory=list)
    """The backward pass of the round's last micro-batch, with gradient reductions in between."""
    end: list[Action] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """The first stage that the device works in; -1: none."""
        return self.geometries[0].index if self.geometries else -1

    def geometry(self, stage: int) -> StageGeometry:
        return next(geometry for geometry in self.geometries if geometry.index == stage)

    def weights(self) -> tuple[str, ...]:
        """Return the weights that the device needs, each once."""
        names = (name for g in self.geometries for name in g.network.weights_of(g.first, g.last))
        return tuple(dict.fromkeys(names))

    @property
    def makes_steps(self) -> bool:
        """Whether the device has an optimizer, of which it may step no weight: where a stage has a gateway, only that
        one has."""
        return any(isinstance(action, Step) for action in self.end)

    def stepped_weights(self) -> tuple[str, ...]:
        """Return the weights that the device steps, each once."""
        stages = {action.stage for action in self.end if isinstance(action, Step)}
        names = (n for g in self.geometries if g.index in stages for n in g.network.weights_of(g.first, g.last))
        return tuple(dict.fromkeys(names))

    def weight_box(self, name: str) -> Box | None:
        """Return the part of a weight that the device needs; None: all of it."""
        readers = (g for g in self.geometries if name in g.network.weights_of(g.first, g.last))
        boxes = {g.weight_box(self.device, name) for g in readers}
        return boxes.pop() if len(boxes) == 1 else None

    def inputs(self, micro_batch: int) -> list[Action]:
        """Return the actions that send the inputs that others read."""
        return [_numbered(action, micro_batch) for action in self.before]

    def forward(self, micro_batch: int) -> list[Action]:
        return [_numbered(action, micro_batch) for action in self.forward_actions]

    def backward(self, micro_batch: int, *, is_last: bool) -> list[Action]:
        chosen = self.last_backward_actions if is_last else self.backward_actions
        return [_numbered(action, micro_batch) for action in chosen]

    def finish(self) -> list[Action]:
        return list(self.end)

    def again(self, micro_batch: int) -> list[Action]:
        """Return the forward pass once more, for the device's own backward pass: nothing is sent."""
        passes = [action for action in self.forward(micro_batch) if isinstance(action, Forward)]
        return [msgspec.structs.replace(action, part="again") for action in passes]

    def ahead(self, micro_batch: int) -> list[Action]:
        """Return the forward pass without what a backward pass needs."""
        return [
            msgspec.structs.replace(action, part="ahead") if isinstance(action, Forward) else action
            for action in self.forward(micro_batch)
        ]

    def steps(self, micro_batch: int) -> list[Action]:
        """Return the optimiser's update after a micro-batch that is a mini-batch of its own."""
        return [_numbered(action, micro_batch) for action in self.end]


def _numbered(action: Action, micro_batch: int) -> Action:
    if isinstance(action, Forward):
        return Forward(action.stage, micro_batch, action.first, action.last, action.part)
    if isinstance(action, Backward):
        return Backward(action.stage, micro_batch, action.first, action.last, action.part)
    if isinstance(action, (Send, Receive)):
        template = action.message
        message = Message(template.kind, template.stage, micro_batch, template.parts, template.bytes)
        return Send(action.to, message) if isinstance(action, Send) else Receive(action.source, message)
    is_sum = isinstance(action, Reduce) and action.what != "gradients"
    if is_sum or isinstance(action, (Loss, Step, Await)):
        return msgspec.structs.replace(action, micro_batch=micro_batch)
    return action
