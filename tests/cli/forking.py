"""Commands in processes of their own that need not import torch again: a process that has done so divides for each.

`python forking.py` reads one command a line and answers with its exit code; `run_command` starts it once per test
process. What a command does at its very start (whether it is fast, what it imports) is tested with the program itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import NoReturn


def run_command(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`manyhands WORDS` to its end, with this process's environment and what is added to it."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / "stdout", Path(folder) / "stderr"]
        asked = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": {**os.environ, **environment},
                 "said": [str(path) for path in said]}  # fmt: skip
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the process that divides has ended"
        output, errors = (path.read_text() for path in said)
        return subprocess.CompletedProcess(["manyhands", *words], int(answer), output, errors)


@cache
def _server() -> subprocess.Popen[str]:
    """Ends when its input does, at the latest with this process."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    return process


def _import_all() -> None:
    """Whatever a command imports, and what torch imports when it captures its first network."""
    import torch

    import manyhands

    for module in pkgutil.walk_packages(manyhands.__path__, "manyhands."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError:  # something optional is not installed
                continue
    graph = manyhands.capture(torch.nn.Conv2d(1, 1, 1), torch.zeros(2, 1, 2, 2))
    assert graph.network.layers
    assert len(os.listdir("/proc/self/task")) == 1, "only a process of one thread may divide"


def _wait(child: int, limit_seconds: float = 150.0) -> int:
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve() -> None:
    _import_all()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(asked)
        os.write(1, f"{_wait(child)}\n".encode())


def _become(asked: dict[str, object]) -> NoReturn:
    """The command itself, to its end. As Python ends, but for taking all modules apart again."""
    from manyhands.cli.main import main

    opened = [os.open(os.devnull, os.O_RDONLY)]
    for path in asked["said"]:  # type: ignore[attr-defined]
        opened.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    for number, descriptor in enumerate(opened):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])  # type: ignore[call-overload]
    os.chdir(str(asked["cwd"]))
    sys.argv = ["manyhands", *asked["words"]]  # type: ignore[misc]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve()
