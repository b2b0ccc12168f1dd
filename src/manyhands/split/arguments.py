"""The arguments of `manyhands split train` as a `SplitConfig`: a new run, or one that is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.facts.errors import BadValue
from manyhands.job.arguments import check_resumed, given_arguments, resumed_folder, stored_document
from manyhands.split.config import SplitConfig

DOCUMENT = "split_wish"
"""The key of config.yaml under which the command's options are kept, since 0.1."""


def split_config(arguments: Mapping[str, Any]) -> SplitConfig:
    """Return the configuration of a command; arguments that were left out are None."""
    values = given_arguments(arguments)
    folder = resumed_folder(values, "split train")
    if folder is None:
        return SplitConfig.from_command(values)
    document = stored_document(folder, DOCUMENT)
    if document is None:
        raise BadValue(
            f"{folder} was not started by manyhands split train.", hint="In Python: mh.split_train(..., resume=FOLDER)."
        )
    stored = SplitConfig.stored_values(document)
    check_resumed(SplitConfig, folder, stored, values)
    if "epochs" in values or "steps" in values:
        stored |= {"epochs": None, "steps": None}
    return SplitConfig.from_command({**stored, **values})
