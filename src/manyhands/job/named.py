"""A training job as typed on the command line: model, data and optimiser by name, and a run to go on with.

What can be found wrong without torch is found before it is imported, and before a run folder is made.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.data.sets import NAMES, STAND_INS
from manyhands.facts.errors import BadFile, BadPlan, BadValue, unknown
from manyhands.facts.plan import ByChannels, Plan
from manyhands.files.documents import load_cluster, read_document
from manyhands.models.registry import entry_of, from_file
from manyhands.planner.replanning import WAYS as WAYS_TO_REPLAN
from manyhands.planner.strategies import is_strategy_name, strategy_names
from manyhands.planner.task import TileOptions
from manyhands.plans.networks import parse_input
from manyhands.plans.planning import plan_file
from manyhands.plans.tiles import tile_options
from manyhands.runtime.failure_detector import HEARTBEAT_TIMEOUT_SECONDS
from manyhands.schedule.feeding import WAYS as WAYS_TO_FEED
from manyhands.session.joining import parse_address, parse_devices, refuse_preset

if TYPE_CHECKING:
    from torch import nn

    from manyhands.data.data_sets import DataSets

MODEL, DATA, EPOCHS, BATCH_SIZE, OPTIMIZER = "tiny", "digits", 10, 64, "SGD:lr=0.1,momentum=0.9"
DEMO_DEVICES = 4
MAY_CHANGE = (
    "epochs",
    "steps",
    "plan",
    "grid",
    "rows",
    "columns",
    "reduce",
    "feed",
    "micro_batches",
    "tune",
    "devices",
    "cluster",
    "gpus",
    "lab",
    "scale",
    "slots",
    "traces",
    "listen",
    "has_typed_token",
    "min_devices",
    "max_devices",
    "replan",
    "backup_every",
    "silence",
)
"""What a run may go on with in another way; the rest decides what is computed."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wish:
    """What was typed, checked; a run folder keeps it for --resume."""

    model: str = MODEL
    data: str = DATA
    input: str = ""
    epochs: int = EPOCHS
    steps: int | None = None
    batch_size: int = BATCH_SIZE
    optimizer: str = OPTIMIZER
    plan: str = "samples"
    micro_batches: int | None = None
    tune: int = 0
    """So many of the best plans are tried before one is taken."""
    grid: str = ""
    """Of tiles: rows x columns; the next two are relative heights and widths."""
    rows: str = ""
    columns: str = ""
    reduce: str = "allreduce"
    feed: str = "step"
    """When samples travel: before their step, or all at the start."""
    batch_norm: str = "synchronised"
    seed: int = 0
    shuffle: bool = True
    devices: int | None = None
    """How many it begins with; None: four on this machine, the first that joins, or as many as a plan file names."""
    max_devices: int | None = None
    """More are not used; on this machine so many are started."""
    min_devices: int = 1
    """The floor: with fewer left the job waits for others, then ends."""
    listen: str = ""
    """HOST:PORT where workers of other machines join; empty: they are started here."""
    has_typed_token: bool = False
    """A token was typed, which the folder does not keep: to go on it must be typed again."""
    cluster: str = ""
    gpus: int = 0
    lab: str = ""
    """A preset or cluster file to be played on this machine; the next three say how."""
    scale: float | None = None
    slots: int | None = None
    traces: tuple[str, ...] = ()
    replan: str = "auto"
    backup_every: int | None = None
    """Rounds between two backups; None: so that they are hardly felt."""
    silence: float = HEARTBEAT_TIMEOUT_SECONDS
    """A worker that says nothing for so long is lost."""

    def __post_init__(self) -> None:
        least = {"epochs": 1, "steps": 1, "batch_size": 1, "micro_batches": 1, "devices": 1, "gpus": 0, "seed": 0,
                 "tune": 0, "backup_every": 0, "min_devices": 1}  # fmt: skip
        for field, smallest in least.items():
            value = getattr(self, field)
            if value is not None and value < smallest:
                raise BadValue(f"{_option(field)} is {value}; it must be at least {smallest}.")
        if self.cluster and (self.devices is not None or self.gpus):
            option = "--devices" if self.devices is not None else "--gpus"
            raise BadValue(f"{option} cannot be given beside --cluster {self.cluster}, which decides that.")
        if self.lab and (self.cluster or self.devices is not None or self.gpus):
            option = "--cluster" if self.cluster else "--gpus" if self.gpus else "--devices"
            raise BadValue(f"{option} cannot be given beside --lab {self.lab}, which decides that.")
        if (self.grid or self.rows or self.columns) and self.plan != "tiles":
            raise BadValue("--grid, --rows and --columns are for --share tiles.", hint="Add --share tiles.")
        if self.reduce not in ("allreduce", "gateway"):
            raise unknown("way to add up gradients", self.reduce, ("allreduce", "gateway"))
        if self.feed not in WAYS_TO_FEED:
            raise unknown("way to feed samples", self.feed, WAYS_TO_FEED)
        if self.replan not in WAYS_TO_REPLAN:
            raise unknown("way to re-plan", self.replan, WAYS_TO_REPLAN)
        if not self.silence > 0:
            raise BadValue(f"--silence is {self.silence}; it must be more than 0 seconds.")
        if not self.lab and (self.scale is not None or self.slots is not None or self.traces):
            raise BadValue("--scale, --slots and --trace say how a lab is played.", hint="Name one: --lab pi3x6")

    @property
    def has_plan_file(self) -> bool:
        return not is_strategy_name(self.plan)

    @property
    def tiles(self) -> TileOptions:
        return tile_options(self.grid or None, self.rows or None, self.columns or None)

    @property
    def count(self) -> int:
        """How many workers it begins with. Those of this machine are all there at once."""
        if self.cluster or self.lab:
            return len(load_cluster(self.cluster or self.lab).devices) * (self.slots or 1)
        if self.devices is None and self.tiles.grid is not None:
            return self.tiles.grid[0] * self.tiles.grid[1]
        if self.listen:
            return self.devices or 1
        return self.max_devices or self.devices or DEMO_DEVICES


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def wish_for(given: Mapping[str, Any], *, share: str | None, plan: str | None, resume: str, out: str) -> Wish:
    """What the user wants, from the options that were typed: those left out are None."""
    if share and plan:
        raise BadValue(f"--share {share} and --plan {plan} both say how to share the work.", hint="Give one of them.")
    if share and not is_strategy_name(share):
        raise unknown("way to share the work", share, strategy_names())
    said = {key: value for key, value in given.items() if value is not None}
    if "listen" in said:
        parse_address(said["listen"], 0)
    if "devices" in said:
        said["devices"], said["max_devices"] = parse_devices(str(said["devices"]))
    if share:
        said["plan"] = share
    if "epochs" in said and "steps" in said:
        raise BadValue(
            f"--epochs {said['epochs']} and --steps {said['steps']} both say how long.", hint="Give one of them."
        )
    if plan:
        said |= _decided_by(plan_file(plan), said)
    if resume:
        if out:
            raise BadValue(f"--resume {resume} goes on in that folder; --out {out} names another.", hint="Give one.")
        wish = _on_real_devices(_resumed(Path(resume), said))
        _check_floor(wish)
        return wish
    if out:
        check_out(Path(out))
    wish = _on_real_devices(Wish(**said))
    _check_floor(wish)
    _check_share(wish)
    return wish


def _check_floor(wish: Wish) -> None:
    """A job does not begin below its floor."""
    if wish.min_devices > 1 and wish.min_devices > wish.count:
        fix = f"--min-devices {wish.count}"
        if not wish.cluster and not wish.lab:
            fix = f"--devices {wish.min_devices}, or {fix}"
        raise BadValue(
            f"--min-devices is {wish.min_devices}; the run would begin with {wish.count} device(s).",
            hint=f"Write {fix}.",
        )


def _on_real_devices(wish: Wish) -> Wish:
    """The same wish, unless its cluster is one that nobody has."""
    if wish.cluster:
        refuse_preset(load_cluster(wish.cluster), wish.listen)
    return wish


def _decided_by(file: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan file says of the job; a contradiction is refused."""
    try:
        plan = Plan.from_dict(read_document(file))
    except BadPlan as error:
        raise BadPlan(f"{file}: {error.message}", hint=error.hint) from error
    if any(isinstance(stage.share, ByChannels) for stage in plan.stages):
        raise BadPlan(
            f"{file}: a stage is shared by channels, which is for inference.",
            hint="Run it with manyhands infer; to train, share it by samples or tiles.",
        )
    decided: dict[str, Any] = {
        "model": plan.network if "model" in said else from_file(plan.network, str(file)),
        "batch_size": plan.batch_size, "micro_batches": plan.micro_batches,
        "batch_norm": plan.batch_norm,
    }  # fmt: skip
    for key, value in decided.items():
        if said.get(key, value) != value:
            what = "network" if key == "model" else key
            raise BadPlan(
                f"{file}: {what} is {value}; {_option(key)} is {said[key]}.",
                hint=f"Leave out {_option(key)}, or give another plan.",
            )
    count = _local_count(plan.devices)
    if count and "devices" not in said and not said.get("cluster"):
        decided |= {"devices": count, "max_devices": None}
    return {**decided, "plan": str(file)}


def _check_share(wish: Wish) -> None:
    """Every device gets a sample of every micro-batch, or a tile of every map."""
    count, grid = wish.count, wish.tiles.grid
    if grid is not None and grid[0] * grid[1] != count:
        raise BadValue(
            f"A grid of {grid[0]}x{grid[1]} has {grid[0] * grid[1]} tiles; there are {count} tile slots (devices times "
            "their slots).",
            hint=f"Give a grid of {count} tiles, or --devices {grid[0] * grid[1]}.",
        )
    samples = wish.batch_size // (wish.micro_batches or 1)
    if wish.plan == "samples" and samples < count:
        of = f"a micro-batch of {samples}" if wish.micro_batches else f"a batch of {samples}"
        raise BadValue(
            f"{count} devices cannot share {of} sample(s).",
            hint=f"Give a larger --batch-size, or --devices {samples}.",
        )


def check_out(folder: Path, command: str = "train") -> None:
    """A run is never written over another."""
    if any((folder / name).exists() for name in ("events.jsonl", "config.yaml", "checkpoints")):
        raise BadFile(
            f"{folder}: holds a run already.",
            hint=f"Go on with it: manyhands {command} --resume {folder}\nOr give another folder: --out {folder}-2",
        )
    nearest = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
    if not nearest.is_dir():
        raise BadFile(f"{folder}: cannot be made: {nearest} is a file.", hint="Give another folder with --out.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadFile(f"{folder}: cannot be made: {nearest} is not yours to write.", hint="Give another with --out.")


def _resumed(folder: Path, said: dict[str, Any]) -> Wish:
    """What a run was started with; how long and on which devices may be said anew."""
    if not folder.is_dir():
        raise BadFile(f"{folder}: there is no such run folder.", hint="List them: ls runs")
    if not (folder / "config.yaml").exists():
        raise BadFile(f"{folder}: is no run folder: it has no config.yaml.", hint="List them: ls runs")
    config = read_document(folder / "config.yaml")
    known = config.get("wish") if isinstance(config, dict) else None
    if not isinstance(known, dict):
        raise BadValue(
            f"{folder} was not started by manyhands train: its model cannot be built from a name.",
            hint="In Python: mh.train(model, data, ..., resume=FOLDER).",
        )
    known = {key: value for key, value in known.items() if key in Wish.__dataclass_fields__}
    known["traces"] = tuple(known.get("traces", ()))
    if "model" not in said:
        from_file(str(known.get("model", MODEL)), str(folder / "config.yaml"))
    for key, value in said.items():
        same = full_path(value) == full_path(known.get(key, value)) if key == "data" else known.get(key, value) == value
        if key not in MAY_CHANGE and not same:
            raise BadValue(
                f"{folder} was started with {_option(key)} {known[key]}; it is now {value}. "
                "It would not go on as it was.",
                hint=f"Leave out {_option(key)}, or start a new run.",
            )
    if "epochs" in said:
        known["steps"] = None
    known |= _devices_anew(said, known)
    if "plan" in said and "micro_batches" not in said:
        known["micro_batches"] = None
    if "plan" in said:
        known |= {"grid": "", "rows": "", "columns": ""}
    try:
        return Wish(**{**known, **said})
    except TypeError as error:
        raise BadFile(f"{folder / 'config.yaml'}: is not the configuration of a run: {error}.") from error


def _devices_anew(said: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that goes on forgets of its devices, because others were named: a cluster or a lab in place of all of
    it, --gpus in place of those that join, --listen and --devices in place of a lab."""
    no_lab = {"lab": "", "scale": None, "slots": None, "traces": ()}
    if "cluster" in said or "lab" in said:
        return {**no_lab, "devices": None, "max_devices": None, "gpus": 0, "cluster": "", "listen": ""}
    forgotten: dict[str, Any] = {}
    if "listen" in said:
        forgotten |= {**no_lab, "gpus": 0}
    if "devices" in said:
        forgotten |= {**no_lab, "cluster": ""}
    if "gpus" in said:
        forgotten |= {"listen": ""}
        if known.get("lab"):
            forgotten |= {**no_lab, "cluster": ""}
    return forgotten


# Devices


def _local_count(names: tuple[str, ...]) -> int:
    """How many local workers these are among; 0 where others are named."""
    numbers = [re.fullmatch(r"local-([1-9]\d{0,4})", name) for name in names]
    return max((int(match.group(1)) for match in numbers if match), default=0) if all(numbers) else 0


# Training


def build_model(name: str, data: DataSets) -> nn.Module:
    """A model for a data set: told the number of classes and channels where it takes them."""
    import torch

    from manyhands.models import registry

    torch.manual_seed(0)
    if name.partition(":")[0] in ("torchvision", "timm"):
        return registry.build(name, num_classes=data.num_classes) if data.num_classes else registry.build(name)
    wanted = {"num_classes": data.num_classes, "channels": data.input_shape[0] if data.input_shape else 0}
    wanted |= data.model_options
    taken: Mapping[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # what has no signature takes nothing
        taken = inspect.signature(registry.factory(name)).parameters
    return registry.build(name, **{key: value for key, value in wanted.items() if value and key in taken})


def load_data(wish: Wish) -> DataSets:
    from manyhands.data.sets import load

    shape = parse_input(wish.input)
    known = entry_of(wish.model)
    if shape is None and known is not None and (wish.model, wish.data) != (MODEL, DATA):
        shape = known.input_shape
    return load(wish.data, input_shape=shape)


def none_held_out(data: DataSets) -> str:
    """Why there will be no accuracy, and what gives one."""
    from manyhands.data.loader import length

    return (
        f"{data.name} has {length(data.train)} sample(s), too few to hold one in five out: there will be no accuracy. "
        "Give some to test on: x_test and y_test in a .npz file, or a folder test beside train."
    )


def loss_of(name: str, data: DataSets) -> Any:
    from manyhands.models.registry import loss_function

    known = entry_of(name)
    if known is not None and known.loss not in ("cross_entropy", "mse"):
        return loss_function(known.loss)
    if data.has_boxes:
        return loss_function("region")
    return loss_function("cross_entropy" if data.num_classes else "mse")


def full_path(text: str) -> str:
    """The full path of a file or folder; a name stays a name."""
    path, colon, classes = text.rpartition(":")
    if colon and classes[:1].isdecimal() and Path(path).exists():  # some classes of it
        return f"{Path(path).absolute()}:{classes}"
    is_name = not text or text in (*NAMES, *STAND_INS) or is_strategy_name(text)
    return text if is_name or not Path(text).exists() else str(Path(text).absolute())


def check_classes(model: nn.Module, name: str, data_name: str, data: DataSets) -> None:
    """A network with fewer outputs than the data has classes fails later, far from here, with less to say."""
    import torch

    from manyhands.data.loader import example

    known = entry_of(name)
    if not data.num_classes and known is not None and known.loss not in ("cross_entropy", "mse"):
        return
    inputs, targets = example(data.train, 2)
    was_training = model.training
    try:
        with torch.no_grad():
            output = model.eval()(inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        shape = "x".join(map(str, data.input_shape))
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadValue(
            f"{name} does not take inputs of shape {shape}, as {data_name} gives them: {reason.rstrip('.')}.",
            hint="Give data that fits with --data; pictures are resized by --input, like --input 3x64x64.",
        ) from error
    finally:
        model.train(was_training)
    if not data.num_classes:
        _check_numbers(output, targets, name, data_name)
    elif data.has_boxes:
        from manyhands.models.yolov2 import VOC_ANCHORS

        channels = len(VOC_ANCHORS) * (5 + data.num_classes)
        if not isinstance(output, torch.Tensor) or output.dim() != 4 or output.shape[1] != channels:
            gives = f"an output of shape {tuple(output.shape[1:])}" if isinstance(output, torch.Tensor) else "no tensor"
            raise BadValue(
                f"{name} gives {gives}; {data_name} has boxes of {data.num_classes} classes, for which a "
                f"detector gives maps of {channels} channels.",
                hint="Give a detector, such as --model yolov2, or a folder with one sub-folder of pictures per class.",
            )
    elif isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[1] < data.num_classes:
        raise BadValue(
            f"{name} has {output.shape[1]} outputs; {data_name} has {data.num_classes} classes.",
            hint="Build it with more: a factory may take num_classes.",
        )


def _check_numbers(output: Any, targets: Any, name: str, data_name: str) -> None:
    """Targets that are no class numbers are compared with the output one by one, so there must be as many."""
    import torch

    if not isinstance(output, torch.Tensor) or not isinstance(targets, torch.Tensor) or output.shape == targets.shape:
        return
    gives, wants = ("x".join(map(str, one.shape[1:])) or "one number" for one in (output, targets))
    hint = "Give targets of the shape that the model gives, or a model that gives theirs."
    if output.shape == (*targets.shape, 1):
        hint = "Give targets of the same shape: y[:, None]."
    elif targets.dim() == 1 and bool((targets == targets.round()).all()):
        hint = "Floats are numbers that the output is to come near to. If they are classes: y.astype('int64')."
    raise BadValue(
        f"{name} gives {gives} for a sample; the target of {data_name} is {wants}, {targets.flatten()[0].item():g} for "
        f"the first, as {str(targets.dtype).removeprefix('torch.')}.",
        hint=hint,
    )
