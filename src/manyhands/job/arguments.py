"""Reads the arguments of a command into the values of a configuration: devices, plans, folders, a run to resume.

Errors that can be found without torch are found here, before it is imported and before a run folder is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from manyhands.facts.errors import BadFile, BadPlan, BadValue, unknown
from manyhands.facts.plan import Plan
from manyhands.files.documents import load_cluster, read_document
from manyhands.job.config import Config, fields_of, full_path
from manyhands.job.config_sections import MODEL, DevicesConfig
from manyhands.models.registry import from_file
from manyhands.session.joining import listen_on, parse_address, parse_devices, refuse_preset

NO_LAB: dict[str, Any] = {"lab": "", "scale": None, "slots": None, "traces": ()}
RUN_FILES = ("events.jsonl", "config.yaml", "checkpoints")


def given_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given; a command's parser leaves None for the others."""
    return {name: value for name, value in arguments.items() if value is not None and value != "" and value != []}


def take_share(arguments: dict[str, Any], strategies: Collection[str]) -> None:
    """Set the plan from --share, which names a strategy; refuse it beside --plan, which names a file."""
    share = arguments.pop("share", None)
    if share is None:
        return
    if "plan" in arguments:
        raise BadValue(
            f"--share {share} and --plan {arguments['plan']} both say how to share the work.", hint="Give one of them."
        )
    if share not in strategies:
        raise unknown("way to share the work", share, strategies)
    arguments["plan"] = share


def take_devices(arguments: dict[str, Any]) -> None:
    """Read --devices N or N:M, --listen, --interface and --trace into the fields of `DevicesConfig`."""
    interface = arguments.pop("interface", None)
    if interface:
        arguments["listen"] = listen_on(interface, arguments.get("listen", ""))
    if "listen" in arguments:
        parse_address(arguments["listen"], 0)
    if "devices" in arguments:
        arguments["devices"], arguments["max_devices"] = parse_devices(str(arguments["devices"]))
    if "traces" in arguments:
        arguments["traces"] = tuple(arguments["traces"])


def check_length(arguments: Mapping[str, Any]) -> None:
    """Refuse --epochs beside --steps."""
    if "epochs" in arguments and "steps" in arguments:
        raise BadValue(
            f"--epochs {arguments['epochs']} and --steps {arguments['steps']} both say how long.",
            hint="Give one of them.",
        )


def check_devices(config: DevicesConfig) -> None:
    """Refuse a preset, whose devices do not exist, and a job that would begin with fewer devices than it needs."""
    if isinstance(config.cluster, (str, Path)):
        refuse_preset(load_cluster(config.cluster), config.listen)
    if config.min_devices > 1 and config.min_devices > config.count:
        fix = f"--min-devices {config.count}"
        if not config.cluster and not config.lab:
            fix = f"--devices {config.min_devices}, or {fix}"
        raise BadValue(
            f"--min-devices is {config.min_devices}; the run would begin with {config.count} device(s).",
            hint=f"Write {fix}.",
        )


def check_out(folder: Path, command: str = "train") -> None:
    """Refuse a folder that holds a run, or that cannot be made."""
    if any((folder / name).exists() for name in RUN_FILES):
        raise BadFile(
            f"{folder}: holds a run already.",
            hint=f"Go on with it: manyhands {command} --resume {folder}\nOr give another folder: --out {folder}-2",
        )
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if not nearest.is_dir():
        raise BadFile(f"{folder}: cannot be made: {nearest} is a file.", hint="Give another folder with --out.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadFile(f"{folder}: cannot be made: {nearest} is not yours to write.", hint="Give another with --out.")


def resumed_folder(arguments: Mapping[str, Any], command: str) -> Path | None:
    """Return the folder of --resume; None: it is a new run, whose --out is checked."""
    resume, out = arguments.get("resume"), arguments.get("folder")
    if resume is None:
        if out is not None:
            check_out(Path(out), command)
        return None
    if out is not None:
        raise BadValue(f"--resume {resume} goes on in that folder; --out {out} names another.", hint="Give one.")
    folder = Path(resume)
    if not folder.is_dir():
        raise BadFile(f"{folder}: there is no such run folder.", hint="List them: ls runs")
    if not (folder / "config.yaml").exists():
        raise BadFile(f"{folder}: is no run folder: it has no config.yaml.", hint="List them: ls runs")
    return folder


def stored_document(folder: Path, key: str) -> dict[str, Any] | None:
    """Return what config.yaml stores of the command that started a run; None: it was started in Python."""
    config = read_document(folder / "config.yaml")
    document = config.get(key) if isinstance(config, dict) else None
    return document if isinstance(document, dict) else None


def check_resumed(config: type[Config], folder: Path, stored: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that would make a resumed run compute something different."""
    if "model" not in arguments:
        from_file(str(stored.get("model", MODEL)), str(folder / "config.yaml"))
    fields = fields_of(config)
    for name, value in arguments.items():
        field = fields[name]
        if field.option.on_resume == "free" or field.stored_key is None:
            continue
        before = stored.get(name, value)
        is_same = full_path(value) == full_path(before) if name == "data" else before == value
        if not is_same:
            flag = field.option.flags[0]
            raise BadValue(
                f"{folder} was started with {flag} {before}; it is now {value}. It would not go on as it was.",
                hint=f"Leave out {flag}, or start a new run.",
            )


def forgotten_devices(arguments: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored device options that a resumed run resets, because others were named: a cluster or a lab
    replaces all of them, --gpus those that join, --listen and --devices a lab."""
    if "cluster" in arguments or "lab" in arguments:
        return {**NO_LAB, "devices": None, "max_devices": None, "gpus": 0, "cluster": None, "listen": ""}
    forgotten: dict[str, Any] = {}
    if "listen" in arguments:
        forgotten |= {**NO_LAB, "gpus": 0}
    if "devices" in arguments:
        forgotten |= {**NO_LAB, "cluster": None}
    if "gpus" in arguments:
        forgotten |= {"listen": ""}
        if stored.get("lab"):
            forgotten |= {**NO_LAB, "cluster": None}
    return forgotten


def plan_in(file: str | Path) -> Plan:
    """Return the plan that a file holds; an error names the file."""
    try:
        return Plan.from_dict(read_document(file))
    except BadPlan as error:
        raise BadPlan(f"{file}: {error.message}", hint=error.hint) from error


def local_count(names: tuple[str, ...]) -> int:
    """Return how many local workers are needed for these names to exist; 0 if any other name is among them."""
    numbers = [re.fullmatch(r"local-([1-9]\d{0,4})", name) for name in names]
    return max((int(match.group(1)) for match in numbers if match), default=0) if all(numbers) else 0
