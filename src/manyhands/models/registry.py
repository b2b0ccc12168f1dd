"""The model zoo: names, facts, builders and example data. Listing it does not import torch."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from manyhands.facts.errors import BadFile, BadValue, ManyhandsError, UnknownName, unknown
from manyhands.models import huggingface
from manyhands.models.user_files import is_file_name, load_file, loaded_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

_DEFAULT_IMAGE = (3, 224, 224)
_DEFAULT_CLASSES = 1000


@dataclass(frozen=True)
class ModelEntry:
    """The facts of a model that are known without building it. `macs` is for one sample of `input_shape`."""

    name: str
    description: str
    source: str
    factory: str
    input_shape: tuple[int, ...]
    parameters: int
    macs: int
    kind: Literal["image", "text", "generator", "recommendation"] = "image"
    loss: str = "cross_entropy"
    # Zero where the output is no choice among classes.
    num_classes: int = _DEFAULT_CLASSES
    # "module:function" that gives examples, where random pictures and class numbers will not do.
    inputs: str = ""
    target: str = ""


_ENTRIES = (
    ModelEntry("resnet18", "ResNet of 18 layers, ImageNet",
               "He et al., CVPR 2016, arXiv:1512.03385",
               "manyhands.models.resnet:resnet18", (3, 224, 224), parameters=11_689_512, macs=1_814_073_344),
    ModelEntry("resnet34", "ResNet of 34 layers, ImageNet",
               "He et al., CVPR 2016, arXiv:1512.03385",
               "manyhands.models.resnet:resnet34", (3, 224, 224), parameters=21_797_672, macs=3_663_761_408),
    ModelEntry("resnet50", "ResNet of 50 layers (v1.5, bottlenecks), ImageNet",
               "He et al., CVPR 2016, arXiv:1512.03385",
               "manyhands.models.resnet:resnet50", (3, 224, 224), parameters=25_557_032, macs=4_089_184_256),
    ModelEntry("mobilenetv2", "Inverted residuals with linear bottlenecks, ImageNet",
               "Sandler et al., CVPR 2018, arXiv:1801.04381",
               "manyhands.models.mobilenet:mobilenet_v2", (3, 224, 224), parameters=3_504_872, macs=300_774_272),
    ModelEntry("mobilenetv2-32", "MobileNetV2 for 32x32 pictures: without the first two strides, CIFAR-10",
               "Sandler et al., CVPR 2018, arXiv:1801.04381",
               "manyhands.models.mobilenet:mobilenet_v2_32", (3, 32, 32), parameters=2_236_682, macs=87_976_448,
               num_classes=10),
    ModelEntry("mobilenetv3-large", "Inverted residuals with squeeze-and-excite and hard-swish, ImageNet",
               "Howard et al., ICCV 2019, arXiv:1905.02244",
               "manyhands.models.mobilenet:mobilenet_v3_large", (3, 224, 224), parameters=5_483_032, macs=216_589_760),
    ModelEntry("efficientnet-b1", "Scaled inverted residuals with stochastic depth, ImageNet",
               "Tan and Le, ICML 2019, arXiv:1905.11946",
               "manyhands.models.efficientnet:efficientnet_b1", (3, 224, 224), parameters=7_794_184, macs=569_651_680),
    ModelEntry("efficientnet-b1-32", "EfficientNet-B1 for 32x32 pictures: without the first two strides, CIFAR-10",
               "Tan and Le, ICML 2019, arXiv:1905.11946",
               "manyhands.models.efficientnet:efficientnet_b1_32", (3, 32, 32), parameters=6_525_994, macs=175_290_880,
               num_classes=10),
    ModelEntry("vgg16", "VGG of 16 layers without batch norm, ImageNet",
               "Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556",
               "manyhands.models.vgg:vgg16", (3, 224, 224), parameters=138_357_544, macs=15_470_264_320),
    ModelEntry("vgg19", "VGG of 19 layers without batch norm, ImageNet",
               "Simonyan and Zisserman, ICLR 2015, arXiv:1409.1556",
               "manyhands.models.vgg:vgg19", (3, 224, 224), parameters=143_667_240, macs=19_632_062_464),
    ModelEntry("unet", "U-Net of five levels for segmentation; width=64 sets its size",
               "Ronneberger et al., MICCAI 2015, arXiv:1505.04597",
               "manyhands.models.unet:unet", (3, 256, 256), parameters=31_037_698, macs=48_171_581_440,
               num_classes=2, target="manyhands.models.unet:example_labels"),
    ModelEntry("bert-small", "BERT encoder (4 layers of 512) with a classifier of sentences",
               "Devlin et al., NAACL 2019, arXiv:1810.04805; google/bert_uncased_L-4_H-512_A-8",
               "manyhands.models.bert:bert_small", (512,), parameters=28_764_674, macs=7_516_455_936,
               kind="text", num_classes=2, inputs="manyhands.models.bert:example_inputs"),
    ModelEntry("bilstm", "Two bidirectional LSTM layers for film reviews, IMDB",
               "Graves and Schmidhuber 2005; widths from the SPLIT paper, Table 3",
               "manyhands.models.bilstm:bilstm", (256,), parameters=2_763_002, macs=66_560_400,
               kind="text", num_classes=2, inputs="manyhands.models.bilstm:example_inputs"),
    ModelEntry("chair", "Generator of 128x128 pictures of chairs from 825 numbers",
               "Dosovitskiy et al., TPAMI 2017, arXiv:1411.5928; widths from the SPLIT paper, Table 3",
               "manyhands.models.chair:chair", (825,), parameters=5_572_603, macs=315_174_016,
               kind="generator", loss="mse", num_classes=0,
               inputs="manyhands.models.chair:example_inputs", target="manyhands.models.chair:example_pictures"),
    ModelEntry("din", "Deep Interest Network for click prediction, MovieLens; the input is a history of films",
               "Zhou et al., KDD 2018, arXiv:1706.06978",
               "manyhands.models.din:din", (50,), parameters=3_801_252, macs=4_491_680,
               kind="recommendation", loss="binary_cross_entropy_with_logits", num_classes=0,
               inputs="manyhands.models.din:example_inputs"),
    ModelEntry("tiny", "Small convolutional network for handwritten digits",
               "manyhands",
               "manyhands.models.tiny:tiny", (1, 16, 16), parameters=40_506, macs=643_712,
               num_classes=10),
    ModelEntry("yolov2-16", "The first 16 layers of YOLOv2 (12 convolutions, 4 max-pools)",
               "Redmon and Farhadi, CVPR 2017, arXiv:1612.08242; darknet yolov2-voc",
               "manyhands.models.yolov2:yolov2_first16", (3, 608, 608), parameters=3_424_160, macs=13_000_343_552,
               loss="mse", num_classes=0, target="manyhands.models.yolov2:example_map"),
    ModelEntry("yolov2", "YOLOv2 object detector, Pascal VOC",
               "Redmon and Farhadi, CVPR 2017, arXiv:1612.08242; darknet yolov2-voc",
               "manyhands.models.yolov2:yolov2", (3, 416, 416), parameters=50_655_389, macs=14_680_167_424,
               loss="region", num_classes=20, target="manyhands.models.yolov2:example_boxes"),
)  # fmt: skip
ZOO: dict[str, ModelEntry] = {entry.name: entry for entry in _ENTRIES}


DECOUPLED = "decoupled"
"""`decoupled:NAME` is a model after `mh.decouple`; `decoupled,groups=2,widen=1.75:NAME` says how."""
LIBRARIES = ("torchvision", "timm", "hf")
"""Packages whose models are built by name without running code that the name chooses."""


def build(name_or_path: str, **kwargs: Any) -> nn.Module:
    """Return a new model with random weights: a zoo name, `module:factory`, `./file.py:Class`,
    `torchvision:NAME`, `timm:NAME`, `hf:TYPE`, `hf:FOLDER` or `decoupled:` and one of those."""
    return _call(name_or_path, factory(name_or_path), kwargs)


def from_file(name: str, place: str) -> str:
    """Return a model's name as it was read from `place`, a file, if it may be used.

    Building a `module:factory` or a `./file.py:Class` runs that code. The author of a plan or a run's folder may not
    choose that for its reader: only a person who types the name does.
    """
    if runs_code(name):
        raise BadFile(
            f"{place}: names the model {name:.120}, which would run code of the module '{name.partition(':')[0]:.80}'.",
            hint=f"If you trust that module, type the name yourself: --model {name:.120}",
        )
    return name


def runs_code(name: str) -> bool:
    """Return whether building a model runs a module that neither manyhands nor one of `LIBRARIES` has chosen."""
    library, colon, _ = original_name(name).partition(":")
    return bool(colon) and library not in LIBRARIES


def factory(name_or_path: str) -> Callable[..., Any]:
    """Return the callable that builds a model of that name."""
    if name_or_path in ZOO:
        return _load(ZOO[name_or_path].factory)
    library, colon, name = name_or_path.partition(":")
    if not colon or not library or not name:
        error = unknown("model", name_or_path, ZOO)
        other_forms = "Or write module:factory, file.py:Class, torchvision:NAME, timm:NAME, hf:TYPE or decoupled:NAME."
        raise UnknownName(error.message, hint=f"{error.hint} {other_forms}".strip())
    if _is_decoupled(name_or_path):
        return _decoupled_factory(name, _decoupled_options(library))
    if library == "hf":
        return huggingface.factory(name)
    if library in LIBRARIES:
        return _library_factory(library, name)
    if is_file_name(library):
        return _attribute(load_file(library), name_or_path)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a user's own module lies in the current folder, and hides no installed one
    # Files written since the folder was last listed would otherwise go unseen.
    importlib.invalidate_caches()
    return _load(name_or_path)


def _load(path: str) -> Callable[..., Any]:
    """Return what `module:attribute` names."""
    module_name = path.partition(":")[0]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UnknownName(
                f"There is no module called '{module_name}', which '{path}' needs.",
                hint=f"Looked in {os.getcwd()} and in the installed packages.",
            ) from error
        raise ManyhandsError(f"Importing '{module_name}' failed: {error}") from error
    except Exception as error:
        raise ManyhandsError(f"Importing '{module_name}' failed: {type(error).__name__}: {error}") from error
    return _attribute(module, path)


def _attribute(module: ModuleType, path: str) -> Callable[..., Any]:
    """Return the callable of a module that `module:attribute` names."""
    module_name, _, attribute = path.partition(":")
    if not hasattr(module, attribute):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"factory in module {module_name}", attribute, callables)
    attribute_value = getattr(module, attribute)
    if not callable(attribute_value):
        raise ManyhandsError(
            f"'{path}' is a {type(attribute_value).__name__}, not a function or class that makes a model."
        )
    factory: Callable[..., Any] = attribute_value
    return factory


def _library_factory(library: str, name: str) -> Callable[..., Any]:
    """Return a function that builds `name` from torchvision or timm, without pretrained weights."""
    try:
        module: Any = importlib.import_module("torchvision.models" if library == "torchvision" else "timm")
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision built for another torch
        raise ManyhandsError(
            f"Model '{library}:{name}' needs {library}, which cannot be imported: {error}",
            hint=f"pip install {library}",
        ) from error
    names: list[str] = module.list_models()
    # timm takes names with a tag of weights after a dot.
    if name.split(".")[0] not in names:
        raise unknown(f"{library} model", name, names)
    if library == "torchvision":
        return lambda **kwargs: module.get_model(name, **{"weights": None, **kwargs})
    return lambda **kwargs: module.create_model(name, **{"pretrained": False, **kwargs})


def _is_decoupled(name: str) -> bool:
    library, colon, inner = name.partition(":")
    return bool(colon and inner) and library.split(",")[0] == DECOUPLED


def original_name(name: str) -> str:
    """Return the model behind `decoupled:NAME`; any other name is its own."""
    return original_name(name.partition(":")[2]) if _is_decoupled(name) else name


def _decoupled_options(library: str) -> dict[str, Any]:
    """Return the options in 'decoupled,groups=2,widen=1.75': {"groups": 2, "widen": 1.75}."""
    kinds: dict[str, Callable[[str], Any]] = {
        "groups": int, "widen": float, "weights": str, "shuffles": lambda text: text if text == "all" else int(text),
    }  # fmt: skip
    options: dict[str, Any] = {}
    for word in library.split(",")[1:]:
        key, _, value = word.partition("=")
        if key not in kinds:
            raise unknown("option of decoupled models", key, kinds)
        try:
            options[key] = kinds[key](value)
        except ValueError as error:
            raise BadValue(
                f"'{word}' is not an option of a decoupled model.", hint="Write decoupled,groups=4,shuffles=3:resnet50."
            ) from error
    return options


def _decoupled_factory(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that builds `name` and decouples it; it takes what `name` takes and how to decouple."""
    from manyhands.decoupling.decouple import decouple

    inner = factory(name)
    decouple_parameters = inspect.signature(decouple).parameters
    options_of_decouple = {key: decouple_parameters[key] for key in ("groups", "shuffles", "widen", "weights")}

    def build_decoupled(**kwargs: Any) -> Any:
        chosen = {**options, **{key: kwargs.pop(key) for key in options_of_decouple if key in kwargs}}
        entry = _entry(name)
        return decouple(_call(name, inner, kwargs), **chosen, inputs=entry.input_shape[1:] if entry else None)

    try:
        model_parameters = inspect.signature(inner).parameters
    except ValueError:
        return build_decoupled
    keywords = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in options_of_decouple.values()
        if parameter.name not in model_parameters
    ]
    last = [parameter for parameter in model_parameters.values() if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    others = [
        parameter for parameter in model_parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    named: Any = build_decoupled
    named.__signature__ = inspect.Signature([*others, *keywords, *last])
    return build_decoupled


def _call(name: str, factory: Callable[..., Any], kwargs: dict[str, Any]) -> nn.Module:
    from torch import nn

    try:
        inspect.signature(factory).bind(**kwargs)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters) or "nothing"
        raise BadValue(f"Model '{name}' cannot be built: {error}.", hint=f"It takes: {takes}.") from error
    except ValueError:
        pass  # Some built-in callables have no readable signature; then only calling them shows.
    try:
        model = factory(**kwargs)
    except ManyhandsError:
        raise
    except Exception as error:
        raise ManyhandsError(f"Building model '{name}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ManyhandsError(
            f"'{name}' returned a {type(model).__name__}, not a torch.nn.Module.",
            hint="The factory must build the model and return it.",
        )
    return model


def module_of(name: str) -> ModuleType | None:
    """Return the user's module that a name was built from, once it is loaded."""
    library, colon, _ = original_name(name).partition(":")
    if not colon or library in LIBRARIES:
        return None
    return loaded_module(library) if is_file_name(library) else sys.modules.get(library)


def entry_of(name: str) -> ModelEntry | None:
    """Return the zoo's entry, also of a decoupled model of the zoo; None for a model from elsewhere."""
    return ZOO.get(original_name(name))


def _entry(name: str) -> ModelEntry | None:
    """Return the zoo's entry, None for a model from elsewhere, or raise an error for a name of neither."""
    name = original_name(name)
    if name not in ZOO and ":" not in name:
        raise unknown("model", name, ZOO)
    return ZOO.get(name)


def example_batch(
    name: str,
    batch_size: int,
    *,
    input_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor | dict[str, Tensor]:
    """Return random inputs: one tensor, or a dict by argument name where the model takes several. `dtype` is for
    floats.

    A user's module that holds `example_batch(batch_size)` beside its factory defines what its models take.
    """
    import torch

    entry = _entry(name)
    factory = getattr(module_of(name), "example_batch", None)
    if entry is None and callable(factory) and input_shape is None:
        batch: Tensor | dict[str, Tensor] = factory(batch_size)
        return batch
    shape = input_shape or (entry.input_shape if entry else _DEFAULT_IMAGE)
    generator = torch.Generator().manual_seed(seed)
    library, _, inner = original_name(name).partition(":")
    if library == "hf":
        return huggingface.example_inputs(inner, batch_size, input_shape, generator)
    if entry is None or not entry.inputs:
        return torch.randn(batch_size, *shape, generator=generator).to(dtype or torch.get_default_dtype())
    inputs: Tensor | dict[str, Tensor] = _load(entry.inputs)(batch_size, shape, generator)
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point() and dtype is not None:
        return inputs.to(dtype)
    return inputs


def example_target(
    name: str,
    batch_size: int,
    *,
    input_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    num_classes: int | None = None,
) -> Tensor:
    """Return a random target for the model's loss. Give `num_classes` when the model was built with another number."""
    import torch

    entry = _entry(name)
    shape = input_shape or (entry.input_shape if entry else _DEFAULT_IMAGE)
    classes = num_classes or (entry.num_classes if entry else _DEFAULT_CLASSES)
    generator = torch.Generator().manual_seed(seed)
    if entry is not None and entry.target:
        target: Tensor = _load(entry.target)(batch_size, shape, classes, generator)
        return target
    if entry is not None and entry.loss == "binary_cross_entropy_with_logits":
        return torch.randint(0, 2, (batch_size,), generator=generator).float()
    return torch.randint(0, classes, (batch_size,), generator=generator)


def loss_function(name: str) -> Callable[..., Tensor]:
    """Return the function (output, target) -> scalar of that name."""
    import torch.nn.functional as F

    from manyhands.models.yolov2 import region_loss

    functions: dict[str, Callable[..., Tensor]] = {
        "cross_entropy": F.cross_entropy,
        "mse": F.mse_loss,
        "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
        "region": region_loss,
    }
    if name not in functions:
        raise unknown("loss", name, functions)
    return functions[name]
