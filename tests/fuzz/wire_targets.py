"""Parsers of what comes over the network: handshakes, frames, control messages."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from fuzz.judging import Build, Target
from manyhands.executor import codec
from manyhands.executor.log import DeviceLog
from manyhands.executor.projections import SumRecord
from manyhands.facts.errors import ManyhandsError, Refused, WorkerLost
from manyhands.facts.version import __version__
from manyhands.runtime import control, discovery, state
from manyhands.runtime import control_messages as sent
from manyhands.runtime import control_parts as parts
from manyhands.runtime.admission import judged
from manyhands.transport import frames, pake, proofs, sharing, wire_hello
from manyhands.transport.channel import Channel
from manyhands.transport.frames import BadFrame, Header
from manyhands.transport.inbox import Inbox
from manyhands.transport.limiter import ProofLimiter
from manyhands.transport.mailbox import Mailbox
from manyhands.transport.security import Purpose, Security, admit, enter, new_secret, preamble
from manyhands.transport.wire import Broken

PLAIN = Security("a token of the fuzzer", encrypted=False)
ENCRYPTED = Security("a token of the fuzzer", encrypted=True)
SECRET = Security(new_secret(), encrypted=False)
_TOPICS = {("pi", "value x [0:2]"): 48, ("pi", "grad y"): 100_000, ("pi", "nothing"): 0, ("pi", "any time"): 16}


class Ends:
    """A socket that only knows where it leads."""

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 7)

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 8)


class Fed:
    """A wire on which given bytes come, and then its end."""

    encrypted = False
    has_unread = has_unsent = False
    peer_key = b""

    def __init__(self, data: bytes) -> None:
        self.socket: Any = Ends()
        self._left = memoryview(data)
        self.written = 0

    def read(self, views: Sequence[memoryview]) -> int:
        if not len(self._left):
            raise Broken("closed by the other side")
        total = 0
        for view in views:
            part = self._left[: len(view)]
            view[: len(part)] = part
            self._left = self._left[len(part) :]
            total += len(part)
        return total

    def write(self, buffers: Sequence[memoryview]) -> int:
        size = sum(map(len, buffers))
        self.written += size
        return size

    def shut(self) -> None: ...

    def close(self) -> None: ...


def header_target(folder: Path) -> Target:
    def run(data: bytes) -> object:
        size = frames.header_bytes(data[: frames.PRELUDE.size].ljust(frames.PRELUDE.size, b"\0"))
        header = frames.decode(data[frames.PRELUDE.size :][:size])
        assert 0 <= header.length <= frames.LARGEST_CHUNK_BYTES
        assert 0 <= header.offset <= header.offset + header.length <= header.bytes <= frames.LARGEST_MESSAGE_BYTES
        return frames.is_control(header)

    seeds = [frames.encode(header) for header in (Header("pi", 3, 7, "value x", 48, 0, 48), frames.HEARTBEAT)]
    return Target("frame headers", run, seeds, allowed=(BadFrame,), share=2)


def header_body_target(folder: Path) -> Target:
    headers = (
        Header("pi", 3, 7, "value x [0:2]", 48, 0, 48), Header("", -1, 0, "beat", 0, 0, 0),
        Header("pi", 3, 7, "grad y", 100_000, 4096, 4096, 64), frames.control(frames.OFFER, 100),
    )  # fmt: skip
    return Target(
        "frame header fields", lambda data: frames.is_control(frames.decode(data)),
        [msgspec.msgpack.encode(header) for header in headers], "msgpack", (BadFrame,), share=2,
    )  # fmt: skip


def stream_target(folder: Path) -> Target:
    """A connection's bytes into a mailbox that expects four messages."""

    def run(data: bytes) -> object:
        mailbox = Mailbox("me", limit_seconds=1)
        mailbox.open(3, _TOPICS, first_step=7)
        mailbox.expect("pi", "any time", 16)
        into = torch.zeros(12)
        mailbox.post("pi", 7, "value x [0:2]", [into])
        said: list[int] = []
        inbox = Inbox("pi", Fed(data), mailbox, lambda topic, content: said.append(len(content)))  # type: ignore[arg-type]
        try:
            while True:
                inbox.read(1 << 20)
        except Broken:
            return said  # all was read
        finally:
            assert sum(mailbox.received_bytes.values()) <= len(data)
            assert all(size <= frames.LARGEST_CONTROL_BYTES for size in said)
            assert len(mailbox.refusals) <= 100
            assert sum(len(one.early) for one in mailbox._messages.values() if one.early is not None) < 2**21

    def frame(topic: str, size: int, offset: int, length: int, step: int = 7) -> bytes:
        return frames.encode(Header("pi", 3, step, topic, size, offset, length)) + bytes(length)

    whole = frame("value x [0:2]", 48, 0, 48)
    parts = frame("grad y", 100_000, 0, 40_000) + frame("grad y", 100_000, 40_000, 60_000)
    small = frames.encode(frames.HEARTBEAT) + frame("nothing", 0, 0, 0) + frame("any time", 16, 0, 16, 10**6)
    offered = frames.encode(frames.control(frames.OFFER, 5)) + b"12345"
    seeds = [whole, small + whole, parts[:50_000], offered + whole, whole * 3, frames.encode(frames.HEARTBEAT) * 20]
    return Target("frame streams", run, seeds, allowed=(BadFrame, Broken), share=2)


def offer_target(folder: Path) -> Target:
    ends = (("127.0.0.1", 8), ("127.0.0.1", 7))

    def run(data: bytes) -> object:
        one = sharing.MemorySharing(Fed(b""), sharing.SharingSetting())  # type: ignore[arg-type]
        try:
            return one.answer(data, is_welcome=True)
        finally:
            one.close()

    offers = [sharing.Offer(b"manyhands-0", 4 * 2**20, b"k" * 32, *ends), sharing.Offer(b"", 1, b"", *ends)]
    return Target(
        "offers of memory", run, [msgspec.msgpack.encode(offer) for offer in offers], "msgpack", (BadFrame,), share=1
    )


def hello_target(folder: Path) -> Target:
    def finish(data: bytes) -> bytes:
        return struct.pack("<I", len(data) - 4) + data[4:] if len(data) > 4 else data

    said = [{"from": "a", "to": "b"}, {"verdict": "welcome", "name": "pi-1"}, {"from": "é" * 100, "to": ""}]
    seeds = [finish(b"----" + json.dumps(one).encode()) for one in said]
    run = lambda data: wire_hello.read_hello(Fed(data), time.monotonic() + 5)  # noqa: E731
    return Target("hellos of peers", run, seeds, allowed=(Broken,), share=1.5, finish=finish)


def _over_socket(run: Any) -> Any:
    """With a real socket on which the bytes come, and then its end."""

    def judge(data: bytes) -> object:
        near, far = socket.socketpair()
        try:
            far.sendall(data)
            far.shutdown(socket.SHUT_WR)
            return run(near)
        finally:
            near.close()
            far.close()

    return judge


def admit_target(folder: Path) -> Target:
    """By the token at the one purpose, by a secret at the other."""
    both = {Purpose.CONTROL: PLAIN, Purpose.DATA: SECRET}
    hello = proofs.CLIENT_HELLO.pack(bytes(range(32)), 2, 0, bytes(32))
    point = pake.KeyExchange(PLAIN.token, is_client=True).message
    seeds = [
        preamble(PLAIN, Purpose.CONTROL) + hello + point + bytes(96), preamble(SECRET, Purpose.DATA) + hello + bytes(32)
    ]  # fmt: skip
    run = _over_socket(lambda near: admit(near, both, time.monotonic() + 5, ProofLimiter()))
    return Target("handshakes, plain", run, seeds, allowed=(ManyhandsError, Broken), takes_seeds=False)


def admit_encrypted_target(folder: Path) -> Target:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        hello = outgoing.read()
    start = preamble(ENCRYPTED, Purpose.CONTROL)
    run = _over_socket(lambda near: admit(near, {Purpose.CONTROL: ENCRYPTED}, time.monotonic() + 5, ProofLimiter()))
    return Target(
        "handshakes, encrypted", run, [start + hello], allowed=(ManyhandsError, Broken), share=0.4, takes_seeds=False
    )


def enter_target(folder: Path) -> Target:
    def run_once(near: socket.socket) -> object:
        proofs.DIALLED.reset()
        return enter(near, PLAIN, Purpose.CONTROL, "there", time.monotonic() + 5)

    run = _over_socket(run_once)
    hellos = [proofs.SERVER_HELLO.pack(bytes(range(32)), wanted, 7) for wanted in (1, 2, 3, 4)]
    point = pake.KeyExchange(PLAIN.token, is_client=False).message
    start = preamble(PLAIN, Purpose.CONTROL)
    seeds = [start + one + point + b"\1" + bytes(32) for one in hellos] + [b"HTTP/1.1 400 Bad Request\r\n\r\n"]
    return Target(
        "handshakes, the client's side", run, seeds, allowed=(ManyhandsError, Broken, proofs.TakesNoProofs),
        takes_seeds=False,
    )  # fmt: skip


def channel_target(folder: Path) -> Target:
    def run(data: bytes) -> object:
        channel = Channel(Fed(data), largest_bytes=2**20)  # type: ignore[arg-type]
        heard = 0
        try:
            while channel.receive(1.0) is not None:
                heard += 1
        except WorkerLost:
            if not heard:
                raise
        return heard

    seeds = [struct.pack("<I", len(one)) + one for one in (b"", b"{}", bytes(300))]
    return Target("control channels", run, [*seeds, b"".join(seeds)], allowed=(WorkerLost,), share=1.5)


FACTS = parts.Facts("a machine", 4, 4, 10**9, "2.6", pid=7)
HELLO = sent.Hello(__version__, control.PROTOCOL, "pi-1", "127.0.0.1", 1, FACTS)


def messages() -> list[control.Message]:
    """Of every kind that workers send, and some that the coordinator does."""
    entry = parts.TensorEntry("w", "float32", (3, 4))
    return [
        HELLO, sent.Welcome("pi-1", 15.0, {"pi-2": parts.Shape(1e6, 0.01)}, 1e7), sent.Refusal("no", "go"),
        sent.Progress(
            1, 7, 0.5, (1.25,), (0,), (parts.Arrival("pi-2", 1000, 0.1, 0.2),), {"pi-2": 1000},
            sums=(SumRecord(0, 0, 3, -1, (1.5, None), (2.0, 0.0), (0.5,), (2.0,), (2.0, None), 3.0, 4.0),),
        ),
        sent.State(1, 7, (entry,), {"w/step": 3}, (5,)), sent.Hold(1, "pi-2", 7, (entry,), {}, (5,)),
        sent.Held(1, "a", 7, 5, 1), sent.Corrupt(1, "pi-2", "weight:w"),
        sent.Holding(1, {7: (entry,)}, {7: {"a": 1}}, {7: {"w": 5}}), sent.Ids(1, b"x" * 32), sent.Leaving(),
        sent.Failed(1, "BadData", "text", "hint", 3), sent.Done(1, DeviceLog("pi-1")), sent.Clock(-1, 1.5),
        sent.Probed(1, 0.1, 1e6, 1e-9), sent.Diagnosis(1, "layer"), sent.Heartbeat(), sent.Stop(1),
        sent.Start(1, 0, 10, (5,), 2), sent.Retain(0, 5), sent.Survey(1, 0),
    ]  # fmt: skip


class _Peer:
    peer_host = "192.0.2.1"


def control_target(folder: Path) -> Target:
    """A message is read, a worker's first one judged, and room made for the state it tells of."""

    def run(data: bytes) -> object:
        try:
            said: control.Message = control.decode_from_worker(data)
        except Refused:
            said = control.decode_from_coordinator(data)
        if isinstance(said, (sent.State, sent.Hold)) and said.tensors and state.byte_count(said.tensors) < 2**20:
            return state.empty(said.tensors)
        return judged(said, _Peer(), None, {}, None, 3) if isinstance(said, sent.Hello) else said  # type: ignore[arg-type]

    return Target("control messages", run, [control.encode(one) for one in messages()], "json", share=4)


class _Announced:
    """As zeroconf hands it over, with whatever is in it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.name = str(document.get("name"))
        port, texts, hosts = document.get("port"), document.get("texts"), document.get("hosts")
        self.port = port if isinstance(port, int) and 0 < port < 65_536 else None
        self.properties = {
            str(key).encode("utf-8", "replace"): str(value).encode("latin-1", "replace") if value is not None else None
            for key, value in (texts.items() if isinstance(texts, dict) else ())
        }
        self._hosts = ["192.0.2.1", "fe80::1"] * len(hosts) if isinstance(hosts, list) else []

    def parsed_addresses(self) -> list[str]:
        return self._hosts


def announcement_target(folder: Path) -> Target:
    """What somebody on the network says of himself."""

    def run(data: bytes) -> object:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return None
        found = discovery.announced(_Announced(document if isinstance(document, dict) else {}))  # type: ignore[arg-type]
        if found is None:
            return None
        assert found.text.isprintable()
        return found.is_same_version, found.text

    texts = {"version": __version__, "protocol": "8", "run": "resnet", "machine": "pi", "salt": "ab", "mark": "0011"}
    seed = {"name": "a._manyhands._tcp.local.", "port": 7077, "hosts": ["192.0.2.1"], "texts": texts}
    return Target("announcements", run, [json.dumps(seed).encode()], "json", share=1)


def codec_target(folder: Path) -> Target:
    """Packed features: the size is known beforehand, whatever is in them."""
    shapes = {2: (3, 5), 4: (7,), 8: (2, 3), 16: (4,)}

    def run(data: bytes) -> object:
        bits = tuple(shapes)[data[0] % 4 if data else 0]
        shape = shapes[bits]
        size = codec.packed_bytes(torch.Size(shape).numel(), bits)
        packed = torch.frombuffer(bytearray(data[1 : 1 + size].ljust(size, b"\0")), dtype=torch.uint8)
        found = codec.unpack(packed, shape, torch.float32, bits, "cpu")
        assert tuple(found.shape) == shape
        return found

    seeds = []
    for place, (bits, shape) in enumerate(shapes.items()):
        packed = codec.pack(torch.linspace(-1, 2, torch.Size(shape).numel()).reshape(shape), bits)
        seeds.append(bytes([place]) + packed.numpy().tobytes())
    return Target("packed features", run, seeds, share=1)


TARGETS: tuple[Build, ...] = (
    header_target, header_body_target, stream_target, offer_target, hello_target, admit_target, admit_encrypted_target,
    enter_target, channel_target, control_target, announcement_target,
    codec_target,
)  # fmt: skip
