"""One process that has loaded PyTorch, and its children: as good as processes of their own, and none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from manyhands import __version__
from manyhands.facts.cluster import Cluster
from manyhands.runtime import fork_server as fork_servers
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.fork_server import Child, ForkServer, NoForkServer, fork_server_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only"),
    pytest.mark.xdist_group("fork_server"),
]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    found = ForkServer(1)
    yield found
    found.close()


def run(fork_server: ForkServer, path: Path, *words: str, **environment: str) -> Child:
    with path.open("wb") as output:
        return fork_server.fork(words, {**os.environ, **environment}, output.fileno())


def waiting(fork_server: ForkServer, path: Path) -> Child:
    """A worker that looks for a coordinator who is not there."""
    words = ("worker", "--join", "127.0.0.1:9", "--token", "nobody knows", "--name", "x", "--wait", "60")
    return run(fork_server, path, *words, "--parent", str(fork_server.process.pid), MANYHANDS_DIE_WITH_PARENT="1")


def soon(is_so: Callable[[], bool], limit_seconds: float = 10.0) -> bool:
    end = time.monotonic() + limit_seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


def is_gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_a_child_runs_a_command_and_says_how_it_ended(fork_server: ForkServer, tmp_path: Path) -> None:
    right, wrong = (run(fork_server, tmp_path / words[0], *words) for words in (["--version"], ["wurker"]))
    assert (right.wait(30), wrong.wait(30)) == (0, 2)
    assert (right.poll(), right.returncode) == (0, 0)
    assert (tmp_path / "--version").read_text() == f"manyhands {__version__}\n"
    assert "No such command 'wurker'" in (tmp_path / "wurker").read_text()
    right.send_signal(signal.SIGTERM)  # nobody is there: nothing happens


def test_a_child_is_found_by_its_name(fork_server: ForkServer, tmp_path: Path) -> None:
    """`ps` and `pgrep -f` show what it runs, not what its parent does; more than there is room for is cut."""
    child = waiting(fork_server, tmp_path / "x")
    assert soon(lambda: "x" in psutil.Process(child.pid).cmdline())
    shown = [word for word in psutil.Process(child.pid).cmdline() if word]
    assert shown[1:6] == ["-P", "-m", "manyhands", "worker", "--join"]
    assert shown[-2:] == ["--parent", str(fork_server.process.pid)]
    child.kill()
    long = run(fork_server, tmp_path / "long", "worker", "--join", "127.0.0.1:9", "--wait", "60", "--token", 1000 * "y")
    assert soon(lambda: "worker" in psutil.Process(long.pid).cmdline())
    assert psutil.Process(long.pid).cmdline()[-1].startswith("yyy")
    long.kill()
    assert {child.wait(30), long.wait(30)} == {-signal.SIGKILL}


def test_a_signal_in_the_middle_of_a_wait_may_ask_too(fork_server: ForkServer, tmp_path: Path) -> None:
    """The second Ctrl-C kills workers while the first one's end waits for them, in one thread."""
    child = waiting(fork_server, tmp_path / "x")

    def handler(number: int, frame: object) -> None:
        assert child.poll() is None
        child.kill()
        assert child.wait(30) == -signal.SIGKILL

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        assert child.wait(30) == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_child_is_waited_for_where_many_files_are_open() -> None:
    """Descriptors beyond those that select() counts to."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 2048:
        pytest.skip("so many files cannot be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    reading, writing = os.pipe()
    high = os.dup2(reading, 1500)
    try:
        child = Child(os.getpid(), high)
        assert child.poll() is None
        os.write(writing, (7).to_bytes(8, "little"))
        assert child.wait(5) == 7
    finally:
        os.close(reading)
        os.close(writing)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_child_is_as_if_it_had_been_started_by_itself(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        child = waiting(fork_server, tmp_path / "words")
    finally:
        os.sched_setaffinity(0, cores)
    try:
        place = Path(f"/proc/{child.pid}")
        assert soon(lambda: os.getsid(child.pid) == child.pid)
        assert soon(lambda: place.joinpath("cwd").resolve() == tmp_path.resolve())
        assert soon(lambda: os.sched_getaffinity(child.pid) == {max(cores)})
        opened = [os.devnull, str(tmp_path / "words"), str(tmp_path / "words")]
        assert soon(lambda: [os.readlink(place / "fd" / number) for number in "012"] == opened)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        assert child.poll() is None
    finally:
        child.kill()
    assert child.wait(10) == -signal.SIGKILL


@pytest.mark.usefixtures("own_fork_servers")
def test_children_end_with_the_fork_server_and_there_is_another_one(tmp_path: Path) -> None:
    first = fork_server_for(1, 2)
    child = waiting(first, tmp_path / "words")
    assert fork_server_for(1, 1) is first  # it is there already: one worker has it too
    assert soon(lambda: os.getsid(child.pid) == child.pid)
    first.process.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert soon(lambda: is_gone(child.pid))
    with pytest.raises(NoForkServer):
        waiting(first, tmp_path / "words")
    with pytest.raises(NoForkServer, match="single"):
        fork_server_for(1, 1)
    second = fork_server_for(1, 2)
    assert second is not first
    fork_servers.close_fork_servers()
    assert not second.is_alive


_COORDINATOR = """
import os, signal, sys
from manyhands.facts.cluster import Cluster
from manyhands.runtime.coordinator import Coordinator
coordinator = Coordinator.local_cluster(Cluster.local(2))
print(*(process.pid for process in coordinator.local.processes.values()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nobody_is_left_where_the_coordinator_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", _COORDINATOR], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    assert soon(lambda: all(map(is_gone, workers)))


def test_workers_are_children_of_one_unless_they_are_to_be_apart() -> None:
    with Coordinator.local_cluster(Cluster.local(2)) as coordinator:
        parents = {psutil.Process(process.pid).ppid() for process in coordinator.local.processes.values()}
    assert len(parents) == 1
    assert parents != {os.getpid()}
    with Coordinator.local_cluster(Cluster.local(2), apart=True) as coordinator:
        parents = {psutil.Process(process.pid).ppid() for process in coordinator.local.processes.values()}
    assert parents == {os.getpid()}


_IDLE = """
import socket, sys
from manyhands.runtime import fork_server
print(fork_server.tend(socket.socket(fileno=int(sys.argv[1])), idle_seconds=0.2))
"""


@pytest.mark.parametrize("said", [b"", b"\xff" * 8, (2**40).to_bytes(8, "little"), b"\4" + bytes(7) + b"\xc1abc"])
def test_it_ends_where_nobody_asks_and_where_what_is_asked_makes_no_sense(said: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        process = subprocess.Popen(
            [sys.executable, "-c", _IDLE, str(far.fileno())], pass_fds=[far.fileno()], stdout=subprocess.PIPE, text=True
        )
        null = os.open(os.devnull, os.O_RDWR)
        if said:
            socket.send_fds(near, [said[:8]], [null, null])
            near.sendall(said[8:])
        os.close(null)
        assert process.communicate(timeout=30)[0] == "None\n"
        assert process.returncode == 0


def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers.sys, "platform", "darwin")
    with pytest.raises(NoForkServer, match="system"):
        fork_server_for(1, 4)
