"""A training job as typed: how many devices it waits for, uses and needs; and what a run that goes on keeps of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.facts.errors import BadValue
from manyhands.files.documents import write_document
from manyhands.inference.arguments import infer_config
from manyhands.job.devices import devices_for
from manyhands.training.arguments import train_config
from manyhands.training.config import TrainConfig

LISTEN = "0.0.0.0:7077"


def config_of(resume: Path | None = None, **given: Any) -> TrainConfig:
    return train_config({**given, "resume": str(resume) if resume else None})


@pytest.mark.parametrize(
    ("devices", "begins", "most", "here"),
    [("4", 4, None, 4), ("2:6", 2, 6, 6), ("3:3", 3, 3, 3)],
)
def test_a_range_says_what_it_begins_with_and_what_it_uses(
    devices: str, begins: int, most: int | None, here: int
) -> None:
    """And not how few it goes on with: that is the floor, which is one."""
    joined = config_of(devices=devices, listen=LISTEN)
    assert (joined.count, joined.max_devices, joined.min_devices) == (begins, most, 1)
    assert config_of(devices=devices).count == here, "on this machine nobody comes later"
    answering = infer_config({"devices": devices, "listen": LISTEN, "input": "digits"})
    assert (answering.count, answering.max_devices, answering.min_devices) == (begins, most, 1)


def test_a_floor_is_said_by_its_own_option() -> None:
    assert config_of(devices="2:6", listen=LISTEN, min_devices=2).min_devices == 2


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"devices": "6:2"}, "--devices is '6:2'", "2:6"),
        ({"devices": "2", "min_devices": 0}, "--min-devices is 0; it must be at least 1", ""),
        ({"devices": "2:6", "listen": LISTEN, "min_devices": 3}, "--min-devices is 3; the run would begin with 2",
         "Write --devices 3, or --min-devices 2."),
        ({"listen": LISTEN, "min_devices": 2}, "--min-devices is 2; the run would begin with 1", "--devices 2"),
        ({"cluster": "local:2", "min_devices": 4}, "--min-devices is 4; the run would begin with 2", "--min-devices 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(BadValue) as raised:
        config_of(**given)
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_those_of_this_machine_join_nowhere() -> None:
    with (
        pytest.raises(BadValue, match=r"--listen 0\.0\.0\.0:7077 is for workers of other machines; local:2"),
        devices_for(config_of(cluster="local:2", listen=LISTEN), print),
    ):
        pass


# A run that goes on


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run that others had joined."""
    config = config_of(devices="2:6", listen=LISTEN, min_devices=2)
    write_document(tmp_path / "config.yaml", {"wish": config.document()})
    return tmp_path


def test_it_waits_for_the_devices_it_had(stopped: Path) -> None:
    """Not for workers of this machine, while the real ones look for it in vain."""
    config = config_of(stopped)
    assert (config.listen, config.count, config.max_devices, config.min_devices) == (LISTEN, 2, 6, 2)


@pytest.mark.parametrize(
    ("given", "listen", "count"),
    [
        ({"devices": "3"}, LISTEN, 3),
        ({"listen": "10.0.0.1:7078"}, "10.0.0.1:7078", 2),
        ({"cluster": "local:3"}, "", 3),
        ({"gpus": 1}, "", 6),
    ],
)
def test_or_on_others(stopped: Path, given: dict[str, Any], listen: str, count: int) -> None:
    config = config_of(stopped, **given)
    assert (config.listen, config.count) == (listen, count)


def test_one_that_was_in_a_lab_goes_on_with_those_that_join(tmp_path: Path) -> None:
    write_document(tmp_path / "config.yaml", {"wish": config_of(lab="pi3x6", slots=2).document()})
    config = config_of(tmp_path, listen=LISTEN, devices="2")
    assert (config.lab, config.slots, config.listen, config.count) == ("", None, LISTEN, 2)
