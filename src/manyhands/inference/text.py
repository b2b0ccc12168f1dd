"""Text by names: the decoder and the tokenizer that a command names, its prompts as tokens, and what follows as text.

Nothing is downloaded: weights and the tokenizer's files lie beside the configuration, in the folder that is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.facts.errors import BadData, BadValue, NotInstalled
from manyhands.inference.config import InferConfig

if TYPE_CHECKING:
    from torch import nn

    from manyhands.inference.generate import Generated

_WEIGHTS = "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True, eq=False)
class TextModel:
    """A decoder, its tokenizer, and the prompts of a command."""

    name: str
    model: nn.Module
    tokenizer: Any
    """None where no files of one lie beside the network."""
    prompts: tuple[tuple[int, ...], ...]
    note: str
    """The origin of the weights, in a sentence."""

    def answers(self, generated: Generated) -> list[dict[str, Any]]:
        """Return what follows each prompt: tokens, and their text where that is known."""
        answers = []
        for prompt, new in zip(generated.prompts, generated.tokens):
            answer: dict[str, Any] = {"prompt": list(prompt), "tokens": list(new)}
            if self.tokenizer is not None:
                answer["text"] = self.tokenizer.decode(list(new), skip_special_tokens=True)
            answers.append(answer)
        return answers


def load_text_model(config: InferConfig) -> TextModel:
    """Return the decoder that a command names, with its weights, and the command's prompts as tokens."""
    from manyhands.inference.model import load_known

    if not config.model:
        raise BadValue("A prompt needs a network that generates text.", hint="Name it: manyhands infer hf:FOLDER")
    folder = _folder(config.model)
    weights = config.weights
    if not weights and folder is not None and (folder / _WEIGHTS).is_file():
        weights = str(folder / _WEIGHTS)
    loaded = load_known(config.model, weights, config.shape)
    tokenizer: Any = _tokenizer(folder) if folder is not None else None
    if config.prompt and tokenizer is None:
        where = f"{folder} has no tokenizer's files" if folder else f"{config.model} is no folder with a tokenizer"
        raise BadValue(f"--prompt is a text, and {where}.", hint="Give tokens: --tokens 12,7,900")
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in config.prompt]
    prompts += [numbers_in(text) for text in config.tokens]
    return TextModel(loaded.name, loaded.model, tokenizer, tuple(prompts), loaded.note)


def numbers_in(text: str) -> tuple[int, ...]:
    """Return the tokens of a text like 12,7,900."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise BadData(f"--tokens {text!r:.80} is no list of numbers.", hint="--tokens 12,7,900") from None


def _folder(model: str) -> Path | None:
    """Return the folder of hf:FOLDER or hf:FOLDER/config.json, if it is one."""
    kind, _, rest = model.partition(":")
    path = Path(rest).expanduser()
    if kind != "hf" or not path.exists():
        return None
    return path if path.is_dir() else path.parent


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        automatic: Any = importlib.import_module("transformers").AutoTokenizer
    except ImportError as error:
        raise NotInstalled(f"A tokenizer needs transformers: {error}", hint="pip install transformers") from error
    return automatic.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def shown(prompts: Sequence[Sequence[int]]) -> str:
    """Return how many prompts and tokens there are, in words."""
    count = sum(map(len, prompts))
    return f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''} of {count} token{'s' if count > 1 else ''}"
