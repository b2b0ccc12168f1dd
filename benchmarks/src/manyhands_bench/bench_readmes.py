"""The table of last results in each bench's README, made from the stored results alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from manyhands.files.documents import read_text, write_text_atomic
from manyhands_bench.claims import CLAIMS, Claim, shown
from manyhands_bench.results import Result, StoredResults
from manyhands_bench.tables import BEGIN, day, markdown_table, with_table

ALSO = {
    "tile": ("tile-8", "tile-lab"), "infer": ("infer-accuracy",), "recovery": ("recovery-lab",),
    "pipeline": ("pipeline-simulated", "pipeline-hybrid", "pipeline-studies"), "split": ("split-decisions",),
}  # fmt: skip
"""Folder -> further results of its bench."""
MOST_ROWS = 6
"""The most rows for each result: docs/results.md has all of them."""


def write_readmes(stored: StoredResults, folder: Path) -> list[Path]:
    """Write the table into the README of every bench in `folder` and return those files."""
    written = []
    for readme in sorted(folder.glob("*/README.md")):
        text = read_text(readme)
        if BEGIN in text:
            write_text_atomic(readme, with_table(text, last_results(stored, readme.parent.name)))
            written.append(readme)
    return written


def last_results(stored: StoredResults, bench: str) -> str:
    """Return the first figures of a bench, each from the machine that measured it last."""
    rows = []
    for name in (bench, *ALSO.get(bench, ())):
        claims = [claim for claim in CLAIMS if claim.bench == name and set(stored.values(claim)) != {None}]
        for claim in claims[:MOST_ROWS]:
            newest, value = max(_measured(stored, claim), key=lambda pair: pair[0].date)
            rows.append([claim.text, f"{shown(value, claim.form)}, {claim.how}", f"{newest.host.slug}, {day(newest)}"])
    return markdown_table(["figure", "last result", "machine, day"], rows)


def _measured(stored: StoredResults, claim: Claim) -> Iterator[tuple[Result, float]]:
    """Yield every result that has the claim's figure, and the figure."""
    for host, value in zip(stored.hosts, stored.values(claim)):
        result = stored.result(host, claim.bench)
        if result is not None and value is not None:
            yield result, value
