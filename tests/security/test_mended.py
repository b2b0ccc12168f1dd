"""What fuzzing has found: each input that once went through, with the error that a person now gets."""

from __future__ import annotations

import io
import socket
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch

from hand_made import chain
from manyhands.data.arrays import load_arrays
from manyhands.data.cifar import load_jpeg_copy
from manyhands.data.sample_arrays import read_npy
from manyhands.data.silo import Silo
from manyhands.data.wanted import SampleForm
from manyhands.executor import codec
from manyhands.facts.errors import BadData, BadFile, BadPlan, BadValue, Refused
from manyhands.facts.plan import Plan, Stage
from manyhands.facts.plan_check import resolve
from manyhands.inference.handler import _number
from manyhands.inference.requests import Limits, samples_in
from manyhands.observe.live import Live
from manyhands.observe.watching import RunWatch
from manyhands.plans import networks
from manyhands.runtime import control, control_parts, state
from manyhands.transport import wire_hello
from manyhands.transport.channel import Listener, connect
from manyhands.transport.dialling import dial
from manyhands.transport.http_handler import DeadlineHandler, HttpRefusal
from manyhands.transport.security import Purpose, Security, new_token
from manyhands.transport.tcp import TcpEndpoint
from manyhands.transport.wire import write_all

WANTED = SampleForm((1, 2, 2))


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


def packed(path: Path, method: int = zipfile.ZIP_STORED, **arrays: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in arrays.items():
            file.writestr(f"{name}.npy", content)
    return path


@pytest.fixture
def endpoint() -> Iterator[tuple[TcpEndpoint, Security]]:
    security = Security(new_token(), encrypted=False)
    found = TcpEndpoint("a", security)
    yield found, security
    found.close()


def test_a_hello_of_lists_within_lists(endpoint: tuple[TcpEndpoint, Security]) -> None:
    """It was a RecursionError, which left the connection open and the thread with a traceback."""
    found, security = endpoint
    wire = dial(*found.address, security, Purpose.DATA, 1e12)
    write_all(wire, struct.pack("<I", 4000) + b"[" * 4000, 1e12)
    wire.socket.setblocking(True)
    wire.socket.settimeout(10)
    assert wire.socket.recv(1) == b""
    wire.close()
    end = time.monotonic() + 10
    while not any("a hello that is none" in reason for reason in found._rendezvous._listener.reasons):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert wire_hello.LARGEST_HELLO_BYTES >= 4000


def test_whatever_a_guest_does_his_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    security = Security(new_token(), encrypted=False)
    listener = Listener("127.0.0.1", 0, security)

    def fail(wire: object) -> None:
        raise ZeroDivisionError("nobody thought of it")

    listener.peer_listener.receive(Purpose.CONTROL, security, fail)  # type: ignore[arg-type]
    channel = connect(*listener.address, security, 10)
    with pytest.raises(Exception, match="closed by the other side"):
        channel.receive(10)
    channel.close()
    listener.close()
    assert any("nobody thought of it" in reason for reason in listener.reasons)


def test_a_packed_box_beyond_its_type() -> None:
    packed_box = codec.pack(torch.ones(4), 8)
    packed_box[:16] = torch.frombuffer(bytearray(struct.pack("<dd", -1.0, 1e300)), dtype=torch.uint8)
    with pytest.raises(BadValue, match=r"between -1\.0 and 1e\+300"):
        codec.unpack(packed_box, (4,), torch.float32, 8, "cpu")
    assert codec.unpack(packed_box, (4,), torch.float64, 8, "cpu").isfinite().all()


def test_a_control_message_with_a_long_name() -> None:
    with pytest.raises(Refused) as caught:
        control.decode_from_worker(b'{"type": "%s"}' % (b"x" * 50_000))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (2**63,), (-1,), (1,) * 100, (2**35, 2)])
def test_state_that_no_memory_holds(shape: tuple[int, ...]) -> None:
    """Checked before any is taken, without what wraps around in 64 bits."""
    with pytest.raises(BadValue, match=r"no tensor is like that|at most"):
        state.byte_count([control_parts.TensorEntry("w", "float32", shape)])


def test_a_plan_with_a_long_field() -> None:
    with pytest.raises(BadPlan) as caught:
        Plan.from_dict({"network": "a", "batch_size": 1, "stages": [], "x" * 50_000: 1})
    assert len(caught.value.message) < 1000


def test_a_plan_for_a_network_with_a_long_name() -> None:
    plan = Plan("x" * 60_000, 1, (Stage((0, 2), ("y" * 60_000,)),))
    with pytest.raises(BadPlan) as caught:
        resolve(plan, chain(2))
    assert len(str(caught.value)) < 20_000
    assert len(str(BadPlan("a" * 10**6, hint="b" * 10**6))) < 20_000


@pytest.mark.parametrize("spoilt", [b"(3, 1, 2, 2)[( ", b"(3, 1, 2, 2),'''"])
def test_an_array_whose_header_is_no_python(tmp_path: Path, spoilt: bytes) -> None:
    """numpy raised tokenize.TokenError."""
    data = npy(numpy.ones((3, 1, 2, 2), numpy.float32)).replace(b"(3, 1, 2, 2), }", spoilt[:15])
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    with pytest.raises(BadFile):
        read_npy(path, WANTED)
    with pytest.raises(BadFile):
        load_arrays(packed(tmp_path / "a.npz", x=data, y=npy(numpy.arange(3))))


def test_a_damaged_archive(tmp_path: Path) -> None:
    """lzma raised LZMAError."""
    path = packed(tmp_path / "a.npz", zipfile.ZIP_LZMA, x=npy(numpy.ones((9, 4), "f4")), y=npy(numpy.arange(9)))
    data = bytearray(path.read_bytes())
    for place in range(60, 80):
        data[place] ^= 0x5A
    path.write_bytes(data)
    with pytest.raises(BadFile):
        load_arrays(path)


@pytest.mark.parametrize("code", [0x110000, 0xFFFFFFFF, 0xD800])
def test_text_of_letters_that_there_are_not(tmp_path: Path, code: int) -> None:
    """Python raised SystemError, or could not print it."""
    text = npy(numpy.array(["ab", "cd"])).replace(b"d\0\0\0", code.to_bytes(4, "little"))
    with pytest.raises(BadData, match="letters that there are not"):
        Silo.read(packed(tmp_path / "silo.npz", id=text, left=npy(numpy.ones(2))))
    numbers = npy(numpy.arange(2))
    with pytest.raises(BadData, match="letters that there are not"):
        load_jpeg_copy(
            packed(tmp_path / "copy.npz", classes=text, jpeg_train=numbers, off_train=numbers, y_train=numbers)
        )


def test_a_form_in_an_encoding_that_there_is_not() -> None:
    kind = "multipart/form-data; boundary*=u\0\0''edge"
    with pytest.raises(HttpRefusal, match="does not say what lies between its parts"):
        samples_in(b"--edge\r\n\r\n--edge--", kind, "a", WANTED, Limits())


@pytest.mark.parametrize("text", ["000000001999999", "0", "-1", "9" * 5000, "1e3", ""])
def test_a_number_in_an_address(text: str) -> None:
    with pytest.raises(HttpRefusal):
        _number({"top": text}, "top", 3)
    assert _number({"top": "7"}, "top", 3) == 7


def test_an_origin_that_is_no_address() -> None:
    handler = DeadlineHandler.__new__(DeadlineHandler)
    origins = {"http://[": False, "http://localhost:80": True, "null": False, "http://[::1]": True}
    for origin, is_here in origins.items():
        handler.headers = {"Origin": origin, "Host": "localhost"}  # type: ignore[assignment]
        assert handler.is_from_here() is is_here, origin


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 5000, b"{}", b'{"name": "\xb3"}', b""])
def test_a_damaged_cache_of_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    class Made:
        network = chain(2)

    path = tmp_path / "network.json"
    path.write_bytes(content)
    monkeypatch.setattr(networks, "_cached", lambda *_: path)
    monkeypatch.setattr(networks, "capture_model", lambda *_: Made)
    assert networks.load_network("mobilenetv2") == Made.network
    assert msgspec.json.decode(path.read_bytes(), type=type(Made.network)) == Made.network


def test_a_run_folder_of_nonsense(tmp_path: Path) -> None:
    """Following it raises nothing."""
    (tmp_path / "config.yaml").write_text("steps: VM$t7\n")
    (tmp_path / "metrics.csv").write_bytes(b'step,loss\n0,1\r5\n"1,2\nnan,inf\n1e400,1\n')
    (tmp_path / "plan.yaml").write_text('{"stages": [1, {"layers": ["a", null], "devices": 3}, {"layers": [0]}]}')
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\n[1]\nnonsense\n')
    assert RunWatch(tmp_path).look().live.steps == 0
    live = Live(state="running", pid=2**60, host=socket.gethostname(), updated=1e12)
    (tmp_path / "live.json").write_bytes(msgspec.json.encode(live))
    assert not RunWatch(tmp_path).look().is_live
