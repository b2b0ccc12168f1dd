"""torchvision's networks."""

from __future__ import annotations

import pytest

from manyhands_bench.networks.subject import call
from manyhands_bench.networks.torchvision_networks import (
    torchvision_detectors,
    torchvision_names,
    torchvision_subject,
)

pytest.importorskip("torchvision")


def test_all_but_the_quantised_ones() -> None:
    names = torchvision_names()
    assert "resnet18" in names
    assert not any(name.startswith("quantized_") for name in names)
    assert "ssdlite320_mobilenet_v3_large" in torchvision_detectors() <= set(names)


@pytest.mark.parametrize("name", ["squeezenet1_1", "lraspp_mobilenet_v3_large"])
def test_a_network_takes_its_batch(name: str) -> None:
    subject = torchvision_subject(name)
    assert call(subject.module.train(), subject.batch(2)) is not None
    assert not subject.is_detector


def test_a_detector_computes_its_losses() -> None:
    subject = torchvision_subject("ssdlite320_mobilenet_v3_large")
    assert subject.is_detector
    assert set(call(subject.module.train(), subject.batch(2))) == {"bbox_regression", "classification"}
