"""Samples that come when they come, and their answers in the same order."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

_POLL_SECONDS = 0.2


class Pulled:
    """Takes samples from whoever has them on a thread of its own, so that answers need not wait for the next one."""

    def __init__(
        self,
        submit: Callable[[Any], Future[Any]],
        samples: Iterable[Any],
        most: int,
        failure: Callable[[], BaseException | None],
    ) -> None:
        """At most so many answers are kept for who takes them; `failure`: why there will be none, if that is so."""
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

    def _put(self, one: Future[Any] | BaseException | None) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self._found.put(one, timeout=_POLL_SECONDS)
                return
        if isinstance(one, Future):
            one.cancel()

    def answers(self) -> Iterator[Any]:
        while (one := self._next()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one.result()

    def _next(self) -> Future[Any] | BaseException | None:
        """Of samples there may be none for hours; a stream that has failed is said at once."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._found.get(timeout=_POLL_SECONDS)
            if (error := self._failure()) is not None:
                return error

    def stop(self) -> None:
        """What nobody waits for any more need not be computed."""
        self._stopping.set()
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(one := self._found.get_nowait(), Future):
                    one.cancel()
