"""The HTTP endpoint: pictures and arrays in, answers out one after another as soon as they are there.

    POST /infer     a picture, the bytes of a .npy file, or a form with several; a line of JSON for each, in order
    GET /health     the plan, the devices, how many were answered
    GET /           what to type

On loopback connections are plain. Beyond it they are encrypted with a certificate of this process alone, and clients
show a token; the public key's digest, printed with the curl line, vouches for the certificate.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError
from typing import Any

from manyhands.api.answering_handler import Handler
from manyhands.api.answering_lines import Answer, Labels
from manyhands.api.answering_requests import Limits, Room
from manyhands.api.answering_stream import Asks, Late, in_order
from manyhands.api.joining import reachable
from manyhands.data.wanted import Samples, Wanted
from manyhands.engine.http_door import Door
from manyhands.engine.http_handler import Refusal
from manyhands.engine.security import is_loopback, new_token, server_context
from manyhands.facts.errors import BadData, ManyhandsError

DECODED_AT_ONCE = 2
"""Pictures that are unpacked at the same time: a small file may be a large picture."""


class Answering:
    """Answers HTTP requests until it is closed."""

    def __init__(
        self,
        asks: Asks,
        wanted: Wanted,
        labels: Labels,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        bearer: str = "",
        limits: Limits | None = None,
        health: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.asks, self.wanted, self.labels = asks, wanted, labels
        self.limits = limits or Limits()
        self.is_encrypted = not is_loopback(host)
        self.bearer = bearer or (new_token() if self.is_encrypted else "")
        """What clients must know; empty: nothing, since only this machine can ask."""
        self.room = Room(self.limits.held_bytes)
        self.decoding = threading.BoundedSemaphore(DECODED_AT_ONCE)
        self._health = health or (lambda: {})
        context, self.certificate = server_context() if self.is_encrypted else (None, b"")
        self._door = Door((host, port), self._handler, self.limits, context)
        self.host, self.port = reachable(host), int(self._door.server_address[1])

    def _handler(self, *connected: Any) -> Handler:
        return Handler(self, *connected)

    def __enter__(self) -> Answering:
        self._door.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._door.close()

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

    def command(self, file: str = "picture.png") -> str:
        """What to type, ready to be copied."""
        words = ["curl", "-N"]
        if self.is_encrypted:
            words += ["--insecure", "--pinnedpubkey", f"'{self.pin}'"]
        if self.bearer:
            words += ["-H", f"'Authorization: Bearer {self.bearer}'"]
        return " ".join([*words, "--data-binary", f"@{file}", f"{self.url}/infer"])

    def health(self) -> dict[str, Any]:
        return {"takes": self.wanted.text, **self._health()}

    def help(self) -> str:
        """The page for people."""
        options = self.command("x").partition(" --data-binary")[0]
        return (
            f"manyhands answers here. The network takes {self.wanted.text}; pictures are made to fit.\n\n"
            f"A picture, or a .npy file with one sample or several on its first axis:\n"
            f"  {options} --data-binary @picture.png {self.url}/infer\n"
            f"  {options} --data-binary @samples.npy {self.url}/infer\n\n"
            f"Several files:\n  {options} -F file=@1.png -F file=@2.png {self.url}/infer\n\n"
            "A line of JSON comes for each sample, in order, as soon as it is there. ?top=3: so many classes; ?raw=1: "
            f"all numbers.\nHow it goes:\n  {options} {self.url}/health\n\n"
            f"At most {self.limits.body_bytes:,} bytes and {self.limits.samples:,} samples a request, which is given "
            f"{self.limits.request_seconds:g} s.\n"
        )

    def answers(self, samples: Samples) -> Generator[Answer, None, None]:
        """In order. A few are asked ahead, so that the devices are busy and other clients have their turn."""
        answered, count, seconds = 0, len(samples), self.limits.request_seconds
        found = in_order(self.asks, samples, self.limits.under_way, seconds)
        try:
            for answer in found:
                answered += 1
                yield answer
        except Late:
            raise Refusal(
                504,
                f"{answered} of {count} samples were answered in {seconds:g} s, and a request gets no more.",
                "Send fewer at a time, or look at /health: devices may have been lost.",
            ) from None
        except CancelledError:
            raise Refusal(503, f"The service ended; {answered} of {count} samples were answered.") from None
        except BadData as error:
            raise Refusal(400, error.message, error.hint) from error
        except ManyhandsError as error:
            raise Refusal(503, error.message, error.hint) from error
        finally:
            found.close()
