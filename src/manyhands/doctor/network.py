"""Checks what a run needs from its workers and from the network between them. Every wait has a timeout: no answer is a
finding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from manyhands.doctor.check import BROKEN, HERE, OK, WARNING, Check, PairRate
from manyhands.doctor.confinement import confinement_check
from manyhands.doctor.firewall import firewall_here, remedy
from manyhands.doctor.machine import WORKER_BYTES
from manyhands.executor.messages import COORDINATOR
from manyhands.facts.errors import ManyhandsError, WorkerLost
from manyhands.facts.hosts import host_and_port
from manyhands.facts.link import Link
from manyhands.facts.units import format_bytes, format_rate, format_seconds
from manyhands.profiler.this_machine import identify
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.measuring import learn_routes, probe_pair, probe_reachability
from manyhands.runtime.member import Member
from manyhands.runtime.reachability import NO_MEMBER, ProbeAnswer
from manyhands.runtime.route_probing import relay_shown

MOST_WALL_SECONDS = 2.0
"""Largest allowed difference in the time of day. It only orders what is written about a run."""
MOST_DRIFT_SECONDS = 5e-3
"""Largest allowed drift of clocks between two measurements: timelines of several machines are drawn by these clocks."""
_DRIFT_LOOK_SECONDS = 0.3
SLOW_BYTES_PER_SECOND = 125_000.0
LONG_DELAY_SECONDS = 0.5
_FIRST_BYTES, _MOST_BYTES = 32_000, 4_000_000
_LOOK_SECONDS = 0.25
"""Time for which a link is kept busy while its rate is measured."""
PAIRS_SECONDS = 120.0
"""No further pair is measured after this many seconds."""

Say = Callable[[str], None]


def worker_checks(members: Iterable[Member]) -> Iterator[Check]:
    """Yield checks of what the workers reported about their machines when they joined."""
    this_machine = identify()
    for member in members:
        facts = member.facts
        described = f"{facts.machine}, {format_bytes(facts.memory_bytes)}"
        yield worker_check(member.name, described, facts.torch, this_machine.torch, facts.memory_bytes)
        if facts.confinement is not None:
            yield confinement_check(facts.confinement, member.name)


def worker_check(name: str, described: str, torch: str, own_torch: str, memory_bytes: int) -> Check:
    if memory_bytes < WORKER_BYTES:
        fix = "Nothing fits beside Python and torch there: use another device."
        return Check("worker", BROKEN, described, f"{format_bytes(WORKER_BYTES)} of memory", fix, name)
    if torch.partition("+")[0] != own_torch.partition("+")[0]:
        fix = f"On {name}: pip install torch=={own_torch.partition('+')[0]}"
        needed = f"torch {own_torch}, as here: others may round otherwise"
        return Check("worker", WARNING, described, needed, fix, name)
    return Check("worker", OK, described, f"torch {own_torch}, as here", where=name)


# Clocks


def clock_checks(coordinator: Coordinator, names: Iterable[str]) -> Iterator[Check]:
    """Yield checks of the clocks: whether they run alike, measured twice, and whether they show the same time of
    day."""
    worker_names = list(names)
    first = coordinator.clock_sync.synchronize(worker_names)
    before = {name: coordinator.members[name].clock_offset_seconds for name in first}
    time.sleep(_DRIFT_LOOK_SECONDS)
    second = coordinator.clock_sync.synchronize(list(first))
    for name in worker_names:
        if name not in second:
            yield no_answer(coordinator, name, "clock")
            continue
        member = coordinator.members[name]
        drift = member.clock_offset_seconds - before[name]
        yield clock_check(name, member.wall_offset_seconds, drift, max(first[name], second[name]))


def clock_check(name: str, wall_offset: float | None, drift: float, round_trip: float) -> Check:
    """Return a check of one clock. `wall_offset` is added to that machine's time of day to get this machine's."""
    needed = f"the same time of day within {MOST_WALL_SECONDS:g} s"
    if abs(drift) > max(MOST_DRIFT_SECONDS, round_trip):
        difference = (
            f"within {_DRIFT_LOOK_SECONDS:g} s its clock went {format_seconds(abs(drift))} another way than this one"
        )
        fix = f"Pictures of timelines will be wrong. Is {name} a virtual machine that is paused at times?"
        return Check("clock", WARNING, difference, "clocks that go alike", fix, name)
    if wall_offset is None:
        return Check(
            "clock", WARNING, "it did not say what time it has", needed, "Install the same version there.", name
        )
    difference = f"{format_seconds(abs(wall_offset))} {'behind' if wall_offset > 0 else 'ahead'}"
    if abs(wall_offset) > MOST_WALL_SECONDS:
        return Check("clock", WARNING, difference, needed, f"On {name}: sudo timedatectl set-ntp true", name)
    return Check("clock", OK, f"{difference}; there and back in {format_seconds(round_trip)}", needed, where=name)


def no_answer(coordinator: Coordinator, name: str, subject: str) -> Check:
    member = coordinator.members[name]
    why = coordinator.local.ending(name) or member.reason or "it did not answer within 2 s"
    output = coordinator.local.last_words(name)[-400:]
    fix = f"Start it again, and look at what it prints. {output}".strip()
    return Check(subject, BROKEN, why, "an answer", fix, name)


# Pairs


def pair_checks(
    coordinator: Coordinator,
    names: Iterable[str],
    links: list[PairRate],
    say: Say,
    limit_seconds: float = PAIRS_SECONDS,
) -> Iterator[Check]:
    """Yield checks of every pair: whether it can connect, and how fast it is. Measured rates are added to `links`."""
    end = time.monotonic() + limit_seconds
    say("whether all can reach each other")
    shut, lost = _find_routes(coordinator, list(names))
    for name, why in lost.items():
        yield Check("worker", BROKEN, why, "a worker that answers", "Start it again, and look at its log.", name)
    for (source, target), answer in sorted(shut.items()):
        yield unreached(coordinator, source, target, answer)
    answering = [name for name in names if name not in lost]
    for pair, relay in coordinator.routes.relayed(answering).items():
        yield relayed(coordinator, *pair, relay)
    pairs = [pair for pair in itertools.combinations(answering, 2) if pair not in shut and pair[::-1] not in shut]
    for number, (first, second) in enumerate(pairs):
        if time.monotonic() > end:
            unmeasured = len(pairs) - number
            yield Check(
                "link", WARNING, f"{unmeasured} of {len(pairs)} pairs were not measured", "time", "Run it again."
            )
            return
        say(f"the link between {first} and {second} ({number + 1} of {len(pairs)})")
        try:
            measured = _measure(coordinator, (first, second))
        except ManyhandsError as error:
            fix = error.hint or "Start both again; is one of them busy with something else?"
            yield Check("link", BROKEN, error.message, "data that arrives", fix, f"{first}, {second}")
            continue
        relay = coordinator.routes.relay(first, second)
        links += [
            PairRate(sender, receiver, measured[sender].bytes_per_second, measured[sender].delay_seconds, relay)
            for sender, receiver in ((first, second), (second, first))
        ]
        yield link_check(first, second, measured, relay)


def _find_routes(
    coordinator: Coordinator, names: list[str]
) -> tuple[dict[tuple[str, str], ProbeAnswer], dict[str, str]]:
    """Return the pairs for which there is no way, neither direct nor through a relay, with what the first found; and
    why some workers do not answer at all."""
    lost: dict[str, str] = {}
    while True:
        answering = [name for name in names if name not in lost]
        try:
            return _shut(coordinator, answering) if answering else {}, lost
        except ManyhandsError as error:
            failed = {name: error.message for name in answering if coordinator.members[name].is_lost}
            if not failed:  # no worker is lost, but one does not answer: all get the error
                return {}, lost | dict.fromkeys(answering, error.message)
            lost |= failed


def _shut(coordinator: Coordinator, names: list[str]) -> dict[tuple[str, str], ProbeAnswer]:
    learn_routes(coordinator, names)
    shut = {
        (source, target): answer
        for source, answers in probe_reachability(coordinator, names).items()
        for target, answer in answers.items()
        if not answer.is_open
    }
    for pair in shut:
        if COORDINATOR not in pair:
            coordinator.routes.suspect(pair)
    learn_routes(coordinator, names)  # those are tried from the other side, too
    return {pair: answer for pair, answer in shut.items() if coordinator.routes.between(*pair) is None}


def relayed(coordinator: Coordinator, first: str, second: str, relay: str) -> Check:
    """Return a check for a pair that only a relay connects: it works, and is slower than it could be."""
    host, port = coordinator.members[second].address
    answer = ProbeAnswer(host, port, NO_MEMBER, 0.0)
    fix = "Nothing needs to be done. To be faster, let them reach each other, or let a device relay that is near both: "
    fix += "manyhands worker --relay\n"
    fix += remedy(answer, first, coordinator.members[first].address[0], second, fixed_port=False)
    text = f"they do not reach each other; {relay_shown(relay)} relays between them"
    return Check(
        "reach", WARNING, text, f"{first} can connect to {second}, or the other way", fix, f"{first}, {second}"
    )


def unreached(coordinator: Coordinator, source: str, target: str, answer: ProbeAnswer) -> Check:
    """Return a check for a pair that cannot connect, with the fix."""
    tool = firewall_here() if target == COORDINATOR else ""
    host = coordinator.members[source].address[0] if source != COORDINATOR else "the coordinator's address"
    if source == COORDINATOR and (member := coordinator.members.get(target)) is not None:
        host = member.channel.local_host
    fix = remedy(answer, _shown(source), host, _shown(target), tool, fixed_port=False)
    where = host_and_port(answer.host, answer.port)
    failure = f"{_shown(target)} at {where}: {answer.outcome} ({answer.text or 'no reason given'})"
    return Check("reach", BROKEN, failure, f"{_shown(source)} can connect to it", fix, f"{source}, {target}")


def _shown(name: str) -> str:
    return HERE if name == COORDINATOR else name


def _measure(coordinator: Coordinator, pair: tuple[str, str]) -> dict[str, Link]:
    """Measure a link shortly, and then again for as long as its rate allows."""
    measured = probe_pair(coordinator, pair, dict.fromkeys(pair, _FIRST_BYTES))
    sizes = {name: _size(link) for name, link in measured.items()}
    if min(sizes.values()) <= _FIRST_BYTES:
        return measured
    return probe_pair(coordinator, pair, sizes)


def _size(link: Link) -> int:
    return int(min(_MOST_BYTES, max(_FIRST_BYTES, link.bytes_per_second * _LOOK_SECONDS)))


def link_check(first: str, second: str, links: Mapping[str, Link], relay: str = "") -> Check:
    """Return a check of both directions of a pair."""
    rates = [links[name].bytes_per_second for name in (first, second)]
    delay = max(links[name].delay_seconds for name in (first, second))
    text = f"{format_rate(rates[0])} there, {format_rate(rates[1])} back, {format_seconds(delay)} one way"
    text += f", through {relay_shown(relay)}" if relay else ""
    needed = f"{format_rate(SLOW_BYTES_PER_SECOND)} or more, at most {format_seconds(LONG_DELAY_SECONDS)}"
    where = f"{first}, {second}"
    if min(rates) < SLOW_BYTES_PER_SECOND or delay > LONG_DELAY_SECONDS:
        fix = "Use a cable or another Wi-Fi channel; `manyhands plan --what-if` says what a faster link would bring."
        return Check("link", WARNING, text, needed, fix, where)
    return Check("link", OK, text, needed, where=where)


def lost_before_joining(error: ManyhandsError) -> Check:
    """Return a check for a worker on this machine that ended before it joined."""
    fix = f"Its last output: {error.hint}" if error.hint and isinstance(error, WorkerLost) else error.hint
    return Check("worker", BROKEN, error.message, "workers that start", fix or "Run again with --debug.")
