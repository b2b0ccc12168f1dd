"""transformers.TrainingArguments as options of mh.train: with transformers' own objects, against its own Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import manyhands as mh
from manyhands.facts.errors import BadValue
from manyhands.runtime.coordinator import Coordinator
from real_runs import workers

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.xdist_group("training")


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, samples: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.norm(torch.tanh(self.layer(x))))
        return {"logits": logits} if labels is None else {"loss": functional.cross_entropy(logits, labels)}


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(str(folder), **{"report_to": "none", "use_cpu": True, **options})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Coordinator]:
    with workers(2) as coordinator:
        yield coordinator


@pytest.mark.filterwarnings("ignore:Of TrainingArguments")
def test_it_trains_as_transformers_does(cluster: Coordinator, tmp_path: Path) -> None:
    """The same order of samples in both: groups without decay, warmup and a cosine, clipping, accumulation."""
    given = arguments(
        tmp_path / "hf", per_device_train_batch_size=3, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=0.05, weight_decay=0.3, max_grad_norm=0.2, lr_scheduler_type="cosine", warmup_steps=3,
        train_sampling_strategy="sequential", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    plain, model = Model(), Model()
    transformers.Trainer(plain, given, train_dataset=Rows()).train()
    given.train_sampling_strategy = "random"  # the loader has the order
    loader = DataLoader(Rows(), batch_size=6)
    options = mh.from_training_arguments(given, model, loader, folder=tmp_path / "run", plan="samples")
    result = mh.train(model, loader, **options, cluster=cluster)
    assert len(result.losses) == 8
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def test_fields_in_our_words(tmp_path: Path) -> None:
    model, data = Model(), Rows()
    with pytest.warns(UserWarning, match="logging_steps.*use_cpu.*no effect"):
        options = mh.from_training_arguments(
            arguments(
                tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=7, seed=9,
                weight_decay=0.5, logging_steps=3, eval_strategy="steps", eval_steps=2, report_to=["tensorboard"],
                metric_for_best_model="eval_loss",
            ),
            model, data, validate=data,
        )  # fmt: skip
    assert options["batch_size"] == 12
    assert "micro_batches" not in options
    assert (options["steps"], options["seed"], options["clip_norm"]) == (7, 9, 1.0)
    assert (options["validate_every"], options["precision"]) == (2, "float32")
    assert options["folder"] == str(tmp_path)
    assert [type(each) for each in options["callbacks"]] == [mh.TensorBoard]
    decays = {id(p): group["weight_decay"] for group in options["optimizer"].param_groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "layer.weight": 0.5, "layer.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0, "head.weight": 0.5,
        "head.bias": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        ({"optim": "adafactor"}, "optim is 'adafactor'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch", "validate": Rows()}, "a metric"),
        ({"eval_strategy": "epoch"}, "there is no held-out data"),
    ],
)
def test_what_would_be_another_training_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    given = dict(options)
    validate = given.pop("validate", None)
    with pytest.raises(BadValue, match=words) as refused:
        mh.from_training_arguments(
            arguments(tmp_path, per_device_train_batch_size=4, **given), Model(), Rows(), validate=validate
        )
    assert refused.value.hint
