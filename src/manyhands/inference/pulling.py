"""Pulls samples that arrive at any time from an iterator, and yields their answers in the same order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

_POLL_SECONDS = 0.2


class Pulled:
    """Takes samples from an iterable on its own thread, so that answers need not wait for the next sample."""

    def __init__(
        self,
        submit: Callable[[Any], Future[Any]],
        samples: Iterable[Any],
        most: int,
        failure: Callable[[], BaseException | None],
    ) -> None:
        """Hold at most `most` answers for the consumer; `failure` returns why no more will come, if that is so."""
        self._submit, self._samples, self._failure = submit, samples, failure
        self._found: queue.Queue[Future[Any] | BaseException | None] = queue.Queue(most)
        self._stopping = threading.Event()
        threading.Thread(target=self._pull, name="samples", daemon=True).start()

    def _pull(self) -> None:
        try:
            for sample in self._samples:
                if self._stopping.is_set():
                    return
                self._put(self._submit(sample))
        except BaseException as error:
            self._put(error)
        else:
            self._put(None)

    def _put(self, reply: Future[Any] | BaseException | None) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self._found.put(reply, timeout=_POLL_SECONDS)
                return
        if isinstance(reply, Future):
            reply.cancel()

    def answers(self) -> Iterator[Any]:
        while (reply := self._next()) is not None:
            if isinstance(reply, BaseException):
                raise reply
            yield reply.result()

    def _next(self) -> Future[Any] | BaseException | None:
        """Return the next answer. Samples may not come for hours; a stream that has failed is reported at once."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._found.get(timeout=_POLL_SECONDS)
            if (error := self._failure()) is not None:
                return error

    def stop(self) -> None:
        """Cancel the remaining samples: no caller waits for their answers any more."""
        self._stopping.set()
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(reply := self._found.get_nowait(), Future):
                    reply.cancel()
