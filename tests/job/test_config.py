"""One configuration per job: an option that is added to it is found in all five places that are derived from it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.config_options import takes_options_of
from manyhands.data.sets import NAMES
from manyhands.facts.errors import BadValue, UnknownName
from manyhands.inference import config as inference
from manyhands.inference.config import InferConfig
from manyhands.job import config_sections
from manyhands.job.arguments import check_resumed
from manyhands.job.config import Config, fields_of, keywords_of, option
from manyhands.planner.inference import INFERENCE_STRATEGIES
from manyhands.planner.replanning import WAYS as WAYS_TO_REPLAN
from manyhands.planner.split_choice import BASELINES
from manyhands.planner.strategies import STRATEGIES
from manyhands.runtime import failure_detector, order, streaming
from manyhands.schedule.feeding import WAYS as WAYS_TO_FEED
from manyhands.split import config as splitting
from manyhands.split.arguments import split_config
from manyhands.split.config import SplitConfig
from manyhands.training import config as training
from manyhands.training.arguments import train_config
from manyhands.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).parent / "stored_0_2_0"
NEW = {"clip_norm": None, "clip_value": None, "ema": None}
"""Options of jobs that train, and that 0.2.0 did not have."""
CONFIGS: list[type[Config]] = [TrainConfig, SplitConfig, InferConfig]


@dataclass(frozen=True, kw_only=True)
class LongerConfig(TrainConfig):
    """`TrainConfig` with one more option."""

    patience: int = option(3, "Steps to wait for.", "--patience", kind=int, at_least=1, on_resume="same")


# The five places


def test_an_added_option_is_on_the_command_line() -> None:
    seen: list[Any] = []

    @takes_options_of(LongerConfig)
    def command(**arguments: Any) -> None:
        seen.append(LongerConfig.from_command(arguments).patience)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(command)
    text = CliRunner().invoke(app, ["--help"]).output
    assert "--patience" in text
    assert "Steps to wait for. Default: 3." in " ".join(text.split())
    for words in ([], ["--patience", "5"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert seen == [3, 5]
    refused = CliRunner().invoke(app, ["--patience", "0"]).exception
    assert "--patience is 0; it must be at least 1" in str(refused)


def test_an_added_option_is_a_keyword_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LongerConfig.from_keywords("mh.train", {"patience": 4}).patience == 4
    with pytest.raises(BadValue, match="patience is 0; it must be a whole number of at least 1"):
        LongerConfig.from_keywords("mh.train", {"patience": 0})
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from making import options

    assert "    patience: int\n" in options.source(LongerConfig, "train")


def test_an_added_option_is_checked_when_a_run_is_resumed() -> None:
    config = LongerConfig(patience=4)
    assert config.decisive["patience"] == 4, "a checkpoint keeps it"
    stored = LongerConfig.stored_values(config.document())
    check_resumed(LongerConfig, Path("run"), stored, {"patience": 4})
    with pytest.raises(BadValue, match="was started with --patience 4; it is now 5"):
        check_resumed(LongerConfig, Path("run"), stored, {"patience": 5})


def test_an_added_option_is_in_the_run_folder() -> None:
    assert LongerConfig(patience=4).document()["patience"] == 4


def test_an_added_option_is_on_the_reference_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from making import configs

    row = "| `--patience` | `patience` | `3` | same | Steps to wait for. |"
    assert row in configs.section("train", LongerConfig).splitlines()


# What configurations are


def test_choices_are_those_that_the_program_knows() -> None:
    choices = {name: field.option.choices for name, field in fields_of(TrainConfig).items()}
    assert tuple(training.STRATEGIES) == STRATEGIES
    assert tuple(inference.STRATEGIES) == INFERENCE_STRATEGIES
    assert sorted(choices["replan"] or ()) == sorted(WAYS_TO_REPLAN)
    assert sorted(choices["feed"] or ()) == sorted(WAYS_TO_FEED)
    assert tuple(splitting.BASELINES) == tuple(BASELINES)
    assert config_sections.DATA in NAMES


def test_limits_are_those_of_the_runtime() -> None:
    """They are written here again because importing the runtime takes seconds, which --help must not."""
    assert config_sections.WAIT_LIMIT_SECONDS == order.WAIT_LIMIT_SECONDS
    assert config_sections.HEARTBEAT_TIMEOUT_SECONDS == failure_detector.HEARTBEAT_TIMEOUT_SECONDS
    assert inference.MOST_WAITING == streaming.MOST_WAITING


@pytest.mark.parametrize("config", CONFIGS)
def test_every_choice_of_every_option_is_accepted(config: type[Config]) -> None:
    for name, field in fields_of(config).items():
        for value in field.option.choices or ():
            beside = {"silos": "a=x,server=y"} if value == splitting.AMONG_SILOS else {}
            config(**{name: value}, **beside)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_option_has_a_sentence_and_a_default_that_is_allowed(config: type[Config]) -> None:
    config()
    for name, field in fields_of(config).items():
        assert field.option.help.endswith("."), name
        assert field.option.help[0].isupper() or field.option.flags, name


def test_defaults_agree_between_python_and_the_command_line() -> None:
    assert train_config({}).plan == TrainConfig().plan == "auto"
    differ = {
        f"{config.__name__}.{name}"
        for config in CONFIGS
        for name, field in keywords_of(config).items()
        if field.command_default != field.default
    }
    assert differ == {"TrainConfig.epochs", "TrainConfig.batch_size", "TrainConfig.shuffle", "SplitConfig.shuffle"}


def test_a_misspelt_keyword_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadValue, match=r"mh\.train has no option batchsize") as refused:
        mh.train(None, None, loss=None, optimizer=None, batchsize=3)  # type: ignore[arg-type, call-arg]
    assert refused.value.hint == "Did you mean batch_size?"
    with pytest.raises(UnknownName, match="way to feed samples"):
        TrainConfig(feed="sometimes")


# Runs of 0.2.0


def test_a_training_of_0_2_0_is_resumed_as_it_was(tmp_path: Path) -> None:
    text = (STORED / "train.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text)
    config = train_config({"resume": str(tmp_path)})
    new = {"depths": "", "precision": "float32", "exact": False, "validate_every": "", **NEW}
    assert config.document() == yaml.safe_load(text)["wish"] | new
    assert (config.plan, config.silence_seconds, config.steps, config.seed) == ("samples", 5.0, 4, 3)
    with pytest.raises(BadValue, match="was started with --seed 3; it is now 4"):
        train_config({"resume": str(tmp_path), "seed": 4})


def test_a_split_of_0_2_0_is_resumed_as_it_was(tmp_path: Path) -> None:
    text = (STORED / "split.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text)
    config = split_config({"resume": str(tmp_path)})
    assert config.document() == yaml.safe_load(text)["split_wish"] | NEW
    assert (config.edge_bytes, config.phases, config.widths) == (512_000_000, ((0, 2),), (8,))
    assert replace(config, k="0").phases == ((0, 0),)


def test_help_needs_no_torch() -> None:
    import subprocess

    code = "import manyhands.cli.main, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
