"""How often a token may be guessed, by a clock that the test turns."""

from __future__ import annotations

import pytest

from manyhands.transport.admission import client_network
from manyhands.transport.limiter import FREE_FAILURES, TOTAL_FAILURES, Limited, ProofLimiter


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(limiter: ProofLimiter, origin: str) -> None:
    with limiter.attempt(origin):
        pass


def guesses(limiter: ProofLimiter, clock: Clock, origins: list[str], seconds: float) -> int:
    """As many as are taken in so many seconds."""
    count, end, number = 0, clock.now + seconds, 0
    while clock.now < end:
        number += 1
        try:
            fail(limiter, origins[number % len(origins)])
            count += 1
        except Limited:
            clock.now += 0.5
    return count


def test_one_address_waits_longer_and_longer() -> None:
    clock = Clock()
    limiter = ProofLimiter(clock=clock)
    for _ in range(FREE_FAILURES):
        fail(limiter, "10.0.0.7")
    waits = []
    for _ in range(11):
        with pytest.raises(Limited) as caught:
            limiter.check("10.0.0.7")
        waits.append(caught.value.seconds)
        clock.now += caught.value.seconds
        fail(limiter, "10.0.0.7")
    assert waits == pytest.approx([1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300])
    limiter.check("10.0.0.8")  # another is not kept waiting


@pytest.mark.slow
def test_guesses_of_a_day() -> None:
    """What the arithmetic of the minimum length rests on."""
    clock = Clock()
    day = 86_400.0
    assert guesses(ProofLimiter(clock=clock), clock, ["10.0.0.7"], day) <= 320
    many = [f"10.0.{number // 250}.{number % 250}" for number in range(4000)]
    found = guesses(ProofLimiter(clock=clock), clock, many, day)
    assert 1400 <= found <= TOTAL_FAILURES + day / 60 + 1


def test_guesses_side_by_side_gain_nothing() -> None:
    limiter = ProofLimiter()
    begun = [limiter.attempt("10.0.0.7") for _ in range(16)]
    for one in begun:
        one.__enter__()
    with pytest.raises(Limited):
        limiter.check("10.0.0.7")
    for one in begun:
        one.__exit__(None, None, None)
    with pytest.raises(Limited):
        limiter.check("10.0.0.7")


def test_a_right_proof_costs_nothing() -> None:
    limiter = ProofLimiter()
    for _ in range(200):
        with limiter.attempt("10.0.0.7") as attempt:
            attempt.succeeded()
    for number in range(int(TOTAL_FAILURES)):
        fail(limiter, f"10.0.1.{number}")
    with pytest.raises(Limited):
        limiter.check("10.0.0.7")


def test_an_error_within_is_a_failure() -> None:
    limiter = ProofLimiter()
    for _ in range(FREE_FAILURES):
        with pytest.raises(TimeoutError), limiter.attempt("10.0.0.7"):
            raise TimeoutError
    with pytest.raises(Limited):
        limiter.check("10.0.0.7")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True), ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.7", "10.0.0.7", True), ("10.0.0.7", "10.0.0.8", False), ("fe80::1%eth0", "fe80::2", True),
        ("", "10.0.0.7", False),
    ],
)  # fmt: skip
def test_what_counts_as_one_address(one: str, other: str, is_same: bool) -> None:
    assert (client_network(one) == client_network(other)) is is_same
