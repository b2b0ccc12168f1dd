"""One check of the doctor. Plain Python, because a package may be what is missing."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, BROKEN = "ok", "warning", "broken"
HERE = "this machine"


@dataclass(frozen=True)
class Check:
    """One finding: the state found, the state needed, and what to type where the two differ."""

    subject: str
    state: str
    """ok; warning: a run works, but something is not as it should be; broken: a run would fail."""
    found: str
    needed: str = ""
    fix: str = ""
    where: str = HERE
    """A machine, a worker, or a pair of workers."""


@dataclass(frozen=True)
class PairRate:
    """A link between two workers, as measured."""

    source: str
    target: str
    bytes_per_second: float
    delay_seconds: float
    """One way, in seconds."""
    relay: str = ""
    """The device that relays between them; empty: they reach each other."""


@dataclass
class Findings:
    """All checks in the order they were made, and the measured links."""

    checks: list[Check] = field(default_factory=list)
    links: list[PairRate] = field(default_factory=list)

    @property
    def broken(self) -> list[Check]:
        return [check for check in self.checks if check.state == BROKEN]

    @property
    def warnings(self) -> list[Check]:
        return [check for check in self.checks if check.state == WARNING]

    def to_dict(self) -> dict[str, Any]:
        return {
            "fit": not self.broken,
            "broken": len(self.broken),
            "warnings": len(self.warnings),
            "checks": [asdict(check) for check in self.checks],
            "links": [asdict(link) for link in self.links],
        }


# Versions, without the package that reads them: it may be missing


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: '2.13.0+cpu' -> 2, 13; zeros at the end do not count."""
    match = re.match(r"\d+(\.\d+)*", version.strip())
    numbers = [int(part) for part in match.group().split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def requirement(text: str) -> tuple[str, list[tuple[str, str]]] | None:
    """Return a requirement's name and limits: 'torch<2.14,>=2.6'. None if only an extra or another system needs it."""
    name_and_limits, _, marker = text.partition(";")
    if marker.strip():
        return None
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)\)?", name_and_limits)
    if match is None:
        return None
    return match.group(1), re.findall(r"(>=|<=|==|!=|~=|<|>)\s*([\w.*+!-]+)", match.group(2))


def unmet(version: str, limits: list[tuple[str, str]]) -> str:
    """Return 'older' or 'newer' if a version is outside its limits, or an empty string if it is within them."""
    installed = release(version)
    for sign, limit in limits:
        bound = release(limit)
        if (sign in (">=", "~=") and installed < bound) or (sign == ">" and installed <= bound):
            return "older"
        if (sign == "<=" and installed > bound) or (sign == "<" and installed >= bound):
            return "newer"
        if sign == "==" and installed[: len(bound)] != bound:
            return "older" if installed < bound else "newer"
    return ""


def limits_text(limits: list[tuple[str, str]]) -> str:
    return ", ".join(f"{sign}{limit}" for sign, limit in sorted(limits, reverse=True)) or "any version"
