"""torchvision's networks."""

from __future__ import annotations

import pytest

from manyhands_bench.networks.subject import call
from manyhands_bench.networks.torchvision_networks import (
    VIDEO_SHAPES,
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


def test_an_mvit_is_trained_on_small_videos() -> None:
    """It has the layers that it has otherwise; only its table of positions is shorter."""
    usual, trained = (dict(torchvision_subject("mvit_v1_b", is_trained=way).module.named_parameters())
                      for way in (False, True))  # fmt: skip
    changed = {name for name, weight in usual.items() if weight.shape != trained[name].shape}
    assert usual.keys() == trained.keys()
    assert changed == {"pos_encoding.spatial_pos", "pos_encoding.temporal_pos"}
    assert torchvision_subject("mvit_v1_b", is_trained=True).batch(2).shape == (2, *VIDEO_SHAPES[0])
