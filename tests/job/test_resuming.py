"""What is said of how to go on: a command that can be document as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.job.resuming import is_needed_again, resume_command


@pytest.mark.parametrize(
    ("command", "document", "words"),
    [
        ("train", {"devices": 4, "listen": ""}, "manyhands train --resume runs/a"),
        ("train", {"devices": 2, "max_devices": 6, "min_devices": 1, "listen": "0.0.0.0:7077"},
         "manyhands train --resume runs/a --listen 0.0.0.0:7077 --devices 2:6"),
        ("train", {"devices": 3, "max_devices": None, "min_devices": 2, "listen": "10.0.0.1:7077"},
         "manyhands train --resume runs/a --listen 10.0.0.1:7077 --devices 3 --min-devices 2"),
        ("train", {"devices": None, "listen": "0.0.0.0:7077", "has_typed_token": True},
         "manyhands train --resume runs/a --listen 0.0.0.0:7077 --token TOKEN"),
        ("split train", {"listen": "0.0.0.0:7077", "silos": "edge=left,server=target"},
         "manyhands split train --resume runs/a --listen 0.0.0.0:7077"),
    ],
)  # fmt: skip
def test_as_it_was_started(command: str, document: dict[str, Any], words: str) -> None:
    assert resume_command(command, Path("runs/a"), document) == words


def test_a_folder_may_have_any_name() -> None:
    assert resume_command("train", Path("my runs/a"), {}) == "manyhands train --resume 'my runs/a'"


def test_a_token_of_the_environment_need_not_be_document_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_TOKEN", "secret")
    assert [is_needed_again(token) for token in ("", "secret", "other")] == [False, False, True]
