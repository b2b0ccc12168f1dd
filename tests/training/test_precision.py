"""mh.train in a lower precision: on workers, against plain PyTorch; resumed; refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from lower_precision import SAMPLES, Pictures, Rows, distance, drawn_anew, row_batches, trained_plainly
from manyhands.executor import checkpoint
from manyhands.facts.errors import BadValue, UnknownName
from manyhands.facts.plan import BySamples, Single, Stage
from manyhands.runtime.coordinator import Coordinator
from real_runs import workers

pytestmark = pytest.mark.xdist_group("precision")
STEPS = 4
FIRST = 2.0**16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def rows(scales: tuple[float, ...] = (1.0,) * STEPS) -> TensorDataset:
    batches = row_batches(0, steps=len(scales))
    return TensorDataset(torch.cat([x * s for (x, _), s in zip(batches, scales)]), torch.cat([y for _, y in batches]))


def trained(module: nn.Module, cluster: Any, folder: Path, data: TensorDataset | None = None, **options: Any) -> Any:
    return mh.train(
        module, data or rows(), loss=functional.cross_entropy, optimizer=mh.Optimizer("SGD", lr=0.05, momentum=0.9),
        batch_size=SAMPLES, shuffle=False, cluster=cluster, folder=folder, **options,
    )  # fmt: skip


def halves(cluster: Coordinator, module: nn.Module) -> mh.Plan:
    """A pipeline of two stages, cut in the middle."""
    with torch.autocast("cpu", torch.bfloat16):
        graph = mh.capture(module, rows()[:SAMPLES][0], granularity="operators")
    first, second = list(cluster.members)[:2]
    count, cut = len(graph.layers), len(graph.layers) // 2
    return mh.Plan(
        type(module).__name__, SAMPLES, (Stage((0, cut), (first,), Single()), Stage((cut, count), (second,), Single()))
    )


def test_bf16_on_two_workers_is_pytorchs(cluster: Coordinator, tmp_path: Path) -> None:
    module = Rows()
    drawn_anew(module, 3)
    before = copy.deepcopy(module)
    result = trained(
        module, cluster, tmp_path / "run", plan=halves(cluster, module), precision="bf16", granularity="operators",
        test=rows(),
    )  # fmt: skip
    batches = row_batches(0, steps=STEPS)
    exact = trained_plainly(before, batches, torch.float64)
    plain = trained_plainly(before, batches, torch.bfloat16)
    assert distance(module.state_dict(), exact) <= 1.5 * distance(plain, exact)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        loss = functional.cross_entropy(module(rows().tensors[0]), rows().tensors[1])
    assert result.test.loss == pytest.approx(float(loss), rel=1e-3)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "verified" for event in events)


@pytest.mark.slow
def test_fp16_skips_and_goes_on_where_it_was(cluster: Coordinator, tmp_path: Path) -> None:
    """The second of four steps overflows. A run that is stopped after it and resumed ends as one that was not."""
    data, said = rows((1.0, 3e4, 1.0, 1.0)), list[str]()
    one, two = OneStage(), OneStage()
    drawn_anew(one, 1)
    drawn_anew(two, 1)
    stage = Stage((0, 3), tuple(list(cluster.members)[:2]), BySamples((4, 2)))
    options: dict[str, Any] = {"precision": "fp16", "plan": mh.Plan("OneStage", SAMPLES, (stage,)), "data": data}
    whole = trained(one, cluster, tmp_path / "whole", say=said.append, **options)
    assert whole.skipped_steps == [1]
    assert any("Gradients of step 1 overflowed" in text for text in said)
    assert scale_in(tmp_path / "whole") == (FIRST / 2, 2)
    trained(two, cluster, tmp_path / "parts", steps=2, **options)
    assert scale_in(tmp_path / "parts") == (FIRST / 2, 0)
    trained(two, cluster, tmp_path / "parts", resume=True, steps=STEPS, **options)
    assert scale_in(tmp_path / "parts") == (FIRST / 2, 2)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name
    with pytest.raises(BadValue, match="started with precision = fp16; it is now bf16"):
        trained(two, cluster, tmp_path / "parts", resume=True, steps=STEPS + 1, data=data, precision="bf16")


class OneStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def scale_in(folder: Path) -> tuple[float, int]:
    newest = checkpoint.load_newest(folder)
    assert newest is not None
    scalars = newest.checkpoint.optimizer_scalars
    return scalars["loss scale/scale"], scalars["loss scale/steps"]


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="no precision called 'fp8'"):
        trained(Rows(), None, tmp_path / "run", precision="fp8")
    with pytest.raises(BadValue, match="keeps weights in float32; the module's place is float64"):
        trained(Rows().double(), None, tmp_path / "run", precision="bf16")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadValue, match=r"under torch\.autocast") as refused:
        trained(Rows(), None, tmp_path / "run")
    assert "precision='bf16'" in str(refused.value.hint)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_memory_and_time_are_planned_in_the_lower_precision() -> None:
    """Bytes saved for the backward pass, and those of a cut, are half as many; weights keep theirs."""
    x = torch.randn(4, 3, 8, 8)
    networks = {}
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        with torch.autocast("cpu", dtype, enabled=precision != "float32"):
            networks[precision] = mh.capture(Pictures(), x, granularity="operators").network
    full, half = (
        [layer for layer in networks[precision].layers if not layer.name.endswith("#1")]
        for precision in ("float32", "bf16")
    )
    by_name = {layer.name.removesuffix("#2"): layer for layer in half}
    checked = 0
    for layer in full:
        other = by_name.get(layer.name.removesuffix("#2"))
        if other is not None and other.name.startswith(("b", "c", "d", "e", "f")):
            assert other.output_bytes * 2 == layer.output_bytes, layer.name
            assert other.parameter_bytes == layer.parameter_bytes
            checked += 1
    assert checked >= 4
    saved = {name: sum(layer.saved_bytes for layer in network.layers) for name, network in networks.items()}
    assert saved["bf16"] <= 0.7 * saved["float32"]
