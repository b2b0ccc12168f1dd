"""The HTTP endpoint: pictures and arrays go in, answers come out one after another as soon as they are ready.

    POST /infer     a picture, the bytes of a .npy file, or a form with several; a line of JSON for each, in order
                    JSON; one document of JSON
    GET /infer      what to send, and what to type
    GET /health     the plan, the devices, the number of samples answered

On loopback connections are plain. Beyond it they are encrypted with a certificate of this process alone, and clients
show a token; the public key's digest, printed with the curl line, vouches for the certificate.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any

from manyhands.data.wanted import SampleForm, SampleSource
from manyhands.facts.errors import BadData, ManyhandsError
from manyhands.inference.handler import Handler
from manyhands.inference.lines import Answer, Labels
from manyhands.inference.requests import ACCEPTED, JSON, Limits, Room
from manyhands.inference.stream import Asks, Late, in_order
from manyhands.session.joining import reachable
from manyhands.transport.http_handler import HttpRefusal
from manyhands.transport.http_server import HttpServer
from manyhands.transport.security import is_loopback, new_token, server_context

DECODED_AT_ONCE = 2
"""Most request bodies decoded at the same time: a small file may be a large picture."""


class Answering:
    """Answers HTTP requests until it is closed."""

    def __init__(
        self,
        asks: Asks,
        wanted: SampleForm,
        labels: Labels,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bearer: str = "",
        limits: Limits | None = None,
        health: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.asks, self.labels = asks, labels
        self.wanted = dataclasses.replace(wanted, resize_words="ask /infer?resize=1", shape_option="")
        self.limits = limits or Limits()
        self.is_encrypted = not is_loopback(host)
        self.bearer = bearer or (new_token() if self.is_encrypted else "")
        """The token that clients must send; empty: none, since only this machine can connect."""
        self.room = Room(self.limits.held_bytes)
        self.decoding = threading.BoundedSemaphore(DECODED_AT_ONCE)
        self._health = health or (lambda: {})
        context, self.certificate = server_context() if self.is_encrypted else (None, b"")
        self._server = HttpServer((host, port), self._handler, self.limits, context)
        self.host, self.port = reachable(host), int(self._server.server_address[1])

    def _handler(self, *connected: Any) -> Handler:
        return Handler(self, *connected)

    def __enter__(self) -> Answering:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_encrypted else ''}://{host}:{self.port}"

    @property
    def pin(self) -> str:
        """The digest of the certificate's public key, as curl takes it."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        key = x509.load_der_x509_certificate(self.certificate).public_key()
        digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
        return f"sha256//{base64.b64encode(digest).decode()}"

    @property
    def _curl(self) -> str:
        """The curl command with every option that it needs to reach this server."""
        words = ["curl", "-N"]
        if self.is_encrypted:
            words += ["--insecure", "--pinnedpubkey", f"'{self.pin}'"]
        if self.bearer:
            words += ["-H", f"'Authorization: Bearer {self.bearer}'"]
        return " ".join(words)

    @property
    def example(self) -> str:
        """A shell command that works as it is: it sends one sample of zeros, as JSON."""
        sample = "0"
        for extent in reversed(self.wanted.shape):
            sample = f"[{sample}]*{extent}"
        sent = f"-H 'Content-Type: {JSON}' --data-binary @- {self.url}/infer"
        return f"python3 -c 'print({sample})' | {self._curl} {sent}"

    def health(self) -> dict[str, Any]:
        return {"takes": self.wanted.text, **self._health()}

    def help(self) -> str:
        """Return the help page for people."""
        shape, curl, url = self.wanted.text, self._curl, f"{self.url}/infer"
        pictures = f"  {curl} --data-binary @picture.png '{url}?resize=1'\n" if self.wanted.takes_pictures else ""
        return (
            f"manyhands answers here: POST one sample of {shape} ({self.wanted.kind}), or several on one more axis in "
            f"front, to {url}.\n{self._about_sizes()}\n\n"
            f"Try it, as it is:\n  {self.example}\n\n"
            f'JSON, as {{"inputs": [...]}} or the lists alone, is answered by one document, {{"answers": [...]}}:\n'
            f"  {curl} -H 'Content-Type: {JSON}' --data-binary @samples.json {url}\n\n"
            f"Files are answered by a line of JSON for each sample, in order, as soon as it is there:\n{pictures}"
            f"  {curl} --data-binary @samples.npy {url}\n"
            f"  {curl} -F file=@1.npy -F file=@2.npy {url}\n\n"
            "?top=3: so many classes; ?raw=1: all numbers; ?name=...: what a single file is called.\n"
            f"Content-Type is one of: {', '.join(ACCEPTED)}.\n"
            f"At most {self.limits.body_bytes:,} bytes and {self.limits.samples:,} samples a request, which is given "
            f"{self.limits.request_seconds:g} s.\n\nHow it goes:\n  {curl} {self.url}/health\n"
        )

    def _about_sizes(self) -> str:
        if not self.wanted.can_resize:
            return "Another shape is refused."
        if self.wanted.resize:
            return "Pictures and arrays of another height and width are resized; with ?resize=0 they are refused."
        return "Another shape is refused; with ?resize=1 pictures and arrays are resized to this height and width."

    def help_document(self) -> dict[str, Any]:
        """Return the help for programs."""
        return {
            "shape": list(self.wanted.shape),
            "dtype": self.wanted.kind,
            "several": "on one more axis in front",
            "resize": self.wanted.resize,
            "content_types": list(ACCEPTED),
            "most_bytes": self.limits.body_bytes,
            "most_samples": self.limits.samples,
            "example": self.example,
        }

    def wanted_by(self, *, resize: bool) -> SampleForm:
        """Return the form that one request's samples must have."""
        if not resize:
            return dataclasses.replace(self.wanted, resize=False)
        try:
            return self.wanted.resizing()
        except BadData as error:
            raise HttpRefusal(400, error.message, error.hint) from error

    def answers(self, samples: SampleSource) -> Generator[Answer, None, None]:
        """Yield answers in order. A few samples are submitted ahead, so that the devices are busy and other clients get
        their turn."""
        answered, count, seconds = 0, len(samples), self.limits.request_seconds
        replies = in_order(self.asks, samples, self.limits.under_way, seconds)
        try:
            for answer in replies:
                answered += 1
                yield answer
        except Late:
            raise HttpRefusal(
                504,
                f"{answered} of {count} samples were answered in {seconds:g} s, and a request gets no more.",
                "Send fewer at a time, or look at /health: devices may have been lost.",
            ) from None
        except CancelledError:
            raise HttpRefusal(503, f"The service ended; {answered} of {count} samples were answered.") from None
        except BadData as error:
            raise HttpRefusal(400, error.message, error.hint) from error
        except ManyhandsError as error:
            raise HttpRefusal(503, error.message, error.hint) from error
        finally:
            replies.close()
