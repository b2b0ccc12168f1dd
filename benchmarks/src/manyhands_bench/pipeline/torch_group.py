"""PyTorch's processes as the bench sees them: it starts them, sends them requests, and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from manyhands.facts.errors import ManyhandsError, TimedOut
from manyhands_bench.core.ddp import end_all
from manyhands_bench.pipeline.torch_setting import LIMIT_SECONDS, BareRound, TorchSetting, TorchVariant

START_SECONDS = 120.0


_TAIL_BYTES = 600


class TorchGroup:
    """The processes, for as long as requests are sent; an error names the one that dies or does not answer."""

    def __init__(
        self, setting: TorchSetting, places: Sequence[Sequence[str]], *, host: str = "127.0.0.1", interface: str = "lo",
        cores: Sequence[int | None] = (),
    ) -> None:  # fmt: skip
        """Start the processes.

        places  for each process the words before its command, such as those that bring it into a lab
        host    the address at which the others reach the first process
        cores   the core that each is pinned to; None or empty: any
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.processes: list[subprocess.Popen[str]] = []
        self._logs = [tempfile.TemporaryFile() for _ in places]  # noqa: SIM115
        try:
            for rank, before in enumerate(places):
                core = cores[rank] if cores else None
                words = [
                    *before, sys.executable, "-m", "manyhands_bench.pipeline.torch_pipeline", str(rank),
                    str(len(places)), host, interface, str(-1 if core is None else core), json.dumps(asdict(setting)),
                ]  # fmt: skip
                self.processes.append(
                    subprocess.Popen(
                        words, text=True, bufsize=1, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        stderr=self._logs[rank],
                    )
                )  # fmt: skip
            all_ranks = range(len(places))
            port = self._answers([0], "begin", START_SECONDS)[0]
            for rank in all_ranks[1:]:
                self._tell(rank, port)
            self._answers(all_ranks, "join the others", START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, way: TorchVariant, steps: int) -> list[float]:
        """Return the seconds of each of `steps` training steps."""
        answers = self._ask({"do": "train", "way": asdict(way), "steps": steps}, f"run {way}")
        return [float(seconds) for seconds in answers[way.ranks[0]]]

    def units(self, samples: int) -> list[tuple[float, int]]:
        """Return, for every unit that a pipeline can be cut before, its seconds for some samples on the first device,
        forward and backward, and the bytes it hands on."""
        timed = self._ask({"do": "units", "samples": samples}, "time the network's parts", ranks=[0])[0]
        return [(seconds, size) for seconds, size in timed]

    def bare(self, bounds: Sequence[int], samples: int, seconds: float) -> list[list[BareRound]]:
        """Return the rounds of every stage, computed on all processes at once, one stage each; nothing is exchanged."""
        request = {"do": "bare", "bounds": list(bounds), "samples": samples, "seconds": seconds}
        answers = self._ask(request, "compute their stages alone")
        return [[BareRound(*round) for round in rounds] for rounds in answers.values()]

    def _ask(self, request: dict[str, Any], task: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        receivers = range(len(self.processes)) if ranks is None else ranks
        for rank in receivers:
            self._tell(rank, request)
        return self._answers(receivers, task, LIMIT_SECONDS)

    def _tell(self, rank: int, message: object) -> None:
        pipe = self.processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()
        except OSError as error:
            raise self._died(rank, "take a request") from error

    def _answers(self, ranks: Sequence[int], task: str, limit_seconds: float) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        end = time.monotonic() + limit_seconds
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                output = self.processes[rank].stdout
                assert output is not None
                selector.register(output, selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready:
                    silent = ", ".join(str(rank) for rank in ranks if rank not in answers)
                    raise TimedOut(f"Torch rank {silent} did not {task} within {limit_seconds:g} s.")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise self._died(key.data, task)
                    answer = json.loads(line)
                    if "error" in answer:
                        raise ManyhandsError(f"Torch rank {key.data} could not {task}: {answer['error']}")
                    answers[key.data] = answer["found"]
                    selector.unregister(key.fileobj)
        return {rank: answers[rank] for rank in ranks}

    def _died(self, rank: int, task: str) -> ManyhandsError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[rank].wait(5)
        file = self._logs[rank]
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        words = file.read().decode(errors="replace").strip()
        return ManyhandsError(
            f"Torch rank {rank} ended (exit code {self.processes[rank].poll()}) when it was to {task}: {words}"
        )

    def close(self) -> None:
        end_all(self.processes)
        for file in self._logs:
            file.close()

    def __enter__(self) -> TorchGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
