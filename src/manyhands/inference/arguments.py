"""The arguments of `manyhands infer` as an `InferConfig`: which devices, which plan, which network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.facts.errors import BadValue, unknown
from manyhands.inference.config import STRATEGIES, InferConfig
from manyhands.job.arguments import check_devices, given_arguments, local_count, plan_in, take_devices, take_share


def infer_config(arguments: Mapping[str, Any]) -> InferConfig:
    """Return the configuration of a command; arguments that are None were left out.

    If no devices are named, this machine starts as many workers as a plan file names, or as it has cores for.
    """
    options = given_arguments(arguments)
    if network := options.pop("network", ""):
        if options.get("model"):
            raise BadValue(f"Both {network} and --model {options['model']} are given.", hint="Give one of them.")
        options["model"] = network
    take_share(options, STRATEGIES)
    take_devices(options)
    plan = str(options.get("plan", "auto"))
    is_file = plan not in STRATEGIES
    if is_file and not Path(plan).is_file():
        raise unknown("plan file or strategy", plan, STRATEGIES)
    if not any(options.get(name) for name in ("devices", "cluster", "lab", "listen")):
        from manyhands.session.opening import MOST_DEFAULT_WORKERS
        from manyhands.session.session import usable_cores

        count = local_count(plan_in(plan).devices) if is_file else 0
        options["devices"] = count or max(min(MOST_DEFAULT_WORKERS, usable_cores()), options.get("gpus") or 1)
    config = InferConfig.from_command(options)
    check_devices(config)
    return config


def decoupled_name(model: str, text: str) -> str:
    """Return a decoupled model's name: '4,3,1.5' of resnet50 -> 'decoupled,groups=4,shuffles=3,widen=1.5:resnet50'."""
    match = re.fullmatch(r"(\d{1,4})(?:,(\d{1,4}|all)(?:,(\d{1,3}(?:\.\d{1,4})?))?)?", text.strip())
    if match is None:
        raise BadValue(
            f"--decouple '{text:.40}' is not groups,shuffles,widening.",
            hint="Write 4,3,1.5 or only 4.",
        )
    parts = zip(("groups", "shuffles", "widen"), match.groups())
    return f"decoupled,{','.join(f'{key}={value}' for key, value in parts if value)}:{model}"
