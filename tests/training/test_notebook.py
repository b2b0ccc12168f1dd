"""Notebooks: a real kernel trains, is interrupted, and trains again; and a plain script without a guard."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manyhands

SOURCE = Path(manyhands.__file__).parents[1]
BEGIN = """
import time, psutil, torch
from torch import nn
import manyhands as mh
from manyhands.session import measuring
measuring.MEASURE_SECONDS = 0.1
torch.manual_seed(0)
data = [(torch.randn(6), torch.tensor(i % 3)) for i in range(48)]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))

def workers():
    return [p for p in psutil.Process().children(recursive=True) if "worker" in " ".join(p.cmdline())]

model = Net()
first = model.a.weight.detach().clone()
options = dict(loss=nn.functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.1), batch_size=8,
               cluster=mh.Cluster.local(2), plan="samples")
"""
LIMIT_SECONDS = 120.0


class Kernel:
    """A kernel, to which cells are given as a notebook does."""

    def __init__(self, folder: Path) -> None:
        client = pytest.importorskip("jupyter_client")
        pytest.importorskip("ipykernel")
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        self.manager = client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_SECONDS)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def begin(self, cell: str) -> Any:
        """Start a cell; yields its messages as they come, with the reply to it last."""
        ticket = self.client.execute(cell)
        while True:
            message = self.client.get_iopub_msg(timeout=LIMIT_SECONDS)
            if message["parent_header"].get("msg_id") != ticket:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            yield message

    def run(self, cell: str) -> list[dict[str, Any]]:
        """Run a cell to its end, which must be a good one; return its output."""
        messages = list(self.begin(cell))
        errors = ["\n".join(m["content"]["traceback"]) for m in messages if m["msg_type"] == "error"]
        assert not errors, errors[0]
        return messages

    def value(self, expression: str) -> str:
        return shown(self.run(expression), "execute_result")[-1]["text/plain"]


def shown(messages: list[dict[str, Any]], kind: str) -> list[dict[str, str]]:
    return [message["content"]["data"] for message in messages if message["msg_type"] == kind]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        kernel.run(BEGIN)
        yield kernel
    finally:
        kernel.close()


def test_a_cell_shows_its_progress_and_a_short_result_and_can_run_twice(kernel: Kernel) -> None:
    for _ in range(2):
        messages = kernel.run("result = mh.train(model, data, steps=6, **options)\nresult")
        pages = [data["text/html"] for data in shown(messages, "update_display_data")]
        assert "6 of 6" in pages[-1]
        assert "loss" in pages[-1]
        assert "http://127.0.0.1:" in pages[-1]
        result = shown(messages, "execute_result")[-1]
        assert len(result["text/plain"]) < 500
        assert "<table>" in result["text/html"]
        assert len(result["text/html"]) < 2000
        assert kernel.value("workers()") == "[]"
    page = re.search(r"http://127.0.0.1:\d+/", pages[-1])
    assert page is not None
    kernel.run(f"import urllib.request; assert urllib.request.urlopen('{page[0]}').status == 200")
    assert len(kernel.value("result.plan")) < 1000


def test_an_interrupted_cell_leaves_a_trained_model_and_no_processes(kernel: Kernel) -> None:
    kernel.run("model = Net(); before = {n: t.clone() for n, t in model.state_dict().items()}")
    interrupted, name = False, ""
    for message in kernel.begin("mh.train(model, data, steps=10**6, folder='stopped', **options)"):
        page = message["content"].get("data", {}).get("text/html", "")
        if not interrupted and "<th style='text-align:left'>step</th>" in page:
            interrupted = True
            kernel.manager.interrupt_kernel()
        if message["msg_type"] == "error":
            name = message["content"]["ename"]
    assert interrupted
    assert name == "KeyboardInterrupt"
    assert kernel.value("workers()") == "[]"
    kernel.run("assert not torch.equal(model.a.weight, before['a.weight'])")
    kernel.run(
        "import glob\nfrom safetensors.torch import load_file\n"
        "newest = sorted(glob.glob('stopped/checkpoints/step-*/model.safetensors'))[-1]\n"
        "assert all(torch.equal(load_file(newest)[n], t) for n, t in model.state_dict().items())"
    )
    kernel.run("result = mh.train(model, data, steps=2, **options)")


def test_a_loop_of_ones_own_in_cells(kernel: Kernel) -> None:
    cell = "step = mh.prepare(model, options['loss'], options['optimizer'], cluster=options['cluster'], plan='samples')"
    kernel.run("model = Net(); x, y = torch.randn(8, 6), torch.arange(8) % 3")
    for is_last in (False, True):  # the second closes the step of the first
        kernel.run(cell)
        assert kernel.value("len(workers()) >= 2") == "False", "it begins at the first batch"
        assert 0 < float(kernel.value("step(x, y).item()")) < 5
        assert kernel.value("len(workers()) >= 2") == "True"
        kernel.run("step.close()" if is_last else "del step")
    kernel.run(cell)
    interrupted, name = False, ""
    for message in kernel.begin("while True: print(step(x, y).item())"):
        if not interrupted and message["msg_type"] == "stream":
            interrupted = True
            kernel.manager.interrupt_kernel()
        if message["msg_type"] == "error":
            name = message["content"]["ename"]
    assert (interrupted, name) == (True, "KeyboardInterrupt")
    kernel.run("step.close()")
    assert kernel.value("workers()") == "[]"
    assert kernel.value("bool(torch.isfinite(model(x)).all())") == "True"


@pytest.mark.slow
def test_a_script_without_a_guard_trains_and_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        BEGIN + "print('begins')\nresult = mh.train(model, data, steps=3, folder='a', **options)\n"
        "options.pop('batch_size'), options.pop('loss'), options.pop('optimizer')\n"
        "step = mh.prepare(model, nn.functional.cross_entropy, mh.Optimizer('SGD', lr=0.1), folder='b', **options)\n"
        "for _ in range(3):\n"
        "    loss = step(torch.stack([x for x, _ in data[:8]]), torch.stack([y for _, y in data[:8]]))\n"
        "print(result, float(loss), len(workers()))\n"  # and it forgets to close
    )
    began = time.time()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1, "no worker runs the script again"
    assert "<TrainResult: steps 3, loss" in done.stdout
    assert (tmp_path / "b" / "checkpoints" / "step-000003").exists(), "what was forgotten is closed at the end"
    import psutil

    left = [
        one for one in psutil.process_iter(["create_time", "cwd"])
        if (one.info["create_time"] or 0) > began and one.info["cwd"] == str(tmp_path)
    ]  # fmt: skip
    assert not left
