"""The fork server, which starts the processes of a scenario quickly: it loads PyTorch once, and they are its forks.

It resembles the product's own (`runtime/fork_server.py`), for processes that the benchmark must be able to disturb. All
have the mark of the benchmark in their environment, by which those left behind are found.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from manyhands.facts.errors import ManyhandsError, TimedOut
from manyhands.runtime.processes import end_with
from manyhands_bench.chaos.coordinator import CoordinatorConfig
from manyhands_bench.chaos.worker import WorkerConfig

MARK = "MANYHANDS_CHAOS"
LOAD_SECONDS = 120.0
END_SECONDS = 5.0
_LARGEST = 65536


class ForkServer:
    """The benchmark's end of the fork server."""

    def __init__(self, mark: str, home: Path) -> None:
        """Start the fork server; `home` is the folder for measurements made meanwhile, in place of the user's own."""
        self.mark = mark
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ, MARK: mark, "MANYHANDS_HOME": str(home), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "manyhands_bench.chaos.fork_server", str(far.fileno())], env=environment,
            pass_fds=[far.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        far.close()
        self._door = near
        self._door.settimeout(LOAD_SECONDS)
        self._ask({})

    def start(
        self,
        config: CoordinatorConfig | WorkerConfig,
        log: Path,
        *,
        namespace: str = "",
        group: tuple[str, str] = ("", ""),
    ) -> int:
        """Start a process that runs as the configuration says and return its id; `group`: lab and device."""
        role = "coordinator" if isinstance(config, CoordinatorConfig) else "worker"
        return self._ask(
            {"role": role, "config": asdict(config), "log": str(log), "namespace": namespace, "group": group}
        )

    def _ask(self, request: dict[str, Any]) -> int:
        try:
            self._door.send(json.dumps(request).encode())
            return int(self._door.recv(_LARGEST) or b"0")
        except OSError as error:
            raise TimedOut(f"The process that starts others does not answer: {error}.") from error

    def children(self) -> list[int]:
        """Return the running processes that bear the mark, without the fork server itself."""
        return [pid for pid in marked(self.mark) if pid != self.process.pid]

    def end_children(self) -> None:
        """Kill every process that it has started, and wait until they are gone."""
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_gone(pid, END_SECONDS)

    def close(self) -> None:
        """End the fork server, and with it what it has started."""
        self._door.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def marked(mark: str) -> list[int]:
    """Return the live processes with this mark."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def is_alive(process: int) -> bool:
    """Return whether a process exists, running or stopped; the fork server has no zombies."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def wait_gone(process: int, limit_seconds: float) -> bool:
    end = time.monotonic() + limit_seconds
    while is_alive(process):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


# The fork server's own process


def main() -> None:
    from manyhands.runtime.serving import load_everything

    door = socket.socket(fileno=int(sys.argv[1]))
    end_with(os.getppid())
    load_everything()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children do not become zombies
    while text := door.recv(_LARGEST):
        request = json.loads(text)
        child = os.fork() if request else 0
        if request and child == 0:
            door.close()
            _become(request)
        door.send(str(child).encode())


def _become(request: dict[str, Any]) -> None:
    """Run the requested function in this new process, and end it."""
    code = 1
    try:
        end_with(os.getppid())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = _run(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except ManyhandsError as error:
        print(f"Error: {error.message} {error.hint}", file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(request: dict[str, Any]) -> int:
    from manyhands.lab import groups
    from manyhands.lab.spaces import entered
    from manyhands_bench.chaos import coordinator, worker

    lab, device = request["group"]
    if lab:
        groups.find().enter(lab, device)
    with entered(request["namespace"]) if request["namespace"] else contextlib.nullcontext():
        if request["role"] == "worker":
            worker.run(WorkerConfig(**request["config"]))
        else:
            config = request["config"]
            coordinator.run(CoordinatorConfig(**{**config, "devices": tuple(config["devices"])}))
    return 0


if __name__ == "__main__":
    main()
