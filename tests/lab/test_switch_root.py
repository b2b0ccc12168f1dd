"""The switch between network namespaces: real frames, real delays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` command here"),
]

COUNT = 3
CLONE_NEWNET = 0x40000000
RUN = f"""
import select, sys
from manyhands.lab.switch import Switch
switch = Switch([f"p{{n}}" for n in range({COUNT})], lambda *_: 0.0)
over = False
def on_idle(now):
    global over
    if select.select([sys.stdin], [], [], 0)[0]:
        words = sys.stdin.readline().split()
        over = not words
        if words == ["count"]:
            print(switch.frames, switch.bytes, switch.dropped, flush=True)
        elif words:
            for sender, receiver in [(0, 1), (1, 0)]:
                switch.set_delay(sender, receiver, float(words[0]))
            print("set", flush=True)
    return now + 0.01
print("ready", flush=True)
switch.run(lambda: over, on_idle)
"""
"""The switch as a process: a number sets the delay between members 0 and 1, `count` asks, the end of input ends it."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Net:
    """A hub with a switch in it, and members around it."""

    def __init__(self) -> None:
        self.tag = f"mh-switch{os.getpid()}"
        self.process: subprocess.Popen[str] | None = None

    def up(self) -> None:
        hub = f"{self.tag}-hub"
        ip("netns", "add", hub)
        for member in range(COUNT):
            space = f"{self.tag}-{member}"
            ip("netns", "add", space)
            ip("-n", hub, "link", "add", f"p{member}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", space, "link", "set", "eth0", "address", f"02:6d:68:00:00:{member:02x}")
            ip("-n", space, "address", "add", f"10.77.0.{member + 1}/16", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", hub, "link", "set", f"p{member}", "up")
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", hub, sys.executable, "-c", RUN],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._answer() == "ready"

    def down(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                assert self.process.wait(5) == 0
            finally:
                self.process.kill()
                self.process.wait()
        for name in ("hub", *range(COUNT)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", f"{self.tag}-{name}")

    def _answer(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, words: str) -> str:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self._answer()

    def socket(self, member: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket in a member's namespace: a thread enters it, and the socket stays there."""
        made: list[socket.socket] = []

        def make() -> None:
            with open(f"/run/netns/{self.tag}-{member}") as space:
                assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET) == 0
            made.append(socket.socket(socket.AF_INET, kind))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        made[0].settimeout(10)
        return made[0]

    def connected(self, sender: int, receiver: int) -> tuple[socket.socket, socket.socket]:
        with self.socket(receiver) as listening:
            listening.bind(("", 0))
            listening.listen()
            sending = self.socket(sender)
            sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sending.connect((f"10.77.0.{receiver + 1}", listening.getsockname()[1]))
            accepted = listening.accept()[0]
            accepted.settimeout(10)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sending, accepted


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    made = Net()
    try:
        made.up()
        yield made
    finally:
        made.down()


def round_trip(net: Net, count: int = 40) -> float:
    """The median, over TCP, between members 0 and 1."""
    sending, accepted = net.connected(0, 1)
    with sending, accepted:

        def echo() -> None:
            while text := accepted.recv(100):
                accepted.send(text)

        thread = threading.Thread(target=echo)
        thread.start()
        took = []
        for _ in range(count):
            start = time.perf_counter()
            sending.send(b"x" * 64)
            sending.recv(100)
            took.append(time.perf_counter() - start)
            time.sleep(0.002)
        sending.shutdown(socket.SHUT_WR)
        thread.join()
    return statistics.median(took)


def best_error(net: Net, seconds: float) -> float:
    """Of three tries: this machine may have other things to do."""
    assert net.ask(str(seconds)) == "set"
    error = 1.0
    for _ in range(3):
        error = min(error, abs(round_trip(net) / (2 * seconds) - 1))
        if error < 0.10:
            break
    return error


@pytest.mark.parametrize("seconds", [0.001, 0.005, 0.020, 0.040])
def test_delays_are_what_was_asked(net: Net, seconds: float) -> None:
    assert best_error(net, seconds) < 0.10


@pytest.mark.parametrize("seconds", [0.001, 0.010])
def test_delays_hold_while_all_cores_compute(net: Net, seconds: float) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.2)
        assert best_error(net, seconds) < 0.10
    finally:
        for each in busy:
            each.kill()
            each.wait()


def test_much_data_passes_whole_and_unhurt(net: Net) -> None:
    """64 MB at the speed of this machine: nothing is dropped, and the frames are large."""
    net.ask("0.0003")
    before = [int(word) for word in net.ask("count").split()]
    sending, accepted = net.connected(0, 1)
    data = os.urandom(2**20) * 64
    got = bytearray()
    with accepted:

        def take() -> None:
            while text := accepted.recv(2**20):
                got.extend(text)

        thread = threading.Thread(target=take)
        thread.start()
        start = time.perf_counter()
        with sending:
            sending.sendall(data)
        thread.join()
        took = time.perf_counter() - start
    frames, size, dropped = (int(now) - then for now, then in zip(net.ask("count").split(), before))
    assert bytes(got) == data
    assert dropped == 0
    assert size > len(data)
    assert frames < len(data) / 5000  # acknowledgements are among them
    assert len(data) / took > 125e6 / 4


def test_datagrams_pass_with_right_checksums(net: Net) -> None:
    with net.socket(2, socket.SOCK_DGRAM) as getting, net.socket(0, socket.SOCK_DGRAM) as giving:
        getting.bind(("", 0))
        for size in (0, 1, 1472, 1473, 40_000):
            giving.sendto(b"\xa5" * size, ("10.77.0.3", getting.getsockname()[1]))
            assert getting.recv(65_536) == b"\xa5" * size


def test_a_cable_is_pulled_and_put_back(net: Net) -> None:
    net.ask("0.001")
    sending, accepted = net.connected(0, 1)
    with sending, accepted:
        for _ in range(2):
            ip("-n", f"{net.tag}-hub", "link", "set", "p1", "down")
            sending.send(b"x")
            accepted.settimeout(0.3)
            with pytest.raises(TimeoutError):
                accepted.recv(1)
            ip("-n", f"{net.tag}-hub", "link", "set", "p1", "up")
            accepted.settimeout(10)
            assert accepted.recv(1) == b"x"
    assert best_error(net, 0.005) < 0.10


def test_an_idle_switch_takes_no_processor_time(net: Net) -> None:
    assert net.process is not None
    stat = f"/proc/{net.process.pid}/schedstat"

    def used() -> float:
        with open(stat) as file:
            return int(file.read().split()[0]) / 1e9

    before = used()
    time.sleep(2)
    assert (used() - before) / 2 < 0.05
