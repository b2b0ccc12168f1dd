"""Adapters as PEFT keeps them: `adapter_model.safetensors` and `adapter_config.json`, without the frozen weights.

    model = peft.get_peft_model(base, LoraConfig(...))      # mh.train(model, ...) writes RUN/adapter at its end
    mh.save_adapter(model, "adapter")                       # or at any time
    PeftModel.from_pretrained(base, "adapter")

A module wrapped by PEFT is written by PEFT itself. One with adapters of its own is written under PEFT's names: the path
of a parameter in the base model after `base_model.model.`. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from manyhands.facts.errors import BadFile, BadValue
from manyhands.files.documents import make_folder, sync_folder, write_bytes_atomic, write_document, write_failed

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "lm_head")
_SAMPLED_BYTES = 4096


def peft_model_of(module: nn.Module) -> nn.Module | None:
    """Return the module that PEFT has wrapped: this one, or the first inside of it; None: there is none."""
    return next((child for child in module.modules() if _is_wrapped(child)), None)


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(getattr(module, "peft_config", None), Mapping) and hasattr(module, "get_base_model")


def save_adapter(model: nn.Module, folder: str | Path, *, config: Mapping[str, Any] | None = None) -> Path:
    """Write what a fine-tuned module has trained as PEFT does, and return the folder.

    model    wrapped by PEFT; or any other module of which only adapters (and heads) are trained
    config   of a module that PEFT has not wrapped: the content of adapter_config.json, such as
             {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise BadFile(f"{folder}: is a file; an adapter is a folder.")
    wrapped = peft_model_of(model)
    if wrapped is not None:
        if config is not None:
            raise BadValue("config is given, but PEFT has wrapped the model: it has its own.", hint="Leave config out.")
        _save_wrapped(wrapped, folder)
    else:
        _save_plain(model, folder, config)
    return folder


def _save_wrapped(model: Any, folder: Path) -> None:
    """Write by PEFT's own function into a new folder beside, then move the files into place."""
    temporary = folder.absolute().with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        make_folder(temporary)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of embeddings that it adds, and of a model card that is not kept
            model.save_pretrained(
                str(temporary), safe_serialization=True, save_embedding_layers=_saved_embeddings(model)
            )
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            for written in sorted(temporary.rglob(name)):
                write_bytes_atomic(folder / written.relative_to(temporary), written.read_bytes())
    except OSError as error:
        raise write_failed(folder, error, what="the adapter") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _saved_embeddings(model: Any) -> bool | str:
    """Return PEFT's `save_embedding_layers`: left to PEFT, except where it would ask the network whether the vocabulary
    has grown."""
    configs = model.peft_config.values()
    sources = [str(config.base_model_name_or_path or "") for config in configs]
    if all(not source or (Path(source) / "config.json").is_file() for source in sources):
        return "auto"
    targets = [getattr(config, "target_modules", None) or () for config in configs]
    return any(name in each for each in targets for name in _EMBEDDINGS)


def _save_plain(model: nn.Module, folder: Path, config: Mapping[str, Any] | None) -> None:
    if config is None or not isinstance(config.get("peft_type"), str):
        raise BadValue(
            f"{type(model).__name__} is not wrapped by PEFT, and config has no peft_type.",
            hint='config={"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}, or '
            "peft.get_peft_model(model, peft.LoraConfig(...)).",
        )
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if len(trained) in (0, len(parameters)):
        raise BadValue(
            f"{type(model).__name__} trains {len(trained)} of {len(parameters)} parameters: it has no adapter.",
            hint="Freeze the others: parameter.requires_grad_(False).",
        )
    tensors = {_PREFIX + name.replace(".default.", "."): _dense(parameter) for name, parameter in trained.items()}
    write_bytes_atomic(folder / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    write_document(folder / CONFIG_FILE, {"inference_mode": True, **config})
    sync_folder(folder)


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to("cpu", copy=True).contiguous()


def sampled_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names, types, shapes and the first, middle and last bytes of some tensors: it tells weights of
    another origin apart without reading files of gigabytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        numbers = tensor.reshape(-1)
        count = max(1, _SAMPLED_BYTES // tensor.element_size())
        middle = max(0, numbers.numel() // 2 - count // 2)
        for part in (numbers[:count], numbers[middle : middle + count], numbers[-count:]):
            digest.update(part.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
