"""The candidates for a transport compared on this machine: latency, throughput, and the detection of a dead peer.

Every candidate is two processes of its own. They are measured in turn, round by round, so that a ratio compares
figures taken within the same seconds, whatever else the machine is doing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from manyhands.facts.errors import TimedOut, WorkerLost
from manyhands_bench.core.link_protocol import BURST_MESSAGE_BYTES, BURST_MESSAGES, GLOO_LIMIT_SECONDS, LIMIT_SECONDS
from manyhands_bench.core.links import LINKS, PINGS_AT_ONCE, SIZES, messages_of

_KILL_AFTER_SECONDS = 0.03
_KILL_ATTEMPTS = 3


class _Process:
    """The process of one end of one candidate."""

    def __init__(self, kind: str, role: str) -> None:
        self.title = f"{kind} {role}"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manyhands_bench.core.links", kind, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complaints: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._hear_complaints, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._answers.put(line[1:])
        self._answers.put(None)

    def _hear_complaints(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._complaints = [*self._complaints[-20:], line]

    def tell(self, command: str, argument: object = None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # dead: the answer says so
            self._process.stdin.write(json.dumps([command, argument]) + "\n")
            self._process.stdin.flush()

    def answer(self, limit_seconds: float = LIMIT_SECONDS * 2) -> object:
        try:
            line = self._answers.get(timeout=limit_seconds)
        except queue.Empty:
            raise TimedOut(f"The benchmark's '{self.title}' gave no answer within {limit_seconds:g} s.") from None
        if line is None:
            raise WorkerLost(f"The benchmark's '{self.title}' ended:\n{''.join(self._complaints)}")
        return json.loads(line)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


class _Pair:
    """The two connected processes of one transport."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.a, self.b = _Process(kind, "a"), _Process(kind, "b")
        try:
            self.b.tell("start")
            address = self.b.answer()
            self.b.tell("connect", "")
            self.a.tell("connect", address)
            self.a.answer()
            self.b.answer()
        except BaseException:
            self.close()
            raise

    def both(self, command: str, argument: object = None) -> object:
        """Send both ends a command, and return what the first end measured."""
        self.b.tell(command, argument)
        self.a.tell(command, argument)
        answer = self.a.answer()
        self.b.answer()
        return answer

    def close(self) -> None:
        self.a.kill()
        self.b.kill()


def bench_engine(quick: bool = False, on_progress: Callable[[str], None] = lambda _: None) -> dict[str, float | str]:
    """Return figures under flat names: '<candidate>_latency_us', '<candidate>_throughput_mb_per_s',
    '<candidate>_kill_seconds', ratios; for shared memory and TCP also '<candidate>_latency_us_<size>' and
    '<candidate>_stream_gb_s_<size>'."""
    figures: dict[str, float | str] = {}
    kinds = list(LINKS)
    if importlib.util.find_spec("zmq") is None:
        kinds = [kind for kind in kinds if not kind.startswith("zeromq")]
        figures["zeromq"] = "not installed: pip install 'manyhands[bench]'"
    pairs: list[_Pair] = []
    try:
        for kind in kinds:
            on_progress(f"starting {kind}")
            pairs.append(_Pair(kind))
        figures |= _latency(pairs, 5 if quick else 15, on_progress)
        figures |= _throughput(pairs, 5 if quick else 15, on_progress)
        figures |= _sharing(pairs, 5 if quick else 15, on_progress)
        for pair in pairs:
            on_progress(f"killing a {pair.kind} sender in the middle of a message")
            figures |= _kill(pair)
    finally:
        for pair in pairs:
            pair.close()
    return figures


def _latency(pairs: list[_Pair], rounds: int, on_progress: Callable[[str], None]) -> dict[str, float | str]:
    medians: dict[str, list[float]] = {pair.kind: [] for pair in pairs}
    for number in range(rounds + 1):
        on_progress(f"latency, round {number} of {rounds}")
        for pair in pairs:
            seconds = pair.both("ping", PINGS_AT_ONCE)
            assert isinstance(seconds, list)
            if number:  # the first warms up
                medians[pair.kind].append(statistics.median(seconds) / 2)
    figures: dict[str, float | str] = {
        f"{kind}_latency_us": round(statistics.median(values) * 1e6, 1) for kind, values in medians.items()
    }
    figures["latency_ratio"] = _ratio(medians["tcp"], medians["raw"])
    figures["tls_latency_ratio"] = _ratio(medians["tls"], medians["raw"])
    return figures


def _throughput(pairs: list[_Pair], rounds: int, on_progress: Callable[[str], None]) -> dict[str, float | str]:
    seconds: dict[str, list[float]] = {pair.kind: [] for pair in pairs}
    for number in range(rounds + 1):
        on_progress(f"throughput, round {number} of {rounds}")
        for pair in pairs:
            burst_seconds = pair.both("burst")
            assert isinstance(burst_seconds, float)
            if number:
                seconds[pair.kind].append(burst_seconds)
    size = BURST_MESSAGES * BURST_MESSAGE_BYTES / 1e6
    figures: dict[str, float | str] = {
        f"{kind}_throughput_mb_per_s": round(size / statistics.median(values), 1) for kind, values in seconds.items()
    }
    figures["exchange_efficiency"] = _ratio(seconds["raw"], seconds["tcp"])
    figures["tls_exchange_efficiency"] = _ratio(seconds["raw"], seconds["tls"])
    return figures


def _sharing(pairs: list[_Pair], rounds: int, on_progress: Callable[[str], None]) -> dict[str, float | str]:
    """Compare shared memory with TCP at every size. A ratio above 1 means that shared memory is faster."""
    compared = [pair for pair in pairs if pair.kind in ("tcp", "shm")]
    figures: dict[str, float | str] = {}
    for name, size in SIZES.items():
        on_progress(f"shared memory, {name}")
        latency: dict[str, list[float]] = {pair.kind: [] for pair in compared}
        stream: dict[str, list[float]] = {pair.kind: [] for pair in compared}
        for number in range(rounds + 1):
            for pair in compared:
                measured = pair.both("compare", size)
                assert isinstance(measured, list)
                if number:
                    latency[pair.kind].append(measured[0] / 2)
                    stream[pair.kind].append(measured[1])
        for kind in latency:
            figures[f"{kind}_latency_us_{name}"] = round(statistics.median(latency[kind]) * 1e6, 1)
            rate = size * messages_of(size) / statistics.median(stream[kind])
            figures[f"{kind}_stream_gb_s_{name}"] = round(rate / 1e9, 3)
        figures[f"shm_latency_ratio_{name}"] = _ratio(latency["tcp"], latency["shm"])
        figures[f"shm_stream_ratio_{name}"] = _ratio(stream["tcp"], stream["shm"])
    return figures


def _ratio(above: list[float], below: list[float]) -> float:
    """Return the median ratio, taken round by round, so that a busy moment affects both."""
    return round(statistics.median(upper / lower for upper, lower in zip(above, below, strict=True)), 3)


def _kill(pair: _Pair) -> dict[str, float | str]:
    """Measure the seconds from the sender's death until the receiver notices. An attempt whose message had arrived
    whole by then does not count."""
    for attempt in range(_KILL_ATTEMPTS):
        current = pair if attempt == 0 else _Pair(pair.kind)
        try:
            current.a.tell("receive_dying")
            current.a.answer()
            current.b.tell("send_dying")
            current.b.answer()
            time.sleep(_KILL_AFTER_SECONDS / (attempt + 1))
            killed_at = time.monotonic()
            current.b.kill()
            answer = current.a.answer()
        finally:
            if current is not pair:
                current.close()
        assert isinstance(answer, list)
        known_at, outcome = answer
        if outcome != "arrived":
            break
    else:
        return {f"{pair.kind}_kill_seconds": "the whole message arrived first, each time"}
    seconds = round(known_at - killed_at, 3)
    if pair.kind == "gloo" and seconds > GLOO_LIMIT_SECONDS * 0.8:
        return {"gloo_kill_seconds": seconds, "gloo_kill": f"waits for its time-out of {GLOO_LIMIT_SECONDS:g} s"}
    return {f"{pair.kind}_kill_seconds": seconds, f"{pair.kind}_kill": str(outcome)}


if __name__ == "__main__":
    begin = time.monotonic()
    for name, value in bench_engine("--quick" in sys.argv[1:], lambda text: print(text, file=sys.stderr)).items():
        print(f"{name:36} {value}")
    print(f"{time.monotonic() - begin:.0f} s")
