"""A plan that does not fit in memory is refused for that, whatever the strategy: what a device needs, has, and what
helps."""

from __future__ import annotations

import pytest

from manyhands.explaining.comparison import compare
from manyhands.facts.cluster import Cluster
from manyhands.facts.device import Device
from manyhands.facts.errors import BadPlan, OutOfMemory
from manyhands.facts.link import Link
from manyhands.facts.network import Network
from manyhands.plans.networks import load_network
from manyhands.plans.planning import plan as make_plan

STATIC = r"487 kB weights, gradients and optimiser"
"""Of the whole network; its largest layer, features#3, has 223 kB of them."""


@pytest.fixture(scope="module")
def tiny() -> Network:
    return load_network("tiny")


def of_memory(kilobytes: int, count: int = 6) -> Cluster:
    ports = {"up_bytes_per_second": 1e7, "down_bytes_per_second": 1e7}
    devices = (
        Device(name=f"d{number}", gflops=1.0, memory_bytes=1000 * kilobytes, **ports) for number in range(count)
    )  # fmt: skip
    return Cluster("small", tuple(devices), Link(1e7, 1e-3))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("strategy", ["samples", "single", "tiles"])
def test_weights_that_fit_no_device_are_not_the_batch(tiny: Network, strategy: str) -> None:
    """Eight samples were cut into micro-batches of four, fewer than devices, and those were blamed."""
    with pytest.raises(OutOfMemory, match=rf"^d0 would hold 6\d\d kB of 200 kB at '.*' \({STATIC}, the rest") as caught:
        make_plan(tiny, of_memory(200), batch_size=8, strategy=strategy)
    assert caught.value.hint == (
        "Weights, gradients and optimiser alone are more than d0 has: no batch size helps. Nor do more devices: layer "
        "features#3 has 223 kB of that, more than any of them. Use devices with more memory (manyhands devices lists "
        "kinds)."
    )


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("strategy", ["pipeline", "mixed"])
def test_a_layer_that_fits_no_device(tiny: Network, strategy: str) -> None:
    with pytest.raises(OutOfMemory, match=r"\(features#3\) needs 318 kB with one sample; d1 has 200 kB") as caught:
        make_plan(tiny, of_memory(200), batch_size=8, strategy=strategy)
    assert caught.value.hint.startswith("No batch size and no more devices help")
    with pytest.raises(OutOfMemory) as caught:
        make_plan(tiny, of_memory(300), batch_size=8, strategy=strategy)
    assert "smaller inputs (--input)" in caught.value.hint
    with pytest.raises(OutOfMemory, match="needs 466 kB with one sample"):  # Adam keeps two
        make_plan(tiny, of_memory(200), batch_size=8, strategy=strategy, optimizer_slots=2)


def test_a_mixed_plan_still_takes_two_devices(tiny: Network) -> None:
    with pytest.raises(BadPlan, match="it takes two devices"):
        make_plan(tiny, of_memory(10_000, 1), batch_size=8, strategy="mixed")


@pytest.mark.slow
def test_auto_says_what_helps(tiny: Network) -> None:
    with pytest.raises(BadPlan, match="samples: d0 would hold") as caught:
        make_plan(tiny, of_memory(200), batch_size=8)
    assert "cannot be shared" not in caught.value.message
    assert "devices with more memory" in caught.value.hint


def test_what_is_advised_fits(tiny: Network) -> None:
    cluster = of_memory(450)
    with pytest.raises(OutOfMemory) as caught:
        make_plan(tiny, cluster, batch_size=8, strategy="samples")
    assert "fewer layers on each device (--share pipeline)" in caught.value.hint
    assert "SGD without momentum" in caught.value.hint
    make_plan(tiny, cluster, batch_size=8, strategy="pipeline")


def test_activations_are_the_batch(tiny: Network) -> None:
    """Micro-batches are advised as long as one has more samples than there are devices, a smaller batch too."""
    with pytest.raises(OutOfMemory) as caught:
        make_plan(tiny, of_memory(700, 2), batch_size=64, strategy="samples", micro_batches=1)
    assert caught.value.hint.startswith("Use more micro-batches (--micro-batches), a smaller batch (--batch-size), ")
    with pytest.raises(OutOfMemory) as caught:
        make_plan(tiny, of_memory(550, 2), batch_size=2, strategy="samples")
    assert caught.value.hint.startswith("Use a smaller share for this device, more stages (--share pipeline), or ")


def test_too_few_samples_are_still_too_few(tiny: Network) -> None:
    with pytest.raises(BadPlan, match=r"A micro-batch of 2 sample\(s\) cannot be shared by 6 devices"):
        make_plan(tiny, of_memory(10_000), batch_size=2, strategy="samples")


def test_baselines_are_refused_for_memory_too(tiny: Network) -> None:
    compared = compare(tiny, of_memory(200), batch_size=8)
    for name in ("data parallel", "EDDL"):
        assert "would hold" in compared.row(name).problem
        assert len(compared.row(name).problem) < 250
    assert "runs out of memory" in compared.row("PipeDream").problem  # another number of micro-batches can be shared


def test_one_device_has_no_pipeline_and_is_compared_all_the_same(tiny: Network) -> None:
    compared = compare(tiny, of_memory(10**6, count=1), batch_size=8)
    assert compared.ours.seconds == compared.row("one device").seconds
    with pytest.raises(BadPlan, match="two devices or more"):
        make_plan(tiny, of_memory(10**6, count=1), batch_size=8, strategy="pipeline")


def test_inference(tiny: Network) -> None:
    cluster = of_memory(70, 2)
    with pytest.raises(OutOfMemory, match=r"kB of them in layer 2 \(features#3\); .* at most 70 kB each") as caught:
        make_plan(tiny, cluster, objective="latency", strategy="pipeline")
    assert "--share channels" in caught.value.hint
    with pytest.raises(OutOfMemory, match=r"\(163 kB weights, the rest") as caught:
        make_plan(tiny, cluster, objective="latency", strategy="single")
    assert "--share channels" in caught.value.hint
    with pytest.raises(BadPlan, match="No plan for inference") as refused:
        make_plan(tiny, cluster, objective="latency")
    assert refused.value.hint.startswith("Use more devices, or devices with more memory")
