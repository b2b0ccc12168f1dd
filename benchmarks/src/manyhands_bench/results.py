"""What benches found, kept as files: benchmarks/results/MACHINE/NAME.json, one for each bench and machine.

A result is a bench's figures as it printed them, in an envelope that says by which command, on which machine, with
which versions, when, and how busy the machine was. A value that is not known is None or empty, never a guess.
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
    """The machine."""

    processor: str
    cores: int
    """Those a process may use."""
    architecture: str = ""
    memory_bytes: int | None = None
    gpu: str = ""
    system: str = ""
    """Operating system and kernel."""

    @property
    def slug(self) -> str:
        """Its folder's name: the processor and the cores."""
        plain = re.sub(r"\((r|tm|c)\)|\bcpu\b|@.*$", " ", self.processor.lower())
        words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-") or "unknown"
        return f"{words[:60].rstrip('-')}-{self.cores}-cores"


class Result(msgspec.Struct, frozen=True):
    """One bench on one machine."""

    name: str
    command: str
    host: Host
    state: State
    figures: dict[str, float | int | None] = {}
    """As printed; None: no finite number."""
    how_run: str = ""
    """Where it was not simply by the command: how else."""
    reason: str = ""
    """Why it failed or was left out, or which of its parts failed."""
    versions: dict[str, str] = {}
    date: str = ""
    """When it began, UTC."""
    commit: str = ""
    """Commit of the checkout that was measured; ends in + if files were changed since."""
    seconds: float | None = None
    load_before: float | None = None
    """Processes that ran or waited, over the last minute."""
    load_after: float | None = None
    quick: bool = False
    """A look: the figures do not count."""
    said: str = ""
    """What it printed beside the figures: machine, settings of both sides, parts that were left out."""

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
    """Every stored result, by machine and name."""
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
    """Stored results, by machine."""

    hosts: tuple[Host, ...]
    """The one with the most results first."""
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
        """Only one that counts."""
        matching = (
            result for result in self.results if result.counts and result.name == name and result.host.slug == host.slug
        )
        return next(matching, None)

    def values(self, claim: Claim) -> list[float | None]:
        """On each machine."""
        results = [self.result(host, claim.bench) for host in self.hosts]
        return [claim.value(result.figures) if result is not None else None for result in results]
