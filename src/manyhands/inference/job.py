"""An inference job as typed on the command line: which devices, which plan, and how it goes.

Devices are found as for training (`job.machines`); only what is shared and how differs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadPlan, BadValue, unknown
from manyhands.facts.plan import Plan
from manyhands.files.documents import read_document
from manyhands.job import named as jobs
from manyhands.planner.inference import INFERENCE_STRATEGIES

if TYPE_CHECKING:
    from manyhands.facts.cluster import Cluster, LabCluster
    from manyhands.inference.infer import Inference
    from manyhands.inference.model import Known
    from manyhands.runtime.coordinator import Coordinator
    from manyhands.session.session import Say


def plan_named(share: str | None, plan: str | None) -> str:
    """A strategy, or a plan file that is there."""
    if share and plan:
        raise BadValue(f"--share {share} and --plan {plan} both say how to share the work.", hint="Give one of them.")
    name = share or plan or "auto"
    if share and share not in INFERENCE_STRATEGIES:
        raise unknown("way to share the work", share, INFERENCE_STRATEGIES)
    if name not in INFERENCE_STRATEGIES and not Path(name).is_file():
        raise unknown("plan file or strategy", name, INFERENCE_STRATEGIES)
    return name


def decoupled_name(model: str, text: str) -> str:
    """'4,3,1.5' of resnet50 -> 'decoupled,groups=4,shuffles=3,widen=1.5:resnet50'."""
    match = re.fullmatch(r"(\d{1,4})(?:,(\d{1,4}|all)(?:,(\d{1,3}(?:\.\d{1,4})?))?)?", text.strip())
    if match is None:
        raise BadValue(
            f"--decouple '{text:.40}' is not groups,shuffles,widening.",
            hint="Write 4,3,1.5 or only 4.",
        )
    said = zip(("groups", "shuffles", "widen"), match.groups())
    return f"decoupled,{','.join(f'{key}={value}' for key, value in said if value)}:{model}"


def wish_for(given: dict[str, Any], plan: str) -> jobs.Wish:
    """Which devices, as `train` is asked; without a word as many workers here as a plan file names, or there are
    cores for."""
    is_file = plan not in INFERENCE_STRATEGIES
    said = {**given, "plan": plan if is_file else "auto"}
    if not any(given.get(key) for key in ("devices", "cluster", "lab", "listen")):
        from manyhands.session.opening import MOST_DEFAULT_WORKERS
        from manyhands.session.session import usable_cores

        count = _named_in(plan) if is_file else 0
        said["devices"] = str(count or max(min(MOST_DEFAULT_WORKERS, usable_cores()), given.get("gpus") or 1))
    return jobs.wish_for(said, share=None, plan=None, resume="", out="")


def _named_in(file: str) -> int:
    """How many local workers a plan file is for; 0: it names others."""
    try:
        names = Plan.from_dict(read_document(file)).devices
    except BadPlan as error:
        raise BadPlan(f"{file}: {error.message}", hint=error.hint) from error
    numbers = [re.fullmatch(r"local-([1-9]\d{0,4})", name) for name in names]
    return max((int(match.group(1)) for match in numbers if match), default=0) if all(numbers) else 0


def opened(
    known: Known,
    machines: Cluster | LabCluster | Coordinator,
    wish: jobs.Wish,
    plan: str,
    objective: str,
    say: Say,
    *,
    home: str = "",
) -> Inference:
    """The network handed out: it answers when this returns."""
    from manyhands.inference.infer import Inference

    return Inference.open(
        known.model, known.example, cluster=machines, plan=plan, objective=objective, name=known.name, say=say,
        home=home, min_devices=wish.min_devices, max_devices=wish.max_devices,
    )  # fmt: skip


def health(running: Inference) -> dict[str, Any]:
    """How it goes, for whoever looks after it."""
    plan = running.plan
    return {
        "network": running.graph.name,
        "objective": running.objective,
        "devices": list(plan.devices),
        "answered": running.answered,
        "waiting": running.waiting,
        "reruns": running.reruns,
        "recoveries": list(running.recoveries),
        "predicted_seconds": running.predicted_seconds,
        "plan": plan.to_dict(),
    }
