"""`manyhands lab` as typed. What needs root is in tests/lab; one walk through all commands is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from command_processes import PROGRAM
from forking import run_command

from manyhands.cli import lab as lab_command
from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.link import DirectedLink, Link
from manyhands.lab.control_groups import GroupStatistics
from manyhands.lab.lab import DeviceStatus

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root"),
    pytest.mark.skipif(shutil.which("tc") is None, reason="there is no `tc` command here"),
]


def manyhands(*words: str, code: int = 0) -> str:
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.quick(every=13)
@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["lab", "up", "pi3x7"], 3, "Did you mean pi3x6"),
        (["lab", "up", "local:2"], 10, "this machine itself"),
        (["lab", "up", "home", "--trace", "nowhere.txt"], 10, "there is no file"),
        (["lab", "status", "no_such_lab"], 17, "There is no lab called 'no_such_lab'"),
        (["lab", "cut", "pi", "--lab", "no_such_lab"], 17, "There is no lab called 'no_such_lab'"),
        (["lab", "check", "--lab", "no_such_lab"], 17, "There is no lab called 'no_such_lab'"),
        (["lab", "status", "-l", "no_such_lab"], 17, "There is no lab called 'no_such_lab'"),
        (["lab", "status", "one", "--lab", "another"], 10, "Which lab: one or another?"),
        (["lab", "cutt", "pi"], 2, "No such command 'cutt'"),
        (["train", "--lab", "pi3x7"], 3, "Did you mean pi3x6"),
        (["train", "--lab", "home", "--devices", "2"], 10, "--devices cannot be given beside --lab home"),
        (["train", "--scale", "2"], 10, "Name one: --lab"),
        (["train", "--lab", "home", "--share", "samples", "--batch-size", "3"], 10, "4 devices cannot share"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.xdist_group("commands")
def test_slips_of_the_pen(words: list[str], code: int, part: str) -> None:
    done = run_command(*words)
    assert done.returncode == code, done.stdout + done.stderr
    assert part in done.stdout + done.stderr


class TestWalk:
    """Up, look, run, break, heal, down."""

    pytestmark = needs_root

    def read_only_a_little(self, *words: str) -> None:
        """As `| head` does: the command ends, says nothing, and its exit code is a shell's."""
        with subprocess.Popen([PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().split()[1] == "y"
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 141

    def test_through_all_commands(self, tmp_path: Path) -> None:
        name = f"w{os.getpid()}"
        file = tmp_path / "two.yaml"
        file.write_text(
            "name: two\ndevices: [{kind: pi4, count: 2, memory: 200 MB}]\nlink: {rate: 50 Mbit/s, delay: 2 ms}\n"
        )
        try:
            said = manyhands("lab", "up", str(file), "--name", name, "--scale", "2")
            assert "time scale 2: computing and links are 2 times slower" in said
            assert "Any pair: 25 Mbit/s, 4 ms one way. The coordinator has no limit and no delay." in said
            assert said.count("well") == 2
            lines = manyhands("lab", "run", "--lab", name, "--", "hostname", "-I").splitlines()
            assert sorted(line.split() for line in lines) == [["pi4-1", "10.77.0.2"], ["pi4-2", "10.77.0.3"]]
            one = manyhands("lab", "run", "--lab", name, "-d", "pi4-2", "--", "sh", "-c", "exit 7", code=7)
            assert one == ""
            manyhands("lab", "run", "--lab", name, "-d", "pi4-9", "--", "true", code=3)
            manyhands("lab", "cut", "pi4-1", "--lab", name)
            manyhands("lab", "freeze", "pi4-2", "--lab", name)
            manyhands("lab", "slow", "pi4-2", "0.5", "--lab", name)
            state = json.loads(manyhands("lab", "status", name, "--json"))
            assert state["scale"] == 2.0
            assert state["kept"]
            assert [one["is_cut"] for one in state["devices"]] == [True, False]
            assert [one["group"]["is_frozen"] for one in state["devices"]] == [False, True]
            assert state["devices"][1]["state"] == ["frozen", "slow 0.5"]
            assert state["devices"][1]["share_now"] == pytest.approx(state["devices"][1]["share"] / 2, rel=0.01)
            assert "frozen, slow 0.5" in manyhands("lab", "status", "--lab", name)
            assert "The smallest factor for pi4-2 is" in manyhands(
                "lab", "slow", "pi4-2", "0.0001", "-l", name, code=10
            )
            manyhands("lab", "heal", "--lab", name)
            state = json.loads(manyhands("lab", "status", name, "--json"))
            assert not any(one["is_cut"] or one["group"]["is_frozen"] for one in state["devices"])
            self.read_only_a_little("lab", "run", "--lab", name, "--", "yes")
            with subprocess.Popen([PROGRAM, "lab", "run", "-l", name, "-d", "pi4-1", "--", "sleep", "60"]):
                end = time.monotonic() + 20
                while not json.loads(manyhands("lab", "status", name, "--json"))["devices"][0]["processes"]:
                    assert time.monotonic() < end
                assert "Something runs on pi4-1" in manyhands("lab", "check", "--lab", name, code=17)
                manyhands("lab", "kill", "pi4-1", "--lab", name)
            manyhands("lab", "slow", "pi4-1", "2", "--lab", name, code=10)
        finally:
            manyhands("lab", "down", "--lab", name)
        assert f"There is no lab called '{name}'" in manyhands("lab", "down", name, code=17)


def status_of(**changes: object) -> DeviceStatus:
    group = GroupStatistics(0.0, 0.0, 0, 0, None, int(str(changes.get("kills", 0))), bool(changes.get("frozen")))
    return DeviceStatus("x", "10.77.0.2", 0.5, (0,), bool(changes.get("cut")), 0, group)


def test_a_devices_state_is_what_is_to_be_said() -> None:
    assert lab_command._state(status_of(), 0.5, 0.5) == ()
    assert lab_command._state(status_of(), 0.4999, 0.5) == (), "the kernel rounds"
    assert lab_command._state(status_of(), 0.25, 0.5) == ("slow 0.5",)
    assert lab_command._state(status_of(), None, 0.5) == ("full speed",)
    assert lab_command._state(status_of(cut=True, frozen=True, kills=2), 0.5, 0.5, "home.txt") == (
        "cut", "frozen", "2 killed for memory", "follows home.txt",
    )  # fmt: skip


def test_links_in_a_line() -> None:
    devices = tuple(Device(name=name, gflops=1, memory_bytes=1) for name in ("x", "y", "z"))
    link = Link(1.25e6, 0.005)
    said = lab_command._links_text(Cluster("a", devices, link))
    assert said == "Any pair: 10 Mbit/s, 5 ms one way. The coordinator has no limit and no delay."
    there, back = DirectedLink("x", "y", Link(1e6, 0.1)), DirectedLink("y", "x", Link(1e6, 0.2))
    same = DirectedLink("y", "z", link)
    assert "; 1 pair differs." in lab_command._links_text(Cluster("a", devices, link, (there, back, same)))
    other = DirectedLink("z", "y", Link(1e6, 0.1))
    assert "; 2 pairs differ." in lab_command._links_text(Cluster("a", devices, link, (there, other)))
    free = lab_command._links_text(Cluster("a", devices, Link(float("inf"), 0.0)))
    assert free.startswith("Any pair: unlimited, no delay.")
    assert lab_command._links_text(Cluster("a", devices[:1], link)) == "The coordinator has no limit and no delay."
