"""Pictures are drawn whatever the numbers are."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from manyhands.observe.figures import short_name
from manyhands.observe.plots import MOST_POINTS, _thinned, draw_losses, draw_utilisation, running_mean


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "losses",
    [[], [0.7], [math.nan], [2.0, math.nan, math.inf, 1.0], [1e308, -1e299, 3.0], [5.0] * 40],
    ids=["empty", "one", "none finite", "some finite", "huge", "flat"],
)
def test_losses_are_drawn(losses: list[float], tmp_path: Path) -> None:
    path = draw_losses(losses, tmp_path / "loss.png", title="cost $1 and $2", first_step=7, epoch_steps=3)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_very_many_losses_are_thinned_but_keep_their_extremes() -> None:
    values = np.random.default_rng(0).random(100_000)
    values[77_777] = 9.0
    steps, thin = _thinned(np.arange(len(values)), values)
    assert len(thin) <= MOST_POINTS + 2
    assert thin.max() == 9.0
    assert (thin.min(), steps[0], steps[-1]) == (values.min(), 0, 99_999)
    assert (values[steps] == thin).all()


def test_running_mean_is_the_mean_around() -> None:
    values = np.array([1.0, 2.0, 6.0, 1e30, 1.0, 2.0, 3.0])
    places, means = running_mean(values, 3)
    assert places.tolist() == list(range(7))
    assert means[[0, 1, 5, 6]].tolist() == pytest.approx([1.5, 3.0, 2.0, 2.5])


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("predicted", [None, {}, {"a": 0.4, "only predicted": 1.0}])
def test_utilisation_is_drawn(predicted: dict[str, float] | None, tmp_path: Path) -> None:
    busy = {"a": 0.5, "b $x$": 1.2, "c": math.nan, "d": -0.1}
    path = draw_utilisation(busy, predicted, tmp_path / "use.png", title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
    draw_utilisation({}, predicted, path, title="")


def test_long_names_keep_their_ends() -> None:
    assert short_name("pi-1") == "pi-1"
    assert short_name("a" * 30 + "-17").endswith("aaa-17")
    assert len(short_name("x" * 500)) == 28


@pytest.mark.slow
def test_the_users_matplotlib_is_left_alone(tmp_path: Path) -> None:
    """Importing draws nothing in; drawing loads no pyplot, which would choose a backend for everybody."""
    code = (
        "import sys; from pathlib import Path; from manyhands.observe.plots import draw_losses\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"draw_losses([1.0], Path({str(tmp_path / 'a.png')!r}), title='')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
