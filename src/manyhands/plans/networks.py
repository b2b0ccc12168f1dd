"""Networks by name: captured once and cached, so that planning need not import torch.

Only the zoo's own models are cached, and only for the source they were captured from: the key holds a digest of the
package's models and graph folders. A user's `module:factory` is captured anew each time.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from manyhands.facts.errors import BadFile, BadValue, ManyhandsError
from manyhands.facts.network import Network
from manyhands.facts.version import __version__
from manyhands.files.documents import cache_folder, write_bytes_atomic
from manyhands.models.registry import ZOO

if TYPE_CHECKING:
    from manyhands.graph.graph import Graph

EXAMPLE_SAMPLES = 2


def parse_input(text: str) -> tuple[int, ...] | None:
    """Parse a shape: '3x608x608' -> (3, 608, 608); empty: the model's default."""
    if not text:
        return None
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or any(not 1 <= extent <= 65536 for extent in shape):
        raise BadValue(
            f"--input '{text}' is not a shape.", hint="Write it like 3x224x224, each number from 1 to 65536."
        )
    return shape


def capture_model(model: str, input_shape: tuple[int, ...] | None = None, granularity: str = "blocks") -> Graph:
    """Build and capture a model by name, with its loss: from the zoo, `decoupled:NAME`, `module:factory`, or a
    library."""
    from manyhands.graph.capture import capture
    from manyhands.models import registry

    module, entry = registry.build(model), registry.entry_of(model)
    options: dict[str, Any] = {}
    try:
        batch = registry.example_batch(model, EXAMPLE_SAMPLES, input_shape=input_shape)
        if entry is not None:
            options["loss"] = registry.loss_function(entry.loss)
            options["target"] = registry.example_target(model, EXAMPLE_SAMPLES, input_shape=input_shape)
    except (ValueError, RuntimeError) as error:
        usual = f" Its own is {'x'.join(map(str, entry.input_shape))}." if entry is not None else ""
        shape = "x".join(map(str, input_shape or ()))
        raise BadValue(f"{model} does not take an input of shape {shape}: {error}.{usual}") from error
    return capture(module, batch, granularity=granularity, name=model, **options)


def load_network(model: str, input_shape: tuple[int, ...] | None = None, granularity: str = "blocks") -> Network:
    """Return the network of a model, from the cache if it is there."""
    if model not in ZOO:
        return capture_model(model, input_shape, granularity).network
    path = _cached(model, input_shape, granularity)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Network)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError, ManyhandsError):  # missing or damaged
        network = capture_model(model, input_shape, granularity).network
        with contextlib.suppress(BadFile):  # a cache that cannot be written only costs time
            write_bytes_atomic(path, msgspec.json.encode(network))
        return network


def _cached(model: str, input_shape: tuple[int, ...] | None, granularity: str) -> Path:
    shape = "x".join(map(str, input_shape)) if input_shape else "default"
    return cache_folder() / "networks" / f"{model}-{shape}-{granularity}-{_source_digest()}.json"


def _source_digest() -> str:
    digest = hashlib.sha256(__version__.encode())
    package = Path(__file__).parent.parent
    for folder in ("models", "graph", "facts"):
        for file in sorted((package / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
