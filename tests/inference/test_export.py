"""Networks as ONNX files: what another program computes with them is what PyTorch does, for batches of any size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from groups import slow_if
from manyhands.facts.errors import BadFile, BadValue, CaptureFailed, NotInstalled
from manyhands.inference.export import check_path, export_onnx
from manyhands.models.registry import ZOO, build, example_batch


def needed() -> Any:
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnxruntime")


def compared(path: Path, model: nn.Module, inputs: torch.Tensor) -> float:
    """The largest difference, as a part of the largest output."""
    session = needed().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    with torch.no_grad():
        expected = model.eval()(inputs)
    return float((torch.from_numpy(answer) - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=slow_if(n != "tiny")) for n in ("tiny", "resnet18", "mobilenetv2")]
)
def test_the_zoo_gives_the_same_answers(name: str, tmp_path: Path) -> None:
    needed()
    torch.manual_seed(0)
    model = build(name)
    for module in model.modules():  # statistics as after some training, not those of the beginning
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    shape = ZOO[name].input_shape
    example = example_batch(name, 2, input_shape=shape)
    assert export_onnx(model.train(), example, tmp_path / "model.onnx") == tmp_path / "model.onnx"
    assert model.training, "the model is as it was"
    for count in (1, 2, 5):
        assert compared(tmp_path / "model.onnx", model, torch.randn(count, *shape)) < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"], "one file, weights included"


class Two(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left * 2 + right


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("named", [False, True])
def test_several_inputs(named: bool, tmp_path: Path) -> None:
    onnxruntime = needed()
    values = {"left": torch.randn(3, 4), "right": torch.randn(3, 4)}
    path = export_onnx(Two(), values if named else tuple(values.values()), tmp_path / "two.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == ["left", "right"]
    more = {name: torch.randn(7, 4) for name in values}
    (answer,) = session.run(None, {name: value.numpy() for name, value in more.items()})
    torch.testing.assert_close(torch.from_numpy(answer), Two()(**more))


class Unwilling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"ends in \.onnx"):
        check_path(tmp_path / "model.pt")
    with pytest.raises(BadFile, match="there is no folder"):
        check_path(tmp_path / "none" / "model.onnx")
    needed()
    for example in (torch.zeros(1, 3), torch.tensor(1.0), "text"):
        with pytest.raises(BadValue, match="batch of 2 or more"):
            export_onnx(nn.Linear(3, 2), example, tmp_path / "model.onnx")
    with pytest.raises(CaptureFailed, match="Unwilling cannot be written as ONNX"):
        export_onnx(Unwilling(), torch.randn(2, 3), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_without_onnx_it_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(NotInstalled, match=r"pip install 'manyhands\[onnx\]'"):
        mh.export_onnx(nn.Linear(3, 2), torch.zeros(2, 3), tmp_path / "model.onnx")


@pytest.mark.slow
def test_large_weights_lie_in_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed()
    monkeypatch.setattr("manyhands.inference.export.MOST_BYTES", 1000)
    model = nn.Linear(30, 40)
    path = export_onnx(model, torch.zeros(2, 30), tmp_path / "model.onnx")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert compared(path, model, torch.randn(3, 30)) < 1e-5
