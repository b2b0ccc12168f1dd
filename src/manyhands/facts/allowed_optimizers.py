"""The classes of other packages that may train weights in this process: only those that its user has allowed by name.

A job names its optimizer as text. A class of torch.optim is looked up among PyTorch's own; any other is imported from
its package, and runs code of it, so that no document decides which: a worker's user does (--allow-optimizer).
"""

from __future__ import annotations

from collections.abc import Iterable

from manyhands.facts.errors import BadValue
from manyhands.facts.optimizer_options import checked_name

_allowed: set[str] = set()


def allow_optimizers(names: Iterable[str]) -> None:
    """Allow classes of other packages, each with its whole path, in this process and the workers that it starts."""
    for name in names:
        if "." not in checked_name("optimizer", name):
            raise BadValue(
                f"The optimizer '{name:.80}' needs no permission: only classes of other packages do.",
                hint="Write package.Class, like timm.optim.lamb.Lamb.",
            )
        _allowed.add(name)


def allowed_optimizers() -> list[str]:
    """Return the classes that are allowed in this process."""
    return sorted(_allowed)


def check_allowed(name: str) -> None:
    """Refuse a class of another package that was not allowed."""
    if name not in _allowed:
        raise BadValue(
            f"The optimizer {name:.120} is of another package, which was not allowed here.",
            hint=f"Allow it in Python, allow_optimizers=['{name:.120}'], and where each worker is started "
            f"(--allow-optimizer {name:.120}).",
        )
