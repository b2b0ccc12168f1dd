"""Results made by hand: shared by the tests of stored results and of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands_bench.results import Host, Result

SMALL = Host("Intel(R) Xeon(R) CPU @ 2.00GHz", 2, "x86_64", 8 * 10**9, "", "Linux 6.1")


LARGE = Host("Neoverse-N1", 16, "aarch64", 64 * 10**9, "NVIDIA T4", "Linux 6.8")


ROOT = Path(__file__).parents[2]


def result(name: str, host: Host = SMALL, **figures: float) -> Result:
    return Result(
        name, f"manyhands bench {name} --json", host, "measured", figures=figures, versions={"torch": "2.13.0"},
        date="2026-01-02T03:04:05Z", commit="abcdef0123", seconds=600.0, load_before=0.1, load_after=1.9,
    )  # fmt: skip


def stored() -> Path:
    out = ROOT / "benchmarks" / "results"
    if not out.is_dir():
        pytest.skip("not in a checkout")
    return out
