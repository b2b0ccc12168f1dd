"""mh.train on data without targets: networks that compute their own loss of the inputs alone, as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import manyhands as mh
from manyhands.data.given import with_labels
from manyhands.facts.errors import BadData, BadValue
from manyhands.facts.optimizer import Optimizer
from manyhands.graph.own_loss import LABELS
from manyhands.runtime.coordinator import Coordinator
from real_runs import BATCH, Pictures, assert_close, train, workers

pytestmark = pytest.mark.xdist_group("training")
STEPS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 64))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return functional.mse_loss(self.decoder(self.encoder(x)), x)


class Views(nn.Module):
    """Every two samples meet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))
        self.other = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = functional.normalize(self.one(x.flatten(1)), dim=-1)
        other = functional.normalize(self.other(x.flatten(1).flip(1)), dim=-1)
        logits = one @ other.t() * self.scale.exp()
        places = torch.arange(x.shape[0])
        loss = functional.cross_entropy(logits, places) + functional.cross_entropy(logits.t(), places)
        return {"loss": loss, "logits": logits}


class Dicts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": Pictures(STEPS * BATCH).pictures[index]}


PICTURES = Pictures(STEPS * BATCH)
DATA: dict[str, Any] = {
    "tensors": PICTURES.pictures, "a data set of one tensor": TensorDataset(PICTURES.pictures), "dicts": Dicts(),
    "pairs of which targets are not used": PICTURES,
}  # fmt: skip


@pytest.mark.quick("autoencoder by samples")
@pytest.mark.parametrize(
    ("make", "way", "kind"),
    [
        (Autoencoder, "samples", "tensors"), (Autoencoder, "pipeline", "a data set of one tensor"),
        (Autoencoder, "samples", "pairs of which targets are not used"), (Views, "pipeline", "dicts"),
    ],
    ids=["autoencoder by samples", "autoencoder by pipeline", "unused targets", "views"],
)  # fmt: skip
def test_a_network_without_labels_trains_as_on_one_device(
    cluster: Coordinator, tmp_path: Path, make: type[nn.Module], way: str, kind: str
) -> None:
    model, plain = make(), make()
    optimizer = Optimizer("SGD", lr=0.2, momentum=0.9)
    ran = train(
        cluster, way, tmp_path, model=model, data=DATA[kind], loss=None, steps=STEPS, shuffle=False,
        optimizer=optimizer, test=DATA[kind] if make is Autoencoder else None, verify=True,
    )  # fmt: skip
    ran.assert_as_planned()
    assert len(ran.result.plan.devices) == 2
    stepper = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        stepper.zero_grad()
        returned = plain(PICTURES.pictures[step * BATCH : (step + 1) * BATCH])
        loss = returned["loss"] if isinstance(returned, dict) else returned
        loss.backward()
        stepper.step()
        assert ran.result.losses[step] == pytest.approx(loss.item(), rel=1e-10)
    assert_close(ran.state, plain.state_dict())
    if make is Autoencoder:
        with torch.no_grad():
            wanted = plain(PICTURES.pictures).item()
        assert ran.result.test is not None
        assert ran.result.test.loss == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
def test_held_out_data_for_pairs_of_samples_is_refused_before_training(cluster: Coordinator, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match=r"every two samples[\s\S]*test_unlabelled_training.py:\d+"):
        train(cluster, "pipeline", tmp_path, model=Views(), data=PICTURES, loss=None, steps=2, test=PICTURES)


def test_a_loss_function_needs_targets(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="not a pair"):
        mh.train(Autoencoder(), PICTURES.pictures, loss=functional.mse_loss, optimizer=Optimizer("SGD", lr=0.1),
                 batch_size=BATCH, folder=tmp_path)  # fmt: skip


def test_samples_become_pairs() -> None:
    x, y = torch.arange(6).view(3, 2), torch.tensor([0, 1, 0])
    assert with_labels(x, LABELS)[1][1] == ()
    assert torch.equal(with_labels(TensorDataset(x), LABELS)[2][0], x[2])
    pairs = TensorDataset(x, y)
    assert with_labels(pairs, LABELS) is pairs
    labelled = with_labels([{"ids": x[i], "mask": x[i], "labels": y[i]} for i in range(3)], LABELS)
    inputs, target = labelled[1]
    assert list(inputs) == ["ids", "mask"]
    assert target == 1
    assert len(labelled) == 3
