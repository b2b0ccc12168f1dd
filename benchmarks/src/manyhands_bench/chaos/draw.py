"""Drawing of the faults that strike each training job, from a seed. Pure: no process, no clock.

A scenario is one training job with several faults, one after another. Scenario `k` of seed `s` is always the same one,
whatever ran before it, so a failing one can be repeated alone: `manyhands bench chaos --seed s --scenario k`.

Every way of sharing has its own pack of cards, one or two for each kind of fault. A pack is dealt to the end before it
is shuffled again, so every pair (kind of fault, way of sharing) comes up after a known number of scenarios.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manyhands.facts.errors import BadValue, unknown

SHARES = ("samples", "tiles", "pipeline", "mixed", "split")
FAULTS_EACH = 12
"""Faults of one scenario."""
SPLIT_DEVICES = ("edge", "server")
COORDINATOR = "coordinator"
"""As a victim: the coordinator's process in place of a worker."""
SLOW_DEVICE_SECONDS = 30.0
SLOWED_TIMES = 5
LONG_STOP_SECONDS, SHORT_STOP_SECONDS = 20.0, 0.6
"""A stopped worker is continued once it was given up, after the long time at the latest; the short one is below the
heartbeat timeout, so nobody may be given up."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    text: str
    """A description for the documentation and for progress lines."""
    cards: int = 2
    """Cards in every pack."""
    needs: str = ""
    """The facility it cannot do without: "network" (namespaces), "groups" (control groups) or "disk" (a mount), all of
    which need root; empty: none."""
    is_fatal: bool = False
    """Whether its victim cannot go on and is expected to be given up."""


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill", "kill -9 of a worker", is_fatal=True),
        Kind("stop", "SIGSTOP of a worker, SIGCONT later", is_fatal=True),
        Kind("hang", "a worker's computing thread stands still, its heartbeats go on", is_fatal=True),
        Kind("partition", "two workers cannot reach each other, both reach the coordinator", needs="network",
             is_fatal=True),
        Kind("slow-link", "a worker's link becomes slow for some seconds", needs="network"),
        Kind("junk", "random bytes, TLS rubbish and half-open connections to every port of the job"),
        Kind("disk-full", "the run folder's disk is full for some seconds", needs="disk"),
        Kind("oom", "the kernel kills a worker that needs more memory than its control group has", needs="groups",
             is_fatal=True),
        Kind("clock", "the wall clock of a process jumps by hours"),
        Kind("coordinator", "kill -9 of the coordinator, then --resume"),
        Kind("slow-device", f"a worker computes {SLOWED_TIMES} times slower for {SLOW_DEVICE_SECONDS:g} s", cards=1),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault, and when it strikes."""

    kind: str
    victims: tuple[int, ...]
    """Indices into the devices in use when it strikes, modulo their number; a partition has two. (-1,): the
    coordinator."""
    after_steps: int
    """New rounds since the previous fault was over."""
    delay_seconds: float
    """Delay after the last of them, so that the fault falls anywhere in a round."""
    seconds: float = 0.0
    """Its duration, for kinds that have one."""
    amount: float = 0.0
    """For a clock, the seconds it jumps; for a link, its bytes per second."""

    @property
    def is_fatal(self) -> bool:
        """Whether a victim is expected to be given up."""
        return KINDS[self.kind].is_fatal and not (self.kind == "stop" and self.seconds <= SHORT_STOP_SECONDS)


@dataclass(frozen=True)
class ChaosScenario:
    """One training job and what happens to it."""

    seed: int
    number: int
    share: str
    devices: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return f"{self.seed}-{self.number}-{self.share}"


def chosen_kinds(only: Sequence[str], skipped: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the kinds to draw from: those requested, in the order of `KINDS`, without those that cannot be made
    here."""
    for name in only:
        if name not in KINDS:
            raise unknown("kind of fault", name, KINDS)
    kinds = tuple(name for name in KINDS if (not only or name in only) and name not in skipped)
    if not kinds:
        raise BadValue(
            f"None of the faults asked for can be made here: {', '.join(only or KINDS)}.",
            hint="Run it as root on Linux, or ask for others: --only kill,stop,hang,junk,clock,coordinator",
        )
    return kinds


def scenario(seed: int, number: int, kinds: Sequence[str], faults: int = FAULTS_EACH) -> ChaosScenario:
    """Return scenario `number` of `seed`."""
    turn, place = divmod(number, len(SHARES))
    share = random.Random(f"{seed} ways {turn}").sample(SHARES, len(SHARES))[place]
    drawing = random.Random(f"{seed} scenario {number}")
    devices = SPLIT_DEVICES if share == "split" else tuple(f"w{i + 1}" for i in range(drawing.choice((3, 4))))
    dealt = _dealt(seed, share, kinds, turn * FAULTS_EACH, faults)
    return ChaosScenario(seed, number, share, devices, tuple(_fault(kind, len(devices), drawing) for kind in dealt))


def scenarios(seed: int, kinds: Sequence[str], faults: int | None) -> Iterator[ChaosScenario]:
    """Yield scenarios with `faults` faults in all; None: without end."""
    remaining, number = faults, 0
    while remaining is None or remaining > 0:
        yield scenario(seed, number, kinds, FAULTS_EACH if remaining is None else min(remaining, FAULTS_EACH))
        remaining = None if remaining is None else remaining - FAULTS_EACH
        number += 1


def _dealt(seed: int, share: str, kinds: Sequence[str], first: int, count: int) -> list[str]:
    """Return cards `first` to `first + count` of a way's pack, which is shuffled anew whenever it is used up."""
    pack = [kind for kind in kinds for _ in range(KINDS[kind].cards)]
    dealt = []
    for place in range(first, first + count):
        shuffle, card = divmod(place, len(pack))
        dealt.append(random.Random(f"{seed} {share} pack {shuffle}").sample(pack, len(pack))[card])
    return dealt


def _fault(kind: str, devices: int, drawing: random.Random) -> Fault:
    victims = tuple(drawing.sample(range(devices), 2 if kind == "partition" else 1))
    after, delay = drawing.randint(2, 12), drawing.uniform(0.0, 0.2)
    seconds, amount = 0.0, 0.0
    if kind == "stop":
        seconds = SHORT_STOP_SECONDS if drawing.random() < 0.25 else LONG_STOP_SECONDS
    elif kind == "slow-link":
        seconds, amount = drawing.uniform(2.0, 4.0), drawing.choice((250e3, 500e3, 1e6))
    elif kind == "disk-full":
        seconds = drawing.uniform(1.0, 3.0)
    elif kind == "clock":
        victims = (-1,) if drawing.random() < 0.3 else victims
        amount = drawing.choice((-1, 1)) * drawing.uniform(3600.0, 7 * 86400.0)
    elif kind == "slow-device":
        seconds = SLOW_DEVICE_SECONDS
    return Fault(kind, victims, after, delay, seconds, amount)
