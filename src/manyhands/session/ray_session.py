"""Clusters on Ray: an actor for each worker, and another one in place of each that is lost, while a session lasts.

Ray finds machines with the resources that workers ask for, starts the actors and tells when one is gone. The workers
join the coordinator as any others do: orders and tensors travel over manyhands' own connections.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from manyhands.facts.errors import BadValue, ManyhandsError, NotInstalled, Refused, TimedOut, WorkerLost, lasting_codes
from manyhands.facts.ray_cluster import RayCluster
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.heartbeats import heartbeat_interval
from manyhands.runtime.member import Member
from manyhands.session.ray_actor import RayActor
from manyhands.session.session import Say, Session
from manyhands.transport.security import is_loopback, new_secret

MOST_FAILURES = 5
"""Times that a worker may end in a row without having joined; then no other is started in its place."""
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0)
"""Pauses before another actor is started, by the number of failures in a row; the last one repeats."""
_LOOK_SECONDS = 0.5
_CLOSE_SECONDS = 10.0


@contextlib.contextmanager
def ray_session(
    setup: RayCluster, *, say: Say, limit_seconds: float, heartbeat_timeout_seconds: float
) -> Iterator[Session]:
    """Yield a session with workers that Ray has started; they, and a Ray cluster that was started for it, end with
    it."""
    ray = _imported()
    with _connected(ray, setup, say):
        host = str(ray.util.get_node_ip_address())
        with Coordinator(
            "127.0.0.1" if is_loopback(host) else host, token=new_secret(), on_event=say, announce=False,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            heartbeat_seconds=heartbeat_interval(heartbeat_timeout_seconds),
        ) as coordinator, contextlib.closing(RayActors(ray, setup, coordinator, say)) as actors:  # fmt: skip
            coordinator.wanted = set(setup.names)
            say(f"Waiting for {setup.count} worker(s) that Ray starts ({_request_text(setup)} each).")
            actors.start()
            _wait(coordinator, actors, setup, limit_seconds)
            yield Session(coordinator, coordinator.cluster(f"ray:{setup.count}"), False, setup.threads)


def _imported() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise NotInstalled("mh.Cluster.ray needs ray, which is not installed.", hint="Type: pip install ray") from error


@contextlib.contextmanager
def _connected(ray: Any, setup: RayCluster, say: Say) -> Iterator[None]:
    """Connect to the Ray cluster, unless this program has done so; then leave it as it is."""
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=setup.address or None, include_dashboard=None, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BadValue(
            f"No Ray cluster answers at {setup.address or 'RAY_ADDRESS'}: {error!s:.300}",
            hint="ray status says whether one runs here; ray start --head starts one. Without address= one is started "
            "for this job.",
        ) from error
    try:
        say(f"Connected to Ray {ray.__version__}.")
        yield
    finally:
        ray.shutdown()


def _request_text(setup: RayCluster) -> str:
    words = [f"{setup.num_cpus:g} CPU"]
    words += [f"{setup.num_gpus:g} GPU"] if setup.num_gpus else []
    words += [f"{setup.memory_bytes} bytes of memory"] if setup.memory_bytes else []
    return ", ".join([*words, *(f"{amount:g} {name}" for name, amount in setup.resources)])


def _wait(coordinator: Coordinator, actors: RayActors, setup: RayCluster, limit_seconds: float) -> None:
    """Wait until all workers have joined. An error names what keeps them, as far as Ray or their ends tell."""
    end = time.monotonic() + limit_seconds
    while True:
        try:
            coordinator.wait_for(setup.names, min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))
            break
        except TimedOut as error:
            if actors.failure is not None:
                raise actors.failure from error
            if time.monotonic() >= end:
                raise TimedOut(
                    f"{error.message} Ray's cluster has {actors.resources_text()}.",
                    hint=f"Each worker asks for {_request_text(setup)}. Fewer workers, or: ray status",
                ) from error
    coordinator.wait_for(setup.names, limit_seconds)  # which a job waits for again before it begins


@dataclass
class _Place:
    """The place of one worker: its present actor, and how often it ended."""

    name: str
    actor: Any = None
    ending: Any = None
    """Ray's reference to how its work ended."""
    member_before: Member | None = None
    """The member that had this name when the actor was started."""
    failures: int = 0
    """Times in a row that it ended without having joined."""
    start_at: float = 0.0
    """When another one may be started."""
    is_given_up: bool = False


class RayActors:
    """One actor for each worker, and a thread that starts another one where one is lost."""

    def __init__(self, ray: Any, setup: RayCluster, coordinator: Coordinator, say: Callable[[str], None]) -> None:
        self._ray, self._setup, self._coordinator, self._say = ray, setup, coordinator, say
        self._kind = ray.remote(RayActor)
        self._places = [_Place(name) for name in setup.names]
        self.failure: ManyhandsError | None = None
        """The reason why a worker was given up, if one was."""
        self.replaced = 0
        """Actors that were started in place of others."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray actors", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def resources_text(self) -> str:
        """Return the cluster's resources in words: '4 CPU (0 free)'."""
        total, free = self._ray.cluster_resources(), self._ray.available_resources()
        names = [name for name in total if name in ("CPU", "GPU") or name in dict(self._setup.resources)]
        return ", ".join(f"{total[name]:g} {name} ({free.get(name, 0):g} free)" for name in names) or "no resources"

    def _run(self) -> None:
        try:
            while not self._closing.wait(_LOOK_SECONDS):
                for place in self._places:
                    if place.ending is None:
                        self._start_if_due(place)
                    elif self._ray.wait([place.ending], timeout=0)[0]:
                        self._ended(place)
        except Exception as error:  # of Ray's many kinds: it is gone, or its connection
            if not self._closing.is_set():
                self.failure = WorkerLost(f"Ray does not answer: {type(error).__name__}: {error!s:.300}")
                self._say(f"{self.failure.message} Lost workers are not replaced any more.")

    def _start_if_due(self, place: _Place) -> None:
        """Start an actor, once the coordinator has noticed that the one before is gone: its name is free then."""
        member = self._coordinator.members.get(place.name)
        is_free = member is None or member.is_lost
        if self._closing.is_set() or place.is_given_up or not is_free or time.monotonic() < place.start_at:
            return
        security = self._coordinator.security
        place.member_before = member
        place.actor = self._kind.options(scheduling_strategy="SPREAD", **self._setup.requests()).remote()
        place.ending = place.actor.work.remote(
            place.name, self._coordinator.address, security.token, encrypted=security.encrypted,
            timeout_factor=security.timeout_factor, threads=self._setup.threads, compute=self._setup.compute,
        )  # fmt: skip

    def _ended(self, place: _Place) -> None:
        """Note how a worker ended; another one is started in its place, unless that would end in the same way."""
        has_joined = self._coordinator.members.get(place.name) is not place.member_before
        try:
            code, last_words = self._ray.get(place.ending)
            ending = f"ended with exit code {code}"
        except Exception as error:  # of Ray's many kinds
            code, ending, last_words = -1, f"was lost: {type(error).__name__}", str(error)
        self._end(place)
        if self._closing.is_set():
            return
        place.failures = 0 if has_joined else place.failures + 1
        place.start_at = time.monotonic() + _PAUSES_SECONDS[min(place.failures, len(_PAUSES_SECONDS) - 1)]
        lasting = _lasting(place.name, code, ending, last_words)
        if lasting is not None or place.failures >= MOST_FAILURES:
            place.is_given_up = True
            self.failure = lasting or WorkerLost(
                f"Worker {place.name} {ending}, {place.failures} times in a row.", hint=last_words[-800:]
            )
            self._say(f"{self.failure.message} No other is started in its place.")
            return
        self.replaced += 1
        self._say(f"Worker {place.name} {ending}: Ray starts another.")

    def _end(self, place: _Place) -> None:
        actor, place.actor, place.ending = place.actor, None, None
        if actor is not None:
            with contextlib.suppress(Exception):  # it may be gone, and Ray with it
                self._ray.kill(actor)

    def close(self) -> None:
        """End all actors, and replace none."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        for place in self._places:
            self._end(place)


def _lasting(name: str, code: int, ending: str, last_words: str) -> ManyhandsError | None:
    """Return the error where another worker would end in the same way; None where it may not."""
    if code < 0 and "ModuleNotFoundError" in last_words and "manyhands" in last_words:
        return NotInstalled(
            f"Worker {name} cannot be started: a machine of the Ray cluster has no manyhands.",
            hint="Install the same version on all of them, or: ray.init(runtime_env={'pip': ['manyhands']})",
        )
    if code not in lasting_codes():
        return None
    return Refused(f"Worker {name} {ending}.", hint=last_words[-800:])
