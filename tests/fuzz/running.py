"""The fuzz command: a million inputs over all parsers, in as many processes as there are cores.

    python -m tests.fuzz --inputs 1000000            all parsers; exit code 1 if one misbehaved
    python -m tests.fuzz --target plans --seed 7     one of them, other inputs
    python -m tests.fuzz --target plans --file fuzz-failures/plans-123.bin      an input again
    python -m tests.fuzz --engine atheris --target plans    led by coverage, where atheris is installed

An input whose process dies or does not come back is found too: the parent sees which it was, and makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz import data_targets, drawing, file_targets, operator_targets, wire_targets
from fuzz.judging import Build, Fault, Judge, Target, clock, limit_memory

BUILDS: tuple[Build, ...] = (
    *wire_targets.TARGETS, *file_targets.TARGETS, *data_targets.TARGETS, *operator_targets.TARGETS,
)  # fmt: skip
HANG_SECONDS = 60.0
"""By the clock on the wall: an input that waits for something uses no time of its own."""
START_SECONDS = 300.0
"""Until a new process has everything it needs, and for all inputs that are drawn."""
LEAK_BYTES = 512 * 2**20
"""By which a process may have grown at the end of a target."""
DRAWN_PART = 0.01
"""Of the inputs, drawn by hypothesis; the others are mutated."""
MOST_FAULTS = 5
"""Of one parser, that are written down."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: nothing is to be kept."""
    memory = Path("/dev/shm")
    found = Path(tempfile.mkdtemp(prefix="manyhands-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield found
    finally:
        shutil.rmtree(found, ignore_errors=True)


def built(folder: Path, names: Sequence[str] = ()) -> list[Target]:
    """All parsers, or those whose names have one of these words, each with a folder of its own."""
    found = []
    for build in BUILDS:
        own = folder / build.__name__
        own.mkdir(exist_ok=True)
        target = build(own)
        if not names or any(name.lower() in target.name.lower() for name in names):
            found.append(target)
    return found


@dataclass(frozen=True)
class Chunk:
    """Some inputs of a parser."""

    target: str
    first: int
    count: int
    drawn: bool = False


@dataclass
class Account:
    """How it went with a parser."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    faults: list[Fault] = field(default_factory=list)


class Child:
    """A process that judges, and what it is at."""

    def __init__(self, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.at: Any = context.Array("d", [0.0, 0.0], lock=False)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_judge, args=(theirs, self.at, seed), daemon=True)
        self.process.start()
        theirs.close()
        self.chunk: Chunk | None = None
        self._is_new = True

    def give(self, chunk: Chunk) -> None:
        self.chunk = chunk
        grace_seconds = START_SECONDS if self._is_new or chunk.drawn else 0.0
        self.at[0], self.at[1] = chunk.first, time.monotonic() + grace_seconds
        self._is_new = False
        self.connection.send(chunk)

    @property
    def is_stuck(self) -> bool:
        return self.chunk is not None and time.monotonic() - self.at[1] > HANG_SECONDS

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join(10)


def _judge(connection: Any, at: Any, seed: int) -> None:
    """A child's life."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what decoders in C complain of
    judge, warm = Judge(), set[str]()
    with scratch() as folder, clock():
        targets = {target.name: target for target in built(folder)}
        limit_memory()
        while True:
            try:
                chunk = connection.recv()
            except (EOFError, OSError):
                return
            target = targets[chunk.target]
            if target.name not in warm:
                target.warm_up()
                warm.add(target.name)
            before, start = _resident_bytes(), time.monotonic()
            judge.refused, faults = 0, []
            if chunk.drawn:
                faults = drawing.judge_drawn(judge, target, seed, chunk.count)
            else:
                for number in range(chunk.first, chunk.first + chunk.count):
                    at[0], at[1] = number, time.monotonic()
                    fault = judge.judge(target, target.input(seed, number), number)
                    if fault is not None:
                        faults.append(fault)
            grown = _resident_bytes() - before
            if grown > LEAK_BYTES:
                what = f"{chunk.count} inputs left {grown / 2**20:.0f} MB behind"
                faults.append(Fault(target.name, chunk.first, what, target.input(seed, chunk.first)))
            connection.send((judge.refused, time.monotonic() - start, faults[:MOST_FAULTS], len(faults)))


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def chunks_of(targets: Sequence[Target], inputs: int) -> list[Chunk]:
    """The inputs, shared out."""
    total = sum(target.share for target in targets)
    found = []
    for target in targets:
        own = max(100, -(-int(inputs * target.share) // max(1, int(total)))) if len(targets) > 1 else inputs
        own = max(own, round(inputs * target.share / total))
        drawn = max(1, int(own * DRAWN_PART))
        size = max(20, min(2000, own // 8))
        found += [Chunk(target.name, first, min(size, own - drawn - first)) for first in range(0, own - drawn, size)]
        found.append(Chunk(target.name, 0, drawn, drawn=True))
    return found


def run(targets: Sequence[Target], inputs: int, seed: int, processes: int, failures: Path) -> dict[str, Account]:
    """Judge so many inputs. Prints a line for every parser that is done."""
    waiting = deque(chunks_of(targets, inputs))
    accounts = {target.name: Account() for target in targets}
    left = {name: sum(chunk.target == name for chunk in waiting) for name in accounts}
    by_name = {target.name: target for target in targets}
    children = [Child(seed) for _ in range(max(1, min(processes, len(waiting))))]
    try:
        while waiting or any(child.chunk for child in children):
            for child in children:
                if child.chunk is None and waiting:
                    child.give(waiting.popleft())
            busy = [child for child in children if child.chunk is not None]
            ready = multiprocessing.connection.wait([child.connection for child in busy], 1.0)
            for child in busy:
                chunk = child.chunk
                assert chunk is not None
                if child.connection in ready:
                    try:
                        refused, seconds, faults, _ = child.connection.recv()
                    except (EOFError, OSError):
                        ended = _ended(child, by_name, seed)
                    else:
                        ended = None
                        account = accounts[chunk.target]
                        account.inputs += chunk.count
                        account.refused += refused
                        account.seconds += seconds
                        account.faults += faults
                        child.chunk = None
                elif child.is_stuck:
                    ended = _ended(child, by_name, seed)
                else:
                    continue
                if ended is not None:
                    number = int(child.at[0])
                    accounts[chunk.target].faults.append(ended)
                    accounts[chunk.target].inputs += number + 1 - chunk.first
                    child.end()
                    children[children.index(child)] = Child(seed)
                    rest = chunk.first + chunk.count - number - 1
                    if rest > 0 and not chunk.drawn and len(accounts[chunk.target].faults) < MOST_FAULTS:
                        waiting.appendleft(Chunk(chunk.target, number + 1, rest))
                        left[chunk.target] += 1
                left[chunk.target] -= 1
                if not left[chunk.target]:
                    _tell(chunk.target, accounts[chunk.target], failures)
    finally:
        for child in children:
            child.end()
    return accounts


def _ended(child: Child, targets: dict[str, Target], seed: int) -> Fault:
    """An input from which a process did not come back."""
    child.process.join(0.2)
    number = int(child.at[0])
    code = child.process.exitcode
    what = f"does not come back within {HANG_SECONDS:g} s" if code is None else f"ended its process (exit code {code})"
    assert child.chunk is not None
    target = targets[child.chunk.target]
    return Fault(target.name, number, what, target.input(seed, number))


def _tell(name: str, account: Account, failures: Path) -> None:
    rate = account.inputs / account.seconds if account.seconds else 0.0
    refused = account.refused / max(1, account.inputs)
    print(
        f"{name:32} {account.inputs:9,} inputs {rate:9,.0f}/s {refused:6.1%} refused   {len(account.faults)} faults",
        flush=True,
    )
    for fault in account.faults[:MOST_FAULTS]:
        path = write_down(fault, failures)
        print(
            f"    input {fault.number}: {fault.what}\n    again: python -m tests.fuzz --target '{name}' --file {path}"
        )
        if fault.trace:
            print("        " + fault.trace.strip().replace("\n", "\n        "), flush=True)


def write_down(fault: Fault, failures: Path) -> Path:
    failures.mkdir(parents=True, exist_ok=True)
    path = failures / f"{re.sub('[^a-z0-9]+', '-', fault.target.lower())}-{fault.number}.bin"
    path.write_bytes(fault.data)
    return path


def again(target: Target, data: bytes) -> int:
    """One input, with what comes out of it in full."""
    with clock():
        fault = Judge().judge(target, data)
    print(f"{target.name}: {fault.what if fault is not None else 'as it should be'}")
    if fault is not None:
        print(fault.trace)
    return int(fault is not None)


def main(words: Sequence[str] | None = None) -> int:
    given = arguments().parse_args(words)
    warnings.simplefilter("ignore")
    with scratch() as folder:
        targets = built(folder, given.target)
        if given.list or not targets:
            print("\n".join(target.name for target in targets or built(folder)))
            return 0 if targets else 2
        if given.file:
            return again(targets[0], Path(given.file).read_bytes())
        if given.engine == "atheris":
            from fuzz import covering

            return covering.run(targets, given.inputs, given.seed, given.failures)
        start = time.monotonic()
        accounts = run(targets, given.inputs, given.seed, given.processes, given.failures)
    total, faults = sum(one.inputs for one in accounts.values()), sum(len(one.faults) for one in accounts.values())
    seconds = time.monotonic() - start
    print(f"{total:,} inputs, {len(accounts)} parsers, seed {given.seed}, {seconds:.0f} s: {faults} faults")
    return int(faults > 0)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Hostile inputs for every parser.")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seed", type=int, default=1, help="another one gives other inputs")
    parser.add_argument("--target", action="append", default=[], help="parsers with this in their name")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engine", choices=("mutation", "atheris"), default="mutation")
    parser.add_argument("--file", help="judge this input")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where failing inputs go")
    parser.add_argument("--list", action="store_true", help="the parsers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
