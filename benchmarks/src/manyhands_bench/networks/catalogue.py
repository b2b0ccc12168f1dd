"""The public networks that the installed packages have, by names like timm:resnet18."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from manyhands.facts.errors import NotInstalled, unknown
from manyhands_bench.networks.outcome import LIBRARIES, Library
from manyhands_bench.networks.subject import Subject
from manyhands_bench.networks.timm_networks import timm_names, timm_subject
from manyhands_bench.networks.torchvision_networks import torchvision_detectors, torchvision_names, torchvision_subject
from manyhands_bench.networks.transformers_networks import transformers_names, transformers_subject

PACKAGES: Mapping[Library, tuple[str, ...]] = {
    "torchvision": ("torchvision",), "timm": ("timm", "torchvision"), "hf": ("transformers",),
}  # fmt: skip
_NAMES: Mapping[str, Callable[[], list[str]]] = {
    "torchvision": torchvision_names, "timm": timm_names, "hf": transformers_names,
}  # fmt: skip
_SUBJECTS: Mapping[str, Callable[[str], Subject]] = {
    "torchvision": torchvision_subject, "timm": timm_subject, "hf": transformers_subject,
}  # fmt: skip
SEED = 0
DRAWN_PART = 0.1


def missing_packages() -> dict[Library, str]:
    """Return the libraries whose networks cannot be built here, with the package that is not installed."""
    absent = {library: [name for name in PACKAGES[library] if find_spec(name) is None] for library in LIBRARIES}
    return {library: names[0] for library, names in absent.items() if names}


def subject_named(name: str) -> Subject:
    """Return the network of a name like timm:resnet18."""
    library, _, rest = name.partition(":")
    return _SUBJECTS[library](rest)


def trained_subject(name: str) -> Subject:
    """Return the network of a name as it is trained: a few that take large inputs only are made for smaller ones."""
    library, _, rest = name.partition(":")
    return torchvision_subject(rest, is_trained=True) if library == "torchvision" else subject_named(name)


def all_networks() -> list[str]:
    """Return the names of every network of the installed packages."""
    missing = missing_packages()
    if len(missing) == len(LIBRARIES):
        raise NotInstalled(
            "None of torchvision, timm and transformers is installed: there is no public network to walk.",
            hint="pip install torchvision timm transformers",
        )
    return [f"{library}:{name}" for library in LIBRARIES if library not in missing for name in _NAMES[library]()]


def detectors() -> set[str]:
    """Return the names of torchvision's detectors; none where it is not installed."""
    return set() if "torchvision" in missing_packages() else {f"torchvision:{n}" for n in torchvision_detectors()}


def chosen_networks(names: Sequence[str], only: Sequence[str], limit: int | None) -> list[str]:
    """Return those of the networks that are asked for by library or name; with a limit so many, evenly spread."""
    chosen = list(names)
    if only:
        wanted: set[str] = set()
        for word in only:
            matching = {name for name in names if word in (name, name.partition(":")[0], name.partition(":")[2])}
            if not matching:
                raise unknown("network or library", word, {*names, *LIBRARIES})
            wanted |= matching
        chosen = [name for name in names if name in wanted]
    if limit is None or limit >= len(chosen):
        return chosen
    return [chosen[place * len(chosen) // limit] for place in range(limit)]


def drawn_tenth(names: Sequence[str]) -> list[str]:
    """Return the networks that are trained: a tenth of those given, at least one, drawn with seed 0."""
    count = min(len(names), math.ceil(DRAWN_PART * len(names)))
    return sorted(random.Random(SEED).sample(sorted(names), count))
