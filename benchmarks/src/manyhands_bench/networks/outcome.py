"""The outcome of one public network, and the file of one line for each that lets a stopped walk go on."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Literal

import msgspec

from manyhands.facts.errors import ManyhandsError

Library = Literal["torchvision", "timm", "hf"]
LIBRARIES: tuple[Library, ...] = ("torchvision", "timm", "hf")
Step = Literal["build", "capture", "forward", "samples", "pipeline", "tiles", "train"]
TRAINED_LIMIT = 1e-9
"""The largest relative difference to plain PyTorch after training steps that counts as equal."""
LINES = "networks.jsonl"
_LINE = re.compile(r"\S+\.py:\d+")
_LONGEST = 2000
_FRAMES = 8


class Problem(msgspec.Struct, frozen=True):
    """An error in one step of a network's examination."""

    step: Step
    kind: str
    """The error's class, or `timeout`, `memory` or `crash` for what the walk saw from outside."""
    text: str
    is_bare: bool
    """Whether it is no ManyhandsError; for a capture, also one that names no line of the user's."""


def _raised_in(error: BaseException) -> str:
    """Return the innermost lines that an error went through, the last first."""
    frames = reversed(traceback.extract_tb(error.__traceback__)[-_FRAMES:])
    return "".join(f"\n  at {frame.filename}:{frame.lineno}, in {frame.name}" for frame in frames)


class NetworkOutcome(msgspec.Struct):
    """The outcome of one network, filled in step by step: one that ends half-way keeps the steps before."""

    name: str
    """Its library and its name there, as in timm:resnet18."""
    is_detector: bool = False
    """Whether it is one of torchvision's detectors, which are counted apart."""
    not_run: str = ""
    """The reason that the plain module does not run here: such a network is in no share."""
    captured: bool = False
    is_convolutional: bool = False
    """Whether the captured graph has convolutions, and no attention and no softmax; where nothing was captured,
    whether the module has."""
    operators: int = 0
    forward_difference: float | None = None
    """The largest difference between what the graph and the module return, over the largest element."""
    shares: dict[str, bool] = {}
    """Samples, pipeline, tiles -> whether there is such a plan with two devices."""
    tiled_layers: float | None = None
    """The part of the layers that the plan of tiles has in its tiles."""
    is_drawn: bool = False
    """Whether it is in the drawn tenth, which is trained."""
    trained_by: str = ""
    """The way of sharing it was trained with."""
    trained_difference: float | None = None
    """The largest difference of a loss or a weight to plain PyTorch after the training steps."""
    reordered_difference: float | None = None
    """Where that is more than counts as equal: the same between plain PyTorch and itself with the samples of each batch
    in reverse order."""
    problems: list[Problem] = []
    step: Step = "build"
    """The step under way, or the last."""
    seconds: float = 0.0
    is_complete: bool = False

    @property
    def library(self) -> str:
        return self.name.partition(":")[0]

    def add_problem(self, step: Step, error: BaseException) -> None:
        """Add an error that was raised in this process."""
        text, is_ours = str(error) or repr(error), isinstance(error, ManyhandsError)
        is_bare = not is_ours or (step == "capture" and not _LINE.search(text))
        text += "" if is_ours else _raised_in(error)
        self.problems = [*self.problems, Problem(step, type(error).__name__, text[:_LONGEST], is_bare)]

    def add_end(self, kind: Literal["timeout", "memory", "crash"], text: str) -> None:
        """Add the end of the network's process before it had an outcome."""
        self.problems = [*self.problems, Problem(self.step, kind, text[:_LONGEST], is_bare=True)]


class StoredOutcome(msgspec.Struct):
    """A line of the file: an outcome, and the versions and sources that it was made with."""

    made_with: str
    outcome: NetworkOutcome


def read_outcomes(path: Path, made_with: str) -> dict[str, NetworkOutcome]:
    """Return the stored outcomes that were made with the same versions and sources, by name; the last one counts. A
    line that is cut off, as of a walk that was killed, is passed over."""
    outcomes: dict[str, NetworkOutcome] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            stored = msgspec.json.decode(line, type=StoredOutcome)
        except msgspec.MsgspecError:
            continue
        if stored.made_with == made_with and stored.outcome.is_complete:
            outcomes[stored.outcome.name] = stored.outcome
    return outcomes


def append_outcome(path: Path, outcome: NetworkOutcome, made_with: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(StoredOutcome(made_with, outcome)) + b"\n")
