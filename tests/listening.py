"""A worker that listens, as a thread of the test or as a process of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType

from manyhands.facts.errors import ManyhandsError
from manyhands.runtime.device_book import own_credentials
from manyhands.runtime.joining import Joining
from manyhands.runtime.serving import listen
from manyhands.transport.keys import Role
from manyhands.transport.security import new_token
from manyhands.transport.transport import Transport

HERE = "127.0.0.1"
LIMIT_SECONDS = 20.0
_SCRIPT = """
import os, sys
from manyhands.runtime.serving import listen
from manyhands.runtime.joining import Joining
listen(
    Joining("127.0.0.1", int(sys.argv[2]), os.environ["MANYHANDS_TOKEN"], sys.argv[1], threads=1, encrypted=True,
            parent=os.getppid()),
    report=lambda text: print(text, file=sys.stderr, flush=True),
    on_listening=lambda address, token: print(address[1], flush=True),
)
"""


class Listening:
    """`serving.listen` in a thread; ended with the block."""

    def __init__(
        self, name: str = "server", *, token: str = "", port: int = 0, encrypted: bool = True, once: bool = False,
        transport: Transport | None = None, timeout_factor: float = 1.0, limit_seconds: float = 60.0,
        say: Callable[[str], None] | None = None, home: Path | None = None,
    ) -> None:  # fmt: skip
        self.said: list[str] = []
        self._home = tempfile.TemporaryDirectory()  # a device of its own: its key is not that of the coordinator
        self.error: ManyhandsError | None = None
        self.stopping = threading.Event()
        told: queue.SimpleQueue[tuple[tuple[str, int], str] | None] = queue.SimpleQueue()
        joining = Joining(
            HERE, port, token, name, encrypted=encrypted, timeout_factor=timeout_factor, limit_seconds=limit_seconds,
            credentials=partial(own_credentials, Role.WORKER, folder=home or Path(self._home.name)),
        )  # fmt: skip

        def run() -> None:
            try:
                listen(
                    joining, say or self.said.append, once=once, stopping=self.stopping, transport=transport,
                    on_listening=lambda address, token: told.put((address, token)),
                )  # fmt: skip
            except ManyhandsError as error:
                self.error = error
            finally:
                told.put(None)

        self.thread = threading.Thread(target=run, name=f"listening {name}", daemon=True)
        self.thread.start()
        found = told.get(timeout=LIMIT_SECONDS)
        if found is None:
            assert self.error is not None
            raise self.error
        self.address, self.token = found

    def __enter__(self) -> Listening:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(LIMIT_SECONDS)
        self._home.cleanup()
        assert not self.thread.is_alive(), "it hangs"


class ListeningProcess:
    """The same as a process, encrypted, at a port of this machine."""

    def __init__(self, name: str, *, token: str = "", port: int = 0) -> None:
        self.token = token or new_token()
        environment = {**os.environ, "MANYHANDS_TOKEN": self.token, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, name, str(port)], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    @cached_property
    def address(self) -> tuple[str, int]:
        """As soon as it can be dialled."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.words()
        return HERE, int(line)

    def words(self) -> str:
        """All it said, once it has ended."""
        return self.process.communicate(timeout=LIMIT_SECONDS)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_SECONDS)


class Relay:
    """A port that leads to another one, as a router's or ssh's does; its cable can be pulled, without a word."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._door = socket.create_server((HERE, 0))
        self.address: tuple[str, int] = self._door.getsockname()
        self._sockets: list[socket.socket] = [self._door]
        self._dead: set[socket.socket] = set()
        self.is_pulled = False
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def pull(self) -> None:
        """Nothing passes, and nobody is told; connections of now never come back."""
        self.is_pulled = True
        self._dead.update(self._sockets)

    def plug_in(self) -> None:
        self.is_pulled = False

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                self._sockets.append(near)
                if self.is_pulled:
                    continue  # it answers, as far as TCP goes; nothing comes
                far = socket.create_connection(self._target)
                self._sockets.append(far)
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), name="relay", daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if one not in self._dead:
                    other.sendall(data)
            if one not in self._dead:
                other.shutdown(socket.SHUT_WR)
