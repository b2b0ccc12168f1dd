"""Discovery between hosts, as far as the kernel can tell: two namespaces, and a bridge that carries the multicast."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from test_namespaces import WORKERS, Hosts, standing

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` command here"),
]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    number = os.getpid() % 250
    with standing(Hosts(f"{os.getpid() % 10**5}d", f"10.214.{number}", f"10.214.{number}.1")) as found:
        yield found


def test_copies_of_one_sd_card_find_the_coordinator_and_are_told_apart(hosts: Hosts, tmp_path: Path) -> None:
    """Nothing is typed but the token; both have this machine's host name and id, and network cards of their own."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str, before: tuple[str, ...] = ()) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MANYHANDS_HOME": str(tmp_path / name)}
        environment["MANYHANDS_DISCOVERY"] = hosts.address if name == "train" else ""
        file: IO[bytes]
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "manyhands", *words], stdout=file, stderr=file, env=environment,
                cwd=tmp_path,
            )  # fmt: skip
        processes.append(process)
        return process, log

    try:
        job = ("--listen", f"{hosts.address}:0", "--devices", "2", "--steps", "3", "--token", "the secret")
        train, told = start("train", "train", *job)
        workers = []
        for name in WORKERS:
            words = ("worker", "--token", "the secret", "--threads", "1")
            workers.append(start(name, *words, before=("ip", "netns", "exec", hosts.namespace(name))))
        assert train.wait(240) == 0, told.read_text() + "".join(log.read_text() for _, log in workers)
        names = set()
        for number, (worker, log) in enumerate(workers, start=2):
            assert worker.wait(30) == 0, log.read_text()
            found = re.search(
                rf"Joined {re.escape(hosts.address)}:\d+ as (\S+) through eth0 \({hosts.subnet}\.{number}\)",
                log.read_text(),
            )
            assert found is not None, log.read_text()
            names.add(found.group(1))
        assert len(names) == 2
        assert "its SD card or disk is a copy" in told.read_text()
        assert '"coordinator"' in (tmp_path / "alpha" / "devices.json").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
