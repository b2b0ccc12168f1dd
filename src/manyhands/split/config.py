"""A split as typed on the command line: names in place of objects, a paper's settings as presets, a run to go on with.

What can be found wrong without torch is found before it is imported, and before a run folder is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadFile, BadValue, UnknownName, unknown
from manyhands.facts.hyper import Hyper, hyper
from manyhands.facts.optimizer import Optimizer
from manyhands.facts.optimizer import parse as parse_optimizer
from manyhands.facts.units import parse_bytes, parse_seconds
from manyhands.files.documents import read_document
from manyhands.files.traces import read_link_trace
from manyhands.job import named as jobs
from manyhands.models.registry import ZOO, from_file
from manyhands.planner.split_choice import BASELINES
from manyhands.session.joining import DEVICE_NAME, parse_address
from manyhands.split.plans import CONVENTIONAL, bits_of, labels_of, mode_of, phases_of, side_of

if TYPE_CHECKING:
    from manyhands.data.data_sets import DataSets
    from manyhands.job.base import OnOpened, OnPlanned, OnStep
    from manyhands.split.job import SplitResult

EPOCHS, BATCH_SIZE, OPTIMIZER = 4, 32, "SGD:lr=0.05,momentum=0.9"
MAY_CHANGE = (
    "epochs", "steps", "cut", "bits", "k", "mode", "rival", "trace", "cloud", "edge_slowdown", "server_slowdown",
    "memory", "delay", "calibrate", "allowed_drop", "listen", "has_typed_token",
)  # fmt: skip
"""What a run may go on with in another way; the rest decides what is computed."""


@dataclass(frozen=True)
class SplitWish:
    """What was typed, checked; a run folder keeps it for --resume."""

    model: str = jobs.MODEL
    data: str = jobs.DATA
    input: str = ""
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    optimizer: str = ""
    lr: float | None = None
    preset: bool = False
    cut: str = "auto"
    bits: str = "auto"
    k: str = "5"
    mode: str = "grouped"
    rival: str = ""
    labels: str = "edge"
    edge_side: str = "upstream"
    silos: str = ""
    listen: str = ""
    """Where devices with silos join; empty: processes of this machine are given theirs."""
    has_typed_token: bool = False
    """See `jobs.Wish`."""
    freeze: str = "0"
    weights: str = ""
    trace: str = ""
    cloud: str = ""
    edge_slowdown: float = 1.0
    server_slowdown: float = 1.0
    memory: str = ""
    delay: str = ""
    calibrate: float = 0.0
    """Seconds; 0: only what an earlier one found."""
    allowed_drop: float = 0.01
    seed: int = 0
    granularity: str = "blocks"

    def __post_init__(self) -> None:
        for field, least in (("epochs", 1), ("steps", 1), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise BadValue(f"{_option(field)} is {value}; it must be at least {least}.")
        if self.epochs is not None and self.steps is not None:
            raise BadValue(
                f"--epochs {self.epochs} and --steps {self.steps} both say how long.", hint="Give one of them."
            )
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise BadValue(f"--lr is {self.lr}; it must be > 0.")
        for field in ("edge_slowdown", "server_slowdown"):
            if not 1 <= getattr(self, field) < float("inf"):
                raise BadValue(f"{_option(field)} is {getattr(self, field)}; it must be 1 or more.")
        (
            phases_of(self.k),
            bits_of(self.bits),
            mode_of(self.mode),
            labels_of(self.labels),
            side_of(self.edge_side),
        )
        rivals = (*BASELINES, CONVENTIONAL) if parse_silos(self.silos) is not None else tuple(BASELINES)
        if self.rival and self.rival not in rivals:
            raise unknown("rival", self.rival, rivals)
        if self.optimizer:
            parse_optimizer(self.optimizer)
        if self.trace:
            read_link_trace(self.trace)
        if self.memory:
            parse_bytes(self.memory, "--memory")
        if self.delay:
            parse_seconds(self.delay, "--delay")
        if not 0 <= self.calibrate < float("inf"):
            raise BadValue(f"--calibrate is {self.calibrate}; it must be 0 or more seconds.")
        if not 0 < self.allowed_drop < 1:
            raise BadValue(f"--allowed-drop is {self.allowed_drop}; it must be between 0 and 1, like 0.01.")
        if self.trace and self.cloud:
            raise BadValue(
                f"--trace {self.trace} is played between processes of this machine; {self.cloud} has its own link.",
                hint="Leave out one of --trace and --cloud.",
            )
        if self.listen:
            parse_address(self.listen, 0)
            if not self.silos or self.cloud or self.preset:
                raise BadValue(
                    f"--listen {self.listen} is for devices that have silos; --silos says who has what.",
                    hint="Add --silos edge-a=left,edge-b=right,server=target; leave out --cloud and --preset.",
                )
        if self.model not in ZOO and ":" not in self.model:
            error = unknown("model", self.model, ZOO)
            raise UnknownName(error.message, hint=f"{error.hint} Or write module:factory.".strip())


def parse_silos(text: str) -> dict[str, tuple[str, ...]] | None:
    """'edge-a=left,edge-b=right+mask,server=target' -> who has what."""
    if not text:
        return None
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        device, sign, names = part.strip().partition("=")
        if not sign or not DEVICE_NAME.fullmatch(device) or device in found or not all(names.split("+")):
            raise BadValue(
                f"--silos '{text:.80}' does not say who has what.",
                hint="Write edge-a=left,edge-b=right,server=target; several of one device: edge-a=left+mask.",
            )
        found[device] = tuple(names.split("+"))
    return found


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def split_wish(given: Mapping[str, Any], *, resume: str, out: str) -> SplitWish:
    """What the user wants, from the options that were typed: those left out are None."""
    said = {key: value for key, value in given.items() if value is not None}
    if not resume:
        if out:
            jobs.check_out(Path(out), "split train")
        return SplitWish(**said)
    folder = Path(resume)
    if out:
        raise BadValue(f"--resume {resume} goes on in that folder; --out {out} names another.", hint="Give one.")
    if not (folder / "config.yaml").exists():
        raise BadFile(f"{folder}: is no run folder: it has no config.yaml.", hint="List them: ls runs")
    config = read_document(folder / "config.yaml")
    known = config.get("split_wish") if isinstance(config, dict) else None
    if not isinstance(known, dict):
        raise BadValue(
            f"{folder} was not started by manyhands split train.", hint="In Python: mh.split_train(..., resume=FOLDER)."
        )
    known = {key: value for key, value in known.items() if key in SplitWish.__dataclass_fields__}
    if "model" not in said:
        from_file(str(known.get("model", jobs.MODEL)), str(folder / "config.yaml"))
    for key, value in said.items():
        if key not in MAY_CHANGE and known.get(key, value) != value:
            raise BadValue(
                f"{folder} was started with {_option(key)} {known[key]}; it is now {value}. "
                "It would not go on as it was.",
                hint=f"Leave out {_option(key)}, or start a new run.",
            )
    if "epochs" in said or "steps" in said:
        known |= {"epochs": None, "steps": None}
    return SplitWish(**{**known, **said})


def preset_of(wish: SplitWish, data: DataSets) -> Hyper | None:
    """The paper's settings for this model and data, where they are asked for."""
    return hyper(wish.model, data.kind or wish.data) if wish.preset else None


def optimizer_of(wish: SplitWish, preset: Hyper | None, steps_per_epoch: int) -> Optimizer:
    """As typed, as the paper had it, or as usual; --lr goes before."""
    text = wish.optimizer or (preset.optimizer_text(steps_per_epoch) if preset is not None else OPTIMIZER)
    found = parse_optimizer(text)
    if wish.lr is None:
        return found
    options = {**found.options, "lr": wish.lr}
    return Optimizer(found.name, schedule=found.schedule, **options)


def split_job(
    wish: SplitWish,
    *,
    token: str = "",
    folder: Path | None = None,
    resume: Path | None = None,
    on_opened: OnOpened | None = None,
    on_planned: OnPlanned | None = None,
    on_step: OnStep | None = None,
    say: jobs.Say | None = None,
) -> SplitResult:
    """Train by names."""
    if wish.listen:
        from manyhands.split.joined_silos import joined_job

        return joined_job(
            wish, token=token, folder=folder, resume=resume, on_opened=on_opened, on_planned=on_planned,
            on_step=on_step, say=say,
        )  # fmt: skip
    data = jobs.load_data(jobs.Wish(model=wish.model, data=wish.data, input=wish.input))
    preset = preset_of(wish, data)
    if preset is not None:
        if preset.note and say is not None:
            say(preset.note)
        if not wish.input and preset.input_shape and preset.input_shape != data.input_shape:
            shape = "x".join(map(str, preset.input_shape))
            data = jobs.load_data(jobs.Wish(model=wish.model, data=wish.data, input=shape))
        options = {**data.model_options, **{key: int(value) for key, value in preset.model_options.items()}}
        data = dataclasses.replace(data, model_options=options)
    if data.test is None and say is not None:
        say(jobs.none_held_out(data))
    batch_size = wish.batch_size or (preset.batch_size if preset is not None else BATCH_SIZE)
    epochs = wish.epochs or (preset.epochs if preset is not None else EPOCHS)
    model = jobs.build_model(wish.model, data)
    jobs.check_classes(model, wish.model, wish.data, data)
    from manyhands.data.loader import length
    from manyhands.data.order import BatchOrder
    from manyhands.split.training import split_train

    per_epoch = BatchOrder(length(data.train), batch_size, True, wish.seed).steps_per_epoch
    return split_train(
        model, data.train, loss=jobs.loss_of(wish.model, data), optimizer=optimizer_of(wish, preset, per_epoch),
        batch_size=batch_size, epochs=epochs, steps=wish.steps, cut=wish.cut, bits=wish.bits, k=wish.k,
        mode=wish.mode, trace=wish.trace or None, cloud=wish.cloud or None, token=token, seed=wish.seed,
        edge_slowdown=wish.edge_slowdown, server_slowdown=wish.server_slowdown, edge_side=wish.edge_side,
        labels=wish.labels, silos=parse_silos(wish.silos), freeze=wish.freeze, weights=wish.weights or None,
        rival=wish.rival, folder=folder, resume=resume or False, test=data.test,
        memory_bytes=parse_bytes(wish.memory) if wish.memory else None,
        delay_seconds=parse_seconds(wish.delay) if wish.delay else 0.0, granularity=wish.granularity,
        calibrate_seconds=wish.calibrate, allowed_drop=wish.allowed_drop, data_name=data.kind or data.name,
        name=wish.model, config={"split_wish": dataclasses.asdict(wish)}, on_opened=on_opened, on_planned=on_planned,
        on_step=on_step, say=say,
    )  # fmt: skip
