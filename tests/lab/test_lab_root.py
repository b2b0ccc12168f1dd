"""A lab's devices are on their own network, as slow and small as asked, break on command, and leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab_places import CORE_GFLOPS, ROOT_ONLY, assert_nothing_left, cluster, leftovers, run_on, small_lab, tag

from manyhands.facts.cluster import LabCluster
from manyhands.facts.errors import BadValue, LabError, UnknownName
from manyhands.facts.lab import play
from manyhands.facts.trace import parse_trace
from manyhands.lab import measure, record
from manyhands.lab.check import check
from manyhands.lab.lab import Lab
from manyhands.lab.removal import labs, take_down
from manyhands.lab.spaces import COORDINATOR_SPACE, Spaces

pytestmark = ROOT_ONLY
_PACKETS_FOR_FIVE_SECONDS = 40 * 1500 / 5
"""A rate so low that five seconds are measured."""


def wait_until(is_so: Callable[[], bool], limit_seconds: float = 10) -> None:
    end = time.monotonic() + limit_seconds
    while not is_so():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def test_a_device_is_alone_on_its_network_and_pinned() -> None:
    with small_lab(0.3, 0.2) as lab:
        said = run_on(lab, "d1", "import os, socket; print(os.sched_getaffinity(0), len(socket.if_nameindex()))")
        assert said.stdout.strip() == f"{set(lab.played.seat('d1').cores)} 2", "lo and eth0"
        far = f"import socket; socket.create_connection(('{lab.address('d2')}', 9), 2)"
        assert "Connection refused" in run_on(lab, "d1", far).stderr  # it is there, and nobody listens
        assert "Connection refused" in run_on(lab, COORDINATOR_SPACE, far).stderr
        with pytest.raises(UnknownName):
            lab.words("d3")
        with pytest.raises(LabError, match="is up already"):
            Lab.up(lab.played, tag())
    own = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    assert "10.77." not in own, "an address outside of the lab's namespaces"


def test_what_is_asked_for_is_what_there_is() -> None:
    """The whole of `lab check`; processor shares are looked at generously: other tests run beside this one."""
    with small_lab(0.3, 0.1, delay=0.005, memory_bytes=200 * 10**6) as lab:
        found = list(check(lab, lambda text: None))
        kinds = [one.what for one in found]
        assert kinds == ["rate up", "rate down"] * 2 + ["round trip"] * 2 + ["share"] * 2 + ["memory"]
        for one in found:
            assert one.got is not None
            assert one.is_good or (one.what == "share" and one.error < 0.5), one
        assert lab.status()[0].group.oom_kills == 1


def test_a_pulled_cable_and_back() -> None:
    with small_lab(0.3, 0.3) as lab:
        listen = subprocess.Popen(
            [*lab.words("d2"), sys.executable, "-m", "manyhands.lab.probes", "echo", lab.address("d2"), "7001", "20"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert listen.stdout is not None
        assert listen.stdout.readline() == "listening\n"
        ask = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.5);"
            f"s.sendto(b'x', ('{lab.address('d2')}', 7001)); print(s.recv(9))"
        )
        assert run_on(lab, "d1", ask).stdout == "b'x'\n"
        lab.cut("d2")
        assert [one.is_cut for one in lab.status()] == [False, True]
        assert "timed out" in run_on(lab, "d1", ask).stderr
        lab.heal("d2")
        wait_until(lambda: run_on(lab, "d1", ask).stdout == "b'x'\n")
        listen.kill()
        listen.communicate()


def test_frozen_slowed_and_killed() -> None:
    with small_lab(0.4, 0.3) as lab:
        process = subprocess.Popen([*lab.words("d1"), sys.executable, "-m", "manyhands.lab.probes", "burn", "60"])
        wait_until(lambda: lab.status()[0].group.cpu_seconds > 0.1)
        lab.freeze("d1")
        assert lab.status()[0].group.is_frozen
        before = lab.status()[0].group.cpu_seconds
        time.sleep(0.3)
        assert lab.status()[0].group.cpu_seconds - before < 0.02
        lab.heal("d1")
        wait_until(lambda: lab.status()[0].group.cpu_seconds - before > 0.05)
        lab.slow("d1", 0.25)
        before = lab.status()[0].group.cpu_seconds
        time.sleep(1.0)
        assert lab.status()[0].group.cpu_seconds - before < 0.2
        with pytest.raises(BadValue, match=r"1\.5 times as fast"):
            lab.slow("d1", 1.5)
        lab.freeze("d1")
        lab.kill("d1")
        assert process.wait(5) == -signal.SIGKILL
        assert lab.status()[0].processes == 0


def test_a_port_follows_its_trace(tmp_path: Path) -> None:
    """Twice as slow at scale 2, and its moments come half as often."""
    trace = tmp_path / "trace.txt"
    trace.write_text("0 80\n3 8\n")
    asked = LabCluster(cluster(0.3, 0.3, name=tag()), scale=2.0, traces=(("d1", str(trace)),))
    played = play(asked, core_gflops=CORE_GFLOPS, cores=sorted(os.sched_getaffinity(0)))
    with Lab.up(played, tag(), owned=True) as lab:
        began = time.monotonic()
        first = measure.rate(lab, "d1", COORDINATOR_SPACE, 5e6)
        assert time.monotonic() - began < 5.5, "too slow to tell: the trace has moved on"
        time.sleep(max(0.0, 6.5 - (time.monotonic() - began)))
        second = measure.rate(lab, COORDINATOR_SPACE, "d1", 5e5)
        assert time.monotonic() - began < 12
    assert first == pytest.approx(5e6, rel=0.2)  # how exact rates are is tested elsewhere
    assert second == pytest.approx(5e5, rel=0.2)
    assert_nothing_left()


def test_a_port_follows_both_directions(tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("0 8 40\n4 40 8\n")
    asked = LabCluster(cluster(0.3, 0.3, name=tag()), traces=(("d1", str(trace)),))
    played = play(asked, core_gflops=CORE_GFLOPS, cores=sorted(os.sched_getaffinity(0)))
    with Lab.up(played, tag(), owned=True) as lab:
        began = time.monotonic()
        wait_until(lambda: lab.spaces.rates("d1") == pytest.approx((1e6, 5e6)))
        wait_until(lambda: lab.spaces.rates("d1") == pytest.approx((5e6, 1e6)))
        assert time.monotonic() - began < 6
    assert_nothing_left()


RECORDED = Path(__file__).parents[3] / "shared/data/traces/ghent-4g/bus_0001.txt"


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded traces are not here")
def test_a_port_follows_a_recorded_trace() -> None:
    """Bytes that came in the first seconds against what the trace allows in them."""
    asked = LabCluster(cluster(0.3, 0.3, name=tag()), traces=(("d1", str(RECORDED)),))
    played = play(asked, core_gflops=CORE_GFLOPS, cores=sorted(os.sched_getaffinity(0)))
    trace = parse_trace(RECORDED.read_text(), "")
    with Lab.up(played, tag(), owned=True) as lab:
        began = time.monotonic()
        got = measure.rate(lab, COORDINATOR_SPACE, "d1", _PACKETS_FOR_FIVE_SECONDS)
        ended = time.monotonic()
        moments = [began + 0.1 + i * 0.1 for i in range(int((ended - began - 0.1) / 0.1))]
        allowed = [trace.at(moment - began)[0] for moment in moments[-50:]]
    assert max(allowed) > 1.3 * min(allowed), "the trace does not move here: nothing was followed"
    assert got == pytest.approx(0.956 * sum(allowed) / len(allowed), rel=0.1)


OWNER = """
import os, sys, time
from lab_places import *
asked = LabCluster(cluster(0.3, 0.3, name=sys.argv[1]))
played = play(asked, core_gflops=CORE_GFLOPS, cores=sorted(os.sched_getaffinity(0)))
lab = Lab.up(played, sys.argv[1], owned=sys.argv[2] == "1")
words = [*lab.words("d1"), sys.executable, "-m", "manyhands.lab.probes", "burn", "60"]
subprocess.Popen(words, stdout=subprocess.DEVNULL)
print("up", flush=True)
time.sleep(60)
"""


def killed_owner(*, owned: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, tag(), str(int(owned))], stdout=subprocess.PIPE, cwd=Path(__file__).parent
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.communicate()


def test_the_owner_is_killed_and_the_lab_goes_down_by_itself() -> None:
    try:
        killed_owner(owned=True)
        wait_until(lambda: not leftovers())
    finally:
        take_down(tag())


def test_nobody_owns_it_and_a_later_down_cleans_up() -> None:
    try:
        killed_owner(owned=False)
        lab = Lab.find(tag())
        wait_until(lambda: lab.status()[0].processes == 1)
        assert lab.is_supervised
        assert lab.record.keeper is not None
        os.kill(lab.record.keeper.pid, signal.SIGKILL)
        wait_until(lambda: not lab.is_supervised)
    finally:
        take_down(tag())
    assert_nothing_left()
    take_down(tag())


def test_what_is_not_ours_is_not_touched() -> None:
    """A namespace that looks like a lab's: nobody has written it down."""
    space = f"mh-{tag()}"
    subprocess.run(["ip", "netns", "add", space], check=True)
    try:
        assert tag() not in labs()
        with pytest.raises(LabError, match=f"{space} are there already, and no lab's"), small_lab(0.3, 0.3):
            pass
        assert space in Spaces.names_of(tag())
    finally:
        subprocess.run(["ip", "netns", "delete", space], check=True)
    assert_nothing_left()


def test_of_two_at_once_one_comes_up() -> None:
    asked = LabCluster(cluster(0.3, 0.3, name=tag()))
    played = play(asked, core_gflops=CORE_GFLOPS, cores=sorted(os.sched_getaffinity(0)))

    def bring_up() -> Lab | LabError:
        try:
            return Lab.up(played, tag(), owned=True)
        except LabError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        found = [one.result() for one in [pool.submit(bring_up) for _ in range(4)]]
    up = [one for one in found if isinstance(one, Lab)]
    try:
        assert len(up) == 1
        assert all("is up already" in one.message for one in found if isinstance(one, LabError))
        assert f"belongs to process {os.getpid()}" in next(o.message for o in found if isinstance(o, LabError))
        assert up[0].is_supervised
        assert [one.name for one in up[0].status()] == ["d1", "d2"]
    finally:
        for one in up:
            one.down()
    assert_nothing_left()


def test_a_supervisor_that_cannot_be_written_down_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[record.LabRecord] = []

    def full(known: record.LabRecord) -> None:
        saved.append(known)
        raise OSError("no space left")

    monkeypatch.setattr(record, "save", full)
    with pytest.raises(OSError, match="no space left"), small_lab(0.3, 0.3):
        pass
    assert saved[0].keeper is not None
    assert_nothing_left()


def test_half_a_lab_is_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails on the way up, nothing stays."""

    def fail(name: str) -> None:
        assert len(leftovers()) > 3
        raise LabError("the supervisor did not start")

    monkeypatch.setattr("manyhands.lab.lab._start_supervisor", fail)
    with pytest.raises(LabError, match="did not start"), small_lab(0.3, 0.3):
        pass
    assert_nothing_left()
