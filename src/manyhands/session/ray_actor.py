"""An actor that Ray runs for each worker: it starts the worker's process on its machine and waits until that ends.

Everything that goes through Ray is plain text and numbers: where the coordinator is, and how the process ended.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from manyhands.runtime.processes import LocalWorkers, WorkerProcess
from manyhands.transport.security import Security

_LAST_CHARACTERS = 800


class RayActor:
    """An actor. The worker is a process of its own, confined as any other, that the kernel kills with the actor's."""

    def work(
        self, name: str, address: tuple[str, int], token: str, *, encrypted: bool, timeout_factor: float, threads: int,
        compute: str,
    ) -> tuple[int, str]:  # fmt: skip
        """Work until the worker has ended; return its exit code and the end of what it printed."""
        logs = Path(tempfile.mkdtemp(prefix="manyhands-ray-"))
        try:
            workers = LocalWorkers(logs=logs)
            security = Security(token, encrypted=encrypted, timeout_factor=timeout_factor)
            workers.start([WorkerProcess((name,), compute)], address, security, threads=threads, apart=True)
            code = workers.processes[name].wait()
            return int(code or 0), workers.last_words(name)[-_LAST_CHARACTERS:]
        finally:
            shutil.rmtree(logs, ignore_errors=True)
