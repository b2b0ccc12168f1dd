"""Parsers of samples: arrays, pictures, annotations, tables; and the requests that bring them over HTTP."""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from fuzz.file_targets import put
from fuzz.judging import Build, Target
from manyhands.dashboard.handler import PageHandler
from manyhands.dashboard.server import Dashboard
from manyhands.data import cifar, detection, movielens
from manyhands.data.arrays import load_arrays
from manyhands.data.sample_arrays import read_array, read_npy, read_npz, shape_in
from manyhands.data.sample_json import read_json
from manyhands.data.samples import read_picture
from manyhands.data.silo import Silo
from manyhands.data.wanted import SampleForm
from manyhands.facts.errors import ManyhandsError
from manyhands.inference.handler import Handler
from manyhands.inference.lines import Labels
from manyhands.inference.requests import Limits, samples_in
from manyhands.inference.server import Answering
from manyhands.transport.http_handler import HttpRefusal
from manyhands.transport.http_server import ConnectionLimits

WANTED = SampleForm((1, 2, 2)).resizing()  # what lies behind a wrong size is reached, too


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


def packed(arrays: Mapping[str, Any], method: int = zipfile.ZIP_STORED) -> bytes:
    """As numpy.savez, and in other methods."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as written:
        for name, array in arrays.items():
            written.writestr(f"{name}.npy", npy(array) if not isinstance(array, bytes) else array)
    return file.getvalue()


def zip_sums_right(data: bytes) -> bytes:
    """A .npz file whose sums fit what is in it: damage to the arrays is seen by numpy, not by the archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            content = bytearray(data)
            for entry in found.infolist():
                if entry.compress_type == zipfile.ZIP_STORED and entry.file_size < 2**20:
                    start = entry.header_offset + 30 + len(entry.filename)
                    right = zipfile.crc32(data[start : start + entry.file_size]).to_bytes(4, "little")
                    place = data.find(entry.CRC.to_bytes(4, "little"), found.start_dir)
                    content[entry.header_offset + 14 : entry.header_offset + 18] = right
                    if place >= 0:
                        content[place : place + 4] = right
            return bytes(content)
    except Exception:  # it is none, and stays none
        return data


def array_target(folder: Path) -> Target:
    """The bytes of a .npy file, as a client sends them."""
    seeds = [
        npy(numpy.ones((3, 1, 2, 2), numpy.float32)), npy(numpy.zeros((1, 3, 3), numpy.uint8)),
        npy(numpy.ones((2, 1, 2, 2), ">f8")),
        npy(numpy.asfortranarray(numpy.ones((2, 1, 2, 2), numpy.float16))), npy(numpy.ones((4, 3), numpy.complex64)),
    ]  # fmt: skip

    def run(data: bytes) -> object:
        samples = read_array(data, "sample", WANTED)
        return samples[0], samples[len(samples) - 1]

    return Target("arrays that are sent", run, seeds, share=1.5)


def json_target(folder: Path) -> Target:
    """Samples as JSON, of floats and of whole numbers."""
    seeds = [
        b"[[[1, 2.5], [-3e-2, 4]]]", b'{"inputs": [[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]]}',
        b"[[[1, 2, 3], [4, 5, 6]]]", b"\xef\xbb\xbf [[1, 2], [3]]",
    ]  # fmt: skip

    def run(data: bytes) -> object:
        with contextlib.suppress(ManyhandsError):
            read_json(data, "sample", SampleForm((2, 2), torch.int64))[0]
        return read_json(data, "sample", WANTED)[0]

    return Target("samples as JSON", run, seeds, share=0.5)


def array_file_target(folder: Path) -> Target:
    path = folder / "samples.npy"

    def run(data: bytes) -> object:
        put(path, data)
        shape_in(str(path))
        return read_npy(path, WANTED)[0]

    return Target(
        "array files", run, [npy(numpy.ones((3, 1, 2, 2), numpy.float32)), npy(numpy.zeros((5, 1, 3, 2), numpy.uint8))]
    )


def _archives() -> list[bytes]:
    x, y = numpy.ones((4, 1, 2, 2), numpy.float32), numpy.arange(4) % 2
    return [
        packed({"x": x, "y": y}), packed({"x": x, "y": y}, zipfile.ZIP_DEFLATED),
        packed({"x": x, "y": y}, zipfile.ZIP_BZIP2),
        packed({"x": x, "y": y}, zipfile.ZIP_LZMA),
        packed({"x_train": x.astype(numpy.uint8), "y_train": y, "x_test": x, "y_test": y}),
    ]  # fmt: skip


def archive_target(folder: Path) -> Target:
    path = folder / "data.npz"

    def run(data: bytes) -> object:
        sets = load_arrays(put(path, data))
        return sets.train[0]

    return Target("data sets of arrays", run, _archives(), finish=zip_sums_right, share=0.5)


def sample_archive_target(folder: Path) -> Target:
    path = folder / "samples.npz"

    def run(data: bytes) -> object:
        put(path, data)
        shape_in(str(path))
        return read_npz(path, WANTED)[0]

    return Target("sample archives", run, _archives(), finish=zip_sums_right, share=0.5)


def silo_target(folder: Path) -> Target:
    path = folder / "silo.npz"
    x = numpy.ones((3, 2), numpy.float32)
    seeds = [
        packed({"id": numpy.array([1, 2, 3]), "left": x}),
        packed({"id": numpy.array(["a", "b", "ccc"]), "target": x[:, 0]}),
    ]  # fmt: skip
    run = lambda data: Silo.read(put(path, data)).digests()  # noqa: E731
    return Target("silos", run, seeds, finish=zip_sums_right, share=0.6)


def jpeg_archive_target(folder: Path) -> Target:
    path = folder / "copy.npz"
    one = numpy.frombuffer(picture("JPEG"), numpy.uint8)
    content, offsets = numpy.concatenate([one, one, one]), numpy.arange(4) * len(one)
    arrays = {
        "jpeg_train": content,
        "off_train": offsets,
        "y_train": numpy.array([0, 1, 0]),
        "classes": numpy.array(["a", "b"]),
    }

    def run(data: bytes) -> object:
        put(path, data)
        cifar.is_jpeg_copy(path)
        return cifar.load_jpeg_copy(path).train[0]

    return Target("archives of JPEGs", run, [packed(arrays)], finish=zip_sums_right, share=0.3)


def cifar_target(folder: Path) -> Target:
    root = folder / "cifar"
    root.mkdir(exist_ok=True)
    good = bytes([3]) + bytes(cifar.RECORD_BYTES - 1)

    def run(data: bytes) -> object:
        put(root / "data_batch_1.bin", data)
        return cifar.load_cifar(root).train[0]

    def finish(data: bytes) -> bytes:
        return data.ljust(-(-len(data) // cifar.RECORD_BYTES) * cifar.RECORD_BYTES, b"\1")

    return Target("CIFAR batches", run, [good * 6], finish=finish, share=0.4)


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (9, 7)) -> bytes:
    file = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert(mode).save(file, kind)
    return file.getvalue()


def picture_target(folder: Path) -> Target:
    """Pillow's decoders are not ours; what they may be asked is."""
    seeds = [
        *(picture(kind) for kind in ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")), picture("PNG", "P"),
        picture("PNG", "I;16"),
        picture("TIFF", "F"), picture("PNG", "RGBA"), picture("PNG", "1"),
    ]  # fmt: skip
    run = lambda data: read_picture(data, "sample", WANTED, largest_pixel_count=1_000_000)  # noqa: E731
    return Target("pictures", run, seeds, share=1)


def annotation_target(folder: Path) -> Target:
    (folder / "Annotations").mkdir(exist_ok=True)
    box = "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>30</xmax><ymax>9</ymax></bndbox>"
    thing = f"<object><name>cat</name><difficult>0</difficult>{box}</object>"
    text = f"<annotation><size><width>40</width><height>20</height></size>{thing * 2}</annotation>"
    entities = '<!DOCTYPE a [<!ENTITY x "xxxxxxxx"><!ENTITY y "&x;&x;&x;">]><annotation>&y;</annotation>'

    def run(data: bytes) -> object:
        put(folder / "Annotations" / "one.xml", data)
        return detection._objects(folder, "one", "here")

    seeds = [text.encode(), f'<?xml version="1.0" encoding="utf-8"?>\n{text}'.encode(), entities.encode()]
    return Target("annotations", run, seeds, share=1.5)


def ratings_target(folder: Path) -> Target:
    movies = b'movieId,title,genres\n1,Toy (1995),Adventure|Comedy\n2,"A, b",Drama\n3,C,(no genres listed)\n'
    ratings = b"userId,movieId,rating,timestamp\n" + b"".join(
        b"%d,%d,%d.5,%d\n" % (i // 4, i % 3 + 1, i % 5, i) for i in range(40)
    )

    def run(data: bytes) -> object:
        is_movies = data.startswith(b"movieId") or b"title" in data[:40]
        put(folder / "movies.csv", data if is_movies else movies)
        put(folder / "ratings.csv", ratings if is_movies else data)
        return movielens.load_movielens(folder).train[0]

    return Target("tables of ratings", run, [ratings, movies], share=0.3)


# Requests over HTTP


class Socket:
    """A connection on which a request comes, and then its end."""

    def __init__(self, data: bytes) -> None:
        self._file, self.sent = io.BytesIO(data), 0

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return self._file

    def recv_into(self, buffer: Any) -> int:
        return self._file.readinto(buffer)

    def sendall(self, data: Any) -> None:
        self.sent += len(data)
        assert self.sent < 50_000_000

    def settimeout(self, seconds: Any) -> None: ...

    def setsockopt(self, *_: Any) -> None: ...

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


class AtOnce:
    """Answers every sample."""

    def submit(self, sample: Any, limit_seconds: float = 1.0) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_result(torch.stack([sample.mean(), -sample.mean()]))
        return found


def _form(*files: bytes) -> bytes:
    part = (
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\nContent-Type: image/png\r\n\r\n%s\r\n'
    )
    return b"".join(part % (b"%d.png" % place, file) for place, file in enumerate(files)) + b"--edge--\r\n"


def body_target(folder: Path) -> Target:
    """A body, and what is said of its type, which comes before the first empty line here."""

    def run(data: bytes) -> object:
        kind, _, body = data.partition(b"\n\n")
        samples = samples_in(body, kind.decode("latin-1"), "sample", WANTED, Limits(pixel_count=10**6, samples=50))
        return [samples[index] for index in range(min(3, len(samples)))]

    array = npy(numpy.ones((2, 1, 2, 2), numpy.float32))
    seeds = [
        b"multipart/form-data; boundary=edge\n\n" + _form(picture("PNG"), array),
        b"image/png\n\n" + picture("PNG", "L"),
        b"application/x-npy\n\n" + array, b'application/json\n\n{"inputs": [[[1, 2], [3, 4]]]}',
        b"multipart/form-data; boundary*=utf-8''edge\n\n" + _form(array),
    ]  # fmt: skip
    return Target("bodies of requests", run, seeds, allowed=(ManyhandsError, HttpRefusal), share=1)


def request_target(folder: Path) -> Target:
    """All that comes over a connection: every request gets an answer, and nothing is raised."""
    answering = Answering(AtOnce(), WANTED, Labels(("up", "down")), limits=Limits(pixel_count=10**6, idle_seconds=1))
    array = npy(numpy.ones((2, 1, 2, 2), numpy.float32))

    def request(line: bytes, *headers: bytes, body: bytes = b"") -> bytes:
        length = (b"Content-Length: %d" % len(body),) if body else ()
        return b"\r\n".join((line + b" HTTP/1.1", b"Host: localhost", *headers, *length, b"", body))

    def run(data: bytes) -> object:
        connected = Socket(data)
        Handler(answering, connected, ("127.0.0.1", 9), AlwaysOpen())
        return connected.sent

    form = _form(picture("PNG"))
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(array), array)
    seeds = [
        request(b"GET /health"), request(b"GET /"), request(b"GET /infer", b"Accept: application/json"),
        request(b"POST /infer?resize=0", b"Content-Type: application/json", body=b'{"inputs": [[[1, 2], [3, 4]]]}'),
        request(b"POST /infer?top=1&name=a", b"Content-Type: application/x-npy", body=array),
        request(b"POST /infer", b"Content-Type: multipart/form-data; boundary=edge", body=form) + request(b"GET /"),
        request(b"POST /infer?raw=1", b"Transfer-Encoding: chunked", b"Content-Type: application/x-npy") + chunked,
        request(b"POST /infer", b"Expect: 100-continue", b"Origin: http://[::1]:80", body=array), b"GET /\r\n\r\n",
    ]  # fmt: skip
    return Target("requests", run, seeds, allowed=(), share=1)


class OpenRateLimiter:
    """Nobody has to wait."""

    def passes(self, host: str, seconds: float) -> bool:
        return True


def page_target(folder: Path) -> Target:
    """The dashboard's requests, of a run that has ended."""
    put(folder / "events.jsonl", b'{"time": "x", "event": "started", "model": "tiny"}\n')
    dashboard = Dashboard(("127.0.0.1", 0), folder)
    with contextlib.closing(dashboard):
        _, told = dashboard.reader.update("")
    dashboard.token, dashboard.rate_limiter = "a-token", OpenRateLimiter()  # type: ignore[assignment]

    def run(data: bytes) -> object:
        connected = Socket(data)
        PageHandler(dashboard, connected, ("127.0.0.1", 9), AlwaysOpen())
        return connected.sent

    cursor = re.search(rb'"cursor":"([^"]*)"', told)
    assert cursor is not None
    asked = (
        b"/?token=a-token",
        b"/api/view?token=a-token&since=" + cursor[1],
        b"/api/stream?token=a-token",
        b"/app.js",
    )
    seeds = [
        b"GET %s HTTP/1.1\r\nHost: [::1]:7070\r\nCookie: a=b; %s=a-token\r\n\r\n" % (path, dashboard.cookie.encode())
        for path in asked
    ]
    seeds.append(
        b"GET /api/stream HTTP/1.1\r\nLast-Event-ID: %s\r\nCookie: %s=a-token\r\n\r\n"
        % (cursor[1], dashboard.cookie.encode())
    )
    return Target("requests for the dashboard", run, seeds, allowed=(), share=1)


class AlwaysOpen:
    """As the door of an HTTP server is while it is open."""

    is_closing = False
    limits = ConnectionLimits(idle_seconds=1.0)

    def waits(self, connected: Any) -> bool:
        return True

    def begins(self, connected: Any) -> None:
        pass

    def serves(self, connected: Any) -> bool:
        return True


TARGETS: tuple[Build, ...] = (
    array_target, json_target, array_file_target, archive_target, sample_archive_target, silo_target,
    jpeg_archive_target, cifar_target, picture_target, annotation_target, ratings_target, body_target, request_target,
    page_target,
)  # fmt: skip
