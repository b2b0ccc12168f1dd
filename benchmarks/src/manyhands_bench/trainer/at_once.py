"""Several trainings that begin at once on one machine: seconds until each has done two steps, and what they measured.

Each is a process of its own with two workers; all share one cache, which is empty at first. Before, each runs alone:

    trainings_at_once_seconds         until the last of them has done its second step, after importing torch
    trainings_at_once_profile_ratio   of each, the seconds of a step by its profile at once, over those by its profile
                                      alone; the one furthest from 1
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from manyhands_bench.trainer.first_step import MODULE, FirstStepSetting
from manyhands_bench.trainer.processes import ProcessTask, printed_by, printed_by_all

STEPS = 2


@dataclass(frozen=True)
class AtOnceSetting:
    """The networks that are trained at once, each as a training of its own."""

    models: tuple[str, ...] = ("resnet18", "resnet34", "mobilenetv2", "mobilenetv3-large")
    """Different ones: of equal ones only the first would measure."""
    shape: tuple[int, ...] = (3, 64, 64)
    batch_size: int = 8
    workers: int = 2

    def training(self, model: str) -> FirstStepSetting:
        return FirstStepSetting(model, self.shape, self.batch_size, self.workers, steps=STEPS)


def trainings_at_once(
    setting: AtOnceSetting = AtOnceSetting(), say: Callable[[str], None] = lambda text: None
) -> dict[str, float]:
    """Return the seconds until the first and the last have done two steps, at once and alone, and how much their
    profiles differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainings = [setting.training(model) for model in setting.models]
        alone = []
        for place, training in enumerate(trainings):
            say(f"{training.model} alone")
            alone.append(
                printed_by(ProcessTask(MODULE, training, folder / f"alone{place}", folder / f"alone{place}-home"))
            )
        say(f"{len(trainings)} at once")
        together = printed_by_all(
            [
                ProcessTask(MODULE, training, folder / f"once{place}", folder / "home")
                for place, training in enumerate(trainings)
            ]
        )
        ratios = [
            _profile_seconds(training, folder / f"once{place}") / _profile_seconds(training, folder / f"alone{place}")
            for place, training in enumerate(trainings)
        ]
    ends, ends_alone = ([run["step_ends"][STEPS - 1] for run in runs] for runs in (together, alone))
    return {
        "trainings_at_once": len(trainings), "trainings_at_once_seconds": max(ends),
        "trainings_at_once_first_seconds": min(ends), "trainings_alone_seconds": max(ends_alone),
        "trainings_at_once_profile_ratio": max(ratios, key=lambda ratio: abs(math.log(ratio))),
    }  # fmt: skip


def _profile_seconds(setting: FirstStepSetting, folder: Path) -> float:
    """Return the seconds that all layers take for a device's share of the samples, by the profile of a run."""
    import torch

    from manyhands.graph.capture import capture
    from manyhands.models.registry import build
    from manyhands.runtime.record import read_decided

    network = capture(build(setting.model), torch.zeros(2, *setting.shape)).network
    profile = read_decided(folder, network)[1]
    share = max(1, setting.batch_size // setting.workers)
    device = next(iter(profile.devices.values()))
    return sum(sum(device.layer_seconds(layer, share)) for layer in range(len(device.layers)))
