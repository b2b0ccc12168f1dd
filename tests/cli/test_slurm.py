"""The how-to page's job on a real Slurm cluster of one node: munged, slurmctld and slurmd, of Debian's packages."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from docs_pages import DOCS, blocks

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel")
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find the cluster."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("Slurm's daemons need root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: munged's socket is in it
    folder.chmod(0o755)
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    controller, daemon = free_ports()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=socket.gethostname(), folder=folder, controller=controller, daemon=daemon)
    )
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    environment = {
        **os.environ, "SLURM_CONF": str(configuration), "MANYHANDS_HOME": str(folder / "home"), "COLUMNS": "120",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    words = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge],
        ["slurmctld", "-D", "-f", str(configuration)],
        ["slurmd", "-D", "-f", str(configuration)],
    ]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for line in words:
            daemons.append(
                subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            time.sleep(1)
        wait_until_idle(environment, folder)
        yield environment
    finally:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", "--user=root"], env=environment, timeout=20, capture_output=True)
        for process in reversed(daemons):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait(5)
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    end, state = time.monotonic() + 60, ""
    while "idle" not in state:
        logs = "".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
        assert time.monotonic() < end, f"the node is {state!r}:\n{logs}"
        time.sleep(0.5)
        words = ["sinfo", "--noheader", "--format=%T"]
        state = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20).stdout


def test_the_pages_job_trains(slurm: dict[str, str], tmp_path: Path) -> None:
    (block,) = blocks(DOCS / "howto" / "launch-slurm.md", "sh")
    words = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(words, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=600)
    log = (tmp_path / "job.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    for rank in (0, 1):
        host = socket.gethostname()
        assert f"Started by slurm as rank {rank} of 2, {rank + 1} of 2 on this machine; joining 127.0.0.1:7172." in log
        assert f"has ended the run; {host}-{rank} has left." in log
    assert "step 20 of 20" in log
    assert not list(tmp_path.glob("token-*")), "it is removed"


def test_a_tasks_exit_code_is_sruns(slurm: dict[str, str], tmp_path: Path) -> None:
    """No coordinator, and a wrong option: what a restart policy is to know."""
    environment = {**slurm, "MANYHANDS_TOKEN": "a long token", "MANYHANDS_LISTEN": "0.0.0.0:7179"}
    words = ["srun", "--ntasks", "1", "manyhands", "worker", "--threads", "1"]
    for more, code, reported in (
        (["--wait", "0.2"], 15, "127.0.0.1:7179 within 0.2 s"),
        (["--launcher", "torchrun"], 10, "torchrun has not started this"),
    ):
        done = subprocess.run(
            [*words, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert reported in done.stderr
    outside = subprocess.run(
        [*words[3:], "--launcher", "slurm"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert outside.returncode == 10
    assert "srun has not started this" in outside.stderr
