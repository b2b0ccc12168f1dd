"""Networks of Hugging Face transformers by name, built from their configuration with random weights.

    hf:llama        a model type: a small network of that type
    hf:FOLDER       what config.json in a local folder describes, at full size, with the weights that lie beside it
    hf:config.json  the same, by file

Nothing is downloaded, and no code but that of the installed transformers runs: a name may come from a file
(registry.from_file). Fields of a configuration that name code, kernels or weights are left out. Weights are those of
safetensors files in the folder, if there are any (data, never code): they stay in the files until they are read.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadFile, BadValue, NotInstalled, OutOfMemory, UnknownName, did_you_mean
from manyhands.facts.units import format_bytes
from manyhands.files.documents import read_document

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TOKENS = 64
"""The most tokens of an example, unless its shape is given."""
_SAMPLES_OF_SOUND = 4000
_ELSEWHERE = (
    "Nothing is downloaded: put a model's config.json into a folder, and write hf:FOLDER (hf:./FOLDER, if a type has "
    "that name)."
)
_HEADS = (
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES", "MODEL_MAPPING_NAMES",
)  # fmt: skip
"""The tables of transformers that say which class a model type has, by task; the first that has the type is taken."""
_SMALL = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embedding_size": 64, "word_embed_proj_dim": 64,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "rotary_dim": 8, "intermediate_size": 128, "d_ff": 128, "ffn_dim": 128, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "hidden_dim": 128, "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4,
    "vocab_size": 1000,
}  # fmt: skip
"""Fields by which a network of a type is made small, where its own value is larger."""
_FOREIGN = frozenset({
    "auto_map", "name_or_path", "quantization_config", "attn_implementation", "experts_implementation", "use_kernels",
    "kernel_config", "trust_remote_code", "custom_pipelines", "use_pretrained_backbone", "backbone_kwargs",
    "model_args",
})  # fmt: skip
"""Fields that name code, kernels or weights of elsewhere. So do those that begin with an underscore."""


def factory(name: str) -> Callable[..., nn.Module]:
    """Return a function that builds the network of a name (without `hf:`) with random weights; its keywords are fields
    of the configuration."""
    model_class, config_class, fields = _described(name)

    def build(**changed: Any) -> nn.Module:
        with _offline():
            config = _config(config_class, {**fields, **_plain(changed)})
            from manyhands.weights.mapped import map_weights, without_weights  # imported late: it imports torch

            if (folder := _weights_beside(name)) is not None and not changed:
                with without_weights():
                    empty: nn.Module = model_class(config)
                return map_weights(empty, folder)
            _refuse_too_large(name, model_class, config)
            model: nn.Module = model_class(config)
            return model

    return build


def _weights_beside(name: str) -> Path | None:
    """Return the folder of a configuration, if weights lie there."""
    if not _is_path(name, _transformers(name).CONFIG_MAPPING):
        return None
    path = Path(name).expanduser()
    folder = path if path.is_dir() else path.parent
    return folder if any(folder.glob("*.safetensors")) else None


def example_inputs(
    name: str, batch_size: int, shape: tuple[int, ...] | None, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return random inputs of the network of a name (without `hf:`): tokens, pictures or sound, as it takes them.
    `shape` is that of one sample; None: its configuration's, at most `TOKENS` tokens."""
    import torch

    model_class, config_class, fields = _described(name)
    with _offline():
        config = _config(config_class, fields)
    main = str(getattr(model_class, "main_input_name", "input_ids"))
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", 0) or 2)
    tokens = (min(TOKENS, int(getattr(text, "max_position_embeddings", 0) or TOKENS)),)

    def random_tokens(length: tuple[int, ...]) -> Tensor:  # of the upper half: the lower has padding and the like
        return torch.randint(vocabulary // 2, vocabulary, (batch_size, *length), generator=generator)

    if main == "input_ids":
        inputs = {main: random_tokens(shape or tokens)}
    else:
        inputs = {main: torch.randn(batch_size, *(shape or _shape(main, config)), generator=generator)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = random_tokens(shape if shape and main == "input_ids" else tokens)
    return inputs


def _shape(main: str, config: Any) -> tuple[int, ...]:
    """Return the shape of one sample of what is no text."""
    vision = getattr(config, "vision_config", None) or config
    if main == "input_values":
        return (_SAMPLES_OF_SOUND,)
    if main == "input_features":
        length = getattr(config, "max_source_positions", None)
        sizes = [getattr(config, "num_mel_bins", None), 2 * length if isinstance(length, int) else None]
    else:
        size = getattr(vision, "image_size", None) or 224
        sizes = [getattr(vision, "num_channels", 3), *(size if isinstance(size, (list, tuple)) else (size, size))]
    whole = tuple(size for size in sizes if isinstance(size, int))
    if len(whole) < len(sizes):
        raise BadValue(
            f"The configuration does not say which shape '{main}' has.",
            hint="Give that of one sample: --input 3x224x224.",
        )
    return whole


def _described(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the class of a network, the class of its configuration, and that one's fields."""
    transformers = _transformers(name)
    if not _is_path(name, transformers.CONFIG_MAPPING):
        config_class = _config_class(transformers, name, f"There is no type of networks called '{name}'")
        with _offline():
            fields = _small(config_class)
        return _class_of_type(transformers, name), config_class, {**fields, "use_cache": False}
    path = Path(name).expanduser()
    if not path.exists():
        raise BadFile(f"{path}: there is no such folder.", hint=_ELSEWHERE)
    path = path / "config.json" if path.is_dir() else path
    document = read_document(path)
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise BadFile(f"{path}: is no configuration of transformers: it has no model_type.")
    kind = str(document["model_type"])
    config_class = _config_class(transformers, kind, f"{path}: model_type is '{kind:.80}', which is no type")
    fields = {key: value for key, value in _plain(document).items() if key not in ("model_type", "architectures")}
    architectures = document.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    model_class = _class_named(transformers, named, path) if named else _class_of_type(transformers, kind)
    return model_class, config_class, {**fields, "use_cache": False}


def _is_path(name: str, types: Collection[str]) -> bool:
    return "/" in name or name.endswith(".json") or (name not in types and Path(name).is_dir())


def _transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except (ImportError, RuntimeError) as error:  # RuntimeError: one that does not fit the installed torch
        raise NotInstalled(
            f"Model 'hf:{name}' needs transformers, which cannot be imported: {error}", hint="pip install transformers"
        ) from error


def _config_class(transformers: Any, kind: str, problem: str) -> Any:
    """Return the class of a type's configuration; only transformers' own types have one."""
    try:
        return transformers.CONFIG_MAPPING[kind]
    except KeyError as error:
        close = did_you_mean(kind, list(transformers.CONFIG_MAPPING.keys()))
        raise UnknownName(f"{problem} in the installed transformers.", hint=f"{close} {_ELSEWHERE}".strip()) from error


def _class_of_type(transformers: Any, kind: str) -> Any:
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    for table in _HEADS:
        listed = getattr(tables, table, {}).get(kind)
        if listed:
            named = listed if isinstance(listed, str) else listed[0]
            return _class_named(transformers, named, Path(kind))
    raise UnknownName(
        f"transformers has no network of type '{kind}' by itself: it is a part of others.",
        hint="Name the type of the whole network.",
    )


def _class_named(transformers: Any, named: str, where: Path) -> Any:
    """Return a network's class of transformers; another attribute of the package is refused."""
    attribute = getattr(transformers, named, None) if named.isidentifier() and not named.startswith("_") else None
    if not isinstance(attribute, type) or not issubclass(attribute, transformers.PreTrainedModel):
        raise UnknownName(
            f"{where}: '{named:.80}' is no network of the installed transformers.",
            hint="Code that lies beside a configuration is never run: name a folder with a type that transformers has.",
        )
    return attribute


def _config(config_class: Any, fields: dict[str, Any]) -> Any:
    """Return a configuration that asks for no weights, its parts' neither."""
    config = config_class(**fields)
    parts = [config]
    for part in parts:
        inner = [value for value in vars(part).values() if hasattr(value, "to_dict")]
        parts += [value for value in inner if all(value is not other for other in parts)]
        if getattr(part, "use_pretrained_backbone", False):
            part.use_pretrained_backbone = False
    return config


def _small(config_class: Any) -> dict[str, Any]:
    """Return the fields that make a configuration small; of those that it has, those that are larger."""
    try:
        usual = config_class().to_dict()
    except Exception:  # a configuration of parts, which have to be given
        return {}
    fields: dict[str, Any] = {
        key: least for key, least in _SMALL.items() if type(usual.get(key)) is int and usual[key] > least
    }
    special = {key: value for key, value in usual.items() if key.endswith("token_id") and type(value) is int}
    fields |= dict.fromkeys((key for key, value in special.items() if value >= _SMALL["vocab_size"]), 0)
    try:
        config_class(**fields)
    except Exception:  # a configuration whose fields depend on each other in another way stays as it is
        return {}
    return fields


def _plain(document: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a configuration without the fields that name code, kernels or weights of elsewhere, at any depth."""
    fields: dict[str, Any] = {}
    for key, value in document.items():
        is_elsewhere = key == "backbone" and isinstance(value, str) and not value.isidentifier()
        if str(key) not in _FOREIGN and not str(key).startswith("_") and not is_elsewhere:
            fields[str(key)] = _plain_value(value)
    return fields


def _plain_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def _refuse_too_large(name: str, model_class: Any, config: Any) -> None:
    """Refuse a network whose weights do not fit this machine's free memory, before any is taken."""
    import psutil
    import torch

    try:
        with torch.device("meta"):
            needed = sum(weight.nbytes for weight in model_class(config).state_dict().values())
    except Exception:  # it computes with its weights while it is built: building it shows
        return
    free = psutil.virtual_memory().available
    if needed > free:
        raise OutOfMemory(
            f"The weights of hf:{name} take {format_bytes(needed)}; this machine has {format_bytes(free)} free.",
            hint="Write a config.json with smaller sizes, or use a machine with more memory.",
        )


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep Hugging Face's hub from being asked for anything."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        yield
        return
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
