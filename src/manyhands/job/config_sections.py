"""Sections that several configurations have in common: the job itself, what is trained, the run folder, the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from manyhands.facts.errors import BadValue
from manyhands.job.config import Config, Option, option
from manyhands.job.update_config import UpdateConfig

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.facts.ray_cluster import RayCluster
    from manyhands.job.callbacks import OnOpened, OnPlanned, OnStep, Say
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.session.joining import JoinPoint

MODEL, DATA = "tiny", "digits"
DEMO_DEVICES = 4
WAIT_LIMIT_SECONDS = 600.0
HEARTBEAT_TIMEOUT_SECONDS = 2.0
"""A worker that sends nothing for this long is lost; equals runtime's constant, which would be slow to import here."""


@dataclass(frozen=True, kw_only=True)
class JobConfig(Config):
    """Options of every job."""

    granularity: str = option(
        "blocks", "Where the network may be cut.", choices={"blocks": "", "operators": ""},
        noun="granularity", stored=None,
    )  # fmt: skip
    name: str = option("", "What the network is called in tables and in the run folder.", stored=None)
    say: Say | None = option(None, "Is called with every line that a person should read.", stored=None)
    limit_seconds: float = option(
        WAIT_LIMIT_SECONDS, "Seconds without any message or step after which waiting ends with an error.",
        more_than=0, unit=" seconds", stored=None,
    )  # fmt: skip
    json: bool = option(
        False, "Print one JSON document instead of tables.", "--json", kind=bool, is_keyword=False, stored=None
    )


@dataclass(frozen=True, kw_only=True)
class LearningConfig(Config):
    """The model to train, its data, and the length of training."""

    model: str = option(
        MODEL, "A name from `manyhands models`, or module:factory.", "--model", "-m", is_keyword=False, on_resume="same"
    )
    data: str = option(
        DATA,
        "digits, a folder (one of pictures per class, Pascal VOC, aclImdb, MovieLens, CIFAR-10, rendered chairs), "
        "file.npz, or a synthetic stand-in such as synthetic-imdb.",
        "--data", "-d", is_keyword=False, on_resume="same",
    )  # fmt: skip
    input: str = option("", "Shape of one sample, like 3x64x64.", "--input", is_keyword=False, on_resume="same")
    epochs: int = option(1, "Passes over the data.", "--epochs", "-e", kind=int, at_least=1, command_default=10)
    steps: int | None = option(
        None, "Steps, in place of epochs; of a data set, the incomplete last batch of an epoch is left out.", "--steps",
        kind=int, at_least=1,
    )  # fmt: skip
    batch_size: int | None = option(
        None, "Samples per step, over all devices.", "--batch-size", "-b", kind=int, at_least=1, on_resume="same",
        command_default=64,
    )  # fmt: skip
    optimizer: str = option(
        "SGD:lr=0.1,momentum=0.9",
        "Any of torch.optim, like Adam:lr=1e-3. A learning-rate schedule follows: "
        "Adam:lr=1e-3,schedule=CosineAnnealingLR,T_max=100.",
        "--optimizer", "-o", is_keyword=False, on_resume="same",
    )  # fmt: skip
    seed: int = option(
        0, "Seed of shuffling and dropout.", "--seed", kind=int, at_least=0, at_most=2**63 - 1, on_resume="same"
    )
    shuffle: bool | None = option(
        None, "Draw another order of the samples in every epoch. None: as the DataLoader does, else yes.",
        on_resume="same", command_default=True,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig(Config):
    """The run folder, and the ways to watch the run."""

    folder: str | Path | None = option(
        None, "The run's folder.", "--out", stored=None, default_text="a new one in runs/"
    )
    resume: bool | str | Path = option(
        False, "Go on with the run in this folder.",
        "--resume", stored=None, in_python="True: from the newest checkpoint in `folder`.",
    )  # fmt: skip
    test: Dataset[Any] | None = option(
        None, "Held-out data, which the same workers evaluate after training.", stored=None
    )
    verify: bool | None = option(
        None,
        "Compare the captured graph's loss and gradients with the module's own before the first step; a difference "
        "beyond rounding is an error that names the first layer. None: yes, if there is room.",
        stored=None,
    )
    dashboard: str | None = option(
        None, "Where browsers see the run; beyond this machine it is encrypted and needs a token.", "--dashboard",
        metavar="HOST:PORT|off", is_keyword=False, stored=None,
        default_text="on this machine alone, near port 7070 (with --json: off)",
    )  # fmt: skip
    config: Mapping[str, Any] | None = option(None, "More that the run folder's config.yaml keeps.", stored=None)
    on_opened: OnOpened | None = option(
        None, "Is called with the run's folder before the first step; may return where the run is shown.", stored=None
    )
    on_planned: OnPlanned | None = option(None, "Is called with the plan before the first step.", stored=None)
    on_step: OnStep | None = option(None, "Is called after every step with its number, loss and seconds.", stored=None)


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(JobConfig, RunConfig, UpdateConfig, LearningConfig):
    """Options of every job that trains."""


@dataclass(frozen=True, kw_only=True)
class TokenConfig(Config):
    """The token by which devices join."""

    token: str = option(
        "", "What new workers must know.", "--token", variable="MANYHANDS_TOKEN", is_keyword=False, stored=None,
        default_text="this user's shared token",
    )  # fmt: skip
    token_file: str = option(
        "", "A file with the token on one line: unlike --token, it shows in no list of processes and no history.",
        "--token-file", is_keyword=False, stored=None,
    )  # fmt: skip
    needs_token: bool = option(
        False, "A token was given, which the run folder does not keep: a resumed run needs it again.",
        is_keyword=False, stored="has_typed_token",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DevicesConfig(TokenConfig):
    """The devices."""

    devices: int | None = option(
        None,
        "How many workers, like 4; or 2:6: it waits for two, uses up to six, and goes on down to --min-devices.",
        "--devices", "-n", is_keyword=False, default_text="4 on this machine",
    )  # fmt: skip
    min_devices: int = option(
        1,
        "With fewer workers left the job waits a minute for others to join (--listen, --cluster), then ends.",
        "--min-devices", kind=int, at_least=1,
    )  # fmt: skip
    max_devices: int | None = option(
        None, "More devices are not used, though they join. None: all are.", kind=int, at_least=1
    )
    cluster: Cluster | LabCluster | RayCluster | str | Path | Coordinator | None = option(
        None, "A cluster.yaml whose devices join by name, or local:N.", "--cluster", "-c",
        in_python="Also mh.Cluster.local(n), mh.Cluster.ray(n), or an mh.Coordinator that workers have joined. None: "
        "local workers.",
    )  # fmt: skip
    lab: str = option(
        "", "A preset or cluster.yaml to play on this machine for this run (as root).", "--lab", is_keyword=False
    )
    scale: float | None = option(
        None, "Of --lab: so many times slower than in life.", "--scale", kind=float, is_keyword=False,
        default_text="what fits",
    )  # fmt: skip
    slots: int | None = option(
        None, "Of --lab: workers on a device.", "--slots", kind=int, at_least=1, at_most=16, is_keyword=False
    )
    traces: tuple[str, ...] = option(
        (), "Of --lab: [DEVICE=]FILE of rates that its port follows.", "--trace", is_list=True, is_keyword=False
    )
    listen: str = option(
        "", "HOST:PORT where --devices N workers of other machines join: 0.0.0.0:7077, or [::]:7077 for IPv6 too.",
        "--listen", is_keyword=False,
        other_flags={
            "interface": Option(
                "Listen on this interface's address alone, like tailscale0 or wg0.", ("--interface",), metavar="NAME"
            )
        },
    )  # fmt: skip
    gpus: int = option(
        0, "How many of the local workers each use a GPU.", "--gpus", kind=int, at_least=0, is_keyword=False,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if isinstance(self.cluster, str) and self.cluster and (self.devices is not None or self.gpus):
            name = "--devices" if self.devices is not None else "--gpus"
            raise BadValue(f"{name} cannot be given beside --cluster {self.cluster}, which decides that.")
        if self.lab and (self.cluster is not None or self.devices is not None or self.gpus):
            name = "--cluster" if self.cluster is not None else "--gpus" if self.gpus else "--devices"
            raise BadValue(f"{name} cannot be given beside --lab {self.lab}, which decides that.")
        if not self.lab and (self.scale is not None or self.slots is not None or self.traces):
            raise BadValue("--scale, --slots and --trace say how a lab is played.", hint="Name one: --lab pi3x6")

    @property
    def count(self) -> int:
        """The number of workers that the job begins with. Those of this machine are all present at once."""
        if source := self.lab or self.cluster:
            from manyhands.files.documents import load_cluster

            assert isinstance(source, (str, Path)), "only a cluster that was named is counted"
            return len(load_cluster(source).devices) * (self.slots or 1)
        if self.listen:
            return self.devices or 1
        return self.max_devices or self.devices or DEMO_DEVICES

    @property
    def plan_file(self) -> str:
        """The plan file, if one is given: it names devices."""
        return ""

    @property
    def title(self) -> str:
        """The title of the job, which workers that join are shown."""
        return ""

    @property
    def worker_timeout_seconds(self) -> float:
        """Seconds after which a worker that sends nothing is lost."""
        return HEARTBEAT_TIMEOUT_SECONDS

    @property
    def rendezvous(self) -> JoinPoint:
        """The address where the devices of a cluster file join, and the token that they must know."""
        from manyhands.session.joining import JoinPoint

        return JoinPoint(self.listen, self.token)

    def on(self, machines: Cluster | LabCluster | Coordinator) -> Self:
        """Return the configuration for existing devices, in place of those that it names."""
        return replace(
            self, cluster=machines, devices=None, gpus=0, lab="", scale=None, slots=None, traces=(),
        )  # fmt: skip
