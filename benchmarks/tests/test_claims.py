"""Claims, aims and the papers' figures."""

from __future__ import annotations

import pytest

from manyhands_bench.claims import CLAIMS, Aim, Claim, shown
from manyhands_bench.everything import WORDS
from manyhands_bench.papers import HEADLINES, PAPERS


def test_claims_name_headlines_and_every_headline_is_shown() -> None:
    assert {claim.paper for claim in CLAIMS if claim.paper} == set(HEADLINES)
    assert {one.paper for one in HEADLINES.values()} == set(PAPERS)
    assert {claim.bench for claim in CLAIMS} <= set(WORDS)
    assert len({(claim.bench, claim.key) for claim in CLAIMS}) == len(CLAIMS)


def test_a_simulated_claim_without_a_profile_is_refused() -> None:
    with pytest.raises(AssertionError, match="from which profile"):
        Claim("auto", "gain_min", "", how="simulated")


@pytest.mark.parametrize(
    ("key", "value"), [("max gain_*", 3.0), ("min gain_*", 1.0), ("gain_a", 1.0), ("other", None), ("max none_*", None)]
)
def test_values_of_claims(key: str, value: float | None) -> None:
    assert Claim("auto", key, "").value({"gain_a": 1.0, "gain_b": 3.0, "gain_c": None}) == value


def test_aims_and_forms() -> None:
    assert Aim("≥", 1.0).met(1.0)
    assert not Aim("≤", 0.0).met(1)
    assert [shown(0.5, form) for form in ("times", "seconds", "part", "yes")] == ["0.5x", "0.5 s", "50 %", "no"]
    assert shown(62_000.4, "number") == "62,000"
