"""mh.evaluate equals the module in evaluation mode, whatever the batch size, and leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.facts.errors import BadData
from manyhands.runtime.coordinator import Coordinator
from real_runs import Pictures, assert_same, in_line, names, network, workers

pytestmark = pytest.mark.xdist_group("evaluation")  # its workers are started once


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


def used() -> nn.Sequential:
    """With buffers that are not those of a new network."""
    model = network()
    with torch.no_grad():
        model(Pictures().pictures * 3 + 1)
    return model


def expected(model: nn.Module, data: Pictures) -> tuple[float, float]:
    was_training = model.training
    with torch.no_grad():
        output = model.eval()(data.pictures)
    model.train(was_training)
    return functional.cross_entropy(output, data.classes).item(), float(
        (output.argmax(1) == data.classes).double().mean()
    )


@pytest.mark.quick("29-7")
@pytest.mark.parametrize(("samples", "batch_size"), [(24, 12), (29, 12), (5, 12), (29, 7), (3, 1)])
def test_it_equals_the_module(cluster: Coordinator, samples: int, batch_size: int) -> None:
    model, data = used(), Pictures(samples)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = mh.evaluate(
        model, data, loss=functional.cross_entropy, batch_size=batch_size, cluster=cluster,
        plan="samples" if batch_size > 1 else "single",
    )  # fmt: skip
    loss, accuracy = expected(model, data)
    assert found.loss == pytest.approx(loss, rel=1e-10)
    assert found.accuracy == pytest.approx(accuracy, rel=1e-12)
    assert found.samples == samples
    assert model.training
    assert_same(model.state_dict(), before)


def test_by_a_pipeline_in_evaluation_mode(cluster: Coordinator) -> None:
    model, data = used().eval(), Pictures(29)
    found = mh.evaluate(
        model, data, loss=functional.cross_entropy, batch_size=12, cluster=cluster, plan=in_line(names(cluster))
    )
    loss, accuracy = expected(model, data)
    assert found.loss == pytest.approx(loss, rel=1e-10)
    assert found.accuracy == pytest.approx(accuracy, rel=1e-12)
    assert not model.training


def test_without_a_loss(cluster: Coordinator) -> None:
    found = mh.evaluate(used(), Pictures(14), batch_size=12, cluster=cluster)
    assert found.loss is None
    assert found.accuracy is not None


@pytest.mark.slow
def test_numbers_as_targets_in_another_type(cluster: Coordinator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    inputs, targets = torch.randn(13, 4), torch.rand(13, 1)
    data = TensorDataset(inputs, targets)
    loss = functional.binary_cross_entropy_with_logits
    found = mh.evaluate(model, data, loss=loss, batch_size=4, cluster=cluster)
    with torch.no_grad():
        wanted = loss(model(inputs.double()), targets.double()).item()
    assert found.loss == pytest.approx(wanted, rel=1e-10)
    assert found.accuracy is None


@pytest.mark.slow
def test_losses_that_do_not_follow_from_those_of_batches(cluster: Coordinator) -> None:
    def spread(output: Tensor, target: Tensor) -> Tensor:
        return (output.std(0) - functional.one_hot(target, 5).double().std(0)).square().sum()

    model, data = used(), Pictures(22)
    found = mh.evaluate(model, data, loss=spread, batch_size=8, cluster=cluster, plan="single")
    model.eval()
    with torch.no_grad():
        assert found.loss == pytest.approx(spread(model(data.pictures), data.classes).item(), rel=1e-10)
    ignoring = Pictures(22, change=lambda i, x, y: (x, torch.tensor(-100) if i % 3 == 0 else y))
    found = mh.evaluate(model, ignoring, loss=functional.cross_entropy, batch_size=8, cluster=cluster)
    targets = torch.stack([ignoring[i][1] for i in range(22)])
    with torch.no_grad():
        wanted = functional.cross_entropy(model(data.pictures), targets).item()
    assert found.loss == pytest.approx(wanted, rel=1e-10)


def test_no_data(cluster: Coordinator) -> None:
    with pytest.raises(BadData, match="no samples"):
        mh.evaluate(used(), Pictures(0), cluster=cluster)
