"""A split as arguments and as a plan: K by phase, where the network is cut, how many mini-batches make a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from manyhands.facts.device import DEVICE_NAME
from manyhands.facts.errors import BadValue, unknown
from manyhands.facts.network import Network
from manyhands.facts.plan import BatchNorm, Codec, Plan, Replay, ReplayMode, Stage
from manyhands.planner.split import WIDTHS, Bound, Deployment, Side
from manyhands.planner.split_profile import parse_phases

Phases = tuple[tuple[int, Bound], ...]
"""Pairs (epoch, K): from this epoch on, this K."""
MODES: tuple[ReplayMode, ...] = ("grouped", "window")
USUAL_K = 5
"""The K where "auto" is given and no calibration says otherwise."""
ROUND_BATCHES, WINDOW_BATCHES, UNBOUNDED_BATCHES = 24, 64, 32
"""Approximate mini-batches of a round: in groups, in a window, and without a bound, where all of them are kept."""
ROUND_SECONDS = 10.0
"""About the longest time of a round: a lost server costs no more than one."""


def phases_of(k: int | str | None) -> Phases:
    """Return K by epoch.

    `k` is 5, '5', '4@0,5@8' (4 from epoch 0, 5 from epoch 8), None or 'none' (no bound), or 'auto': the usual K.
    """
    if k == "auto":
        return ((0, USUAL_K),)
    if k is None or (isinstance(k, int) and not isinstance(k, bool) and k >= 0):
        return ((0, k),)
    if not isinstance(k, str):
        raise BadValue(
            f"k is {k!r:.40}; it must be 0 or more updates, None, or by epoch.", hint='Write 5, or "4@0,5@8".'
        )
    return parse_phases(k)


def phases_text(phases: Phases) -> str:
    """Return K by epoch as a user writes it."""
    words = [("none" if k is None else str(k), epoch) for epoch, k in phases]
    return words[0][0] if len(words) == 1 else ",".join(f"{word}@{epoch}" for word, epoch in words)


def cut_of(cut: int | str, network: Network, candidates: Sequence[int], alone: int) -> int | None:
    """Return the layer before which the network is cut.

    `cut` is its number or its name; 'auto': None is returned; 'edge': `alone`, no cut at all.
    """
    text = str(cut)
    if text == "auto":
        return None
    if text == "edge":
        return alone
    names = [layer.name for layer in network.layers]
    if text in names:
        index = names.index(text)
    elif text.isdecimal():
        index = int(text)
    else:
        raise unknown("layer to cut before", text, [*names, "auto", "edge"])
    if index != alone and index not in candidates:
        possible = ", ".join(f"{candidate} ({names[candidate]})" for candidate in candidates[:12])
        raise BadValue(
            f"{network.name} cannot be cut before layer {text}: what crosses there is data, or was not activated.",
            hint=f"Possible: {possible or 'none'}{' ...' if len(candidates) > 12 else ''}; auto; edge (no cut).",
        )
    return index


def bits_of(bits: int | str) -> tuple[int, ...]:
    """Return the widths that features may be packed in; 'auto': any."""
    if str(bits) == "auto":
        return WIDTHS
    if str(bits) not in map(str, WIDTHS):
        raise BadValue(f"bits is {bits!r:.20}; it must be auto or one of {', '.join(map(str, WIDTHS))}.")
    return (int(bits),)


def mode_of(mode: str) -> ReplayMode:
    for candidate in MODES:
        if candidate == mode:
            return candidate
    raise unknown("mode", mode, MODES)


def labels_of(labels: str) -> Literal["edge", "cloud"]:
    if labels not in ("edge", "cloud"):
        raise unknown("place of the labels", labels, ("edge", "cloud"))
    return "cloud" if labels == "cloud" else "edge"


def side_of(edge_side: str) -> Side:
    if edge_side not in ("upstream", "downstream"):
        raise unknown("side of the edge", edge_side, ("upstream", "downstream"))
    return "downstream" if edge_side == "downstream" else "upstream"


@dataclass(frozen=True)
class Ends:
    """The two ends of a split, and what does not change while it runs."""

    network: str
    layers: int
    batch_size: int
    """Samples of a mini-batch, that is, of one step of the optimiser."""
    edge: str = "edge"
    server: str = "server"
    edge_side: Side = "upstream"
    mode: ReplayMode = "grouped"
    error_feedback: bool = True
    pack_gradients: bool = False
    optimizer_slots: int = 1
    batch_norm: BatchNorm = "synchronised"
    gradient_norm: bool = False
    """Whether both ends learn the norm of all gradients before each update."""

    @property
    def alone(self) -> int:
        """The cut that leaves everything to the edge."""
        return self.layers if self.edge_side == "upstream" else 0

    def is_alone(self, deployment: Deployment) -> bool:
        return deployment.cut == self.alone

    def round_batches(self, k: Bound, batch_seconds: float = 0.0) -> int:
        """Return the mini-batches of a round: whole groups, and so many that it does not take too long."""
        group = 1 if k is None else k + 1
        batches = UNBOUNDED_BATCHES if k is None else WINDOW_BATCHES if self.mode == "window" else ROUND_BATCHES
        if batches * batch_seconds > ROUND_SECONDS:
            batches = math.ceil(ROUND_SECONDS / batch_seconds)
        return math.ceil(batches / group) * group

    def plan(self, deployment: Deployment, batch_seconds: float = 0.0) -> Plan:
        """Return the plan of a deployment: two stages, or one where everything is at the edge."""
        k: Bound
        if self.is_alone(deployment):
            stages: tuple[Stage, ...] = (Stage((0, self.layers), (self.edge,)),)
            k = 0
        else:
            codec = Codec(deployment.bits, self.error_feedback, self.pack_gradients)
            before, after = (self.edge, self.server) if self.edge_side == "upstream" else (self.server, self.edge)
            cut, k = deployment.cut, deployment.k
            stages = (Stage((0, cut), (before,)), Stage((cut, self.layers), (after,), codec=codec))
        batches = self.round_batches(k, batch_seconds)
        return Plan(
            self.network, batches * self.batch_size, stages, micro_batches=batches, order="replay",
            replay=Replay(k, self.mode), optimizer_slots=self.optimizer_slots, batch_norm=self.batch_norm,
            gradient_norm=self.gradient_norm,
        )  # fmt: skip

    def deployment(self, plan: Plan) -> Deployment:
        """Return the deployment of a plan of this split."""
        if len(plan.stages) == 1:
            return Deployment(self.alone)
        cut = plan.stages[1].layers[0]
        assert isinstance(cut, int), "the plans made here name layers by their numbers"
        return Deployment(cut, plan.replay.k, plan.stages[1].codec.bits)


def parse_silos(text: str) -> dict[str, tuple[str, ...]] | None:
    """Return which device has which inputs, from text like 'edge-a=left,edge-b=right+mask,server=target'."""
    if not text:
        return None
    holders: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        device, sign, names = part.strip().partition("=")
        if not sign or not DEVICE_NAME.fullmatch(device) or device in holders or not all(names.split("+")):
            raise BadValue(
                f"--silos '{text:.80}' does not say which device has what.",
                hint="Write edge-a=left,edge-b=right,server=target; several of one device: edge-a=left+mask.",
            )
        holders[device] = tuple(names.split("+"))
    return holders
