"""The results of benches as files: benchmarks/results/MACHINE/NAME.json, one for each bench and machine.

A result is a bench's figures as it printed them, in an envelope that records the command, the machine, the versions,
the date, and how busy the machine was. A value that is not known is None or empty, never a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from manyhands.facts.decode import decode
from manyhands.facts.errors import BadFile
from manyhands.files.documents import read_document, write_document
from manyhands_bench.claims import Claim

State = Literal["measured", "failed", "skipped"]


class Host(msgspec.Struct, frozen=True):
    """A machine on which benches ran."""

    processor: str
    cores: int
    """The cores that a process may use."""
    architecture: str = ""
    memory_bytes: int | None = None
    gpu: str = ""
    system: str = ""
    """Operating system and kernel."""

    @property
    def slug(self) -> str:
        """The name of the machine's folder: the processor and the cores."""
        plain = re.sub(r"\((r|tm|c)\)|\bcpu\b|@.*$", " ", self.processor.lower())
        words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"
        return f"{words[:60].rstrip('-')}-{self.cores}-cores"


class Result(msgspec.Struct, frozen=True):
    """The result of one bench on one machine."""

    name: str
    command: str
    host: Host
    state: State
    figures: dict[str, float | int | None] = {}
    """The figures as printed; None: no finite number."""
    how_run: str = ""
    """The way it was run, if not simply by the command."""
    reason: str = ""
    """The reason that it failed or was left out, or the parts that failed."""
    versions: dict[str, str] = {}
    date: str = ""
    """The time at which it began, UTC."""
    commit: str = ""
    """The commit of the checkout that was measured; ends in + if files were changed since."""
    seconds: float | None = None
    load_before: float | None = None
    """The mean number of processes that ran or waited, over the last minute."""
    load_after: float | None = None
    quick: bool = False
    """Whether it was a quick look, whose figures do not count."""
    said: str = ""
    """The output beside the figures: machine, settings of both sides, parts that were left out."""

    @property
    def counts(self) -> bool:
        return self.state == "measured" and not self.quick


def result_path(out: Path, result: Result) -> Path:
    return out / result.host.slug / f"{result.name}.json"


def write_result(out: Path, result: Result) -> Path:
    path = result_path(out, result)
    write_document(path, msgspec.to_builtins(result))
    return path


def read_results(out: Path) -> list[Result]:
    """Return every stored result, by machine and name."""
    results = []
    for path in sorted(out.glob("*/*.json")):
        result = decode(read_document(path), Result, str(path))
        if path != result_path(out, result):
            raise BadFile(
                f"{path}: holds '{result.name}' of '{result.host.slug}'.",
                hint=f"Move it to {result_path(out, result)}.",
            )
        results.append(result)
    return results


@dataclass(frozen=True)
class StoredResults:
    """The stored results and their machines."""

    hosts: tuple[Host, ...]
    """The machines, the one with the most results that count first."""
    results: tuple[Result, ...]

    @classmethod
    def of(cls, out: Path) -> StoredResults:
        results = read_results(out)
        if not results:
            raise BadFile(f"{out}: holds no results.", hint="Measure some: manyhands bench all")
        hosts = {result.host.slug: result.host for result in results}
        counted = {slug: sum(result.counts for result in results if result.host.slug == slug) for slug in hosts}
        order = sorted(hosts, key=lambda slug: (-counted[slug], slug))
        return cls(tuple(hosts[slug] for slug in order), tuple(results))

    def result(self, host: Host, name: str) -> Result | None:
        """Return the result of a bench on a machine; None if there is none that counts."""
        matching = (
            result for result in self.results if result.counts and result.name == name and result.host.slug == host.slug
        )
        return next(matching, None)

    def values(self, claim: Claim) -> list[float | None]:
        """Return the claim's figure on each machine."""
        results = [self.result(host, claim.bench) for host in self.hosts]
        return [claim.value(result.figures) if result is not None else None for result in results]


def first_result(stored: StoredResults, name: str) -> Result | None:
    """Return the result of a bench on the first machine that has one which counts."""
    return next((result for host in stored.hosts if (result := stored.result(host, name)) is not None), None)
