"""`TrainConfig`: every option of `mh.train` and `manyhands train`, with its default, its limits and its help."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.data.sets import NAMES, STAND_INS
from manyhands.facts.errors import BadValue
from manyhands.job.collectives_config import CollectivesConfig
from manyhands.job.config import Config, Option, full_path, option
from manyhands.job.config_sections import HEARTBEAT_TIMEOUT_SECONDS, DevicesConfig, LearningConfig, WorkloadConfig
from manyhands.training.precision import PrecisionConfig
from manyhands.training.watching_config import WatchingConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from manyhands.facts.plan import Plan
    from manyhands.planner.task import TileOptions

PROFILE_SECONDS = 1.0
STRATEGIES = {
    "auto": "fastest",
    "single": "",
    "samples": "",
    "pipeline": "",
    "tiles": "",
    "sites": "a replica in each",
    "mixed": "",
}


@dataclass(frozen=True, kw_only=True)
class SharingConfig(LearningConfig):
    """The ways in which the devices share the work."""

    plan: Plan | str | Path = option(
        "auto",
        "A plan file (manyhands plan --out), in place of --share.",
        "--plan", "-p",
        in_python="Or an mh.Plan, or a strategy: auto, single, samples, pipeline, tiles, sites or mixed; auto, "
        "pipeline and mixed may leave devices out.",
        default_text="the plan of --share",
        other_flags={
            "share": Option(
                "How to share the work.", ("--share", "-s"), choices=STRATEGIES, noun="way to share the work",
                default_text="auto",
            )
        },
    )  # fmt: skip
    grid: str = option(
        "", "Of --share tiles: rows x columns, like 2x2. Volumes have depths x rows x columns.", "--grid",
        is_keyword=False, default_text="the fastest",
    )  # fmt: skip
    rows: str = option(
        "", "Relative heights of the tiles' rows, like 2,1.", "--rows", is_keyword=False, default_text="by speed"
    )
    columns: str = option("", "Relative widths of their columns.", "--columns", is_keyword=False)
    depths: str = option("", "Relative depths of the tiles of volumes and video.", "--depths", is_keyword=False)
    tiles: TileOptions | None = option(None, 'Grid, rows and columns of plan="tiles".', stored=None)
    reduce: str = option(
        "allreduce", "How the devices of a stage add up gradients.", "--reduce",
        choices={"allreduce": "all of them", "gateway": "the first of them"}, noun="way to add up gradients",
    )  # fmt: skip
    feed: str = option(
        "step",
        "When samples travel.",
        "--feed",
        choices={
            "step": "those of a step before it",
            "start": "all at the start, if the devices have room, then only their numbers",
        },
        noun="way to feed samples",
    )  # fmt: skip
    micro_batches: int | None = option(
        None, "Parts of a batch.", "--micro-batches", kind=int, at_least=1, default_text="chosen by the strategy"
    )
    tune: int = option(
        0,
        "Try so many of the strategy's best plans for a few steps each, then those nearest to the best of them, and "
        "take the fastest; 0: trust the simulation.",
        "--tune", kind=int, at_least=0,
    )  # fmt: skip
    batch_norm: str = option(
        "synchronised", "Over what batch norm takes its statistics.", "--batch-norm",
        choices={
            "synchronised": "all devices: exact", "local": "each replica, as DDP; the first one's buffers are kept",
        },
        on_resume="same",
    )  # fmt: skip
    replan: str = option(
        "auto", "How the plan changes when a worker is lost, joins or leaves.", "--replan",
        choices={
            "auto": "whichever is faster", "light": "shares, tiles and cuts move", "heavy": "planned anew",
        },
        noun="way to re-plan",
    )  # fmt: skip
    backup_every: int | None = option(
        None,
        "Rounds between two copies of all weights that workers keep for each other; 0: none, and a loss costs what "
        "came after the last checkpoint.",
        "--backup-every", kind=int, at_least=0, default_text="so that it is hardly felt",
    )  # fmt: skip
    silence_seconds: float = option(
        HEARTBEAT_TIMEOUT_SECONDS,
        "Seconds after which a worker that sends nothing is lost (an mh.Coordinator has its own).",
        "--silence", kind=float, more_than=0, unit=" seconds", stored="silence",
    )  # fmt: skip
    tensorboard: bool = option(
        False, "Write logs for TensorBoard too: tensorboard --logdir runs.", "--tensorboard", kind=bool, stored=None
    )


@dataclass(frozen=True, kw_only=True)
class LengthsConfig(Config):
    """Samples of different lengths."""

    lengths: Sequence[int] | None = option(
        None,
        "Lengths that samples are padded to, like (32, 64, 128) or range(16, 129, 16): batches are made of samples of "
        "similar length, each padded to the shortest of these. None: all samples have one shape.",
        stored=None, on_resume="same",
    )  # fmt: skip
    pad: Mapping[str, float] | None = option(
        None,
        "What fills samples up, by the name of the input or target, like {'input_ids': 50256}. Else 0, and -100 in "
        "targets of whole numbers, which losses ignore.",
        stored=None, on_resume="same",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """Optimizers of other packages."""

    allow_optimizers: Sequence[str] = option(
        (),
        "package.Class of an optimizer of another package, which this process and the workers that it starts may "
        "import (others: manyhands worker --allow-optimizer).",
        "--allow-optimizer", is_list=True, stored=None,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BeginningConfig(Config):
    """The beginning of a run."""

    profile_seconds: float = option(
        PROFILE_SECONDS,
        "Seconds that measuring the network may take before the first step; planning may take half as many. What there "
        "is no time for is done while training, once it takes less than a thirtieth of that. 0: all is done first.",
        "--profile-seconds", kind=float, at_least=0, unit=" seconds", stored=None,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    WorkloadConfig,
    DevicesConfig,
    BeginningConfig,
    WatchingConfig,
    LengthsConfig,
    PrecisionConfig,
    OptimizerConfig,
    CollectivesConfig,
    SharingConfig,
):
    """Every option of `mh.train` and `manyhands train`."""

    def check(self) -> None:
        super().check()
        if (self.grid or self.rows or self.columns or self.depths) and self.plan != "tiles":
            raise BadValue("--grid, --rows, --columns and --depths are for --share tiles.", hint="Add --share tiles.")
        if self.lengths is not None and self.feed == "start":
            raise BadValue("feed='start' lays out samples of one shape.", hint="Leave out feed, or lengths.")
        self.check_joining(self.listen)

    @property
    def has_plan_file(self) -> bool:
        """Whether `plan` names a file, in place of a strategy."""
        return isinstance(self.plan, (str, Path)) and str(self.plan) not in STRATEGIES

    @property
    def plan_file(self) -> str:
        """The plan file, if one is given; else empty."""
        return str(self.plan) if self.has_plan_file else ""

    @property
    def title(self) -> str:
        """The title of the job, which workers that join are shown."""
        return self.model

    @property
    def worker_timeout_seconds(self) -> float:
        """Seconds after which a worker that sends nothing is lost."""
        return self.silence_seconds

    @property
    def tile_options(self) -> TileOptions | None:
        """Grid, rows, columns and depths; None: the planner chooses them."""
        if not (self.grid or self.rows or self.columns or self.depths):
            return self.tiles
        from manyhands.plans.tiles import tile_options

        return tile_options(self.grid or None, self.rows or None, self.columns or None, self.depths or None)

    @property
    def count(self) -> int:
        """The number of workers that the job begins with: one per tile, if a grid is given and no number."""
        grid = self.tile_options.grid if self.tile_options is not None else None
        if grid is not None and self.devices is None and not self.cluster and not self.lab:
            return prod(grid)
        return super().count

    def document(self) -> dict[str, Any]:
        """Return what config.yaml stores. Files have full paths: a run may be resumed from another folder."""
        document = super().document()
        names = (*NAMES, *STAND_INS, *STRATEGIES)
        files = {name: full_path(document[name], names) for name in ("data", "plan", "cluster", "lab")}
        return {**document, **files, "traces": [_full_trace(text) for text in self.traces]}


def _full_trace(text: str) -> str:
    device, sign, file = text.rpartition("=")
    return f"{device}{sign}{full_path(file)}"
