"""The time to the first step of a training on local workers, and what is lost later by not measuring for longer.

Each run is a process of its own with an empty cache. The clock starts when torch is imported, and ends with step 0.

    imported     manyhands and the model are there
    opened       the model is captured, and the run's folder made
    planned      workers have started and measured, and a plan is chosen
    first step   step 0 is done on all devices
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands_bench.trainer.processes import ProcessTask, printed_by

MODULE = "manyhands_bench.trainer.first_step"
PHASES = ("imported", "opened", "planned", "first step")
WARM_UP_STEPS = 2
CLASSES = 10
"""Of the targets; networks may have more."""


@dataclass(frozen=True)
class FirstStepSetting:
    """The network that is trained, and for how long."""

    model: str = "resnet50"
    shape: tuple[int, ...] = (3, 128, 128)
    batch_size: int = 8
    workers: int = 2
    steps: int = 8
    profile_seconds: float | None = None
    """As `mh.train` takes it; None: its default."""


def first_step(
    setting: FirstStepSetting = FirstStepSetting(), repeats: int = 3, say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Return `first_step_seconds`, the median of several processes, and the seconds at which each phase ended;
    `first_step_spread`, the largest less the smallest; `steady_step_seconds`, those of a later step; and what measuring
    thoroughly would have been worth:

    `steady_step_ratio`: seconds of a later step, over those of a run that measured thoroughly first (at most 1 is as
    good). `steady_plan_ratio`: the same as simulated by the thorough measurement, which knows no noise.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number in range(repeats):
            say(f"{setting.model}, run {number + 1} of {repeats}")
            runs.append(_in_process(setting, Path(folder) / f"run{number}"))
        say(f"{setting.model}, measured thoroughly first")
        thorough = _in_process(replace(setting, profile_seconds=0.0), Path(folder) / "thorough")
        plan_ratio = _simulated(setting, Path(folder) / "run0", Path(folder) / "thorough")
    firsts = [run["phases"]["first step"] for run in runs]
    medians = {phase: statistics.median(run["phases"][phase] for run in runs) for phase in PHASES}
    steady = statistics.median(_steady(run["step_seconds"]) for run in runs)
    return {
        "first_step_seconds": medians["first step"],
        "first_step_spread": max(firsts) - min(firsts),
        "first_step_seconds_thorough": thorough["phases"]["first step"],
        **{f"first_step_{phase.replace(' ', '_')}_at": seconds for phase, seconds in medians.items()},
        "steady_step_seconds": steady,
        "steady_step_ratio": steady / _steady(thorough["step_seconds"]),
        "steady_plan_ratio": plan_ratio,
    }


def _steady(step_seconds: Sequence[float]) -> float:
    return statistics.median(step_seconds[WARM_UP_STEPS:])


def _in_process(setting: FirstStepSetting, folder: Path) -> dict[str, Any]:
    """Run one training in a process of its own, with a cache of its own."""
    return printed_by(ProcessTask(MODULE, setting, folder, folder.with_name(f"{folder.name}-home")))


def _simulated(setting: FirstStepSetting, quick: Path, thorough: Path) -> float:
    """Return the seconds of a step by the plan of a run, over those by the plan of a thorough one, by what the latter
    measured."""
    import torch

    from manyhands.facts.plan import Plan
    from manyhands.facts.plan_check import resolve
    from manyhands.files.documents import read_document
    from manyhands.graph.capture import capture
    from manyhands.models.registry import build
    from manyhands.plans.simulating import simulate
    from manyhands.runtime.record import read_decided

    network = capture(build(setting.model), torch.zeros(2, *setting.shape)).network
    cluster, profile, best = read_decided(thorough, network)
    plans = Plan.from_dict(read_document(quick / "plan.yaml")), best
    first, second = (
        simulate(resolve(plan, network, cluster), network, cluster, profile, keep_spans=False).seconds for plan in plans
    )
    return first / second


def main() -> None:
    """Train once, and print the phases, the seconds of every step and the moment at which each ended, as JSON."""
    import torch

    began = time.monotonic()
    phases: dict[str, float] = {}

    def ended(phase: str) -> None:
        phases.setdefault(phase, time.monotonic() - began)

    from torch.nn import functional
    from torch.utils.data import TensorDataset

    import manyhands as mh
    from manyhands.models.registry import build

    setting = FirstStepSetting(**json.loads(sys.argv[1]))
    folder, model, samples = Path(sys.argv[2]), build(setting.model), 2 * setting.batch_size
    ended("imported")
    data = TensorDataset(torch.randn(samples, *setting.shape), torch.randint(0, CLASSES, (samples,)))
    seconds: list[float] = []
    ends: list[float] = []

    def stepped(step: int, loss: float, step_seconds: float) -> None:
        ended("first step")
        seconds.append(step_seconds)
        ends.append(time.monotonic() - began)

    options: dict[str, Any] = {} if setting.profile_seconds is None else {"profile_seconds": setting.profile_seconds}
    mh.train(
        model, data, loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=1e-3), steps=setting.steps,
        batch_size=setting.batch_size, cluster=mh.Cluster.local(setting.workers), folder=folder,
        on_opened=lambda _: ended("opened"), on_planned=lambda _: ended("planned"), on_step=stepped, **options,
    )  # fmt: skip
    print(json.dumps({"phases": phases, "step_seconds": seconds, "step_ends": ends}))


if __name__ == "__main__":
    main()
