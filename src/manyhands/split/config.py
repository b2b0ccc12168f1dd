"""`SplitConfig`: every option of `mh.split_train` and `manyhands split train`, with its default, limits and help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadValue, UnknownName, unknown
from manyhands.job.config import option, varied
from manyhands.job.config_sections import JobConfig, LearningConfig, TokenConfig, WorkloadConfig

if TYPE_CHECKING:
    from manyhands.facts.network import Network
    from manyhands.facts.trace import LinkTrace
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.split.plans import Phases
    from manyhands.split.session import Two
    from manyhands.split.silos import Silos

EPOCHS, BATCH_SIZE, OPTIMIZER = 4, 32, "SGD:lr=0.05,momentum=0.9"
BASELINES = {"edge-only": "", "jointdnn": "", "k0": "", "uncompressed": "", "unbounded": ""}
AMONG_SILOS = "cross-silo"
"""A baseline among silos: every batch waits for its gradients, features go as they are (silo_job.py)."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig(LearningConfig):
    """The options that say where the network is cut, and those of the link between edge and server."""

    lr: float | None = option(
        None, "The learning rate, in place of the optimiser's.", "--lr", kind=float, more_than=0, is_keyword=False,
        on_resume="stored",
    )  # fmt: skip
    preset: bool = option(
        False, "Train as the paper did, by model and data (SPLIT Table 2).", "--preset", kind=bool, is_keyword=False,
        on_resume="stored",
    )  # fmt: skip
    cut: int | str = option(
        "auto",
        "auto: as the link is, again and again as it changes; edge: nothing; or the layer to cut before, by number or "
        "name.",
        "--cut",
    )
    bits: int | str = option(
        "auto", "Bits of a packed feature.", "--bits",
        choices={"auto": "the fastest", "2": "", "4": "", "8": "", "16": "", "32": "as it is"},
        in_python="auto takes no fewer than `least_bits`.",
    )  # fmt: skip
    k: int | str | None = option(
        5,
        "How many updates a gradient may be late. 0: exactly as one device; none: no bound; by epoch, like 4@0,5@8; "
        "auto: as a calibration found it, else 5.",
        "--k", in_python='None: no bound. With cut="auto" it is a limit: where running ahead gains nothing, fewer save '
        "the replay.",
    )  # fmt: skip
    mode: str = option(
        "grouped", "How far the edge runs ahead.", "--mode",
        choices={"grouped": "K+1 batches, then the next", "window": "at most K+1 under way"}, noun="mode",
    )  # fmt: skip
    cloud: str | Two | Coordinator | None = option(
        None, "HOST:PORT of `manyhands split serve`.", "--cloud", default_text="a process of this machine",
        in_python="With an mh.Coordinator its workers have silos, and `data` may be None.",
    )  # fmt: skip
    trace: str | Path | LinkTrace | None = option(
        None,
        "FILE of `seconds mbit_per_second` that the link between local processes follows, or UP_FILE,DOWN_FILE.",
        "--trace",
    )
    delay_seconds: float | str | None = option(
        None, "With --trace: the delay of one way, like 25 ms.", "--delay", stored="delay", in_python="Or seconds."
    )
    rival: str = option(
        "", "Decide as a baseline would.", "--rival", noun="rival",
        choices={"": "", **BASELINES, AMONG_SILOS: "with --silos"},
    )  # fmt: skip
    edge_slowdown: float = option(
        1.0, "The edge takes so many times as long, like 8 for a Pi.", "--edge-slowdown", kind=float, at_least=1
    )
    server_slowdown: float = option(
        1.0, "The server of this machine takes so many times as long.", "--server-slowdown", kind=float, at_least=1
    )
    calibrate_seconds: float = option(
        0.0, "Find the fewest bits of each cut first, in so many seconds; it is kept.", "--calibrate", kind=float,
        at_least=0, unit=" seconds", stored="calibrate", default_text="what an earlier calibration found",
    )  # fmt: skip
    allowed_drop: float = option(
        0.01, "With --calibrate: the accuracy that it may cost.", "--allowed-drop", kind=float, more_than=0, at_most=1
    )
    least_bits: int | Mapping[int, int] | None = option(
        None, "The fewest bits, for all cuts or by cut. None: as a calibration found it, else eight.", stored=None
    )
    memory_bytes: float | str | None = option(
        None, "Memory of the edge, like 512 MB.", "--memory", stored="memory", default_text="no limit",
        in_python="Or bytes. Where everything fits, the edge goes on alone when the server is lost.",
    )  # fmt: skip
    labels: str = option(
        "edge", "Where the labels are.", "--labels", choices={"edge": "", "cloud": ""}, noun="place of the labels",
        on_resume="stored",
    )  # fmt: skip
    edge_side: str = option(
        "upstream", "What stays at the edge.", "--edge-side",
        choices={"upstream": "inputs", "downstream": "outputs, as of a generator"}, noun="side of the edge",
        on_resume="stored",
    )  # fmt: skip
    silos: Silos | str | None = option(
        None, "Which device has which inputs, like edge-a=left,edge-b=right,server=target: a process each.", "--silos",
        on_resume="stored",
        in_python='Or {"edge-a": ("left",), "server": ("target",)}, by the names of the model\'s arguments.',
    )  # fmt: skip
    listen: str = option(
        "", "HOST:PORT where the devices of --silos join: manyhands worker --silo FILE.", "--listen", is_keyword=False
    )
    weights: str | Path | None = option(
        None, "Begin with these: a run's folder, or a .safetensors file.", "--weights", on_resume="stored"
    )
    freeze: int | str = option(
        0, "Do not train so many first layers, or those before a layer's name.", "--freeze", on_resume="stored"
    )
    error_feedback: bool = option(True, "Add what packing lost to the next feature.", stored=None)
    pack_gradients: bool = option(False, "Pack the gradients that return, too.", stored=None)
    data_name: str = option("", "What calibrations call the data.", stored=None)
    backup_every: int | None = option(
        None,
        "Steps between two copies that edge and server keep of each other's part; 0: none, and a lost server costs "
        "what came after the last checkpoint. None: as often as takes a hundredth of the link's time.",
        kind=int, at_least=0, stored=None,
    )  # fmt: skip
    silence_seconds: float | None = option(
        None, "Seconds after which an end that sends nothing is lost. None: 5, and 10 where a cloud is dialled.",
        kind=float, more_than=0, unit=" seconds", stored=None,
    )  # fmt: skip
    engine: Mapping[str, Any] | None = option(None, "Settings of the engine that decides on the cut.", stored=None)


@dataclass(frozen=True, kw_only=True)
class SplitConfig(WorkloadConfig, TokenConfig, LinkConfig):
    """Every option of `mh.split_train` and `manyhands split train`."""

    epochs: int | None = varied(  # type: ignore[assignment]
        LearningConfig, "epochs", None, command_default=None, default_text=str(EPOCHS),
        in_python="None: one.",
    )  # fmt: skip
    batch_size: int | None = varied(
        LearningConfig, "batch_size", None, command_default=None, default_text=str(BATCH_SIZE)
    )
    optimizer: str = varied(LearningConfig, "optimizer", "", default_text=OPTIMIZER)
    shuffle: bool | None = varied(LearningConfig, "shuffle", None, stored=None)
    granularity: str = varied(
        JobConfig, "granularity", "blocks", flags=("--granularity",), on_resume="stored", stored=""
    )
    token: str = varied(
        TokenConfig, "token", "", help="The cloud's token, as it printed it; for the first time only.",
        default_text="asked for", is_keyword=True,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        self._check_split()
        if self.is_command:
            self._check_command()

    def _check_split(self) -> None:
        """Refuse values that cannot be read, or that contradict each other."""
        self.phases, self.edge_bytes, self.delay, self.holders  # noqa: B018
        if self.labels == "cloud" and (
            self.edge_side == "downstream" or self.cut == "edge" or self.rival in ("edge-only", "jointdnn")
            or self.calibrate_seconds
        ):  # fmt: skip
            raise BadValue(
                "The labels are at the cloud: what computes the loss must be there, and nothing is calibrated here.",
                hint='Leave out labels="cloud", or edge_side, cut, rival and the calibration.',
            )
        if self.clip_norm is not None and self.cut != "edge" and {k for _, k in self.phases} != {0}:
            raise BadValue(
                f"{self.spelling('clip_norm')} is {self.clip_norm}: it needs the gradients of both sides at once, and "
                f"with {self.spelling('k')} {self.k} the edge's come after later updates of the server.",
                hint=f"Give {self.spelling('k')} 0 too, or limit each number: {self.spelling('clip_value')}.",
            )
        if self.allowed_drop >= 1:
            raise BadValue(
                f"{self.spelling('allowed_drop')} is {self.allowed_drop}; it must be between 0 and 1, like 0.01."
            )
        if self.trace is not None and isinstance(self.cloud, str):
            raise BadValue(
                f"{self.spelling('trace')} {self.trace} is played between processes of this machine; {self.cloud} has "
                "its own link.",
                hint=f"Leave out one of {self.spelling('trace')} and {self.spelling('cloud')}.",
            )

    def _check_command(self) -> None:
        """Refuse what a command cannot mean."""
        from manyhands.facts.optimizer import parse as parse_optimizer
        from manyhands.files.traces import read_link_trace
        from manyhands.models.registry import ZOO
        from manyhands.session.joining import parse_address

        if self.epochs is not None and self.steps is not None:
            raise BadValue(
                f"--epochs {self.epochs} and --steps {self.steps} both say how long.", hint="Give one of them."
            )
        if self.rival == AMONG_SILOS and self.holders is None:
            raise unknown("rival", self.rival, BASELINES)
        if self.optimizer:
            parse_optimizer(self.optimizer)
        if isinstance(self.trace, str):
            read_link_trace(self.trace)
        if self.listen:
            parse_address(self.listen, 0)
            if self.silos is None or self.cloud or self.preset:
                raise BadValue(
                    f"--listen {self.listen} is for devices that have silos; --silos says which has what.",
                    hint="Add --silos edge-a=left,edge-b=right,server=target; leave out --cloud and --preset.",
                )
        if self.model not in ZOO and ":" not in self.model:
            error = unknown("model", self.model, ZOO)
            raise UnknownName(error.message, hint=f"{error.hint} Or write module:factory.".strip())

    @property
    def phases(self) -> Phases:
        """K by epoch."""
        from manyhands.split.plans import phases_of

        return phases_of(self.k)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that features may be packed in."""
        from manyhands.split.plans import bits_of

        return bits_of(self.bits)

    @property
    def edge_bytes(self) -> float | None:
        """Memory of the edge; None: no limit."""
        from manyhands.facts.units import parse_bytes

        memory = self.memory_bytes
        if isinstance(memory, str):
            return parse_bytes(memory, self.spelling("memory_bytes"))
        if memory is not None and not memory > 0:
            raise BadValue(f"memory_bytes is {memory}; it must be > 0.")
        return memory

    @property
    def delay(self) -> float:
        """Seconds that the trace's link takes one way."""
        from manyhands.facts.units import parse_seconds

        delay = self.delay_seconds or 0.0
        return parse_seconds(delay, self.spelling("delay_seconds")) if isinstance(delay, str) else delay

    @property
    def holders(self) -> Silos | None:
        """The inputs that each device has."""
        from manyhands.split.plans import parse_silos

        return parse_silos(self.silos) if isinstance(self.silos, str) else self.silos

    def cut_in(self, network: Network) -> int | None:
        """Return the cut that the user has chosen; None: any."""
        from manyhands.planner.split_profile import candidate_cuts
        from manyhands.split.plans import cut_of

        alone = len(network.layers) if self.edge_side == "upstream" else 0
        return cut_of(self.cut, network, candidate_cuts(network), alone)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of a split that the run folder keeps, however it was started."""
        from manyhands.split.plans import phases_text

        k = "auto" if self.k == "auto" else phases_text(self.phases)
        return {
            "cut": self.cut, "bits": self.bits, "k": k, "mode": self.mode, "rival": self.rival,
            "edge_side": self.edge_side, "labels": self.labels, "error_feedback": self.error_feedback,
            "pack_gradients": self.pack_gradients, "freeze": self.freeze,
        }  # fmt: skip
