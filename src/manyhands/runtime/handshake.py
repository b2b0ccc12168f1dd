"""The first messages of a worker: it introduces itself, and the coordinator welcomes or refuses it."""

from __future__ import annotations

from manyhands.data.silo import Silo
from manyhands.facts.errors import BadData, BadFile, BadValue, Refused, WorkerLost
from manyhands.facts.hosts import host_and_port
from manyhands.facts.version import __version__
from manyhands.runtime.control import LARGEST_HELLO_BYTES, PROTOCOL, Message, decode_from_coordinator, encode
from manyhands.runtime.control_messages import Hello, Refusal, Welcome
from manyhands.runtime.identity import own_identity
from manyhands.runtime.joining import Joining, facts_of
from manyhands.runtime.quarantine import LONGEST_SECONDS
from manyhands.transport.keys import Credentials, Role
from manyhands.transport.transport import ConnectedEndpoint, ControlChannel


class CalledOtherwise(Refused):
    """Another worker has this one's name; it may join under `name`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason, hint=refusal.hint)
        self.name = refusal.name


class Quarantined(Refused):
    """The run has evicted this worker; it may join again `again_seconds` from now."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason, hint=refusal.hint)
        self.again_seconds = min(refusal.again_seconds, LONGEST_SECONDS)


def hello_of(joining: Joining, channel: ControlChannel, endpoint: ConnectedEndpoint, silo: Silo | None) -> Hello:
    """Return a worker's first message."""
    host, port = endpoint.address
    if joining.advertised is not None:
        host, port = joining.advertised.host, joining.advertised.port or port
    identity = own_identity(joining.process, channel.local_host)
    is_named = joining.is_named and bool(joining.name)
    facts = facts_of(joining, silo)
    return short(Hello(__version__, PROTOCOL, endpoint.name, host, port, facts, identity, is_named))


def short(hello: Hello) -> Hello:
    """Return a hello that is short enough for a coordinator. BadData otherwise, here where the user learns why."""
    size = len(encode(hello))
    if size > LARGEST_HELLO_BYTES:
        arrays = len(hello.facts.silo.arrays) if hello.facts.silo is not None else 0
        raise BadData(
            f"What this worker reports of itself takes {size} bytes; a coordinator reads at most "
            f"{LARGEST_HELLO_BYTES}.",
            hint=f"Its silo has {arrays} arrays: give it fewer, or shorter names.",
        )
    return hello


def welcome_from(joining: Joining, channel: ControlChannel) -> Welcome:
    """Return the coordinator's answer to a hello. Refused where it does not admit this worker."""
    answer = _answer(joining, channel)
    if isinstance(answer, Refusal) and answer.name:
        raise CalledOtherwise(answer)
    if isinstance(answer, Refusal) and answer.again_seconds > 0:
        raise Quarantined(answer)
    if isinstance(answer, Refusal):
        raise Refused(answer.reason, hint=answer.hint)
    if not isinstance(answer, Welcome):
        raise WorkerLost(f"The coordinator at {host_and_port(joining.host, joining.port)} did not answer.")
    return answer


def _answer(joining: Joining, channel: ControlChannel) -> Message | None:
    """Return the coordinator's answer; None where none came."""
    data = channel.receive(joining.limit_seconds)
    try:
        return decode_from_coordinator(data) if data is not None else None
    except Refused as error:
        raise Refused(
            f"The coordinator at {host_and_port(joining.host, joining.port)} sent what manyhands {__version__} cannot "
            f"read: {error.message}",
            hint="Install the same version of manyhands on both.",
        ) from error


def pin_coordinator(credentials: Credentials | None, channel: ControlChannel, coordinator: str) -> bool:
    """Remember the coordinator's key, which is enough from now on, and return whether it is new.

    Refused where its name belongs to another key.
    """
    if credentials is None or not channel.peer_key:
        return False
    name = "".join(character for character in coordinator[:64] if character.isprintable()) or "coordinator"
    try:
        return credentials.book.join(channel.peer_key, name, Role.COORDINATOR)
    except (BadFile, BadValue):
        return False  # the key cannot be stored: the token will be needed again
