"""The Dockerfile, Compose file and Kubernetes manifest of examples/launch: valid, and their commands train."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_processes import Command, leftovers
from test_launched import free_port, until

from manyhands.cli.worker import worker
from manyhands.facts.errors import lasting_codes
from manyhands.runtime.worker_variables import WORKER_VARIABLES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "launch"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
SECRET = {"compose": "/run/secrets/manyhands-token", "kubernetes": "/etc/manyhands/token"}


def pod(name: str) -> dict[str, Any]:
    (job,) = [one for one in MANIFESTS if one["kind"] == "Job" and one["metadata"]["name"] == name]
    return job["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def launched(system: str, part: str) -> tuple[list[str], dict[str, str]]:
    """The words and variables of a container."""
    if system == "compose":
        service = COMPOSE["services"][part]
        return service["command"], service["environment"]
    (container,) = pod("manyhands-workers" if part == "worker" else "manyhands-coordinator")["containers"]
    return container["args"], {one["name"]: one["value"] for one in container["env"]}


# ---------------------------------------------------------------- what they say


@pytest.mark.parametrize("system", SECRET)
def test_variables_are_the_workers(system: str) -> None:
    for part in ("coordinator", "worker"):
        words, variables = launched(system, part)
        assert set(variables) <= set(WORKER_VARIABLES), "of which tests/cli/test_worker.py knows every one"
        assert variables["MANYHANDS_TOKEN_FILE"] == SECRET[system]
        assert words[0] == ("worker" if part == "worker" else "train")


def test_restart_policies_know_the_exit_codes() -> None:
    (job,) = [one for one in MANIFESTS if one["metadata"]["name"] == "manyhands-workers"]
    rules = {rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"]}
    assert tuple(rules["FailJob"]["onExitCodes"]["values"]) == lasting_codes()
    page = (ROOT / "docs" / "howto" / "launch.md").read_text()
    row = re.search(r"\| ([\d, ]+) \| an option, a file", page)
    assert row is not None
    named = {int(code) for code in row.group(1).split(",")}
    assert {2, 4, 10, 12, 18} <= named <= set(lasting_codes())


def test_the_grace_period_is_shorter_than_what_is_waited_before_it_is_killed() -> None:
    compose, kubernetes = launched("compose", "worker")[1], launched("kubernetes", "worker")[1]
    stops = int(COMPOSE["services"]["worker"]["stop_grace_period"].removesuffix("s"))
    assert 0 < int(compose["MANYHANDS_GRACE"]) < stops
    assert 0 < int(kubernetes["MANYHANDS_GRACE"]) < pod("manyhands-workers")["terminationGracePeriodSeconds"]


def test_probes_ask_where_it_answers() -> None:
    (container,) = pod("manyhands-workers")["containers"]
    port = launched("kubernetes", "worker")[1]["MANYHANDS_HEALTH_PORT"].rpartition(":")[2]
    assert [str(one["containerPort"]) for one in container["ports"] if one["name"] == "health"] == [port]
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    port = launched("compose", "worker")[1]["MANYHANDS_HEALTH_PORT"]
    assert f"127.0.0.1:{port}/healthz" in COMPOSE["services"]["worker"]["healthcheck"]["test"][-1]


def test_the_image_has_what_it_copies_and_starts_the_program() -> None:
    lines = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    (entry,) = [json.loads(line.removeprefix("ENTRYPOINT")) for line in lines if line.startswith("ENTRYPOINT")]
    (command,) = [json.loads(line.removeprefix("CMD")) for line in lines if line.startswith("CMD")]
    assert [*entry, *command] == ["manyhands", worker.__name__]


# ---------------------------------------------------------------- schemas


def test_manifests_fit_kubernetes_schemas() -> None:
    """Those of the package kubernetes-validate, unknown fields refused; a wrong one is found."""
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for version in ("1.31", kubernetes.latest_version()):
        for manifest in MANIFESTS:
            kubernetes.validate(manifest, version, strict=True)
    wrong = copy.deepcopy(MANIFESTS[-1])
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, "1.31", strict=True)


def test_the_compose_file_fits_the_schema() -> None:
    """That of the package docker-compose, of which nothing else is used. It is Compose 1's, which knows all that is
    used here but the project's name."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    package = importlib.util.find_spec("compose")
    if package is None or package.origin is None:
        pytest.skip("pip install --no-deps docker-compose")
    path = Path(package.origin).parent / "config" / "compose_spec.json"
    schema = json.loads(path.read_text())
    described = {key: part for key, part in COMPOSE.items() if key != "name"}
    jsonschema.validate(described, schema)
    wrong = copy.deepcopy(described)
    wrong["services"]["worker"]["healthchek"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


# ---------------------------------------------------------------- running


@pytest.mark.slow
@pytest.mark.parametrize("system", SECRET)
def test_containers_commands_train(system: str, tmp_path: Path) -> None:
    """As processes in place of containers: words and variables are theirs, but for addresses and the secret's path."""
    (tmp_path / "..data").mkdir()
    token = subprocess.run(["manyhands", "devices", "run-token"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "..data" / "token").write_text(token)
    (tmp_path / "token").symlink_to("..data/token")  # as Kubernetes mounts it
    words, variables = launched(system, "coordinator")
    replaced = {"MANYHANDS_TOKEN_FILE": str(tmp_path / "token")}
    words = [word.replace(":7077", ":0") for word in words]
    train = command(tmp_path, words, variables | replaced)
    line = train.wait_for("manyhands worker --join")
    port = line.rstrip().rpartition(":")[2]
    words, variables = launched(system, "worker")
    started = []
    for number in (1, 2):
        replaced |= {"MANYHANDS_JOIN": f"127.0.0.1:{port}", "MANYHANDS_NAME": f"container-{number}"}
        replaced["MANYHANDS_HEALTH_PORT"] = str(health := free_port())
        started.append((command(tmp_path, words, variables | replaced), health))
    for _, health in started:
        assert until(health, "/readyz", 200, 120) == "joined"
    assert train.ended(200) == 0, train.text
    for each, _ in started:
        assert each.ended(60) == 0, each.text
        assert token.strip() not in each.text + train.text
        assert leftovers(each.mark) == []


def command(folder: Path, words: list[str], variables: dict[str, str]) -> Command:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in variables.items():
            patch.setenv(name, text)
        return Command(folder, tuple(words))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_starts() -> None:
    """Where something builds images, and has or can fetch the base image."""
    builder = next((name for name in ("docker", "podman", "buildah") if shutil.which(name)), "")
    if not builder:
        pytest.skip("none of docker, podman and buildah is here")
    if subprocess.run([builder, "info"], capture_output=True, timeout=60).returncode:
        pytest.skip(f"{builder} is here, but no engine that it could ask")
    base = os.environ.get("MANYHANDS_TEST_BASE", "python:3.12-slim")
    if subprocess.run([builder, "pull", base], capture_output=True, timeout=300).returncode:
        pytest.skip(f"{builder} cannot fetch {base}")
    build = [builder, "build", "-t", "manyhands", "-f", "examples/launch/Dockerfile", "."]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    if builder != "buildah":
        run = subprocess.run(
            [builder, "run", "--rm", "manyhands", "--version"], capture_output=True, text=True, timeout=60
        )
        assert run.stdout.startswith("manyhands ")
