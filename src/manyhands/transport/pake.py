"""SPAKE2: two ends that know the same token agree on a key; one that does not can try one token per connection.

Each end sends one point of the curve, which is consistent with every token: a recording reveals nothing about the
token, however short it is, not even to a server that a client was lured to. The arithmetic is the `spake2` package's
(Ed25519's group). It does not run in constant time: an attacker who measures many handshakes may learn how many ones
are in a number made of the token, about 4 bits, and no more.
"""

from __future__ import annotations

from typing import Any

MESSAGE_BYTES = 33


class NotAgreed(Exception):
    """The other end's message is not one of the exchange."""


class KeyExchange:
    """One end of one exchange; never used twice."""

    def __init__(self, token: str, *, is_client: bool) -> None:
        from spake2 import SPAKE2_A, SPAKE2_B

        side = SPAKE2_A if is_client else SPAKE2_B
        self._side: Any = side(token.encode(), idA=b"manyhands client", idB=b"manyhands server")
        self.message: bytes = self._side.start()

    def key(self, theirs: bytes) -> bytes:
        """Return the key, which is the same at both ends if they know the same token, and differs otherwise."""
        try:
            return bytes(self._side.finish(theirs))
        except Exception as error:  # not a point, one of the wrong group, our own: the package has a class for each
            raise NotAgreed(str(error)) from error
