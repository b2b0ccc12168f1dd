"""Every check of the doctor can be good and can be bad; what is bad has its fix."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from doctor_ports import closed_port, deaf_port
from manyhands.doctor import machine, network
from manyhands.doctor.check import BROKEN, OK, WARNING, Check, Findings, requirement, unmet
from manyhands.doctor.confinement import confinement_check, confinement_checks
from manyhands.doctor.firewall import firewall_here, opening, remedy
from manyhands.doctor.report import DoctorOptions, discovery_verdict, join_check
from manyhands.facts.errors import BadValue
from manyhands.facts.link import Link
from manyhands.runtime.confinement import Confinement, available
from manyhands.runtime.memory_kills import free_bytes
from manyhands.runtime.reachability import NO_ROUTE, OPEN, REFUSED, SILENT, ProbeAnswer, probe

LIMITS = [(">=", "2.6"), ("<", "2.14")]


def bad(check: Check, state: str, found: str, fix: str) -> None:
    assert (check.state, found in check.found, fix in check.fix) == (state, True, True), check
    assert check.needed


# Versions


def test_requirements_are_read() -> None:
    assert requirement("torch<2.14,>=2.6") == ("torch", [("<", "2.14"), (">=", "2.6")])
    assert requirement("msgspec (>=0.18)") == ("msgspec", [(">=", "0.18")])
    assert requirement('matplotlib>=3.8; extra == "plots"') is None


@pytest.mark.parametrize(
    ("version", "how"),
    [("2.5.9", "older"), ("2.6", ""), ("2.13.0+cpu", ""), ("2.14", "newer"), ("3.0.1", "newer")],
)
def test_versions_are_compared_as_numbers(version: str, how: str) -> None:
    assert unmet(version, LIMITS) == how


def test_python() -> None:
    tried = ["3.11", "3.12", "3.13"]
    assert machine.python_check("3.12.1", [(">=", "3.11")], tried).state == OK
    bad(machine.python_check("3.10.4", [(">=", "3.11")], tried), BROKEN, "3.10.4", "python3.13 -m venv")
    assert machine.python_check("3.15.0", [(">=", "3.11")], tried).state == WARNING


def test_what_the_package_asks_for_is_read_from_its_metadata() -> None:
    limits, tried = machine._python_limits()
    assert (limits, tried) == ([(">=", "3.11")], ["3.11", "3.12", "3.13"])
    assert "2.6" in dict(machine._torch_limits())[">="]


def test_packages() -> None:
    assert machine.package_check("msgspec", "0.19", [(">=", "0.18")]) is None
    missing = machine.package_check("msgspec", "", [(">=", "0.18")])
    assert missing is not None
    bad(missing, BROKEN, "msgspec is not installed", "pip install 'msgspec>=0.18'")
    newer = machine.package_check("typer", "0.30", [("<", "0.29")])
    assert newer is not None
    assert newer.state == WARNING


# Torch


def test_torch_versions() -> None:
    good = {"version": "2.13.0+cpu", "gpus": [], "cuda": None}
    assert machine.torch_check(good, LIMITS).state == OK
    bad(machine.torch_check({**good, "version": "2.1.0"}, LIMITS), BROKEN, "2.1.0", "pip install 'torch>=2.6,<2.14'")
    assert machine.torch_check({**good, "version": "2.15.0"}, LIMITS).state == WARNING


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "another processor"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart"),
        ("import time; time.sleep(60)", "not loaded within"),
    ],
    ids=["another processor", "a library missing", "for ever"],
)
def test_torch_that_cannot_be_used(code: str, said: str) -> None:
    """It is tried in a process of its own: this one survives."""
    tried = machine.try_torch(code, limit_seconds=60 if "time" not in code else 0.5)
    assert isinstance(tried, str)
    bad(machine.torch_check(tried, LIMITS), BROKEN, said, "torch")


def test_gpus() -> None:
    good = {"version": "2.13", "gpus": ["A100"], "cuda": "13.0"}
    assert machine.gpu_check(good, is_driver_here=True).found == "A100"
    none = {"version": "2.13+cpu", "gpus": [], "cuda": None}
    assert machine.gpu_check(none, is_driver_here=False).state == OK
    bad(machine.gpu_check(none, is_driver_here=True), WARNING, "build for the CPU", "CUDA build")


# Cores, memory, disk


def test_cores_and_memory() -> None:
    assert machine.cores_check(4, 4).state == OK
    bad(machine.cores_check(2, 4), WARNING, "2", "--devices 2")
    assert machine.memory_check(8 * 10**9, 4).state == OK
    bad(machine.memory_check(900_000_000, 4), BROKEN, "900 MB", "--devices 2")
    bad(machine.memory_check(100_000_000, 1), BROKEN, "100 MB", "swap")
    assert machine.memory_check(1_000_000_000, 2).state == WARNING


def test_too_little_memory_in_this_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel lets this process have counts, not what the machine has."""
    monkeypatch.setattr("manyhands.runtime.memory_kills.limit_bytes", lambda group: 300_000_000)
    assert free_bytes() < 300_000_000
    assert machine.memory_check(free_bytes(), 1).state == BROKEN


def test_folders(tmp_path: Path) -> None:
    assert machine.folder_check("run folder", tmp_path / "runs" / "deep", "x").state == OK
    assert list(tmp_path.iterdir()) == []
    bad(machine.folder_check("cache folder", Path("/proc/nowhere/x"), "MANYHANDS_HOME=x"), BROKEN, "cannot be written",
        "MANYHANDS_HOME=x")  # fmt: skip
    bad(machine.room_check("run folder", "runs", 50_000_000, "cd x"), BROKEN, "50 MB", "cd x")
    assert machine.room_check("run folder", "runs", 500_000_000, "cd x").state == WARNING


def test_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Confinement(("own temp folder", "no new privileges", "Landlock 7", "seccomp"))
    assert confinement_check(whole).state == OK
    assert "Landlock 7" in confinement_check(whole, "pi").found
    old = Confinement(("no new privileges", "seccomp"), ("Landlock (kernel 5.4 without Landlock)",))
    bad(confinement_check(old, "pi"), WARNING, "without Landlock (kernel 5.4", "lsm=")
    bad(confinement_check(Confinement(missing=("switched off",)), "pi"), WARNING, "not confined", "--no-confine")
    for word, found in (("off", "switched off by MANYHANDS_CONFINE"), ("maybe", "MANYHANDS_CONFINE is 'maybe'")):
        monkeypatch.setenv("MANYHANDS_CONFINE", word)
        (check,) = confinement_checks()
        bad(check, WARNING, found, "nset MANYHANDS_CONFINE" if word == "off" else "Unset it")
    monkeypatch.delenv("MANYHANDS_CONFINE")
    (check,) = confinement_checks()
    assert check.found == available().text


def test_shared_memory_and_open_files() -> None:
    assert machine.shared_memory_check(True, "", 10**9).state == OK
    bad(machine.shared_memory_check(True, "", 2**20), WARNING, "/dev/shm", "--shm-size")
    bad(machine.shared_memory_check(True, "0", 10**9), WARNING, "switched off", "unset")
    bad(machine.shared_memory_check(False, "", None), WARNING, "none", "TCP")
    assert machine.open_files_check(1024, 4096, 6).state == OK
    bad(machine.open_files_check(64, 20000, 6), BROKEN, "64", "ulimit -n 4096")
    bad(machine.open_files_check(64, 64, 6), BROKEN, "64", "As root")


def test_a_processor_held_back(tmp_path: Path) -> None:
    files = {
        "devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "devices/system/cpu/cpu0/cpufreq/scaling_driver": "cpufreq-dt\n",
        "devices/platform/soc/soc:firmware/get_throttled": "50005\n",
        "class/thermal/thermal_zone0/temp": "84312\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    rate, heat = machine.speed_checks(tmp_path)
    bad(rate, WARNING, "powersave", "scaling_governor")
    bad(heat, WARNING, "voltage", "power supply")
    assert "throttled" in heat.found
    assert "84 degrees" in heat.found
    (tmp_path / "devices/system/cpu/cpu0/cpufreq/scaling_driver").write_text("intel_pstate\n")
    (tmp_path / "devices/platform/soc/soc:firmware/get_throttled").write_text("0\n")
    (tmp_path / "class/thermal/thermal_zone0/temp").write_text("41000\n")
    assert [check.state for check in machine.speed_checks(tmp_path)] == [OK, OK]
    assert list(machine.speed_checks(tmp_path / "nothing to read")) == []


def test_the_lab_and_discovery() -> None:
    assert machine.lab_verdict("").state == OK
    bad(machine.lab_verdict("Network namespaces need root: type sudo before the command."), WARNING, "root", "sudo")
    bad(machine.lab_verdict("`tc` is not here: install iproute2."), WARNING, "iproute2", "apt install iproute2")
    assert discovery_verdict("").state == OK
    bad(discovery_verdict("nothing was heard"), WARNING, "nothing", "--join")


# The network, without workers


def test_a_port_that_refuses_one_that_is_silent_and_one_that_is_open() -> None:
    with socket.socket() as listener, deaf_port() as deaf:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert probe("127.0.0.1", listener.getsockname()[1]).outcome == OPEN
        assert probe("127.0.0.1", closed_port()).outcome == REFUSED
        assert probe("127.0.0.1", deaf, 0.3).outcome == SILENT
    assert probe("no-such-host.invalid", 1, 2.0).outcome in ("no such host", SILENT)


def test_remedies_depend_on_what_the_network_said() -> None:
    refused, silent, lost = (ProbeAnswer("10.0.0.2", 40123, how, 0.1, "words") for how in (REFUSED, SILENT, NO_ROUTE))
    for answer, word in ((refused, "rejects"), (silent, "drops")):
        text = remedy(answer, "pi-1", "10.0.0.1", "pi-2", fixed_port=False)
        assert word in text
        for part in ("ufw allow proto tcp from 10.0.0.1", "firewall-cmd", "nft insert rule", "On pi-2"):
            assert part in text
    assert "ping 10.0.0.2" in remedy(lost, "pi-1", "10.0.0.1", "pi-2", fixed_port=False)


def test_commands_that_open_a_firewall(tmp_path: Path) -> None:
    assert opening("10.0.0.1", 7077, "ufw") == ["sudo ufw allow proto tcp from 10.0.0.1 to any port 7077"]
    assert "ip6 saddr fd00::1 tcp dport 7077" in opening("fd00::1", 7077, "nftables")[0]
    assert len(opening("10.0.0.1", None)) == 3
    assert firewall_here(tmp_path) == ""
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/ufw/ufw.conf").write_text("ENABLED=no\n")
    assert firewall_here(tmp_path) == ""
    (tmp_path / "etc/ufw/ufw.conf").write_text("# as it is\nENABLED=yes\nLOGLEVEL=low\n")
    assert firewall_here(tmp_path) == "ufw"


def test_a_coordinator_that_cannot_be_reached() -> None:
    bad(join_check(f"127.0.0.1:{closed_port()}"), BROKEN, "refused", "Is the coordinator running")


def test_clocks() -> None:
    assert network.clock_check("pi", 0.5, 1e-5, 1e-3).state == OK
    bad(network.clock_check("pi", -90.0, 1e-5, 1e-3), WARNING, "90 s ahead", "timedatectl set-ntp true")
    bad(network.clock_check("pi", 0.0, 0.2, 1e-3), WARNING, "200 ms", "Pictures")
    assert network.clock_check("pi", 0.0, 0.2, 1.0).state == OK, "over a slow link it cannot be told"
    bad(network.clock_check("pi", None, 0.0, 1e-3), WARNING, "did not say", "same version")


def test_links_and_workers() -> None:
    fast, slow, far = Link(1e8, 1e-4), Link(1e4, 1e-4), Link(1e8, 0.8)
    assert network.link_check("a", "b", {"a": fast, "b": fast}).state == OK
    bad(network.link_check("a", "b", {"a": fast, "b": slow}), WARNING, "80 kbit/s back", "cable")
    assert network.link_check("a", "b", {"a": far, "b": fast}).state == WARNING
    assert network.worker_check("pi", "x", "2.13.0+cpu", "2.13.0", 10**9).state == OK
    bad(network.worker_check("pi", "x", "2.9.1", "2.13.0+cpu", 10**9), WARNING, "x", "pip install torch==2.13.0")
    assert network.worker_check("pi", "x", "2.13.0", "2.13.0", 10**8).state == BROKEN


def test_what_was_asked_for() -> None:
    assert DoctorOptions().started_here == 2
    assert DoctorOptions(listen="0.0.0.0:0").started_here == 0
    for wrong in (
        DoctorOptions(workers=2, lab="pi3x6"),
        DoctorOptions(workers=-1),
        DoctorOptions(devices=0),
        DoctorOptions(wait_seconds=0.0),
    ):
        with pytest.raises(BadValue):
            wrong.check()
    with pytest.raises(BadValue, match="pi3x6 is a preset"):
        DoctorOptions(cluster="pi3x6").check()
    DoctorOptions(cluster="pi3x6", listen="127.0.0.1:0").check()


def test_warnings_do_not_make_it_unfit() -> None:
    found = Findings([Check("x", WARNING, "y"), Check("x", OK, "y")])
    assert found.to_dict()["fit"]
    found.checks.append(Check("x", BROKEN, "y"))
    assert not found.to_dict()["fit"]
