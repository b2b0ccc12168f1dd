"""Checkpoints: whole or not there, read with care, and enough to go on exactly."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from manyhands.executor import checkpoint_files
from manyhands.executor.checkpoint import Checkpoint, broken_after, is_any, latest, load, load_newest, prune, save
from manyhands.facts.errors import BadFile, BadValue
from manyhands.facts.optimizer import Optimizer
from scheduled_stepper import ScheduledStepper

FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]


class Tied(nn.Module):
    """Convolution, batch norm, and two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.conv(images)).mean(dim=(2, 3))
        result: torch.Tensor = self.second(self.first(hidden).tanh())
        return result


def simple(step: int = 120, value: float = 1.0, **given: Any) -> Checkpoint:
    return Checkpoint(
        **{
            "step": step,
            "model": {"w": torch.full((3, 2), value)},
            "optimizer_tensors": {"w/exp_avg": torch.full((3, 2), value / 2), "w/step": torch.tensor(float(step))},
            "optimizer_scalars": {"w/other": None, "w/count": 3},
            "optimizer": Optimizer("Adam", lr=1e-3, betas=(0.9, 0.99), schedule=("StepLR", {"step_size": 3})),
            "seed": 7,
            "facts": {"epoch": 2, "loss": 0.25, "names": ["a", None]},
            **given,
        }
    )


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("."))


def change_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """As somebody would who knows how the digest is made."""
    document = json.loads((path / "state.json").read_text())
    change(document)
    document["sha256"] = checkpoint_files.document_digest(document)
    (path / "state.json").write_text(json.dumps(document))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, simple())
    assert path == tmp_path / "checkpoints" / "step-000120"
    assert sorted(entry.name for entry in path.iterdir()) == FILES
    assert leftovers(tmp_path) == []
    loaded, saved = load(path), simple()
    assert (loaded.step, loaded.seed, loaded.optimizer) == (120, 7, saved.optimizer)
    assert loaded.facts == saved.facts
    assert loaded.optimizer_scalars == saved.optimizer_scalars
    assert loaded.model.keys() == saved.model.keys()
    assert torch.equal(loaded.model["w"], saved.model["w"])
    assert {name: tensor.tolist() for name, tensor in loaded.optimizer_tensors.items()} == {
        name: tensor.tolist() for name, tensor in saved.optimizer_tensors.items()
    }


def test_a_model_takes_it_as_a_state_dict(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied().to(memory_format=torch.channels_last)
    model(torch.randn(5, 3, 6, 6))  # moves the running averages
    path = save(tmp_path, simple(model=model.state_dict()))
    again = Tied()
    again.load_state_dict(load_file(path / "model.safetensors"))
    model.to(memory_format=torch.contiguous_format).eval()
    again.eval()
    images = torch.randn(2, 3, 6, 6)
    assert torch.equal(again(images), model(images))
    assert again.norm.num_batches_tracked == 1
    assert again.second.weight is again.first.weight


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    model = {
        "base": base,
        "same": base,
        "turned": base.T,
        "row": base[1],
        "stretched": torch.ones(1).expand(5),
        "parameter": nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "number": torch.tensor(3),
        "none": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "wide": torch.ones(2, dtype=torch.float64) / 3,
    }
    loaded = load(save(tmp_path, simple(model=model))).model
    assert loaded.keys() == model.keys()
    for name, tensor in model.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


def test_training_goes_on_exactly(tmp_path: Path) -> None:
    optimizer = Optimizer("NAdam", lr=0.01, schedule=("CosineAnnealingLR", {"T_max": 9}))

    def steps(model: nn.Module, stepper: Any, first: int, last: int) -> None:
        for step in range(first, last):
            images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(images).square().sum().backward()
            stepper.step()
            stepper.zero()

    torch.manual_seed(0)
    whole, part, resumed = Tied().double(), Tied().double(), Tied().double()
    part.load_state_dict(whole.state_dict())
    steps(whole, ScheduledStepper(optimizer, dict(whole.named_parameters())), 0, 8)
    stepper = ScheduledStepper(optimizer, dict(part.named_parameters()))
    steps(part, stepper, 0, 5)
    tensors, scalars = stepper.state()
    save(tmp_path, Checkpoint(5, part.state_dict(), tensors, scalars, optimizer, seed=0, facts={}))

    path = latest(tmp_path)
    assert path is not None
    found = load(path)
    resumed.load_state_dict(found.model)
    again = ScheduledStepper(found.optimizer, dict(resumed.named_parameters()))
    again.load(found.optimizer_tensors, found.optimizer_scalars, found.step)
    steps(resumed, again, 5, 8)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, simple(value=1.0))
    path = save(tmp_path, simple(value=2.0))
    assert load(path).model["w"][0, 0] == 2.0
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-000120"]


def failing(real: Callable[..., Any], calls: list[int], wrong: Callable[[int], bool]) -> Callable[..., Any]:
    def call(*words: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if wrong(calls[-1]):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*words, **named)

    return call


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("name", ["rename", "replace", "fsync", "mkdir"])
@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
def test_a_save_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_lasting: bool
) -> None:
    """Each call in turn fails, until a save makes so few calls that none does."""
    save(tmp_path, simple(value=1.0))
    real = getattr(os, name)
    failures = 0
    for number in range(50):
        calls: list[int] = []
        with monkeypatch.context() as patch:
            wrong = (
                (lambda call, number=number: call >= number)
                if is_lasting
                else (lambda call, number=number: call == number)
            )
            patch.setattr(os, name, failing(real, calls, wrong))
            said = ""
            try:
                save(tmp_path, simple(value=2.0))
            except BadFile as error:
                said = str(error)
        failed = bool(said)
        assert not failed or "No space left on device" in said
        path = latest(tmp_path)
        assert path is not None
        assert load(path).model["w"][0, 0] == (1.0 if failed else 2.0)
        if failed:
            failures += 1
            if not (is_lasting and name == "rename" and number == 1):  # there even putting it back fails
                assert path.name == "step-000120"
                assert leftovers(tmp_path) == []
            else:
                assert path.name.endswith(".old")
                os.rename(path, tmp_path / "checkpoints" / "step-000120")
        if len(calls) <= number:
            break
        if not failed:  # a call that may fail: forcing a folder to disk is not possible everywhere
            save(tmp_path, simple(value=1.0))
    assert failures >= {"rename": 2, "replace": 1, "fsync": 3, "mkdir": 1}[name]
    assert load(tmp_path / "checkpoints" / "step-000120").model["w"][0, 0] == 2.0


def test_killed_between_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends at once puts nothing back; the old checkpoint is found under its other name."""
    save(tmp_path, simple(step=60))
    save(tmp_path, simple(value=1.0))
    process = os.fork()
    if process == 0:
        real = os.rename
        calls: list[int] = []

        def rename(*words: Any) -> None:
            if calls:
                os._exit(9)
            calls.append(1)
            real(*words)

        os.rename = rename  # type: ignore[assignment]
        save(tmp_path, simple(value=2.0))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    path = latest(tmp_path)
    assert path is not None
    assert path.name.startswith(".step-000120")
    assert load(path).model["w"][0, 0] == 1.0
    monkeypatch.setattr(checkpoint_files, "_STALE_SECONDS", -1)
    prune(tmp_path, 2)
    assert latest(tmp_path) == path  # what is not replaced is kept
    assert len(leftovers(tmp_path)) == 1
    again = save(tmp_path, simple(value=3.0))
    assert latest(tmp_path) == again
    prune(tmp_path, 2)
    assert leftovers(tmp_path) == []


def test_folders_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(BadFile, match=r"step-000120: the checkpoint cannot be written: (Not a directory|File exists)"):
        save(tmp_path, simple())
    with pytest.raises(BadFile, match="checkpoints: cannot be read: Not a directory"):
        latest(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": -1}, "of step -1; steps are >= 0"),
        ({"facts": {"model": object()}}, "cannot be written as a document"),
        ({"facts": {"loss": float("nan")}}, "cannot be written as a document"),
        ({"optimizer_scalars": {"a": torch.ones(1)}}, "cannot be written as a document"),
        ({"model": {"w": torch.ones(2, device="meta")}}, "'w' has no values"),
        ({"model": {"w": torch.ones(2, 2).to_sparse()}}, "'w' is not dense"),
        ({"model": {"__metadata__": torch.ones(2)}}, "'__metadata__' has a taken name"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadValue, match=message):
        save(tmp_path, simple(**given))
    assert latest(tmp_path) is None
    assert not (tmp_path / "checkpoints").exists() or leftovers(tmp_path) == []


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("name", FILES)
def test_damage_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    """Any flipped bit, and any cut, extension or loss of a file."""
    path = save(tmp_path, simple())
    content = (path / name).read_bytes()
    said = name if name == "state.json" else r"SHA-256 is \w{16}…; state.json says \w{16}…"
    for place in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        (path / name).write_bytes(flipped)
        with pytest.raises(BadFile, match=said):
            load(path)
        assert latest(tmp_path) is None
    for broken in (content[:-3], content[: len(content) // 2], b"", content + b"}"):
        (path / name).write_bytes(broken)
        with pytest.raises(BadFile, match=name):
            load(path)
    (path / name).unlink()
    with pytest.raises(BadFile, match=f"{name}: cannot be read: No such file"):
        load(path)
    assert latest(tmp_path) is None
    (path / name).mkdir()
    with pytest.raises(BadFile, match=f"{name}: is not a plain file"):
        load(path)


def test_a_file_cut_short_is_seen_by_its_size(tmp_path: Path) -> None:
    old, new = save(tmp_path, simple(1)), save(tmp_path, simple(2))
    size = (new / "model.safetensors").stat().st_size
    os.truncate(new / "model.safetensors", size - 4)
    with pytest.raises(
        BadFile, match=rf"model\.safetensors: {size - 4} bytes .*; state.json says {size}\. .*cut short"
    ):
        load(new)
    assert prune(tmp_path, 1) == []  # it does not count
    assert latest(tmp_path) == old


def test_files_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    old, new = save(tmp_path, simple(1, value=1.0)), save(tmp_path, simple(2, value=2.0))
    shutil.copy(old / "model.safetensors", new / "model.safetensors")  # of the same size
    with pytest.raises(BadFile, match="damaged, or belongs to another checkpoint"):
        load(new)
    assert latest(tmp_path) == old


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(version=2), "of version 2; this is version 1"),
        (lambda state: state.update(step=-4), "step is -4; it must be >= 0"),
        (lambda state: state.update(step="4"), "step is '4': expected `int`"),
        (lambda state: state.update(step=True), "step is True: expected `int`"),
        (lambda state: state.pop("seed"), "the field 'seed' is missing"),
        (lambda state: state.update(more=1), "there is no field 'more'"),
        (lambda state: state.update(optimizer={"name": "a b"}), "state.json: The optimizer is 'a b'"),
        (lambda state: state["files"].pop("model.safetensors"), "its files are optimizer.safetensors; they must be"),
        (lambda state: state["files"].update({"../../x": {"bytes": 1, "sha256": ""}}), r"its files are \.\./\.\./x"),
    ],
)
def test_a_state_that_is_wrong(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    path = save(tmp_path, simple())
    change_state(path, change)
    with pytest.raises(BadFile, match=message):
        load(path)


def test_a_changed_state_is_noticed(tmp_path: Path) -> None:
    """However well it reads; what is only spaced otherwise is the same."""
    path = save(tmp_path, simple(facts={"epoch": 2, "7": None, "rate": 1e-05, "name": "ä"}))
    document = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(document))
    assert load(path).facts["name"] == "ä"
    for change in ({"seed": 8}, {"step": 121}, {"facts": {}}, {"optimizer_scalars": {"w/other": None, "w/count": 4}}):
        (path / "state.json").write_text(json.dumps(document | change))
        with pytest.raises(
            BadFile, match=r"state.json: the SHA-256 of its values is \w{16}…; it says \w{16}….*changed"
        ):
            load(path)
        assert latest(tmp_path) is None


def test_a_state_of_version_0_2_has_no_digest(tmp_path: Path) -> None:
    path = save(tmp_path, simple())
    document = json.loads((path / "state.json").read_text())
    del document["sha256"]
    (path / "state.json").write_text(json.dumps(document))
    assert load(path).step == 120


def test_tensors_that_are_no_tensors(tmp_path: Path) -> None:
    """Sizes and digests that agree prove nothing about who wrote them."""
    path = save(tmp_path, simple())
    for content in (b"", b"\xff" * 40, b"\x80\x04cos\nsystem\n", (10**9).to_bytes(8, "little") + b"{}"):
        (path / "model.safetensors").write_bytes(content)
        size, digest = checkpoint_files.size_and_digest(path / "model.safetensors")

        def agree(state: dict[str, Any], size: int = size, digest: str = digest) -> None:
            state["files"]["model.safetensors"] = {"bytes": size, "sha256": digest}

        change_state(path, agree)
        with pytest.raises(BadFile, match=r"model\.safetensors: is not a safetensors file"):
            load(path)


def test_the_latest_is_of_the_highest_step(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for step in (999_999, 20, 1_000_000, 3):
        save(tmp_path, simple(step))
    parent = tmp_path / "checkpoints"
    (parent / "step-9999999").mkdir()  # empty
    (parent / "step-abc").mkdir()
    (parent / "notes.txt").write_text("mine")
    shutil.copytree(parent / "step-000020", parent / ".step-5000000.12.abcd.tmp")
    assert latest(tmp_path) == parent / "step-1000000"
    (parent / "step-1000000" / "optimizer.safetensors").write_bytes(b"cut")
    assert latest(tmp_path) == parent / "step-999999"


def test_the_newest_that_can_be_read(tmp_path: Path) -> None:
    """What is wrong with later ones comes along, also where only reading the tensors shows it."""
    assert load_newest(tmp_path) is None
    assert not is_any(tmp_path)
    paths = [save(tmp_path, simple(step)) for step in (1, 2, 3, 4)]
    found = load_newest(tmp_path)
    assert found is not None
    assert (found.path, found.checkpoint.step, found.broken, found.note) == (paths[3], 4, (), "")
    os.truncate(paths[3] / "model.safetensors", 40)
    (paths[2] / "optimizer.safetensors").write_bytes(b"\xff" * 40)
    size, digest = checkpoint_files.size_and_digest(paths[2] / "optimizer.safetensors")
    change_state(
        paths[2], lambda state: state["files"].update({"optimizer.safetensors": {"bytes": size, "sha256": digest}})
    )
    found = load_newest(tmp_path)
    assert found is not None
    assert (found.path, found.checkpoint.step) == (paths[1], 2)
    first, second, last = found.note.splitlines()
    assert first.startswith(f"{paths[3] / 'model.safetensors'}: 40 bytes")
    assert second.startswith(f"{paths[2] / 'optimizer.safetensors'}: is not a safetensors file")
    assert last == f"Passed over; the checkpoint before is used: {paths[1]}, of step 2."
    assert [error.message for error in broken_after(tmp_path, 2)] == [first, second]
    assert [error.message for error in broken_after(tmp_path, 3)] == [first]
    for path in paths[:2]:
        (path / "state.json").unlink()
    with pytest.raises(BadFile, match=r"checkpoints: none of 4 checkpoint\(s\) can be read") as caught:
        load_newest(tmp_path)
    assert len(caught.value.message.splitlines()) == 5
    assert all(str(path) in caught.value.message for path in paths)
    assert is_any(tmp_path)


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, simple(step))
    parent = tmp_path / "checkpoints"
    (parent / "notes.txt").write_text("mine")
    assert [path.name for path in prune(tmp_path, 3)] == ["step-000001", "step-000002"]
    assert sorted(path.name for path in parent.iterdir()) == ["notes.txt", *(f"step-00000{step}" for step in (3, 4, 5))]
    assert prune(tmp_path, 3) == []
    (parent / "step-000005" / "model.safetensors").unlink()
    (parent / "step-000004" / "state.json").write_text("{")
    assert prune(tmp_path, 1) == []  # the third is the only one that can be read
    assert latest(tmp_path) == parent / "step-000003"
    assert prune(tmp_path / "nowhere", 1) == []
    with pytest.raises(BadValue, match="0 checkpoints are to be kept; it must be >= 1"):
        prune(tmp_path, 0)


def test_pruning_clears_what_killed_saves_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, simple(1))
    left = path.with_name(".step-000002.99.0a1b2c3d.tmp")
    left.mkdir()
    save_file({"a": torch.ones(1)}, left / "model.safetensors")
    prune(tmp_path, 1)
    assert left.exists()  # it may be in the making
    monkeypatch.setattr(checkpoint_files, "_STALE_SECONDS", -1)
    prune(tmp_path, 1)
    assert not left.exists()
    assert latest(tmp_path) == path


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="there is no such checkpoint"):
        load(tmp_path / "checkpoints" / "step-000001")
