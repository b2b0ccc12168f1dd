"""`manyhands lab` as typed. What needs root is in tests/lab; one walk through all commands is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_processes import PROGRAM

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root"),
    pytest.mark.skipif(shutil.which("tc") is None, reason="there is no `tc` command here"),
]


def manyhands(*words: str, code: int = 0) -> str:
    done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["lab", "up", "pi3x7"], 3, "Did you mean pi3x6"),
        (["lab", "up", "local:2"], 10, "this machine itself"),
        (["lab", "up", "home", "--trace", "nowhere.txt"], 10, "there is no file"),
        (["lab", "status", "no_such_lab"], 17, "There is no lab called 'no_such_lab'"),
        (["lab", "cut", "pi", "--lab", "no_such_lab"], 17, "There is no lab called 'no_such_lab'"),
        (["lab", "cutt", "pi"], 2, "No such command 'cutt'"),
        (["train", "--lab", "pi3x7"], 3, "Did you mean pi3x6"),
        (["train", "--lab", "home", "--devices", "2"], 10, "--devices cannot be given beside --lab home"),
        (["train", "--scale", "2"], 10, "Name one: --lab"),
        (["train", "--lab", "home", "--batch-size", "3"], 10, "4 devices cannot share"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_slips_of_the_pen(words: list[str], code: int, part: str) -> None:
    assert part in manyhands(*words, code=code)


class TestWalk:
    """Up, look, run, break, heal, down."""

    pytestmark = needs_root

    def test_through_all_commands(self, tmp_path: Path) -> None:
        name = f"w{os.getpid()}"
        file = tmp_path / "two.yaml"
        file.write_text(
            "name: two\ndevices: [{kind: pi4, count: 2, memory: 200 MB}]\nlink: {rate: 50 Mbit/s, delay: 2 ms}\n"
        )
        try:
            said = manyhands("lab", "up", str(file), "--name", name, "--scale", "2")
            assert "time scale 2: computing and links are 2 times slower" in said
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
            manyhands("lab", "heal", "--lab", name)
            state = json.loads(manyhands("lab", "status", name, "--json"))
            assert not any(one["is_cut"] or one["group"]["is_frozen"] for one in state["devices"])
            manyhands("lab", "kill", "pi4-1", "--lab", name)
            manyhands("lab", "slow", "pi4-1", "2", "--lab", name, code=10)
        finally:
            manyhands("lab", "down", name)
        assert f"There is no lab called '{name}'" in manyhands("lab", "down", name, code=17)
