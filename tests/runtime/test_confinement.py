"""A confined process: what it can no longer do, and that a worker needs none of it."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.facts.cluster import Cluster
from manyhands.facts.errors import BadValue
from manyhands.runtime import confinement, landlock, seccomp
from manyhands.runtime.confinement import Confinement, is_asked_for
from manyhands.runtime.coordinator import Coordinator
from manyhands.runtime.landlock import READ, Rule
from manyhands.runtime.own_folder import own_folder
from manyhands.transport.shared_memory import FillingRing
from real_runs import assert_close, shared, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
needs_seccomp = pytest.mark.skipif(bool(seccomp.why_not_available()), reason=seccomp.why_not_available())
needs_landlock = pytest.mark.skipif(bool(landlock.why_not_available()), reason=landlock.why_not_available())
ALLOWED = 0x7FFF0000

ATTEMPTS = """
import ctypes, json, os, resource, signal, socket, sys, tempfile, threading, time
start = time.perf_counter()
from manyhands.runtime.confinement import confined
loaded = time.perf_counter()
library = ctypes.CDLL(None, use_errno=True)
secret, given = sys.argv[1:3]
found = {}

def call(function, *words):
    if function(*words) == -1:
        raise OSError(ctypes.get_errno(), "")

def attempt(name, function):
    try:
        function()
        found[name] = 0
    except OSError as error:
        found[name] = error.errno

with confined(reads=[given]) as own:
    found["milliseconds"] = 1e3 * (time.perf_counter() - loaded)
    found["text"], found["folder"] = own.text, tempfile.gettempdir()
    found["mode"] = os.stat(found["folder"]).st_mode & 0o777
    found["status"] = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
    attempt("exec", lambda: os.execv("/bin/true", ["true"]))
    attempt("ptrace", lambda: call(library.ptrace, 16, os.getppid(), None, None))
    attempt("unshare", lambda: call(library.unshare, 0x10000000))
    attempt("mount", lambda: call(library.mount, b"none", b"/mnt", b"tmpfs", 0, None))
    attempt("settime", lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
    attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close())
    attempt("inet", lambda: socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET).close())
    attempt("interfaces", socket.if_nameindex)
    attempt("read secret", lambda: open(secret).close())
    attempt("write secret", lambda: open(secret, "w").close())
    attempt("write beside", lambda: open(secret + ".new", "w").close())
    attempt("delete", lambda: os.unlink(secret))
    attempt("read given", lambda: open(given).close())
    attempt("write given", lambda: open(given, "a").close())
    attempt("list home", lambda: os.listdir(os.path.dirname(secret)))
    attempt("other memory", lambda: open(f"/proc/{os.getppid()}/mem", "rb").close())
    attempt("signal", lambda: os.kill(os.getppid(), 0))
    attempt("temporary", lambda: tempfile.NamedTemporaryFile().close())
    attempt("null", lambda: open(os.devnull, "wb").close())
    attempt("thread", lambda: threading.Thread(target=int).start())
    child = os.fork()
    if child == 0:
        attempt("in a child", lambda: os.execv("/bin/true", ["true"]))
        os._exit(found["in a child"])
    found["in a child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
found["is left"] = os.path.exists(found["folder"])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a confined process found when it tried; 0: it worked, else the error's number."""
    folder = tmp_path_factory.mktemp("home")
    secret, given = folder / "id_ed25519", folder / "silo.npz"
    secret.write_text("secret")
    given.write_text("samples")
    temporary = tmp_path_factory.mktemp("temporary")
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, str(secret), str(given)], capture_output=True, text=True, timeout=60,
        env={**os.environ, "TMPDIR": str(temporary), confinement.CONFINE_VARIABLE: "on"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def of(status: object, name: str) -> int:
    assert isinstance(status, dict)
    return int(status[name])


@pytest.mark.quick(every=6)
@needs_seccomp
@pytest.mark.parametrize("what", ["exec", "ptrace", "unshare", "mount", "settime", "in a child"])
def test_system_calls_that_fail(attempts: dict[str, object], what: str) -> None:
    assert attempts[what] == errno.EPERM


@needs_seccomp
def test_the_kernel_confirms_it(attempts: dict[str, object]) -> None:
    assert of(attempts["status"], "NoNewPrivs") == 1
    assert of(attempts["status"], "Seccomp") == 2
    assert attempts["packet"] == errno.EAFNOSUPPORT


@pytest.mark.quick(every=7)
@needs_landlock
@pytest.mark.parametrize(
    "what",
    ["read secret", "write secret", "write beside", "delete", "write given", "list home", "other memory"],
)
def test_files_it_cannot_reach(attempts: dict[str, object], what: str) -> None:
    assert attempts[what] == errno.EACCES


@needs_landlock
def test_signals_stay_within(attempts: dict[str, object]) -> None:
    assert attempts["signal"] == (errno.EPERM if landlock.version() >= 6 else 0)


@pytest.mark.parametrize("what", ["inet", "interfaces", "read given", "temporary", "null", "thread"])
def test_what_a_worker_needs(attempts: dict[str, object], what: str) -> None:
    assert attempts[what] == 0


def test_its_temporary_folder_is_private_and_removed(attempts: dict[str, object]) -> None:
    assert (attempts["mode"], attempts["is left"]) == (0o700, False)


def test_it_costs_little(attempts: dict[str, object]) -> None:
    """Measured: 5 to 10 ms on two shared Arm cores; a loaded machine may take longer."""
    assert isinstance(attempts["milliseconds"], float)
    assert attempts["milliseconds"] < 500


# Real workers


@pytest.mark.slow
@needs_seccomp
def test_local_workers_are_confined_and_exact(tmp_path: Path) -> None:
    """Forked ones, those that are started by themselves, and the same numbers as on one device."""
    with Coordinator.local_cluster(Cluster.local(2), logs=tmp_path / "logs") as coordinator:
        for member in coordinator.alive():
            status = Path(f"/proc/{member.facts.pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            assert (int(fields["NoNewPrivs"]), int(fields["Seccomp"])) == (1, 2)
            assert member.facts.confinement == confinement.available()
        ran = train(coordinator, shared(("local-1", "local-2"), 6, 6), tmp_path / "two", steps=3)
        ran.assert_as_planned()
        one = train(coordinator, "single", tmp_path / "one", steps=3)
        assert_close(ran.state, one.state)


FETCHING = """
import sys
from manyhands.runtime.confinement import confined
with confined() as own:
    from manyhands.transport.shared_memory import find
    ring = find(sys.argv[1].encode(), 2**20, bytes.fromhex(sys.argv[2]))
    print(ring.nonce.hex(), own.text)
    ring.close()
"""


@pytest.mark.slow
def test_memory_in_common_with_a_process_that_is_not_confined() -> None:
    """As a worker has it with its coordinator, into whose files of /proc it can no longer look."""
    ring = FillingRing(2**20)
    try:
        words = [sys.executable, "-c", FETCHING, ring.place.decode(), ring.key.hex()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        nonce, _, how = done.stdout.strip().partition(" ")
        assert bytes.fromhex(nonce) == ring.nonce
        assert how == confinement.available().text
    finally:
        ring.close()


def test_what_the_environment_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, is_on in (("", True), ("on", True), ("OFF", False)):
        monkeypatch.setenv(confinement.CONFINE_VARIABLE, word)
        assert (is_asked_for(), is_asked_for(False)) == (is_on, False)
    monkeypatch.setenv(confinement.CONFINE_VARIABLE, "no")
    with pytest.raises(BadValue):
        is_asked_for()


# What is missing is said


def test_a_kernel_without_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(landlock, "version", fail)
    found = confinement.available()
    assert any("without Landlock" in one for one in found.missing)
    assert not any(one.startswith("Landlock") for one in found.parts)


def test_words() -> None:
    assert Confinement(missing=("switched off",)).text == "not confined; switched off"
    some = Confinement(("seccomp",), ("Landlock (kernel 5.4 without Landlock)",))
    assert some.text == "seccomp; without Landlock (kernel 5.4 without Landlock)"


@needs_landlock
def test_landlock_is_not_applied_beside_other_threads() -> None:
    """It would not reach them: better to say that it is missing."""
    code = (
        "import threading; from manyhands.runtime.confinement import confined\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "with confined() as own: print(own.text)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "without Landlock (2 threads run already" in done.stdout
    assert "seccomp" in done.stdout.partition(";")[0]


# The filter, run by hand


def verdict(name: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the filter of an architecture returns for a system call: the kernel's machine, as far as it is used."""
    architecture = seccomp.ARCHITECTURES[name]
    words = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", number, audit or architecture.audit, 0, *words)
    code = list(struct.iter_unpack("<HBBI", seccomp.assemble(architecture)))
    place = loaded = 0
    while True:
        operation, where_true, where_false, operand = code[place]
        place += 1
        if operation == 0x20:
            (loaded,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return int(operand)
        else:
            holds = {0x15: loaded == operand, 0x35: loaded >= operand, 0x45: bool(loaded & operand)}[operation]
            place += where_true if holds else where_false


REFUSED, UNKNOWN, NO_FAMILY = (0x00050000 | number for number in (errno.EPERM, errno.ENOSYS, errno.EAFNOSUPPORT))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("name", list(seccomp.ARCHITECTURES))
def test_every_verdict(name: str) -> None:
    own = seccomp.ARCHITECTURES[name]
    denied = set(own.denied.values())
    special = {435, own.clone, own.socket, own.ioctl}
    assert {number for number in range(1000) if verdict(name, number) == REFUSED} == denied
    assert all(verdict(name, number) == ALLOWED for number in range(1000) if number not in denied | special)
    assert verdict(name, 435) == UNKNOWN
    assert verdict(name, own.clone, 0x3D0F00) == ALLOWED  # a thread
    assert verdict(name, own.clone, signal.SIGCHLD) == ALLOWED  # a fork
    for flag in (0x00020000, 0x10000000, 0x40000000):
        assert verdict(name, own.clone, flag | signal.SIGCHLD) == REFUSED
    assert [verdict(name, own.socket, family) for family in (1, 2, 10, 16)] == [ALLOWED] * 4
    assert [verdict(name, own.socket, family) for family in (0, 3, 17, 38, 40)] == [NO_FAMILY] * 5
    assert [verdict(name, own.ioctl, 0, request) for request in (0x5412, 0x541C)] == [REFUSED] * 2
    assert verdict(name, own.ioctl, 0, 0xC0204601) == ALLOWED  # a GPU driver's
    assert verdict(name, 0, audit=0x40000003) == REFUSED  # 32 bits
    assert verdict(name, 0x40000000 | 1) == (REFUSED if own.has_x32 else ALLOWED)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="asks the compiler's headers")
def test_the_numbers_are_those_of_the_headers() -> None:
    own = seccomp.ARCHITECTURES.get(platform.machine())
    if own is None:
        pytest.skip(f"no filter for {platform.machine()}")
    listed = own.denied | {"seccomp": own.seccomp, "clone": own.clone, "socket": own.socket, "ioctl": own.ioctl}
    done = subprocess.run(
        ["gcc", "-E", "-dM", "-"], input="#include <asm/unistd.h>\n", capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip("no kernel headers")
    said = dict(re.findall(r"(?m)^#define __NR_(\w+) (\d+)$", done.stdout))
    known = {name: int(said[name]) for name in listed if name in said}
    assert len(known) > 30
    assert known == {name: listed[name] for name in known}


# Rules of Landlock


def test_rights_by_version() -> None:
    assert landlock.handled_rights(1) == (1 << 13) - 1
    assert landlock.handled_rights(2) == (1 << 14) - 1
    assert landlock.handled_rights(3) == landlock.handled_rights(4) == (1 << 15) - 1
    assert landlock.handled_rights(5) == landlock.handled_rights(9) == (1 << 16) - 1
    everything = Rule("/x", landlock.WRITE | landlock.USE_DEVICE)
    assert landlock.granted(everything, 1, is_folder=False) == landlock.WRITE_FILE | landlock.READ_FILE
    for version in range(1, 8):
        rights = landlock.granted(everything, version, is_folder=True)
        assert not rights & ~landlock.handled_rights(version), "the kernel refuses what it does not know"
        assert not rights & landlock.EXECUTE


def test_what_a_worker_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/some:{tmp_path}/lib")
    with own_folder() as folder:
        found = {rule.path: rule.rights for rule in confinement.rules(folder, ["silo.npz"], is_gpu=False)}
        assert str(Path("silo.npz").resolve()) in found
        assert found[str(folder.path)] == landlock.WRITE
        assert found[str(folder.parent)] == landlock.REMOVE_DIR
    assert found["/opt/some"] == found["/usr"] == found[sys.base_prefix] == READ
    writable = {path for path, rights in found.items() if rights & landlock.WRITE_FILE}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "shm")}
    assert writable == {*devices, "/proc/self", str(folder.path)}
    outside = {str(Path.home()), "/", "/home", "/root", "/var", "/tmp", "/dev", "/run", str(tmp_path)}
    assert not {path for path, rights in found.items() if rights & READ} & outside


# The temporary folder


def test_what_a_killed_worker_leaves_the_next_one_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import os, time; from manyhands.runtime.own_folder import own_folder\n"
        "with own_folder() as own:\n"
        "    (own.path / 'x').write_text('x'); print(own.path, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    with own_folder() as own:
        assert left.exists(), "its owner runs"
        assert own.path != left
    process.kill()
    process.wait()
    process.stdout.close()
    assert left.exists()
    with own_folder() as own:
        assert not left.exists()
        assert stat.S_IMODE(own.path.stat().st_mode) == stat.S_IMODE(own.parent.stat().st_mode) == 0o700
        assert own.path.parent == tmp_path / f"manyhands-{os.geteuid()}"
    assert list(own.parent.iterdir()) == []


def test_a_name_that_somebody_else_has_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that others can write into is not used, nor is a link followed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    taken = tmp_path / f"manyhands-{os.geteuid()}"
    (tmp_path / "elsewhere").mkdir()
    taken.symlink_to(tmp_path / "elsewhere")
    with own_folder() as own:
        assert own.parent.resolve() not in (taken, tmp_path / "elsewhere")
    taken.unlink()
    taken.mkdir()
    taken.chmod(0o777)
    with own_folder() as own:
        assert own.parent != taken
