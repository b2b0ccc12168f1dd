"""The actions of a device: plain data that prints and parses. Simulator and executor interpret the same ones.

forward s0 m3 0:12                                  operators 0..11 of stage 0 on micro-batch 3
loss s1 m3                                          the loss, and the gradients of what the network returns
backward s0 m3 0:12
forward s0 m3 4:5 interior                          what operator 4 makes without other tiles' data; 'rim': the rest
forward s0 m3 8:9 partial                           sums over this device's own inputs; 'sum': of all devices'
forward s0 m3 0:12 ahead                            keeps only what comes in: it is run 'again' before its backward pass
backward s0 m3 4:5 inputs                           only the gradients of what operator 4 reads; 'weights': the others
backward s0 m3 7:8 rim                              of a normalisation's input, only the gradients in others' tiles
send pi-2 s1 m3 value relu_3[0:4,0:64,0:28,0:28] 802816B     does not wait
receive pi-1 s1 m3 value relu_3[0:4,0:64,0:28,0:28] 802816B  waits for the message; stage 1 reads it
reduce s0 gradients 0:12 pi-1,pi-2 44696B           adds up among the named devices; 'step' waits for it
reduce s0 gradients 0:90 pi-1,pi-3 404B of words    the same, of weights that several stages hold
reduce s0 gradients 0:12 a/a.1,a/a.2,b 44696B       the same, first inside host a
reduce s0 statistics m3 7:8 pi-1,pi-2 516B          waits at once: batch-norm sums are needed to go on
reduce s0 statistics m3b 7:8 pi-1,pi-2 512B later   sends its part only; there is something else to compute meanwhile
await s0 m3b 7:8                                    waits for the others' parts
reduce s0 norm 0:90 pi-1,pi-3 16B                   the norm of all gradients, waited for: the step clips by it
step s0                                             the optimiser's update; 'step s0 m3': of that micro-batch alone
discard s0 m3                                       nothing more is done with that micro-batch
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal, get_args

import msgspec

from manyhands.facts.boxes import Box
from manyhands.facts.errors import BadSchedule

Kind = Literal[
    "value",
    "gradient",
    "halo",
    "halo-gradient",
    "partial",
    "input",
    "output",
    "output-gradient",
    "weights",
    "weight-gradient",
]
ReduceKey = tuple[int, str, int, int, int, bool]
LONGEST_TOPIC = 1000
KINDS: tuple[str, ...] = get_args(Kind)
ForwardPart = Literal["", "interior", "rim", "partial", "sum", "ahead", "again"]
BackwardPart = Literal["", "inputs", "weights", "rim"]


class Part(msgspec.Struct, frozen=True, gc=False):
    """A box of one tensor inside a message. `=x[...]`: among gradients, a value of the forward pass."""

    tensor: str
    box: Box
    is_value: bool = False

    def __str__(self) -> str:
        return f"{'=' if self.is_value else ''}{self.tensor}{self.box}"


class Message(msgspec.Struct, frozen=True, gc=False):
    """The unit that travels from one device to another: boxes of tensors of one micro-batch, packed."""

    kind: Kind
    stage: int
    """The stage that reads the tensors; of a gradient that returns, the stage that has read them."""
    micro_batch: int
    parts: tuple[Part, ...]
    bytes: int

    def __str__(self) -> str:
        parts = "+".join(map(str, self.parts))
        return f"s{self.stage} m{self.micro_batch} {self.kind} {parts} {self.bytes}B"

    @property
    def topic(self) -> str:
        """The message's name on the wire: its text or, where that is long, its beginning and a digest of all of it."""
        text = str(self)
        if len(text) <= LONGEST_TOPIC:
            return text
        return f"{text[:200]}... {hashlib.sha256(text.encode()).hexdigest()} {self.bytes}B"


class Forward(msgspec.Struct, frozen=True, gc=False, tag="forward"):
    """Compute operators [first, last) of a stage for this device's share of a micro-batch."""

    stage: int
    micro_batch: int
    first: int
    last: int
    part: ForwardPart = ""
    """The part that is computed; "": all of it.

    Of one operator: only what needs nothing from other tiles ("interior"), or only the rest ("rim"); or partial sums
    from own channels ("partial"), and then the sum of all devices' ("sum"). Of a whole stage: without what a backward
    pass needs ("ahead"); or once more with it ("again"), on the current weights (SPLIT Eq. 3): the same masks, and no
    buffer changes.
    """

    def __str__(self) -> str:
        part = f" {self.part}" if self.part else ""
        return f"forward s{self.stage} m{self.micro_batch} {self.first}:{self.last}{part}"


class Loss(msgspec.Struct, frozen=True, gc=False, tag="loss"):
    """Compute the loss of what the network returned, and the gradients that backward starts with."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"loss s{self.stage} m{self.micro_batch}"


class Backward(msgspec.Struct, frozen=True, gc=False, tag="backward"):
    """Compute the gradients of operators [first, last), last to first."""

    stage: int
    micro_batch: int
    first: int
    last: int
    part: BackwardPart = ""
    """The part that is computed; "": all of it.

    Of one operator: only the gradients of its inputs ("inputs"), which others wait for, or only those of its weights
    ("weights"). Of a normalisation: of its input's gradient, only what belongs to others' tiles ("rim"), which needs no
    other device's sums.
    """

    def __str__(self) -> str:
        part = f" {self.part}" if self.part else ""
        return f"backward s{self.stage} m{self.micro_batch} {self.first}:{self.last}{part}"


class Send(msgspec.Struct, frozen=True, gc=False, tag="send"):
    """Hand a message to the link; computing goes on."""

    to: str
    message: Message

    def __str__(self) -> str:
        return f"send {self.to} {self.message}"


class Receive(msgspec.Struct, frozen=True, gc=False, tag="receive"):
    """Wait until a message has arrived."""

    source: str
    message: Message

    def __str__(self) -> str:
        return f"receive {self.source} {self.message}"


class Reduce(msgspec.Struct, frozen=True, gc=False, tag="reduce"):
    """Add up numbers among `devices`.

    Gradients travel while computing goes on; statistics are waited for, at once or by an `Await`. The norm is that of
    all gradients of an update: each device gives its part when its own sums of gradients are complete, and waits.
    """

    stage: int
    what: Literal["gradients", "statistics", "norm"]
    first: int
    last: int
    devices: tuple[str, ...]
    bytes: int
    micro_batch: int = -1
    """The micro-batch; -1: once per round."""
    backward: bool = False
    """Statistics of the backward pass."""
    later: bool = False
    """Statistics that an `Await` waits for."""
    weights: tuple[str, ...] = ()
    """Tied weights, whose gradients are added up among all stages that hold them, between operators `first` and `last`.
    Empty: those of which operators [first, last) of one stage complete the gradients."""
    places: tuple[str, ...] = ()
    """Where each device is, as `Plan.places` has it: what is added up goes through the groups. Empty: in one group."""

    @property
    def is_awaited(self) -> bool:
        """Whether a device waits for the others' parts as soon as it has given its own."""
        return self.what == "norm" or (self.what == "statistics" and not self.later)

    @property
    def key(self) -> ReduceKey:
        """The reduction's identity; cheaper to compare than the list of devices."""
        what = f"{self.what} of {self.weights[0]}" if self.weights else self.what
        return (self.stage, what, self.first, self.last, self.micro_batch, self.backward)

    def __str__(self) -> str:
        when = "" if self.micro_batch < 0 else f" m{self.micro_batch}{'b' if self.backward else ''}"
        later = " later" if self.later else ""
        devices, tied = ",".join(self._placed()), f" of {'+'.join(self.weights)}" if self.weights else ""
        return f"reduce s{self.stage} {self.what}{when} {self.first}:{self.last} {devices} {self.bytes}B{later}{tied}"

    def _placed(self) -> tuple[str, ...]:
        """Return the devices, each behind its place: site/host/device."""
        if not self.places:
            return self.devices
        return tuple(f"{place}/{name}" if place else name for place, name in zip(self.places, self.devices))


class Await(msgspec.Struct, frozen=True, gc=False, tag="await"):
    """Wait for every device's part of statistics to which this device has given its own."""

    stage: int
    first: int
    last: int
    micro_batch: int
    backward: bool = False

    @property
    def key(self) -> ReduceKey:
        """The key of the reduction that is waited for."""
        return (self.stage, "statistics", self.first, self.last, self.micro_batch, self.backward)

    def __str__(self) -> str:
        return f"await s{self.stage} m{self.micro_batch}{'b' if self.backward else ''} {self.first}:{self.last}"


class Step(msgspec.Struct, frozen=True, gc=False, tag="step"):
    """Wait for the gradients' reductions, then update the weights of a stage."""

    stage: int
    micro_batch: int = -1
    """The micro-batch; -1: once per round."""

    def __str__(self) -> str:
        return f"step s{self.stage}" if self.micro_batch < 0 else f"step s{self.stage} m{self.micro_batch}"


class Discard(msgspec.Struct, frozen=True, gc=False, tag="discard"):
    """Forget a micro-batch: it came back too late, or nothing comes back at all."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"discard s{self.stage} m{self.micro_batch}"


Action = Forward | Loss | Backward | Send | Receive | Reduce | Await | Step | Discard


def is_urgent(transfer: object) -> bool:
    """Return whether some device's computing waits for what travels.

    Weights and their gradients are bulk: only the step waits for them, so they go last where a device has both to send.
    """
    if isinstance(transfer, Message):
        return transfer.kind not in ("weights", "weight-gradient")
    return isinstance(transfer, Reduce) and transfer.what != "gradients"


_COMPUTE = re.compile(
    r"(forward|backward) s(\d+) m(\d+) (\d+):(\d+)(?: (inputs|weights|interior|rim|partial|sum|ahead|again))?"
)
_LOSS = re.compile(r"loss s(\d+) m(\d+)")
_BOX = r"\[(?:-?\d+:-?\d+(?:,-?\d+:-?\d+)*)?\]"
_NAME = r"[^\[\]+=\s]+"
_PART = re.compile(f"(=?)({_NAME})({_BOX})")
_PARTS = rf"=?{_NAME}{_BOX}(?:\+=?{_NAME}{_BOX})*"
_TRANSFER = re.compile(rf"(send|receive) (\S+) s(\d+) m(\d+) ({'|'.join(KINDS)}) ({_PARTS}) (\d+)B")
_REDUCE = re.compile(
    r"reduce s(\d+) (gradients|statistics|norm)(?: m(\d+)(b?))? (\d+):(\d+) (\S+) (\d+)B( later)?(?: of (\S+))?"
)
_AWAIT = re.compile(r"await s(\d+) m(\d+)(b?) (\d+):(\d+)")
_STEP = re.compile(r"step s(\d+)(?: m(\d+))?")
_DISCARD = re.compile(r"discard s(\d+) m(\d+)")


def parse_action(text: str) -> Action:
    """Return the action that prints as `text`."""
    text = text.strip()
    if match := _COMPUTE.fullmatch(text):
        stage, micro_batch, first, last = map(int, match.groups()[1:5])
        part: Any = match.group(6) or ""
        if match.group(1) == "forward" and part in get_args(ForwardPart):
            return Forward(stage, micro_batch, first, last, part)
        if match.group(1) == "backward" and part in get_args(BackwardPart):
            return Backward(stage, micro_batch, first, last, part)
    if match := _LOSS.fullmatch(text):
        return Loss(int(match.group(1)), int(match.group(2)))
    if match := _TRANSFER.fullmatch(text):
        word, peer, stage_text, micro_batch_text, kind, parts, size = match.groups()
        boxes = tuple(Part(name, Box.parse(box), bool(value)) for value, name, box in _PART.findall(parts))
        message = Message(kind, int(stage_text), int(micro_batch_text), boxes, int(size))  # type: ignore[arg-type]
        return Send(peer, message) if word == "send" else Receive(peer, message)
    if match := _REDUCE.fullmatch(text):
        stage_text, summed, at, back, first_text, last_text, devices, size, later, tied = match.groups()
        places, names = zip(*(device.rpartition("/")[::2] for device in devices.split(",")))
        return Reduce(
            int(stage_text), summed, int(first_text), int(last_text), names, int(size),  # type: ignore[arg-type]
            int(at) if at is not None else -1, bool(back), bool(later), tuple(tied.split("+")) if tied else (),
            places if any(places) else (),
        )  # fmt: skip
    if match := _AWAIT.fullmatch(text):
        stage_text, at, back, first_text, last_text = match.groups()
        return Await(int(stage_text), int(first_text), int(last_text), int(at), bool(back))
    if match := _STEP.fullmatch(text):
        return Step(int(match.group(1)), int(match.group(2)) if match.group(2) is not None else -1)
    if match := _DISCARD.fullmatch(text):
        return Discard(int(match.group(1)), int(match.group(2)))
    raise BadSchedule(f"cannot read the action '{text:.120}'.", hint="Actions look like 'forward s0 m3 0:12'.")


def print_schedule(actions: dict[str, tuple[Action, ...]]) -> str:
    """Return every device's list as text, one action per line."""
    lines = []
    for device, listed in actions.items():
        lines.append(f"device {device}")
        lines.extend(f"  {action}" for action in listed)
    return "\n".join(lines) + "\n"


def parse_schedule(text: str) -> dict[str, tuple[Action, ...]]:
    """Return the actions that `print_schedule` wrote."""
    lists: dict[str, list[Action]] = {}
    current: list[Action] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("device "):
            name = line.removeprefix("device ").strip()
            if name in lists:
                raise BadSchedule(f"line {number}: device '{name}' has a list already.")
            current = lists[name] = []
        elif line.strip():
            if current is None:
                raise BadSchedule(f"line {number}: '{line.strip():.60}' comes before any 'device NAME' line.")
            try:
                current.append(parse_action(line))
            except BadSchedule as error:
                raise BadSchedule(f"line {number}: {error.message}", hint=error.hint) from None
    return {device: tuple(actions) for device, actions in lists.items()}
