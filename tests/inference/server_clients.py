"""A service over a stand-in that answers as it is told to, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy
import torch
from PIL import Image

from manyhands.data.wanted import SampleForm
from manyhands.facts.errors import WorkerLost
from manyhands.inference.lines import Labels
from manyhands.inference.requests import Limits
from manyhands.inference.server import Answering

WANTED = SampleForm((1, 2, 2))
NPY, PNG = {"Content-Type": "application/x-npy"}, {"Content-Type": "image/png"}
JSON = {"Content-Type": "application/json"}


class StandIn:
    """Answers with (mean, 0, -mean) in the order it was asked, on a thread of its own, as an Inference does."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.asked: list[float] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.fails_at = -1
        self.width = 1
        self._thread = ThreadPoolExecutor(1)

    def submit(self, sample: torch.Tensor, limit_seconds: float = 5.0) -> Future[Any]:
        assert tuple(sample.shape) == WANTED.shape
        self.asked.append(float(sample.mean()))
        return self._thread.submit(self._answer, sample, len(self.asked) - 1)

    def _answer(self, sample: torch.Tensor, number: int) -> torch.Tensor:
        assert self.may_answer.wait(20)
        time.sleep(self.pause)
        if number == self.fails_at:
            raise WorkerLost("Nobody is left.", hint="Start workers.")
        return torch.stack([sample.mean(), torch.tensor(0.0), -sample.mean()]).repeat(self.width)


@contextlib.contextmanager
def serving(
    asks: StandIn, *, host: str = "127.0.0.1", wanted: SampleForm = WANTED, **limits: Any
) -> Iterator[Answering]:
    labels = Labels(("up", "flat", "down"))
    with Answering(asks, wanted, labels, host=host, limits=Limits(**limits), health=lambda: {"answered": 7}) as found:
        yield found


def connect(served: Answering) -> http.client.HTTPConnection:
    if not served.is_encrypted:
        return http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", served.port, timeout=20, context=context)


def ask(
    served: Answering,
    body: Any = None,
    headers: dict[str, str] | None = None,
    path: str = "/infer",
    method: str = "POST",
) -> tuple[int, list[Any]]:
    """The status and the lines, or the one document, of a request on a connection of its own."""
    with contextlib.closing(connect(served)) as connection:
        connection.request(method, path, body, headers or {}, encode_chunked=not isinstance(body, (bytes, type(None))))
        answer = connection.getresponse()
        content = answer.read()
        if answer.getheader("Content-Type") == "application/json":
            return answer.status, [json.loads(content)]
        return answer.status, [json.loads(line) for line in content.splitlines()]


def packed(array: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.asarray(array, numpy.float32))
    return file.getvalue()


def samples(*values: float) -> bytes:
    return packed([numpy.full(WANTED.shape, value) for value in values])


def picture(grey: int, kind: str = "PNG", size: tuple[int, int] = (2, 2)) -> bytes:
    """`size`: width and height."""
    file = io.BytesIO()
    Image.new("L", size, grey).save(file, kind)
    return file.getvalue()


def form(files: dict[str, bytes]) -> tuple[bytes, dict[str, str]]:
    parts = [
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\n\r\n%s\r\n' % (name.encode(), content)
        for name, content in files.items()
    ]
    return b"".join(parts) + b"--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


def until(is_so: Callable[[], bool], limit_seconds: float = 10.0) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
