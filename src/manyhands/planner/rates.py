"""Estimates the rates of a link from real transfers, and decides when another deployment is worth it (SPLIT §4.5).

    Meter    one direction. Bytes count while they are back to back; a message alone on an idle link measures delays.
    Rates    both directions, and transfers under way: one that is late counts before it ends.
    Engine   looks now and then, and redeploys if that pays, and has paid for a while.

A meter's estimate is a mean over its last busy seconds, clamped between two quantiles of its window: a dip that fills
less than the lower part of the window changes nothing, a change that fills all but the upper part counts fully.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from manyhands.facts.errors import BadValue
from manyhands.planner.split import (
    WIDTHS,
    Bound,
    Deployment,
    LinkRates,
    SplitProfile,
    edge_only_price,
    fits,
    prices,
    seconds_of,
)
from manyhands.planner.split_choice import Chooser, choose

LEAST_BYTES = 8192
LEAST_SECONDS = 0.02
"""Less data, back to back, measures buffers and delays and not the rate."""
PROBE_SECONDS = 0.25
LONGEST_PROBE_SECONDS = 1.0
"""A probe that has not arrived by then is given up: the job waits for it meanwhile."""
LEAST_PROBE_BYTES = 64_000
MOST_PROBE_BYTES = 4_000_000
MOST_PAUSE = 16
"""The most times by which the pause between two probes of a silent link is extended."""
FAR_PAUSE = 3
"""The times by which it is extended while a link twice as fast as it was found would change nothing either."""


class Sample(msgspec.Struct, frozen=True):
    """Bytes that were sent back to back, the time they took, and when the last arrived."""

    byte_count: float
    seconds: float
    ended: float

    @property
    def rate(self) -> float:
        return self.byte_count / self.seconds


class Meter:
    """The rate of one direction. All times are of one clock; transfers go one after another."""

    def __init__(
        self,
        *,
        memory_seconds: float = 10.0,
        window_seconds: float = 20.0,
        quantile: float = 0.25,
        delay_seconds: float = 0.0,
    ) -> None:
        if not 0 <= quantile <= 0.5 or not memory_seconds > 0 or not window_seconds > 0:
            raise BadValue(
                f"A meter of quantile {quantile}, memory {memory_seconds} s, window {window_seconds} s: the quantile "
                "must be 0 to 0.5, the others > 0."
            )
        self.memory_seconds, self.window_seconds, self.quantile = memory_seconds, window_seconds, quantile
        self.delay_seconds = delay_seconds
        """The extra seconds of a transfer that finds the link idle."""
        self._samples: deque[Sample] = deque()
        self._under_way: deque[tuple[float, float]] = deque()
        self._free = -math.inf
        self._bytes = self._seconds = 0.0

    def begin(self, byte_count: float, now: float) -> None:
        """Record that a transfer was handed to the link; it may have to wait for the one before."""
        self._under_way.append((byte_count, now))

    def end(self, now: float) -> None:
        """Record that the oldest transfer under way has ended."""
        byte_count, began = self._under_way.popleft()
        seconds = self._busy(began, now)
        if began > self._free:  # the link was idle: the bytes counted before are too few for a sample
            self._bytes = self._seconds = 0.0
        self._bytes += byte_count
        self._seconds += seconds
        self._free = max(self._free, now)
        if self._bytes >= LEAST_BYTES and self._seconds >= LEAST_SECONDS:
            self._add(Sample(self._bytes, self._seconds, now))
            self._bytes = self._seconds = 0.0

    def transfer(self, byte_count: float, began: float, ended: float) -> None:
        """Record a transfer that is reported only when it is over; do not mix with `begin` and `end`."""
        self._under_way.clear()
        self.begin(byte_count, began)
        self.end(ended)

    def cancel(self) -> None:
        """Drop the transfers under way: they will not arrive."""
        self._under_way.clear()
        self._bytes = self._seconds = 0.0

    def forget(self) -> None:
        """Forget all measurements: this is another link."""
        self.cancel()
        self._samples.clear()

    def last_measured(self) -> float:
        """Return when the newest sample ended; -inf if there is none."""
        return self._samples[-1].ended if self._samples else -math.inf

    def estimate(self, now: float) -> float | None:
        """Return bytes per second, or None if nothing was measured."""
        samples = [*self._samples, *self._late(now)]
        if not samples:
            return None
        total_bytes = total_seconds = 0.0
        for sample in samples:
            decay = math.exp(-sample.seconds / self.memory_seconds)
            # within a sample the newest seconds count most, too
            total_bytes = total_bytes * decay + sample.rate * self.memory_seconds * (1 - decay)
            total_seconds = total_seconds * decay + self.memory_seconds * (1 - decay)
        low, high = self._quantiles(samples)
        return min(max(total_bytes / total_seconds, low), high)

    def _busy(self, began: float, now: float) -> float:
        waited_for = began > self._free
        return max(now - max(began, self._free) - (self.delay_seconds if waited_for else 0.0), 1e-9)

    def _late(self, now: float) -> list[Sample]:
        """Return a sample for the transfer that takes longer than expected: at best it ends now."""
        if not self._under_way:
            return []
        byte_count, began = self._under_way[0]
        seconds = self._busy(began, now)
        is_late = bool(self._samples) and byte_count < self._samples[-1].rate * seconds and seconds >= LEAST_SECONDS
        return [Sample(byte_count, seconds, now)] if is_late else []

    def _quantiles(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Return the rates that the link was below, and above, for a `quantile` of the window's busy seconds."""
        begins = samples[-1].ended - self.window_seconds
        weighted = sorted(
            (sample.rate, min(sample.seconds, sample.ended - begins)) for sample in samples if sample.ended > begins
        )
        limit = self.quantile * sum(weight for _, weight in weighted)
        return _reached(weighted, limit), _reached(weighted[::-1], limit)

    def _add(self, sample: Sample) -> None:
        """Add a sample. Short ones are merged, so that about a hundred cover the window and the mean's memory."""
        shortest = self.window_seconds / 40
        if self._samples and self._samples[-1].seconds + sample.seconds <= shortest:
            last = self._samples.pop()
            sample = Sample(last.byte_count + sample.byte_count, last.seconds + sample.seconds, sample.ended)
        self._samples.append(sample)
        newest = sample.ended
        keep = max(self.window_seconds, 3 * self.memory_seconds)
        while len(self._samples) > 1 and self._samples[0].ended < newest - keep:
            self._samples.popleft()


def _reached(weighted: Sequence[tuple[float, float]], limit: float) -> float:
    passed = 0.0
    for rate, weight in weighted:
        passed += weight
        if passed > limit:
            return rate
    return weighted[-1][0]


class Rates:
    """Both directions of a link. Before anything is measured, the rates are `first`."""

    def __init__(self, first: LinkRates, *, up: Meter | None = None, down: Meter | None = None) -> None:
        self.first = first
        self.up = up if up is not None else Meter()
        self.down = down if down is not None else Meter()

    def now(self, now: float) -> LinkRates:
        up, down = self.up.estimate(now), self.down.estimate(now)
        return LinkRates(
            self.first.up_bytes_per_second if up is None else up,
            self.first.down_bytes_per_second if down is None else down,
            self.first.delay_seconds,
        )


class EngineSettings(msgspec.Struct, frozen=True):
    """The settings of an engine: when it looks, and how sure it must be before it changes the deployment."""

    tau: float = 100.0
    """Iterations between two changes that are expected at first."""
    beta: float = 0.5
    """Weight of the past in the mean number of iterations between changes (Eq. 14)."""
    margin: float = 0.1
    """The fraction of the time that a change must save."""
    confirmations: int = 3
    """Looks, one after another, at which the change must be better."""
    paid: float = 2.0
    """The cost that staying must have had before a change, in multiples of the cost of the change."""
    every_seconds: float = 1.0
    """Seconds between two looks."""
    rest_seconds: float = 10.0
    """The least seconds between two changes."""
    probe_seconds: float = 15.0
    """Seconds without a transfer after which a probe is sent."""
    probe_part: float = 0.02
    """The most of the time that probes may take: the next one waits the longer, the longer one took."""

    def __post_init__(self) -> None:
        is_good = self.tau >= 1 and 0 <= self.beta < 1 and 0 <= self.margin < 1 and self.confirmations >= 1
        if not is_good or not 0 < self.probe_part <= 1:
            raise BadValue(
                f"An engine with tau {self.tau}, beta {self.beta}, margin {self.margin}, confirmations "
                f"{self.confirmations}, probe_part {self.probe_part}: tau and confirmations must be >= 1, beta and "
                "margin from 0 to below 1, probe_part above 0 and at most 1."
            )


USUAL_SETTINGS = EngineSettings()


class Engine:
    """Decides when to continue with another deployment.

    It looks every `every_seconds`. Another deployment is better if τ iterations with it, including the change, take
    less than (1 - margin) of τ iterations with the present one. It is taken if that holds at `confirmations` looks one
    after another, if staying has cost `paid` times the cost of the change, and if the last change is `rest_seconds`
    ago. τ is the mean number of iterations between changes (Eq. 14), and not less than those since the last: a state
    that has lasted is expected to last.

    A dip shorter than `quantile` of the meters' window, or than `confirmations` looks, changes nothing. A lasting
    change that saves a part s of the time is acted upon, if it pays, after at most (1 - quantile) of the window, and
    then `confirmations` looks or `paid`·U/s seconds, and one transfer; with everything at the edge, three probes more.
    There are never more than 1 + seconds / `rest_seconds` changes, besides those that a smaller K or a lost link
    requires.

    An engine belongs to one thread: feed its meters there, too.
    """

    def __init__(
        self,
        profile: SplitProfile,
        rates: Rates,
        current: Deployment,
        *,
        k: Bound,
        widths: Sequence[int] = WIDTHS,
        chooser: Chooser = choose,
        drains: bool = False,
        ends_at: int | None = None,
        settings: EngineSettings = USUAL_SETTINGS,
    ) -> None:
        self.profile, self.rates, self.current = profile, rates, current
        self.k, self.widths, self.chooser, self.drains = k, tuple(widths), chooser, drains
        self.settings, self.tau, self.ends_at = settings, settings.tau, ends_at
        self.is_linked = True
        self.changes: list[tuple[float, Deployment]] = []
        self._better, self._lost_seconds = 0, 0.0
        self._looked = self._changed = self._probed = self._rested = -math.inf
        self._changed_at, self._probe_factor, self._pause_factor = 0, 1, 1
        self._least_pause = 0.0
        """The pause before the next probe by which the last one's seconds are `probe_part` of the time."""
        self._far: tuple[float, bool] | None = None
        """When the link was last measured, and whether it was far from changing anything then."""

    def horizon(self, iterations: int) -> float:
        """Return τ: how many iterations the next deployment may count on, at most to the end of the job (`ends_at`)."""
        lasts = max(self.tau, iterations - self._changed_at)
        return max(1.0, lasts if self.ends_at is None else min(lasts, self.ends_at - iterations))

    def look(self, now: float, iterations: int) -> Deployment | None:
        """Return the deployment to continue with after `iterations` of the job, or None to keep the current one. The
        returned deployment becomes current."""
        if not self.is_linked or now - self._looked < self.settings.every_seconds:
            return None
        looked, self._looked = self._looked, now
        rates, tau = self.rates.now(now), self.horizon(iterations)
        best = self.chooser(self.profile, rates, tau, self.current, self.k, self.widths, drains=self.drains)
        if best == self.current:
            self._better, self._lost_seconds = 0, 0.0
            return None
        if self._is_allowed(self.current) and not self._has_paid(best, rates, tau, now - looked):
            return None
        if self._is_allowed(self.current) and now - self._changed < self.settings.rest_seconds:
            return None
        self.take(best, now, iterations)
        return best

    def _has_paid(self, best: Deployment, rates: LinkRates, tau: float, seconds: float) -> bool:
        """Return whether the change has been better for long enough, and staying has cost as much as changing would."""
        staying, going = self._price(self.current, rates, tau), self._price(best, rates, tau)
        if not going < (1 - self.settings.margin) * staying:
            self._better, self._lost_seconds = 0, 0.0
            return False
        getting = going - seconds_of(self.profile, rates, tau, best, drains=self.drains)
        saved = 1.0 if staying == math.inf else 1 - (going - getting) / staying
        self._better += 1
        self._lost_seconds += saved * (seconds if seconds < math.inf else 0.0)
        return self._better >= self.settings.confirmations and self._lost_seconds >= self.settings.paid * getting

    def deployed(self, now: float) -> None:
        """Record that the deployment returned by `look` is running now: the pause before the next change begins."""
        self._looked = self._changed = now

    def lost(self, now: float, iterations: int) -> Deployment | None:
        """Record that the link is lost. Return the deployment with everything at the edge, or None where its memory is
        too small."""
        self.is_linked = False
        self.rates.up.cancel()
        self.rates.down.cancel()
        alone = Deployment(self.profile.edge_only)
        if edge_only_price(self.profile, LinkRates(1.0, 1.0), 1, alone) == math.inf:
            return None
        if alone != self.current:
            self.take(alone, now, iterations)
        return alone

    def found(self, now: float) -> None:
        """Record that the link is back; its rates must be learnt again."""
        self.is_linked = True
        self.rates.up.forget()
        self.rates.down.forget()
        self._better, self._lost_seconds = 0, 0.0
        self._looked, self._probed, self._rested = now, -math.inf, -math.inf
        self._pause_factor, self._least_pause = 1, 0.0

    def probe(self, now: float) -> tuple[int, int]:
        """Return the bytes to send up and down only to measure the rates, because nothing else was sent lately; mostly
        (0, 0).

        A probe that passed too quickly to measure anything is followed by a larger one.
        """
        measured_at = max(self._rested, min(self.rates.up.last_measured(), self.rates.down.last_measured()))
        pause = max(self.settings.probe_seconds * self._pause_factor, self._least_pause)
        if not self.is_linked or now - measured_at < pause:
            return 0, 0
        if now - measured_at < FAR_PAUSE * self.settings.probe_seconds and self._is_far(measured_at, now):
            return 0, 0
        rates = self.rates.now(now)
        pairs = ((self.rates.up, rates.up_bytes_per_second), (self.rates.down, rates.down_bytes_per_second))
        is_in_vain = any(meter.last_measured() < self._probed for meter, _ in pairs)
        self._probe_factor = min(4 * self._probe_factor, 64) if is_in_vain else 1
        up, down = (
            min(round(self._probe_factor * max(rate * PROBE_SECONDS, LEAST_PROBE_BYTES)), MOST_PROBE_BYTES)
            if now - meter.last_measured() >= self.settings.probe_seconds
            else 0
            for meter, rate in pairs
        )
        self._probed = self._rested = now
        return up, down

    def _is_far(self, measured_at: float, now: float) -> bool:
        """Return whether the deployment would stay as it is if the link were twice as fast as it was last measured."""
        if self._far is None or self._far[0] != measured_at:
            rates = self.rates.now(now)
            twice = LinkRates(2 * rates.up_bytes_per_second, 2 * rates.down_bytes_per_second, rates.delay_seconds)
            best = self.chooser(self.profile, twice, self.tau, self.current, self.k, self.widths, drains=self.drains)
            self._far = measured_at, best == self.current
        return self._far[1]

    def probed(self, now: float, *, has_arrived: bool) -> None:
        """Record that a probe has ended or was given up. The next one waits from now on, and longer the less gets
        through and the longer it took: the job stood still for it."""
        self._rested, self._least_pause = now, (now - self._probed) / self.settings.probe_part
        self._pause_factor = 1 if has_arrived else min(2 * self._pause_factor, MOST_PAUSE)
        if not has_arrived:
            self._probe_factor = 1

    def _price(self, deployment: Deployment, rates: LinkRates, tau: float) -> float:
        if deployment.cut == self.profile.edge_only:
            return edge_only_price(self.profile, rates, tau, self.current)
        grid = prices(self.profile, rates, tau, self.current, [deployment.k], [deployment.bits], drains=self.drains)
        return float(grid[0, self.profile.index(deployment.cut), 0])

    def _is_allowed(self, deployment: Deployment) -> bool:
        """Return whether a deployment is within K and memory as they are now: K may have changed with the epoch."""
        ahead, most = (math.inf if k is None else k for k in (deployment.k, self.k))
        return ahead <= most and fits(self.profile, deployment)

    def take(self, deployment: Deployment, now: float, iterations: int) -> None:
        """Make another deployment current from now on."""
        if self.changes:
            self.tau = self.settings.beta * self.tau + (1 - self.settings.beta) * (iterations - self._changed_at)
        self.current, self._better, self._lost_seconds = deployment, 0, 0.0
        self._changed, self._changed_at = now, iterations
        self.changes.append((now, deployment))
