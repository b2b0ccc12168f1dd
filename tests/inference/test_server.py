"""The HTTP endpoint: answers in order, whatever they are sent as, and requests that are refused."""

from __future__ import annotations

import contextlib
import io
import json
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from server_clients import (
    JSON,
    NPY,
    PNG,
    WANTED,
    StandIn,
    ask,
    connect,
    form,
    packed,
    picture,
    samples,
    serving,
    until,
)

from manyhands.data.sample_json import read_json
from manyhands.data.wanted import SampleForm
from manyhands.inference.lines import Answer, Labels, json_line
from manyhands.inference.server import Answering

# Answers


def test_answers_come_in_order_and_with_names() -> None:
    with serving(StandIn()) as served:
        status, lines = ask(served, samples(1, -2, 3), NPY)
        assert status == 200
        assert [line["index"] for line in lines] == [0, 1, 2]
        assert [line["top"][0]["label"] for line in lines] == ["up", "down", "up"]
        assert [line["top"][0]["class"] for line in lines] == [0, 2, 0]
        expected = torch.softmax(torch.tensor([1.0, 0.0, -1.0]).double(), 0)[0]
        assert lines[0]["top"][0]["probability"] == pytest.approx(float(expected), abs=1e-6)
        assert all(line["seconds"] >= 0 for line in lines)
        status, lines = ask(served, samples(1, -2), NPY, "/infer?raw=1")
        assert [line["output"] for line in lines] == [[1, 0, -1], [-2, 0, 2]]
        status, lines = ask(served, samples(1), NPY, "/infer?top=1")
        assert len(lines[0]["top"]) == 1


def test_a_picture_a_form_and_chunks() -> None:
    with serving(StandIn()) as served:
        for kind in ("PNG", "JPEG"):  # told by curl to be a form's fields, it is seen what it is
            headers = {"Content-Type": "application/x-www-form-urlencoded"}
            status, lines = ask(served, picture(255, kind), headers, "/infer?name=white&raw=1")
            assert (status, lines[0]["name"]) == (200, "white")
            assert lines[0]["output"][0] == pytest.approx(1.0)
        body, headers = form({"black.png": picture(0), "two.npy": samples(0.5, 0.25), "white.png": picture(255)})
        status, lines = ask(served, body, headers, "/infer?raw=1")
        assert [line["name"] for line in lines] == ["black.png", "two.npy[0]", "two.npy[1]", "white.png"]
        assert [line["output"][0] for line in lines] == pytest.approx([-1, 0.5, 0.25, 1])
        content = samples(4, 5)
        pieces = iter([content[:50], content[50:120], content[120:]])
        status, lines = ask(served, pieces, {**NPY, "Transfer-Encoding": "chunked"}, "/infer?raw=1")
        assert [line["output"][0] for line in lines] == [4, 5]


def test_the_first_answer_does_not_wait_for_the_last() -> None:
    asks = StandIn(pause=0.02)
    with serving(asks) as served, contextlib.closing(connect(served)) as connection:
        connection.request("POST", "/infer", samples(*range(40)), NPY)
        answer = connection.getresponse()
        assert json.loads(answer.readline())["index"] == 0
        assert len(asks.asked) <= 10, "it asked far ahead of its answers"
        rest = [json.loads(line)["index"] for line in answer.read().splitlines()]
        assert rest == list(range(1, 40))


def test_clients_at_once_each_get_their_own_in_order() -> None:
    with serving(StandIn(pause=0.001)) as served, ThreadPoolExecutor(8) as threads:

        def client(number: int) -> None:
            values = [number * 100 + place for place in range(12)]
            status, lines = ask(served, samples(*values), NPY, "/infer?raw=1")
            assert status == 200
            assert [line["index"] for line in lines] == list(range(12))
            assert [line["output"][0] for line in lines] == values

        list(threads.map(client, range(8)))


def test_one_connection_may_ask_again_and_again() -> None:
    with serving(StandIn()) as served, contextlib.closing(connect(served)) as connection:
        connection.connect()
        kept = connection.sock
        for value in (1.0, 2.0):
            connection.request("POST", "/infer?raw=1", samples(value), NPY)
            assert json.loads(connection.getresponse().read())["output"][0] == value
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"takes": "1x2x2", "answered": 7}
        assert connection.sock is kept


def test_another_size_is_resized_where_that_is_asked_for() -> None:
    larger, wide = picture(255, size=(5, 4)), packed([[[1, 1, 1], [3, 3, 3]]])
    with serving(StandIn()) as served:
        status, lines = ask(served, larger, PNG)
        assert (status, "/infer?resize=1" in lines[0]["hint"]) == (400, True)
        assert "--" not in lines[0]["hint"], "nothing of the command line, which the client did not type"
        status, lines = ask(served, larger, PNG, "/infer?resize=1&raw=1")
        assert (status, lines[0]["output"][0]) == (200, pytest.approx(1.0))
        status, lines = ask(served, wide, NPY, "/infer?resize=1&raw=1")
        assert (status, lines[0]["output"][0]) == (200, pytest.approx(2.0))
    with serving(StandIn(), wanted=WANTED.resizing()) as served:  # manyhands infer --serve --resize
        assert ask(served, larger, PNG)[0] == 200
        assert ask(served, larger, PNG, "/infer?resize=0")[0] == 400
    with serving(StandIn(), wanted=SampleForm((4,))) as served:
        status, lines = ask(served, packed([1, 2, 3, 4]), NPY, "/infer?resize=1")
        assert (status, "takes 4 (float32)" in lines[0]["error"]) == (400, True)


# JSON and help


def test_json_is_answered_by_one_document() -> None:
    one = [[[1, 2], [3, 6]]]
    bodies = [one, {"inputs": one}, [one], {"inputs": [one, [[[0, 0], [0, -4.0]]]]}]
    expected = [[3], [3], [3], [3, -1]]
    with serving(StandIn()) as served:
        for body, means in zip(bodies, expected, strict=True):
            status, found = ask(served, json.dumps(body).encode(), JSON, "/infer?raw=1")
            assert (status, [answer["output"][0] for answer in found[0]["answers"]]) == (200, means)
            assert [answer["index"] for answer in found[0]["answers"]] == list(range(len(means)))
        content = json.dumps({"inputs": one}).encode()
        status, found = ask(served, content, {"Content-Type": "Application/JSON; charset=utf-8"})
        assert found[0]["answers"][0]["top"][0]["label"] == "up"
        status, found = ask(served, content, {"Content-Type": "application/x-www-form-urlencoded"}, "/infer?raw=1")
        assert (status, found[0]["output"][0]) == (200, 3), "as curl sends it where it is told nothing: lines"
        body, headers = form({"a.json": content, "b.npy": samples(5)})
        status, found = ask(served, body, headers, "/infer?raw=1")
        assert [(line["name"], line["output"][0]) for line in found] == [("a.json[0]", 3), ("b.npy[0]", 5)]


def test_a_document_that_is_cut_off_says_why() -> None:
    asks = StandIn()
    asks.fails_at = 2
    with serving(asks) as served:
        status, found = ask(served, json.dumps([[[[1, 1], [1, 1]]]] * 4).encode(), JSON)
        assert (status, len(found[0]["answers"])) == (200, 2)
        assert (found[0]["error"], found[0]["hint"]) == ("Nobody is left.", "Start workers.")


def test_json_of_too_many_numbers_is_not_decoded() -> None:
    content = b"[" + b"0," * 2000 + b"0]"
    with serving(StandIn(), body_bytes=5000, held_bytes=20_000) as served:
        status, found = ask(served, content, JSON)
        assert (status, found[0]["error"]) == (413, "sample: takes 64.1 kB decoded; at most 20 kB are.")
        assert ".npy" in found[0]["hint"]


def test_what_is_accepted_is_listed() -> None:
    with serving(StandIn()) as served:
        _, lines = ask(served, b"x", {"Content-Type": "text/html"})
        for kind in ("application/json", "application/x-npy", "image/png", "multipart/form-data"):
            assert kind in lines[0]["hint"]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_get_says_what_to_send_and_its_command_works(host: str) -> None:
    """The line is run as it stands, with its token and its key where it has them."""
    with serving(StandIn(), host=host) as served:
        token = {"Authorization": f"Bearer {served.bearer}"} if served.bearer else {}
        for path in ("/", "/infer"):
            with contextlib.closing(connect(served)) as connection:
                connection.request("GET", path, headers=token)
                answer = connection.getresponse()
                page = answer.read().decode()
            assert (answer.status, answer.getheader("Content-Type")) == (200, "text/plain; charset=utf-8")
            for part in ("1x2x2 (float32)", served.example, "?resize=1", "application/json", "@picture.png"):
                assert part in page, part
        status, found = ask(served, None, {**token, "Accept": "application/json"}, "/infer", "GET")
        assert (status, found[0]["shape"], found[0]["dtype"]) == (200, [1, 2, 2], "float32")
        assert found[0]["example"] == served.example
        if served.bearer:
            assert ask(served, None, {}, "/infer", "GET")[0] == 401
        assert_works(served)


def assert_works(served: Answering) -> None:
    """With curl; where there is none, what it would send is sent."""
    making, _, sending = served.example.partition(" | ")
    assert making == "python3 -c 'print([[[0]*2]*2]*1)'"
    assert sending.startswith("curl ")
    if shutil.which("curl") and shutil.which("python3"):
        line = served.example.replace(
            served.host, "127.0.0.1"
        )  # beyond loopback it names another address of this machine
        ran = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=True)
        document = json.loads(ran.stdout)
    else:
        sample = subprocess.run([sys.executable, "-c", making.split("'")[1]], capture_output=True, check=True).stdout
        token = {"Authorization": f"Bearer {served.bearer}"} if served.bearer else {}
        status, (document,) = ask(served, sample, {**JSON, **token})
        assert status == 200
    assert [answer["index"] for answer in document["answers"]] == [0]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4, 5)])
def test_the_command_fits_every_shape(shape: tuple[int, ...]) -> None:
    """Also a single number, and many axes."""
    with serving(StandIn(), wanted=SampleForm(shape)) as served:
        program = served.example.split("'")[1]
        made = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        (sample,) = read_json(made, "made", served.wanted)
        assert isinstance(sample, torch.Tensor)
        assert sample.shape == shape


# Refusals


@pytest.mark.quick(every=13)
@pytest.mark.parametrize(
    ("body", "headers", "path", "status", "words"),
    [
        (packed([[1, 2, 3]]), NPY, "/infer", 400, "takes 1x2x2"),
        (samples(float("nan")), NPY, "/infer", 400, "NaN"),
        (samples(1)[:-3], NPY, "/infer", 400, "bytes"),
        (b"\x93NUMPY nonsense", NPY, "/infer", 400, "no array of numbers"),
        (b"no picture", PNG, "/infer", 400, "cannot be read"),
        (b"", PNG, "/infer", 400, "empty"),
        (samples(1), {"Content-Type": "text/html"}, "/infer", 415, "text/html"),
        (packed([[[[1, 2, 3], [4, 5, 6]]]]), NPY, "/infer", 400, "sample is 1x1x2x3; the network takes 1x2x2"),
        (picture(0, size=(5, 4)), PNG, "/infer", 400, "sample is 1x4x5; the network takes 1x2x2"),
        (b"[[1, 2, 3]]", JSON, "/infer", 400, "sample is 1x3; the network takes 1x2x2"),
        (b"[[[1, 2], [3, null]]]", JSON, "/infer", 400, "Expected 'float', got 'null'"),
        (b"[[[1, 2], [3, 4]]", JSON, "/infer", 400, "truncated"),
        (b"", JSON, "/infer", 400, "truncated"),
        (b"[" * 4000, JSON, "/infer", 400, "more than 8 deep"),
        (samples(1), NPY, "/infer?resise=1", 400, "no parameter 'resise'"),
        (samples(1), NPY, "/infer?resize=2", 400, "resize is '2'"),
        (samples(1), NPY, "/infer?top=0", 400, "top is '0'"),
        (samples(1), NPY, "/elsewhere", 404, "nothing at /elsewhere"),
        (b"--edge\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}, "/infer", 400, "cut off"),
        (b"x", {"Content-Type": "multipart/form-data"}, "/infer", 400, "between its parts"),
        (samples(*range(30)), NPY, "/infer", 413, "More than 20 samples"),
        (b"x" * 5001, NPY, "/infer", 413, "at most 5"),
        (samples(1), {**NPY, "Content-Length": "-1"}, "/infer", 400, "no number"),
        (samples(1), {**NPY, "Transfer-Encoding": "gzip"}, "/infer", 400, "transfer coding"),
        (samples(1), {**NPY, "Origin": "https://elsewhere.example"}, "/infer", 403, "web page"),
        (samples(1), {**NPY, "Host": "elsewhere.example"}, "/infer", 403, "web page"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    body: bytes, headers: dict[str, str], path: str, status: int, words: str
) -> None:
    asks = StandIn()
    with serving(asks, body_bytes=5000, samples=20) as served:
        got, lines = ask(served, body, headers, path)
        assert got == status, lines
        assert words in lines[0]["error"]
        assert asks.asked == []
        assert ask(served, samples(1), NPY)[0] == 200, "others are answered"


def test_one_broken_picture_of_a_form_is_named() -> None:
    body, headers = form({"good.png": picture(0), "bad.png": picture(0)[:40]})
    with serving(StandIn()) as served:
        status, lines = ask(served, body, headers)
        assert status == 400
        assert lines[0]["error"].startswith("bad.png: the picture cannot be read")


def test_a_body_without_an_end_is_cut_off() -> None:
    """Chunks that never stop, and a length that is refused before a byte is sent."""

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield bytes(1000)

    with serving(StandIn(), body_bytes=20_000) as served:
        status, _ = ask(served, endless(), {**NPY, "Transfer-Encoding": "chunked"})
        assert status == 413
        with contextlib.closing(connect(served)) as connection:
            connection.putrequest("POST", "/infer")
            connection.putheader("Content-Length", str(10**12))
            connection.putheader("Expect", "100-continue")
            connection.endheaders()
            began = time.monotonic()
            assert connection.getresponse().status == 413
            assert time.monotonic() - began < 2


def test_bodies_share_their_room() -> None:
    with serving(StandIn(), held_bytes=30_000, body_bytes=20_000) as served:
        held: list[socket.socket] = []

        def has_no_room() -> bool:
            if not held or select.select(held, [], [], 0.1)[0]:  # it was refused itself: it came beside the other
                while held:
                    held.pop().close()
                held.append(socket.create_connection(("127.0.0.1", served.port)))
                started = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000\r\n\r\n" + bytes(100)
                held[0].sendall(started)
            return ask(served, bytes(15_000), NPY)[0] == 503

        until(has_no_room)
        held.pop().close()
        until(lambda: ask(served, bytes(15_000), NPY)[0] == 400)  # read, and no picture


def test_a_picture_with_too_many_pixels() -> None:
    file = io.BytesIO()
    Image.new("1", (4000, 4000)).save(file, "PNG")
    with serving(StandIn(), pixel_count=10**6) as served:
        status, lines = ask(served, file.getvalue(), PNG)
        assert (status, "16,000,000 pixels" in lines[0]["error"]) == (400, True)


# Words


def test_what_is_no_choice_among_classes_is_told_as_it_is() -> None:
    labels = Labels()
    answer = Answer(3, "x", {"boxes": torch.tensor([[1.5, float("inf")]])}, 0.25)
    told = json.loads(json_line(labels.described(answer)))
    assert told == {"index": 3, "name": "x", "output": {"boxes": [[1.5, None]]}, "seconds": 0.25}
    assert not Labels(are_classes=False).has_top(torch.zeros(4))
    assert Labels(("a", "b")).top(torch.tensor([0.0, 1.0, 2.0]), 1)[0]["label"] is None, "names of another network"
