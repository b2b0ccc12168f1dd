"""Memory in common between processes: both ways at once, and what is left when one of them is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from endpoint_pairs import wait_until, with_peer
from peer_process import SIZE, exchange, random_messages

from manyhands.facts.errors import WorkerLost
from manyhands.transport.security import Security, new_token
from manyhands.transport.shared_memory import FillingRing, Unshared, find

pytestmark = pytest.mark.slow  # processes of their own for each test


def needs_root(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (
        pytest.mark.root,
        pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces and other users need root"),
        pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` command here"),
    ):
        test = mark(test)
    return test


def memory_in_common() -> set[str]:
    """What any process of this system can see by name."""
    return set(os.listdir("/dev/shm"))


def maps_memory(process: int) -> bool:
    with open(f"/proc/{process}/maps") as file:
        return "/memfd:manyhands" in file.read()


def descriptors() -> list[str]:
    """Of this process, those that are memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the listing's own
    return [target for target in found if target.startswith("/memfd:manyhands")]


def test_random_sizes_both_ways_at_once(security: Security) -> None:
    with with_peer(security, "random", 10) as (b, process):
        own, theirs = random_messages(1), random_messages(0)
        exchange(b, "a", own, theirs)
        b.mailbox.receive("a", 0, "right", [torch.zeros(1, dtype=torch.uint8)])
        assert b.sent_bytes["a"] == sum(map(len, own.values()))
        assert b.mailbox.received_bytes["a"] == sum(map(len, theirs.values())) + 1
        sharing = b._connections["a"].sharing
        assert sharing.filling is not None
        assert sharing.emptying is not None
        assert maps_memory(process)


def test_a_peer_killed_with_its_message_in_the_ring(security: Security) -> None:
    names = memory_in_common()
    with with_peer(security, "stall", 30) as (b, process):
        killed: list[float] = []

        def kill() -> None:
            wait_until(lambda: b.mailbox.received_bytes["a"] > SIZE // 4, 30)
            assert b._connections["a"].sharing.emptying is not None
            assert memory_in_common() == names
            os.kill(process, signal.SIGKILL)
            killed.append(time.monotonic())

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(WorkerLost, match="a was lost: its connection to b broke"):
            b.mailbox.receive("a", 0, "x", [torch.zeros(SIZE, dtype=torch.uint8)])
        noticed = time.monotonic()
        thread.join()
        assert noticed - killed[0] < 15  # silence is noticed after 30
        assert memory_in_common() == names
        wait_until(lambda: not descriptors())
        assert not maps_memory(os.getpid())


def test_a_receiver_killed_while_the_ring_is_full(security: Security) -> None:
    """'a' is stopped, so that it takes nothing, then killed: nothing here waits for it."""
    names = memory_in_common()
    with with_peer(security, "echo", 30) as (b, process):
        content = torch.ones(SIZE, dtype=torch.uint8)
        received = threading.Event()

        def stop() -> None:
            wait_until(lambda: b._connections["a"].sharing.filling is not None)
            os.kill(process, signal.SIGSTOP)
            received.set()

        thread = threading.Thread(target=stop)
        thread.start()
        step = 0
        while not received.is_set() or step < 8:
            b.send("a", step, "x", [content])
            step += 1
            time.sleep(0.01)
        thread.join()
        assert b._connections["a"].outbox.has_work, "there is more than ring and link hold"
        os.kill(process, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerLost):
            b.mailbox.receive("a", 0, "x", [content])
        b.release()
        b.flush(10)
        assert time.monotonic() - start < 15  # silence is noticed after 30
        wait_until(lambda: not descriptors())
        assert memory_in_common() == names


def test_a_process_killed_before_anybody_found_its_offer() -> None:
    """The moment in which memory with a name would be left behind."""
    names = memory_in_common()
    code = (
        "import time; from manyhands.transport.shared_memory import FillingRing;"
        "r = FillingRing(2**20); print(r.place.decode(), r.key.hex(), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    place, key = process.stdout.readline().split()
    assert memory_in_common() == names
    process.kill()
    process.wait()
    process.stdout.close()
    assert memory_in_common() == names
    with pytest.raises(Unshared):
        find(place.encode(), 2**20, bytes.fromhex(key))


FORKED = """
import os, sys
import torch
from manyhands.transport.security import Security
from manyhands.transport.tcp import TcpEndpoint

here, there = os.pipe(), os.pipe()
name, other = ("b", "a") if os.fork() else ("a", "b")
mine, theirs = (here, there) if name == "b" else (there, here)
endpoint = TcpEndpoint(name, Security(sys.argv[1], sys.argv[2] == "True"), limit_seconds=20)
os.write(mine[1], f"{endpoint.address[1]} ".encode().ljust(16))
port = int(os.read(theirs[0], 16))
endpoint.mailbox.open(0, {(other, "x"): 2**22, (other, "y"): 2**22})
endpoint.connect({other: ("127.0.0.1", port)}, 20)
for topic in "xy":
    content, into = torch.full((2**22,), ord(name), dtype=torch.uint8), torch.zeros(2**22, dtype=torch.uint8)
    endpoint.send(other, 0, topic, [content])
    endpoint.mailbox.receive(other, 0, topic, [into])
    assert (into == ord(other)).all()
endpoint.flush(10)
sharing = endpoint._connections[other].sharing
assert sharing.filling is not None and sharing.emptying is not None, sharing.refusal
if name == "b":
    os.write(mine[1], b"done".ljust(16))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
else:
    os.read(theirs[0], 16)
endpoint.close()
"""


def test_workers_that_one_process_divided_into(security: Security) -> None:
    words = [sys.executable, "-c", FORKED, security.token, str(security.encrypted)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


# Where the kernel must say no


@needs_root
def test_another_user() -> None:
    code = (
        "import os, time; from manyhands.transport.shared_memory import FillingRing; os.setresuid(65534, 65534, 65534);"
        "r = FillingRing(2**20); print(r.place.decode(), r.key.hex(), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        place, key = process.stdout.readline().split()
        with pytest.raises(Unshared, match="another user's"):
            find(place.encode(), 2**20, bytes.fromhex(key))
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


@needs_root
def test_a_process_of_another_network_namespace_is_not_given_it() -> None:
    ring = FillingRing(2**20)
    code = (
        "import sys; from manyhands.transport.shared_memory import find, Unshared\n"
        "try:\n    find(sys.argv[1].encode(), 2**20, bytes.fromhex(sys.argv[2]))\n"
        "except Unshared as error:\n    print(error)\nelse:\n    print('found')"
    )
    words = [sys.executable, "-c", code, ring.place.decode(), ring.key.hex()]
    try:
        for prefix, said in (([], "found"), (["unshare", "-n"], "[Errno 111] Connection refused")):
            result = subprocess.run([*prefix, *words], capture_output=True, text=True, timeout=60, check=True)
            assert result.stdout.strip() == said
    finally:
        ring.close()


@pytest.fixture
def space() -> Iterator[tuple[str, str]]:
    """A namespace with a cable to this one: its name, and the address of this end."""
    tag, subnet = f"mhshm{os.getpid() % 10**6}", f"10.214.{os.getpid() % 250}"
    commands = [
        f"netns add {tag}",
        f"link add {tag} type veth peer name eth0 netns {tag}",
        f"address add {subnet}.1/24 dev {tag}",
        f"link set {tag} up",
        f"-n {tag} address add {subnet}.2/24 dev eth0",
        f"-n {tag} link set eth0 up",
        f"-n {tag} link set lo up",
    ]
    try:
        for command in commands:
            try:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"namespaces cannot be made here: {error.stderr}")
        yield tag, f"{subnet}.1"
    finally:
        subprocess.run(["ip", "link", "delete", tag], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", tag], capture_output=True, check=False)


@needs_root
def test_devices_of_a_lab_do_not_pass_their_network_by(space: tuple[str, str]) -> None:
    name, address = space
    security = Security(new_token(), True)
    with with_peer(security, "random", 10, address, ["ip", "netns", "exec", name]) as (b, process):
        exchange(b, "a", random_messages(1), random_messages(0))
        b.mailbox.receive("a", 0, "right", [torch.zeros(1, dtype=torch.uint8)])
        sharing = b._connections["a"].sharing
        assert sharing.refusal == "another host"
        assert sharing.filling is None
        assert sharing.emptying is None
        assert not maps_memory(process)


@needs_root
def test_slots_of_a_lab_device_share(space: tuple[str, str]) -> None:
    """An address of this host that is not loopback, within one namespace."""
    _, address = space
    with with_peer(Security(new_token(), True), "random", 10, address) as (b, _):
        exchange(b, "a", random_messages(1), random_messages(0))
        b.mailbox.receive("a", 0, "right", [torch.zeros(1, dtype=torch.uint8)])
        assert b._connections["a"].sharing.filling is not None
