"""Tests use one thread each, so that two run side by side, and a cache folder of their own."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from groups import group_of, longest_first, mark_slow_cases, try_again, unit_of

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MANYHANDS_LOAD_EVERYTHING", "1")  # the fork server of a test process serves many trainings
if sys.dont_write_bytecode:  # hundreds of processes that tests start would each compile the package, for 1.5 s
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# In CI the same examples every time: a change is judged by what it changes. At home each run draws new ones.
settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")


class _Slow:
    """Marks the cases of a test with `quick` that run with the slow tests, before pytest looks at the marks."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mark_slow_cases(items)
        for item in items:
            try_again(item, config.rootpath)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell script starts with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(_Slow(), "slow cases")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # by the number of tests in a group; see longest_first
    gc.disable()  # importing torch and thousands of tests makes much that stays; see pytest_collection_finish


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's scheduler for groups, but that tests in none stay together by file."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return Scheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was collected out of every later garbage collection: with it, each one takes half a second."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # captures make hundreds of thousands of objects, few of them in cycles


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make once what many tests need, as soon as this process has what makes it: tests of data do without PyTorch."""
    if "manyhands.graph.capture" in sys.modules:
        from kept_exports import keep_exports

        keep_exports()
    if "typer" in sys.modules:
        from one_command_tree import make_commands_once

        make_commands_once()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Since pytest 9.2 xdist writes a test's group where nobody reads it (pytest-xdist#1386): write it once more."""
    if getattr(config.option, "loadgroup", False):  # in a process of `-n`
        longest_first(items)
        for item in items:
            group = group_of(item)
            if group and not item.nodeid.endswith(f"@{group}"):
                named: Any = item
                named._id = type(named._id).parse(f"{item.nodeid}@{group}")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing is read from or written to the user's cache."""
    root: Path = tmp_path_factory.getbasetemp() / "home"
    os.environ["MANYHANDS_HOME"] = str(root)
    os.environ["MANYHANDS_DISCOVERY"] = "off"  # no test tells the network of its coordinators


@pytest.fixture(autouse=True, scope="session")
def _one_fork_server() -> None:
    """That of a test process lasts to its end: another one would load PyTorch again, for 5 s."""
    from manyhands.runtime import fork_server

    fork_server.IDLE_SECONDS = 3600.0


@pytest.fixture
def own_fork_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers that start now are not children of a fork server that has another test's environment."""
    from manyhands.runtime import fork_server

    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "_fork_servers", {})
        yield
        fork_server.close_fork_servers()


@pytest.fixture
def strangers() -> Iterator[None]:
    """Devices that do not know each other, before and after a test. A port that another test's device had may be
    another's by now; its key is not to be missed there."""
    from manyhands.transport.proofs import DIALLED

    DIALLED.reset()
    yield
    DIALLED.reset()
    for name in ("devices.json", "audit.jsonl"):
        (Path(os.environ["MANYHANDS_HOME"]) / name).unlink(missing_ok=True)
