"""Every bench has a README with its command and its last results."""

from __future__ import annotations

import pytest

from made_results import ROOT, stored
from manyhands_bench.bench_readmes import last_results
from manyhands_bench.results import StoredResults
from manyhands_bench.tables import with_table

BENCHES = sorted(path.parent.name for path in (ROOT / "benchmarks/src/manyhands_bench").glob("*/bench.py"))


@pytest.mark.quick(every=14)
@pytest.mark.parametrize("bench", BENCHES)
def test_a_readme_names_its_command_and_has_the_stored_results(bench: str) -> None:
    """`manyhands bench all --page-only` after a result has changed."""
    text = (ROOT / "benchmarks/src/manyhands_bench" / bench / "README.md").read_text()
    assert f"manyhands bench {bench}" in text
    assert with_table(text, last_results(StoredResults.of(stored()), bench)) == text


def test_the_overview_names_every_bench() -> None:
    text = (ROOT / "benchmarks/README.md").read_text()
    assert all(f"`manyhands bench {bench}`" in text for bench in BENCHES)
