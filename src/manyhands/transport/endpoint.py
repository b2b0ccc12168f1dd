"""A device's place in the exchange: the interface of a transport to executors, whichever carries the bytes.

`tcp.py` carries them between processes and machines; `inprocess.py` between threads of one process, for tests whose
faults come at an exact moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from manyhands.transport.mailbox import Mailbox
from manyhands.transport.memory import Memory
from manyhands.transport.security import Security


class RelayAddress(NamedTuple):
    """The device through which two others are connected that cannot reach each other, and its address."""

    name: str
    host: str
    port: int


class Address(NamedTuple):
    """The address of one device's endpoint, as another device connects to it."""

    host: str
    port: int
    is_dialled: bool | None = None
    """Whether the reader connects to it, or waits for it to connect. None: of two names the smaller one connects."""
    security: Security | None = None
    """The security that it expects of connecting peers; None: the same as the reader's."""
    relay: RelayAddress | None = None
    """The relay to which both connect; None: one of the two connects to the other."""

    @classmethod
    def of(cls, address: Address | tuple[str, int]) -> Address:
        return address if isinstance(address, Address) else cls(*address)

    def is_dialled_by(self, reader: str, name: str) -> bool:
        """Return whether `reader` connects to `name`, whose address this is."""
        return reader < name if self.is_dialled is None else self.is_dialled


Peers = Mapping[str, Address | tuple[str, int]]
"""Names and addresses of peers."""


class Endpoint(Protocol):
    """Sends messages to peers by name; messages from them are in the mailbox."""

    name: str
    mailbox: Mailbox
    sent_bytes: Counter[str]
    """Payload bytes handed to the link for the plan, by peer."""
    unplanned_bytes: Counter[str]
    """Payload bytes of all other messages, by peer: those that the receiver expects at any step."""

    def send(
        self, to: str, step: int, topic: str, parts: Sequence[Memory], *, urgent: bool = False, unplanned: bool = False
    ) -> None:
        """Hand a message to the link and return.

        `parts` are sent one after another; they must not change until the receiver has them, or until `release`. An
        urgent message overtakes others between two chunks; `unplanned` says which counter has its bytes. A lost peer is
        an error of the next wait for it, not of this call.
        """

    def board_to(self, peer: str) -> memoryview | None:
        """Return the memory of a board (`board`) that this device writes and a peer of its machine reads; None: there
        is none, or not yet, in which case the peer has been offered one."""

    def board_from(self, peer: str) -> memoryview | None:
        """Return the memory of a board that a peer writes; None: there is none, or not yet."""

    def count_put(self, peer: str, size: int) -> None:
        """Count bytes of the plan that were put on a peer's board."""

    def wake(self, peer: str) -> None:
        """Wake the threads of a peer that wait for what lies on its board."""

    def release(self) -> None:
        """Stop using the senders' memory: what has not left yet is copied, and the tensors may change from now on."""

    def flush(self, limit_seconds: float) -> None:
        """Wait until everything handed over has left."""

    def close(self) -> None: ...
