"""The zoo against published sizes, and every model through torch.export with a free batch size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from groups import by_name
from manyhands.facts.errors import BadValue, ManyhandsError, UnknownName
from manyhands.models import registry
from manyhands.models.efficientnet import StochasticDepth
from manyhands.models.registry import ZOO
from manyhands.models.yolov2 import VOC_ANCHORS, region_loss

# Millions of multiply-adds as papers and torchvision's tables give them.
PUBLISHED_MMACS = {
    "resnet18": 1820,
    "resnet34": 3670,
    "resnet50": 4100,
    "mobilenetv2": 300,
    "mobilenetv3-large": 219,
    "vgg16": 15500,
    "vgg19": 19600,
}
# torchvision's numbers (unet: the common PyTorch one; bert: google's 28,763,648 and a classifier).
PUBLISHED_PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "mobilenetv2": 3_504_872,
    "mobilenetv3-large": 5_483_032,
    "efficientnet-b1": 7_794_184,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "unet": 31_037_698,
    "bert-small": 28_763_648 + 2 * 512 + 2,
}
OUTPUT_SHAPES = {
    "unet": (2, 256, 256),
    "bert-small": (2,),
    "bilstm": (2,),
    "chair": (3, 128, 128),
    "din": (),
    "tiny": (10,),
    "mobilenetv2-32": (10,),
    "efficientnet-b1-32": (10,),
    "yolov2-16": (256, 38, 38),
    "yolov2": (125, 13, 13),
}
SMALL_INPUTS = {"unet": (3, 32, 32), "bert-small": (16,), "bilstm": (12,), "din": (6,), "chair": (825,)}


def small_input(name: str) -> tuple[int, ...]:
    if name == "tiny":
        return (1, 16, 16)
    return SMALL_INPUTS.get(name, (3, 64, 64))


def build_meta(name: str, **kwargs: Any) -> nn.Module:
    """A model without weights. The LSTM has some, because on "meta" torch unrolls it step by step."""
    with torch.device("cpu" if name == "bilstm" else "meta"):
        return registry.build(name, **kwargs)


def call(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    assert isinstance(output, Tensor)
    return output


def to_meta(inputs: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    if isinstance(inputs, dict):
        return {key: value.to("meta") for key, value in inputs.items()}
    return inputs.to("meta")


def meta_batch(name: str, batch_size: int, input_shape: tuple[int, ...] | None = None) -> Tensor | dict[str, Tensor]:
    inputs = registry.example_batch(name, batch_size, input_shape=input_shape)
    return inputs if name == "bilstm" else to_meta(inputs)


class MatmulCounter(TorchFunctionMode):
    """Multiply-adds of products written out in a model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            self.macs += result.numel() * args[0].shape[-1]
        return result


def count_macs(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> int:
    total = 0

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        nonlocal total
        if isinstance(module, nn.ConvTranspose2d):
            total += args[0].numel() * module.weight[0].numel()
        elif isinstance(module, nn.Conv2d):
            total += output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            total += output.numel() * module.in_features
        elif isinstance(module, nn.LSTM):
            steps = args[0].shape[0] * args[0].shape[1]
            total += steps * sum(weight.numel() for weight in module.parameters() if weight.dim() == 2)

    for module in model.modules():
        module.register_forward_hook(hook)
    with MatmulCounter() as products, torch.no_grad():
        call(model.eval(), inputs)
    return total + products.macs


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def export(model: nn.Module, inputs: Tensor | dict[str, Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    if isinstance(inputs, dict):
        shapes = {key: {0: batch} for key in inputs}
        return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    return torch.export.export(model, (inputs,), dynamic_shapes=({0: batch},), strict=False)


def test_listing_does_not_import_torch() -> None:
    code = "import sys; from manyhands.models.registry import ZOO; assert ZOO; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("name", ZOO)
def test_sizes_and_shapes(name: str) -> None:
    entry = ZOO[name]
    model = build_meta(name)
    inputs = meta_batch(name, 1)
    assert count_parameters(model) == entry.parameters
    assert entry.parameters == PUBLISHED_PARAMETERS.get(name, entry.parameters)
    assert count_macs(model, inputs) == entry.macs
    if name in PUBLISHED_MMACS:
        assert entry.macs / 1e6 == pytest.approx(PUBLISHED_MMACS[name], rel=0.02)
    assert call(model, inputs).shape == (1, *OUTPUT_SHAPES.get(name, (1000,)))


def test_efficientnet_macs_at_its_published_size() -> None:
    macs = count_macs(build_meta("efficientnet-b1"), torch.empty(1, 3, 240, 240, device="meta"))
    assert macs == pytest.approx(0.69e9, rel=0.02)


def test_yolov2_matches_the_published_weight_file() -> None:
    """yolov2.weights (COCO, 80 classes): 203,934,260 bytes, 16 of header, then floats with running statistics."""
    model = build_meta("yolov2", num_classes=80)
    statistics = sum(b.numel() for key, b in model.named_buffers() if key.endswith(("running_mean", "running_var")))
    assert 4 * (count_parameters(model) + statistics) + 16 == 203_934_260


def feature_megabytes(model: nn.Module, layers: dict[str, nn.Module], inputs: Tensor | dict[str, Tensor]) -> list[str]:
    sizes: dict[str, str] = {}

    def remember(key: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            sizes[key] = f"{32 * tensor[0].numel() * 4 / 2**20:.3f}"

        return hook

    for key, layer in layers.items():
        layer.register_forward_hook(remember(key))
    call(model.eval(), inputs)
    return [sizes[key] for key in layers]


def test_bilstm_features_match_split_table_3() -> None:
    model: Any = build_meta("bilstm")
    layers = {"1": model.embedding, "2": model.first, "3": model.second}
    assert feature_megabytes(model, layers, meta_batch("bilstm", 2)) == ["3.125", "6.250", "3.125"]
    assert 32 * model.classifier.in_features * 4 / 2**20 == pytest.approx(0.02, abs=0.005)


def test_chair_features_match_split_table_3() -> None:
    model: Any = build_meta("chair")
    layers = {"3": model.joined[1], "4": model.joined[2]}
    layers |= {str(5 + index): model.convolutions[2 * index] for index in range(6)}
    sizes = feature_megabytes(model, layers, meta_batch("chair", 2))
    assert sizes == ["0.031", "0.500", "2.000", "2.000", "2.875", "2.875", "6.000", "6.000"]
    assert 32 * model.joined[0][0].in_features * 4 / 2**20 == pytest.approx(0.05, abs=0.005)


def test_din_features_match_split_table_3() -> None:
    model: Any = build_meta("din")
    assert 32 * model.head[0].in_features * 4 / 2**20 == 0.125


@pytest.mark.slow
def test_small_image_features_match_split_table_3() -> None:
    picture = torch.empty(2, 3, 32, 32, device="meta")
    resnet: Any = build_meta("resnet50", num_classes=10, small_images=True)
    layers = {"1": resnet.stem, "4": resnet.stages[0], "8": resnet.stages[1], "14": resnet.stages[2]}
    assert feature_megabytes(resnet, layers, picture) == ["8.000", "32.000", "16.000", "8.000"]
    mobilenet: Any = build_meta("mobilenetv3-large", num_classes=10, small_images=True)
    # Three stem layers, then fifteen blocks.
    layers = {str(index): mobilenet.blocks[index + 1] for index in (2, 3, 5, 8, 12, 14)}
    assert feature_megabytes(mobilenet, layers, picture) == ["2.000", "3.000", "1.250", "0.625", "0.875", "0.312"]
    assert build_meta("mobilenetv2", small_images=True)(picture).shape == (2, 1000)


@pytest.mark.parametrize("name", ["mobilenetv2", "efficientnet-b1"])
def test_variants_for_small_pictures_lack_the_first_two_strides(name: str) -> None:
    """The last map is four times as high and wide; the weights are the same."""
    picture = torch.empty(2, 3, 32, 32, device="meta")
    large: Any = build_meta(name, num_classes=10)
    small: Any = build_meta(f"{name}-32")
    assert [large.blocks(picture).shape[2], small.blocks(picture).shape[2]] == [1, 4]
    assert small.blocks[:3](picture).shape[2:] == (32, 32)
    assert [parameter.shape for parameter in small.parameters()] == [p.shape for p in large.parameters()]
    assert small.head[-1].out_features == 10


@pytest.mark.quick("din")
@pytest.mark.filterwarnings("ignore:The tensor attributes")  # nn.LSTM refreshes its list of weights
@pytest.mark.parametrize("name", by_name("exported", ZOO, slow=("mobilenetv3-large", "resnet50", "yolov2")))
def test_exports_with_a_free_batch_size(name: str) -> None:
    program = export(build_meta(name).train(), meta_batch(name, 2, small_input(name)))
    (output,) = [node for node in program.graph.nodes if node.op == "output"]
    # The last of the outputs is the model's own; its batch must have stayed a symbol.
    assert not isinstance(output.args[0][-1].meta["val"].shape[0], int)


@pytest.mark.quick("din")
@pytest.mark.filterwarnings("ignore:The tensor attributes")
@pytest.mark.parametrize("name", ["tiny", "din", "bilstm", "chair"])
def test_an_exported_model_computes_the_same_for_another_batch_size(name: str) -> None:
    model = registry.build(name).eval()
    program = export(model, registry.example_batch(name, 2, input_shape=small_input(name)))
    assert set(program.state_dict) == set(model.state_dict())
    inputs = registry.example_batch(name, 5, input_shape=small_input(name), seed=1)
    torch.testing.assert_close(call(program.module(), inputs), call(model, inputs))


@pytest.mark.quick(every=8)
@pytest.mark.parametrize(
    "name",
    ["tiny", "din", "bilstm", "chair", "resnet18", "mobilenetv2", "mobilenetv3-large", "efficientnet-b1"],
)
def test_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    entry = ZOO[name]
    model = registry.build(name).train()
    output = call(model, registry.example_batch(name, 2, input_shape=small_input(name)))
    loss = registry.loss_function(entry.loss)(output, registry.example_target(name, 2, input_shape=small_input(name)))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("name", ZOO)
def test_loss_takes_the_output_and_target(name: str) -> None:
    shape = small_input(name)
    output = call(build_meta(name), meta_batch(name, 2, shape))
    output = torch.zeros(output.shape)
    loss = registry.loss_function(ZOO[name].loss)(output, registry.example_target(name, 2, input_shape=shape))
    assert loss.dim() == 0
    assert torch.isfinite(loss)


def test_tiny_is_small_and_learns() -> None:
    assert ZOO["tiny"].parameters < 100_000
    torch.manual_seed(0)
    model = registry.build("tiny")
    pictures, labels = registry.example_batch("tiny", 16), registry.example_target("tiny", 16)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(15):
        loss = nn.functional.cross_entropy(call(model, pictures), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    assert call(model.eval(), torch.zeros(1, 1, 32, 32)).shape == (1, 10)


def test_examples_repeat_with_their_seed() -> None:
    first, again, other = (registry.example_batch("tiny", 2, seed=seed) for seed in (1, 1, 2))
    assert isinstance(first, Tensor)
    assert isinstance(again, Tensor)
    assert isinstance(other, Tensor)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert registry.example_batch("chair", 2, dtype=torch.float64).dtype == torch.float64  # type: ignore[union-attr]
    assert registry.example_batch("anyone.elses:model", 2).shape == (2, 3, 224, 224)  # type: ignore[union-attr]


def test_stochastic_depth_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer = StochasticDepth(0.25)
    ones = torch.ones(4000, 1, 1, 1)
    dropped = layer.train()(ones)
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(layer.eval()(ones), ones)


@pytest.mark.slow
def test_bert_ignores_padding() -> None:
    torch.manual_seed(0)
    model = registry.build("bert-small", vocabulary=1000, max_length=16).eval()
    inputs = registry.example_batch("bert-small", 2, input_shape=(8,))
    assert isinstance(inputs, dict)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    longer = torch.cat((ids, torch.full((2, 4), 7)), dim=1)
    longer_mask = torch.cat((mask, torch.zeros(2, 4, dtype=torch.long)), dim=1)
    assert torch.allclose(model(ids, mask), model(longer, longer_mask), atol=1e-5)


# The region loss


def perfect_output(target: Tensor) -> Tensor:
    """An output that predicts exactly the one box of `target`, and nothing else, on a grid of 13x13."""
    output = torch.zeros(1, 5, 25, 13, 13)
    output[:, :, 4] = -30.0
    kind, x, y, width, height = target[0, 0].tolist()
    column, row = int(x * 13), int(y * 13)
    shapes = [(min(width * 13, w) * min(height * 13, h), w * h) for w, h in VOC_ANCHORS]
    ratios = [shared / (width * height * 169 + area - shared) for shared, area in shapes]
    anchor = max(range(5), key=ratios.__getitem__)
    cell = output[0, anchor, :, row, column]
    cell[0], cell[1] = torch.logit(torch.tensor([x * 13 - column, y * 13 - row]))
    cell[2] = torch.log(torch.tensor(width * 13 / VOC_ANCHORS[anchor][0]))
    cell[3] = torch.log(torch.tensor(height * 13 / VOC_ANCHORS[anchor][1]))
    cell[4] = 30.0
    cell[5 + int(kind)] = 50.0
    return output.flatten(1, 2)


def test_region_loss_is_zero_for_a_perfect_prediction() -> None:
    target = torch.zeros(1, 4, 5)
    target[0, 0] = torch.tensor([3.0, 0.42, 0.61, 0.3, 0.5])
    perfect = perfect_output(target)
    assert region_loss(perfect, target).item() == pytest.approx(0.0, abs=1e-5)
    # An unseen box costs half of 5 for its objectness, (1 - 0)^2, and no more than rounding elsewhere.
    blind = perfect.unflatten(1, (5, 25)).clone()
    blind[:, :, 4] = -30.0
    assert region_loss(blind.flatten(1, 2), target).item() == pytest.approx(2.5, abs=1e-3)
    # Without boxes, the one sure prediction costs half.
    assert region_loss(perfect, torch.zeros(1, 4, 5)).item() == pytest.approx(0.5, abs=1e-5)


def test_region_loss_does_not_depend_on_padding_and_descends() -> None:
    torch.manual_seed(0)
    target = registry.example_target("yolov2", 3, input_shape=(3, 96, 96))
    output = torch.randn(3, 125, 3, 3, requires_grad=True)
    loss = region_loss(output, target)
    padded = torch.cat((torch.zeros(3, 5, 5), target), dim=1)
    assert region_loss(output, padded).item() == pytest.approx(loss.item(), rel=1e-5)
    (slope,) = torch.autograd.grad(loss, output)
    assert torch.isfinite(slope).all()
    assert region_loss(output - 0.05 * slope, target) < loss


@pytest.mark.slow
def test_region_loss_exports() -> None:
    class Loss(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return region_loss(output, target)

    batch = torch.export.Dim("batch")
    args = (torch.randn(2, 125, 3, 3), registry.example_target("yolov2", 2))
    program = torch.export.export(Loss(), args, dynamic_shapes=({0: batch}, {0: batch}), strict=False)
    output, target = torch.randn(5, 125, 3, 3), registry.example_target("yolov2", 5, seed=1)
    assert torch.allclose(program.module()(output, target), region_loss(output, target))


# Loading by name


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(UnknownName, match="resnet18"):
        registry.build("resnet-18")
    with pytest.raises(UnknownName, match="bert-small"):
        registry.example_batch("bert_small", 2)
    with pytest.raises(UnknownName, match="yolov2"):
        registry.example_target("yolov", 2)
    with pytest.raises(UnknownName, match="cross_entropy"):
        registry.loss_function("crossentropy")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(BadValue, match="width"):
        registry.build("unet", widht=8)
    assert count_parameters(build_meta("unet", width=8)) < 1_000_000


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a person's own module in it, which is the current one."""
    (tmp_path / "own_zoo_models.py").write_text(
        "from torch import nn\n"
        "number = 3\n"
        "def small(outputs=2):\n    return nn.Linear(4, outputs)\n"
        "def wrong():\n    return 'no model'\n"
        "def fails():\n    raise RuntimeError('out of luck')\n"
    )
    (tmp_path / "own_zoo_broken.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "own_zoo_syntax.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


@pytest.mark.usefixtures("own_models")
def test_loads_a_factory_from_the_current_folder() -> None:
    model = registry.build("own_zoo_models:small", outputs=3)
    assert model(torch.zeros(1, 4)).shape == (1, 3)
    assert isinstance(registry.build("torch.nn:Identity"), nn.Identity)


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("own_zoo_models:smal", UnknownName, "Did you mean small"),
        ("own_zoo_models:number", ManyhandsError, "is a int"),
        ("own_zoo_models:wrong", ManyhandsError, "returned a str"),
        ("own_zoo_models:fails", ManyhandsError, "out of luck"),
        ("own_zoo_nowhere:small", UnknownName, "no module called 'own_zoo_nowhere'"),
        ("own_zoo_broken:small", ManyhandsError, "a_package_nobody_has"),
        ("own_zoo_syntax:small", ManyhandsError, "SyntaxError"),
        (":small", UnknownName, "no model called"),
    ],
)
def test_bad_factories_are_explained(path: str, kind: type[ManyhandsError], message: str) -> None:
    with pytest.raises(kind, match=message):
        registry.build(path)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_libraries_that_are_missing_are_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes an import fail, whether or not the library is installed here.
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ManyhandsError, match=f"pip install {library}"):
        registry.build(f"{library}:resnet18")
