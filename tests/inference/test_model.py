"""A network by names: built for the weights that are given, taking what it was trained on, with its classes' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

from manyhands.data.digits import PIXEL_MEAN
from manyhands.data.samples import read_samples
from manyhands.data.wanted import SampleForm
from manyhands.executor import checkpoint
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.files.documents import write_document
from manyhands.inference.arguments import decoupled_name
from manyhands.inference.model import load_known
from manyhands.models import registry


def run_folder(folder: Path, module: torch.nn.Module, **wish: Any) -> Path:
    """What `train` leaves."""
    for step in (3, 5):
        state = {name: value + step if name.endswith("bias") else value for name, value in module.state_dict().items()}
        checkpoint.save(folder, checkpoint.Checkpoint(step, state, {}, {}, Optimizer("SGD", lr=0.1), 0))
    write_document(folder / "config.yaml", {"wish": wish})
    return folder


def test_without_weights_it_is_said() -> None:
    known = load_known()
    assert known.name == "tiny"
    assert "random" in known.note
    assert known.wanted == SampleForm((1, 16, 16))
    assert isinstance(known.example, torch.Tensor)
    assert tuple(known.example.shape) == (1, 16, 16)
    assert not known.model.training


def test_weights_say_how_many_classes_and_channels(tmp_path: Path) -> None:
    model = registry.build("tiny", num_classes=7, channels=3)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    known = load_known("tiny", str(tmp_path / "w.safetensors"), "3x16x16")
    for name, value in known.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    with pytest.raises(BadFile, match="does not fit unet"):
        load_known("unet", str(tmp_path / "w.safetensors"))


def test_a_file_that_alone_says_what_a_sample_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3x32x32 has three samples of 32x32 for a model that takes such; for others it is asked what one is."""
    (tmp_path / "elsewhere_models.py").write_text(
        "from torch import nn\n"
        "def rows(): return nn.Linear(32, 2).double()\n"
        "def pictures(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    source = str(tmp_path / "x.npy")
    numpy.save(source, numpy.zeros((3, 32, 32), numpy.float32))
    rows = load_known("elsewhere_models:rows", source=source)
    assert rows.wanted == SampleForm((32, 32), torch.float64)
    with pytest.raises(BadValue, match=r"does not run on samples of 32x32, which .*x\.npy has on its first") as refused:
        load_known("elsewhere_models:pictures", source=source)
    assert "--shape" in refused.value.hint
    known = load_known("elsewhere_models:pictures", "", "3x32x32", source=source)
    assert len(read_samples(source, known.wanted)) == 1


def test_pictures_are_resized_where_that_is_asked_for() -> None:
    assert load_known().wanted == SampleForm((1, 16, 16))
    assert load_known(resize=True).wanted == SampleForm((1, 16, 16)).resizing()
    with pytest.raises(BadValue, match="takes no pictures"):
        load_known("din", resize=True)


def test_a_run_knows_everything(tmp_path: Path) -> None:
    model = registry.build("tiny")
    folder = run_folder(tmp_path, model, model="tiny", data="digits", input="")
    known = load_known("", str(folder))
    assert "step-000005" in known.note
    assert known.labels.names == tuple("0123456789")
    assert isinstance(known.wanted, SampleForm)
    assert known.wanted.mean == PIXEL_MEAN, "pictures are as bright as those it was trained on"
    bias = "classifier.3.bias"
    assert torch.equal(known.model.state_dict()[bias], model.state_dict()[bias] + 5)
    older = load_known("", str(folder / "checkpoints" / "step-000003"))
    assert torch.equal(older.model.state_dict()[bias], model.state_dict()[bias] + 3)
    assert older.labels.names == tuple("0123456789")
    with pytest.raises(BadValue, match="is a run of tiny; --model is unet"):
        load_known("unet", str(folder))


def test_classes_are_folders_even_if_their_pictures_are_gone(tmp_path: Path) -> None:
    for name in ("dog", "cat", "bird"):
        (tmp_path / "data" / "train" / name).mkdir(parents=True)
    model = registry.build("tiny", num_classes=3)
    folder = run_folder(tmp_path / "run", model, model="tiny", data=str(tmp_path / "data"), input="1x20x20")
    known = load_known("", str(folder))
    assert known.labels.names == ("bird", "cat", "dog")
    assert isinstance(known.wanted, SampleForm)
    assert known.wanted.shape == (1, 20, 20)


def test_a_users_model_takes_what_the_file_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_a_user.py").write_text(
        "from torch import nn\ndef mlp(num_classes=2):\n    return nn.Sequential(nn.Linear(8, num_classes)).double()\n"
    )
    numpy.save(tmp_path / "x.npy", numpy.zeros((4, 8)))
    known = load_known("of_a_user:mlp", "", source="x.npy")
    assert known.wanted == SampleForm((8,), torch.float64)
    numpy.savez(tmp_path / "d.npz", x=numpy.zeros((40, 8), numpy.float32), y=numpy.arange(40) % 5)
    module = registry.build("of_a_user:mlp", num_classes=5)
    folder = run_folder(tmp_path / "run", module, model="of_a_user:mlp", data=str(tmp_path / "d.npz"), input="")
    with pytest.raises(BadFile, match="type the name yourself: --model of_a_user:mlp"):  # no folder chooses code
        load_known("", str(folder))
    known = load_known("of_a_user:mlp", str(folder))
    assert known.model(torch.zeros(1, 8, dtype=torch.float64)).shape == (1, 5)
    assert known.labels.names == ("0", "1", "2", "3", "4")
    (tmp_path / "d.npz").unlink()  # the data may be gone
    known = load_known("of_a_user:mlp", str(folder), source="x.npy")
    assert known.model(torch.zeros(1, 8, dtype=torch.float64)).shape == (1, 5)


def test_several_inputs_are_wanted_by_name() -> None:
    known = load_known("din")
    assert isinstance(known.wanted, dict)
    assert isinstance(known.example, dict)
    assert set(known.wanted) == set(known.example)
    assert not known.labels.are_classes


def test_decoupled_is_a_model_by_another_name() -> None:
    assert decoupled_name("tiny", "2,1,1.5") == "decoupled,groups=2,shuffles=1,widen=1.5:tiny"
    assert decoupled_name("tiny", "4") == "decoupled,groups=4:tiny"
    groups = {layer.groups for layer in load_known(decoupled_name("tiny", "2,all")).model.modules() if _is_conv(layer)}
    assert groups == {1, 2}
    with pytest.raises(BadValue):
        decoupled_name("tiny", "4,x")


def _is_conv(layer: torch.nn.Module) -> bool:
    return isinstance(layer, torch.nn.Conv2d)
