"""A plan: stages, how each is shared, micro-batches, order, codecs. Plain data that a person can read and write.

    network: resnet18
    batch_size: 32
    micro_batches: 4
    order: 1f1b
    stages:
      - layers: [0, 6]                       # from layer 0 up to, not including, layer 6; names work too
        devices: [pi4-1, pi4-2]
        share: {by: samples, samples: [5, 3]}    # of each micro-batch of 8
      - layers: [6, 10]
        devices: [nano]
        codec: {bits: 8}                     # what this stage receives is packed in 8 bits

The four papers are regions of this space: one stage by tiles (TILE), stages by samples (ASTEROID), two stages with a
codec (SPLIT), one stage by channels (DECNN).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from manyhands.facts.decode import OpenUnion, decode, read_open_union
from manyhands.facts.errors import BadPlan, BadValue
from manyhands.facts.extensions import INSTALL_HINT, load_extensions
from manyhands.facts.summary import as_table

if TYPE_CHECKING:
    from manyhands.facts.network import Network

LayerName = int | str
Order = Literal["sequential", "gpipe", "1f1b", "eager", "replay", "stream", "interleave"]
WarmUp = Literal["2(P-p)-1", "2(P-p)", "P-p", "2(P-p)+1"]
BatchNorm = Literal["synchronised", "local"]
ReplayMode = Literal["grouped", "window"]
EVERYWHERE = "everywhere"
BUCKET_BYTES = 4_000_000
"""The bytes of gradients that are summed together, unless a plan says otherwise."""


class Share(OpenUnion):
    """The way in which the devices of a stage divide its work, as a plan states it. A way of sharing is a struct of
    this kind, with a tag of its own in the field `by`, and is registered (`register_share`) before plans can name it.
    """

    __slots__ = ()
    unknown_hint: ClassVar[str] = INSTALL_HINT
    splits_samples: ClassVar[bool] = False
    """Whether each device computes samples of its own."""

    @classmethod
    def members(cls, document: Any = None) -> tuple[type[msgspec.Struct], ...]:
        name = document.get("by") if isinstance(document, dict) else None
        if isinstance(name, str) and name not in _shares:
            load_extensions()
        return tuple(_shares.values())

    @property
    def by(self) -> str:
        """The name of this way of sharing, as plans have it."""
        return share_name(type(self))

    def sample_counts(self, samples: int, devices: int) -> tuple[int, ...]:
        """Return how many of a micro-batch's samples each device computes, be it a part of each."""
        return (samples,) * devices

    def check(self, plan: Plan, index: int, network: Network) -> None:
        """Refuse, with BadPlan, a resolved plan whose stage `index` cannot be shared this way."""

    def text(self, place: int) -> str:
        """Return what the device at `place` of a stage takes of it, for a person."""
        return f"a part by {self.by}"


class Single(msgspec.Struct, Share, frozen=True, tag="single", tag_field="by", forbid_unknown_fields=True):
    """A stage that is not shared: one device does all of it."""


class BySamples(msgspec.Struct, Share, frozen=True, tag="samples", tag_field="by", forbid_unknown_fields=True):
    """A stage of which each device takes some samples of every micro-batch."""

    splits_samples: ClassVar[bool] = True
    samples: tuple[int, ...]

    def sample_counts(self, samples: int, devices: int) -> tuple[int, ...]:
        return self.samples


class ByTiles(msgspec.Struct, Share, frozen=True, tag="tiles", tag_field="by", forbid_unknown_fields=True):
    """A stage of which each device owns a tile of every feature map; devices fill the grid row by row, depth by depth.

    `rows` and `columns` are relative heights and widths: [2, 1] gives the first row two thirds. Groups name the layers,
    or the operators, at which boundary data is exchanged (TILE §4.2). Without `forward_groups` it is exchanged before
    every operator that reads beyond its own tile; without `backward_groups`, backward is the adjoint of forward: each
    device sends what its gradients add to the others' tiles.
    """

    rows: tuple[float, ...]
    columns: tuple[float, ...] = (1,)
    forward_groups: tuple[LayerName, ...] | None = None
    backward_groups: tuple[LayerName, ...] | None = None
    interior_first: tuple[LayerName, ...] = ()
    """Forward groups whose first operator is computed inside the tile while the boundary data travels, and at the rim
    after that: worth it where a link is slow."""
    depths: tuple[float, ...] = ()
    """Relative depths, for maps of (sample, channel, depth, row, column), as of volumes and video; none: no depth is
    cut."""

    @property
    def cuts(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """The relative sizes of tiles along depth, rows and columns."""
        return (self.depths or (1,), self.rows, self.columns)

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of tiles in each direction: rows and columns, or depths, rows and columns where depth is cut."""
        counts = tuple(len(sizes) for sizes in self.cuts)
        return counts if counts[0] > 1 else counts[1:]

    @property
    def grid_text(self) -> str:
        return "x".join(map(str, self.grid))

    def cell(self, place: int) -> tuple[int, ...]:
        """Return where in the grid the device at `place` of a stage is, counted from 0, in each direction."""
        cell: tuple[int, ...] = ()
        for count in reversed(self.grid):
            place, along = divmod(place, count)
            cell = (along, *cell)
        return cell

    def part(self, place: int) -> float:
        """Return the fraction of a map that the device at `place` of a stage owns."""
        sizes = self.cuts[-len(self.grid) :]
        return prod(each[along] / sum(each) for each, along in zip(sizes, self.cell(place), strict=True))


class ByChannels(msgspec.Struct, Share, frozen=True, tag="channels", tag_field="by", forbid_unknown_fields=True):
    """A stage of which each device takes some of the channel groups, in order: `groups` says how many. It is for
    inference.

    A dense layer (fully connected, or a convolution that is not grouped) reads channels of all devices. Each device
    fetches them and makes its own outputs; or, *input-based*, makes partial sums from its own inputs, which go to the
    owner of the output (DECNN §3.2.2).
    """

    groups: tuple[int, ...]
    input_based: tuple[LayerName, ...] | None = None
    """Dense layers, or operators, that are input-based; None: those whose outputs are no more than their inputs."""
    everywhere: tuple[LayerName, ...] = ()
    """The input-based ones whose sums every device gets whole, so that what reads them needs nothing more."""


class MissingShare(msgspec.Struct, Share, frozen=True, tag="missing", tag_field="by"):
    """A way of sharing that a received plan names and this device does not have; `plan_check.resolve` refuses it."""

    name: str


BUILT_IN: tuple[type[Share], ...] = (Single, BySamples, ByTiles, ByChannels)
_shares: dict[str, type[Any]] = {}
"""Name -> the struct that stands for it in plans."""


def share_name(kind: type[Share]) -> str:
    """Return the name of a way of sharing: the tag of its struct."""
    assert issubclass(kind, msgspec.Struct)
    return str(kind.__struct_config__.tag)


def register_share(kind: type[Share]) -> None:
    """Make a way of sharing available to plans: from now on `{by: <its tag>}` is read as this struct."""
    config = kind.__struct_config__ if issubclass(kind, msgspec.Struct) else None
    if config is None or not issubclass(kind, Share) or config.tag_field != "by" or not config.frozen:
        raise BadValue(
            f"{kind.__name__} cannot be registered as a way of sharing.",
            hint='It must be a msgspec.Struct and a Share: frozen=True, tag="its name", tag_field="by".',
        )
    name = share_name(kind)
    if _shares.get(name, kind) is not kind or name == share_name(MissingShare):
        raise BadValue(f"A way of sharing called '{name}' is registered already.", hint="Give it another tag.")
    _shares[name] = kind


def unregister_share(name: str) -> None:
    """Take back `register_share`; what came with manyhands stays."""
    if any(share_name(kind) == name for kind in BUILT_IN):
        raise BadValue(f"'{name}' came with manyhands and cannot be unregistered.")
    _shares.pop(name, None)


for _kind in BUILT_IN:
    register_share(_kind)


def received_share(kind: type, document: Any) -> Any:
    """Return a share of a plan that came over the wire, as `read_open_union` does.

    One that this device does not have is a MissingShare, so that the sender of the plan gets a refusal that names it.
    """
    name = document.get("by") if kind is Share and isinstance(document, dict) else None
    if isinstance(name, str) and name not in _shares:
        load_extensions()
        if name not in _shares:
            return MissingShare(name[:80])
    return read_open_union(kind, document)


class Codec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The packing of features on the wire: n-bit uniform quantisation (SPLIT §4.2); 32 sends them as they are."""

    bits: int = 32
    error_feedback: bool = True
    gradients: bool = False
    """Whether the returned gradients are packed too."""


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of layers on some devices. Which stages feed it follows from the tensors it reads."""

    layers: tuple[LayerName, LayerName]
    devices: tuple[str, ...]
    share: Share = Single()
    codec: Codec = Codec()
    """The codec of what this stage receives from earlier stages."""
    reduce: Literal["allreduce", "gateway"] = "allreduce"
    """The way in which the devices of this stage add up their weight gradients."""
    recompute: tuple[tuple[LayerName, LayerName], ...] = ()
    """Runs of layers, [first, last) each, that keep only what enters them and run forward again in the backward pass:
    less memory for the time of one more forward pass."""


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distance by which stages run ahead of the last one's gradients, with order replay (SPLIT §4.1)."""

    k: int | None = 5
    """The most updates that a gradient may be behind; 0: plain back-propagation; None: no bound but the round."""
    mode: ReplayMode = "grouped"
    """grouped: K+1 mini-batches, and the next when all of them are done; window: never more than K+1 under way."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides which device does what, when."""

    network: str
    batch_size: int
    stages: tuple[Stage, ...]
    micro_batches: int = 1
    order: Order = "1f1b"
    warm_up: WarmUp | tuple[int, ...] = "2(P-p)-1"
    """Forward passes a stage p of P runs ahead of its first backward (ASTEROID §3.2), or one number per stage."""
    batch_norm: BatchNorm = "synchronised"
    homes: dict[str, str] = {}
    """Graph input -> the device that has it; an input not named is at hand wherever it is read."""
    optimizer_slots: int = 1
    """Numbers kept per parameter: by SGD 0, with momentum 1, by Adam 2; one more with an average of the weights."""
    bucket_bytes: int = BUCKET_BYTES
    """Weight gradients are reduced in buckets of about this size, while backward goes on."""
    replay: Replay = Replay()
    gradient_norm: bool = False
    """Whether the devices learn the norm of all gradients before each update, as to clip by it."""
    places: dict[str, str] = {}
    """Device -> where it is: its host, its site, or both (`paris/pi-1`), for sums that go through these groups: inside
    a host first, then inside a site, then among sites, and back. A device that is not named is in none."""

    def _repr_html_(self) -> str:
        stages = {
            f"stage {number}": f"layers {stage.layers[0]} to {stage.layers[1]}, {stage.share.by}: "
            f"{', '.join(stage.devices)}"
            for number, stage in enumerate(self.stages)
        }
        facts = {"batch": f"{self.batch_size} in {self.micro_batches} part(s)", "order": self.order}
        return as_table(f"Plan of {self.network}", {**facts, **stages})

    @property
    def steps_per_round(self) -> int:
        """With order replay every micro-batch is a mini-batch of its own: the optimiser steps after each. With order
        interleave each is a sample, or some, to be answered by itself."""
        return self.micro_batches if self.order in ("replay", "interleave") else 1

    @property
    def step_size(self) -> int:
        """Samples between two steps of the optimiser."""
        return self.batch_size // self.steps_per_round

    @property
    def micro_batch_size(self) -> int:
        return self.batch_size // self.micro_batches

    @property
    def is_training(self) -> bool:
        return self.order not in ("stream", "interleave")

    @property
    def may_repeat_devices(self) -> bool:
        """Whether a device may work in several stages: all go through the passes in one order."""
        in_one_order = self.order in ("sequential", "gpipe", "stream", "interleave")
        return in_one_order or (self.micro_batches == 1 and self.order == "1f1b")

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device that takes part, in the plan's order."""
        homes = [home for home in self.homes.values() if home != EVERYWHERE]
        return tuple(dict.fromkeys([name for stage in self.stages for name in stage.devices] + homes))

    def places_of(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the places of devices that add something up; empty: none is in a group."""
        places = tuple(self.places.get(device, "") for device in devices) if self.places else ()
        return places if any(places) else ()

    def warm_up_of(self, stage: int) -> int:
        """Return K_p: how many forward passes stage p may be ahead of its backward passes."""
        if isinstance(self.warm_up, tuple):
            return self.warm_up[stage]
        ahead = len(self.stages) - stage
        count = {"2(P-p)-1": 2 * ahead - 1, "2(P-p)": 2 * ahead, "P-p": ahead, "2(P-p)+1": 2 * ahead + 1}[self.warm_up]
        return max(1, min(count, self.micro_batches))

    @classmethod
    def from_dict(cls, document: Any) -> Plan:
        return decode(document, cls, "plan", BadPlan)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan without defaults, so that a person reads only what was decided."""
        full = msgspec.to_builtins(self)
        document = _unusual(full, Plan, always=("order", "micro_batches"))
        document["stages"] = [_unusual(stage, Stage) for stage in full["stages"]]
        for stage, original in zip(document["stages"], self.stages):
            if "share" in stage:
                usual = _defaults(type(original.share))
                stage["share"] = {
                    key: value
                    for key, value in stage["share"].items()
                    if value not in (None, [], ()) or key not in usual or usual[key] != value
                }
        return document


def plan_line(plan: Plan) -> str:
    """Return how a plan shares the work, in a few words."""
    ways = " -> ".join(f"{stage.share.by} on {', '.join(stage.devices)}" for stage in plan.stages)
    return f"{len(plan.stages)} stage(s): {ways}"


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Return field -> its default; fields without one are left out."""
    usual: dict[str, Any] = {}
    for info in msgspec.structs.fields(kind):
        if info.default_factory is not msgspec.NODEFAULT:
            usual[info.name] = info.default_factory()
        elif info.default is not msgspec.NODEFAULT:
            usual[info.name] = msgspec.to_builtins(info.default)
    return usual


def _unusual(document: dict[str, Any], kind: type[msgspec.Struct], always: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the fields that differ from their defaults, or have none."""
    usual = _defaults(kind)
    return {key: value for key, value in document.items() if key in always or key not in usual or usual[key] != value}
