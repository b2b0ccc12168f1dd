"""A transport inside one process: frames are handed over as they would be on a wire, faults occur exactly when set.

    board = Switchboard(["a", "b"])
    board.fail_after("a", 7)          # a dies when it sends its 7th message, half of it delivered

    transport = InProcessTransport()  # a whole cluster: Coordinator(transport=transport), Worker(joining, transport)
    transport.cut("a")                # killed
    transport.freeze("a")             # nothing from or to it arrives any more, and no peer is notified

All ends live in one process, so that a test can look at all of them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from manyhands.facts.errors import AddressTaken, TimedOut
from manyhands.transport.inprocess_channel import InProcessChannel, InProcessListener
from manyhands.transport.inprocess_endpoint import RendezvousEndpoint, compare
from manyhands.transport.mailbox import WAIT_LIMIT_SECONDS
from manyhands.transport.security import EVERY_ADDRESS, Purpose, Security
from manyhands.transport.transport import ControlListener

_FIRST_PORT = 40001
_LOOK_SECONDS = 0.1


class InProcessTransport:
    """The control channels and data endpoints of a whole cluster in one process. See `transport.Transport`.

    One object serves all of them; the channels and endpoints of one name share its faults.
    """

    def __init__(self, *, limit_seconds: float = WAIT_LIMIT_SECONDS) -> None:
        self.limit_seconds = limit_seconds
        self.change = threading.Condition(threading.RLock())
        self.before_send: Callable[[str, str, int, str], None] | None = None
        """Called with every data message before it leaves (from, to, step, topic), in its sender's thread."""
        self.listeners: dict[int, InProcessListener] = {}
        self.endpoints: dict[int, RendezvousEndpoint] = {}
        self.channels: set[InProcessChannel] = set()
        self._frozen: set[str] = set()
        self._parted: dict[frozenset[str], float] = {}
        """Pairs that cannot reach each other -> the time since when."""
        self._held: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        """Deliveries that wait for a thaw, by sender and receiver."""
        self._ports = itertools.count(_FIRST_PORT)

    # Called by coordinator and workers

    def listen(self, name: str, host: str, port: int, security: Security) -> InProcessListener:
        with self.change:
            if port in self.listeners:
                raise AddressTaken(f"Cannot listen on {host}:{port}: address already in use.", hint="Choose another.")
            listener = InProcessListener(self, name, (host, port or self.new_port()), security)
            self.listeners[listener.address[1]] = listener
            self.change.notify_all()
            return listener

    def reach(
        self,
        name: str,
        host: str,
        port: int,
        security: Security,
        limit_seconds: float,
        *,
        once: bool = False,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> InProcessChannel:
        deadline = time.monotonic() + limit_seconds
        with self.change:
            while (listener := self.listeners.get(port)) is None or self.is_frozen(name, listener.name):
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0 or once or is_cancelled():
                    raise TimedOut(
                        f"Nobody answered at {host}:{port} within {limit_seconds:g} s.",
                        hint="Is it running, is this its address, and does a firewall let it through?",
                    )
                self.change.wait(min(seconds_left, _LOOK_SECONDS))
            compare(f"{host}:{port}", listener.security, security, Purpose.CONTROL)
            shown = "127.0.0.1" if host in EVERY_ADDRESS else host
            near, far = InProcessChannel(self, name, shown), InProcessChannel(self, listener.name, shown)
            near.other, far.other = far, near
            self.channels |= {near, far}
            listener.ready.append(far)
            self.change.notify_all()
            return near

    def endpoint(
        self, name: str, security: Security, *, host: str, port: int = 0, listener: ControlListener | None = None
    ) -> RendezvousEndpoint:
        with self.change:
            address = listener.address if listener is not None else (host, port or self.new_port())
            endpoint = RendezvousEndpoint(self, name, address, security)
            self.endpoints[endpoint.address[1]] = endpoint
            self.change.notify_all()
            return endpoint

    def new_port(self) -> int:
        return next(port for port in self._ports if port not in self.listeners and port not in self.endpoints)

    # Faults

    def cut(self, name: str) -> None:
        """Break all connections of `name` at once, as if it was killed: for it and for every peer.

        Connections made under this name later are not affected: a killed device may be started again. Ends a freeze.
        """
        reason = f"{name} was cut off"
        with self.change:
            self._frozen.discard(name)
            self._held = {pair: held for pair, held in self._held.items() if name not in pair}
            for channel in [owned for owned in self.channels if owned.name == name]:
                channel.break_off(reason)
                self.pass_on(name, channel.other.name, partial(channel.other.end, reason))
            for endpoint in [owned for owned in self.endpoints.values() if owned.name == name]:
                endpoint.die(reason)
            for listener in [owned for owned in self.listeners.values() if owned.name == name]:
                listener.close()
            self.change.notify_all()

    def freeze(self, name: str) -> None:
        """Hold back everything from and to `name`, without closing a connection: a cable pulled, a process stopped."""
        with self.change:
            self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """Deliver what was held back, in order, including the news that a peer gave up meanwhile."""
        with self.change:
            self._frozen.discard(name)
            for pair in [pair for pair in self._held if name in pair and not self.is_frozen(*pair)]:
                for deliver in self._held.pop(pair):
                    deliver()
            self.change.notify_all()

    def part(self, name: str, other: str) -> None:
        """Hold back everything between these two, without closing a connection: a partial partition."""
        with self.change:
            self._parted[frozenset((name, other))] = time.monotonic()

    def parted_seconds(self, name: str, other: str) -> float:
        """Return for how long two devices have not reached each other; 0: they do."""
        since = self._parted.get(frozenset((name, other)))
        return 0.0 if since is None else time.monotonic() - since

    def is_frozen(self, *names: str) -> bool:
        return not self._frozen.isdisjoint(names) or frozenset(names) in self._parted

    def pass_on(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Make a delivery now, or when both are thawed."""
        with self.change:
            if self.is_frozen(source, target):
                self._held.setdefault((source, target), deque()).append(deliver)
            else:
                deliver()
                self.change.notify_all()

    def is_held(self, source: str) -> bool:
        return any(pair[0] == source for pair in self._held)
